"""An experts file is read as written, or refused with everything that is wrong with it."""

from __future__ import annotations

import math

import pytest

from rivet.experts.config import ExpertConfig, ExpertsFileError, load_experts

GOOD = """
experts:
  - name: algebra
    skill: solves equations
    model: big-model
    base_urls: [https://one.example/v1, https://two.example/v1]
    key_env: ALGEBRA_KEY
    usd_per_million_prompt_tokens: 0.15
    usd_per_million_completion_tokens: 2
    timeout_s: 60
    max_retries: 2
    max_concurrency: 8
    max_tokens: 512
    temperature: 0
    system: Answer with a program.
  - {name: calc, model: m, base_url: "http://127.0.0.1:8000/v1"}
"""


def write(tmp_path, text):
    path = tmp_path / "experts.yaml"
    path.write_text(text)
    return path


def faults(tmp_path, text, **environ):
    with pytest.raises(ExpertsFileError) as caught:
        load_experts(write(tmp_path, text), environ=environ)
    return [fault.replace(str(tmp_path) + "/", "") for fault in caught.value.faults]


def entry(**fields):
    fields = {"name": "calc", "model": "m", "base_url": "http://h/v1"} | fields
    lines = [f"{key}: {value}" for key, value in fields.items() if value is not None]
    return "experts:\n  - " + "\n    ".join(lines) + "\n"


def test_a_good_file_is_read_as_written(tmp_path):
    algebra, calc = load_experts(write(tmp_path, GOOD), environ={"ALGEBRA_KEY": "k"})
    assert algebra == ExpertConfig(
        name="algebra",
        skill="solves equations",
        model="big-model",
        base_urls=("https://one.example/v1", "https://two.example/v1"),
        key_env="ALGEBRA_KEY",
        usd_per_million_prompt_tokens=0.15,
        usd_per_million_completion_tokens=2,
        timeout_s=60,
        max_retries=2,
        max_concurrency=8,
        max_tokens=512,
        temperature=0,
        system="Answer with a program.",
    )
    assert calc == ExpertConfig("calc", "m", ("http://127.0.0.1:8000/v1",))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model": None}, "model: missing; expected The model's name at the endpoint."),
        ({"base_url": None}, "base_url: missing; expected Where it is served"),
        ({"timout_s": 5}, "timout_s: unknown key; did you mean timeout_s?"),
        ({"api_key": "sk-secret9"}, "api_key: unknown key; did you mean key_env?"),
        ({"authorization": "sk-secret9"}, "authorization: unknown key; did you mean key_env?"),
        ({"zzz": 1}, "zzz: unknown key; expected one of name, model"),
        ({"timeout_s": "soon"}, "timeout_s: got str 'soon', expected a number"),
        ({"timeout_s": 0}, "timeout_s: got 0, expected Seconds for one attempt, > 0."),
        ({"timeout_s": ".nan"}, "timeout_s: got nan, expected Seconds"),
        ({"max_retries": -1}, "max_retries: got -1, expected Attempts after the first, >= 0."),
        ({"max_retries": 1.5}, "max_retries: got float 1.5, expected an integer"),
        ({"max_tokens": "true"}, "max_tokens: got bool True, expected an integer"),
        ({"send_seed": 1}, "send_seed: got int 1, expected true or false"),
        ({"name": "'a b'"}, "name: got 'a b', expected letters, digits"),
        ({"model": "''"}, "model: is empty"),
        ({"base_url": "ftp://h/v1"}, "base_url: got 'ftp://h/v1', expected http(s)://"),
        ({"base_url": "h:99/v1"}, "base_url: expected http(s)://"),
        ({"base_url": "http://h:port/v1"}, "base_url: is no URL"),
        ({"base_url": "http://u:secret9@h/v1"}, "base_url: has a user, a query or a fragment"),
        ({"base_url": "http://h/v1?key=secret9"}, "base_url: has a user, a query or a fragment"),
        ({"base_url": 5}, "base_url: got int, expected http(s)://"),
        ({"base_urls": "[http://h/v1]"}, "base_url and base_urls are both set"),
        ({"base_url": None, "base_urls": "[]"}, "base_url"),
        ({"base_url": None, "base_urls": "http://h/v1"}, "base_urls: got str 'http://h/v1', exp"),
        ({"key_env": "sk-secret9"}, "key_env: got 10 characters that are no variable name"),
        ({"key_env": 99}, "key_env: got int, expected text or null"),
        ({"key_env": "CALC_KEY"}, "key_env: the environment variable CALC_KEY is not set"),
    ],
)
def test_a_fault_names_file_line_expert_key_and_what_is_expected(tmp_path, fields, expected):
    (fault,) = faults(tmp_path, entry(**fields))
    name = "'a b'" if fields.get("name") else "'calc'"
    assert fault.startswith(f"experts.yaml:2: expert {name}: {expected}")
    assert "secret9" not in fault


def test_all_faults_of_a_file_come_at_once(tmp_path):
    text = entry(timeout_s=-1, max_retires=2) + "  - {name: calc, base_url: 'http://h/v1'}\n"
    assert [fault.split(": ")[2] for fault in faults(tmp_path, text)] == [
        *("max_retires", "timeout_s", "model")
    ]


def test_a_name_that_is_used_twice_names_both_lines(tmp_path):
    text = entry() + "  - {name: calc, model: n, base_url: 'http://h/v1'}\n"
    (fault,) = faults(tmp_path, text)
    assert fault.startswith("experts.yaml:5: expert 'calc': name is used already in line 2")


def test_the_value_of_a_key_variable_is_never_shown(tmp_path):
    (fault,) = faults(tmp_path, entry(key_env="CALC_KEY"), CALC_KEY="two secret words")
    assert "CALC_KEY" in fault and "secret" not in fault
    (fault,) = faults(tmp_path, entry(key_env="CALC_KEY"), CALC_KEY="")
    assert "CALC_KEY is set but empty" in fault


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "experts.yaml:1: expected the key `experts`; got none"),
        ("- name: calc", "experts.yaml:1: expected the key `experts`; got none"),
        ("expert: []", "experts.yaml:1: expected the key `experts`; got expert"),
        ("experts: []", "experts.yaml:1: experts: expected a non-empty list of experts"),
        ("experts: {name: calc}", "experts.yaml:1: experts: expected a non-empty list"),
        ("experts:\n  - calc", "experts.yaml:2: expected `name: value` lines"),
        ("experts:\n  - name: [", "experts.yaml:2: broken YAML"),
        ("experts:\n  - name: \0", "experts.yaml:1: broken YAML"),
        ("experts:\n - name: a\n   name: b", "experts.yaml:3: broken YAML: name is set twice"),
        ("experts: !!python/object:os.system {}", "experts.yaml:1: "),
    ],
)
def test_a_file_that_is_no_experts_file_is_refused(tmp_path, text, expected):
    (fault,) = faults(tmp_path, text)
    assert fault.startswith(expected)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ExpertsFileError, match="nothere.yaml: no such file"):
        load_experts(tmp_path / "nothere.yaml")
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ExpertsFileError, match="bad.yaml: cannot be read"):
        load_experts(tmp_path / "bad.yaml")


def test_ranges_hold_for_configurations_made_in_code():
    with pytest.raises(ExpertsFileError, match="'calc': max_concurrency: got 0"):
        ExpertConfig("calc", "m", ("http://h/v1",), max_concurrency=0)
    with pytest.raises(ExpertsFileError, match="temperature: got inf"):
        ExpertConfig("calc", "m", ("http://h/v1",), temperature=math.inf)
