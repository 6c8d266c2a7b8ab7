"""Claims about the scripted experts: who is right about what, and from the request alone."""

from __future__ import annotations

import contextlib
import io

import pytest

from data.miniworld.dialogues import code_of
from data.miniworld.experts import EXPERTS, SAGE_ACCURACY, parse_request, route, run_script
from data.miniworld.tasks import FAMILIES, build_split, request_for
from data.problems import Problem


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return build_split("train", 150, 5)


@pytest.fixture(scope="module")
def is_right():
    from reasoning_gym import create_dataset

    scorers = {name: create_dataset(name, seed=1, size=1) for name in FAMILIES}

    def check(problem: Problem, answer: str) -> bool:
        entry = problem.meta["entry"]
        return scorers[problem.meta["dataset"]].score_answer(answer, entry) == 1.0

    return check


def _answer(expert: str, problem: Problem, seed: int = 0) -> str:
    return run_script(code_of(EXPERTS[expert].reply(request_for(problem), seed)))


def test_each_of_three_experts_knows_two_families_and_every_family_has_one():
    assert {name: len(expert.families) for name, expert in EXPERTS.items()} == {
        "calc": 2,
        "numth": 2,
        "algebra": 2,
        "sage": 0,
    }
    assert [route(family) for family in FAMILIES] == [
        *("calc", "calc", "numth", "numth", "algebra", "algebra")
    ]
    with pytest.raises(ValueError, match="expected one of chain_sum"):
        route("geometry")


def test_the_competent_expert_is_always_right(problems, is_right):
    for seed, problem in enumerate(problems):
        assert is_right(problem, _answer(route(problem.meta["family"]), problem, seed))


@pytest.mark.parametrize("name", ["calc", "numth", "algebra"])
def test_the_others_are_always_wrong_and_always_print_something(problems, is_right, name):
    for seed, problem in enumerate(problems):
        if route(problem.meta["family"]) != name:
            answer = _answer(name, problem, seed)
            assert answer and not is_right(problem, answer)


def test_sage_is_right_on_every_family_with_its_stated_probability(problems, is_right):
    right = dict.fromkeys(FAMILIES, 0)
    for seed in range(6):
        for problem in problems:
            right[problem.meta["family"]] += is_right(problem, _answer("sage", problem, seed))
    for family, count in right.items():
        assert abs(count / 900 - SAGE_ACCURACY) < 0.05, family  # 3 standard errors: 0.048


@pytest.mark.parametrize("name", list(EXPERTS))
def test_a_reply_depends_on_the_request_and_the_seed_alone(name):
    replies = [EXPERTS[name].reply("gcd 12, 18", seed) for seed in range(40)]
    assert replies == [EXPERTS[name].reply("gcd 12, 18", seed) for seed in range(40)]
    assert len(set(replies)) > 1
    assert replies != [EXPERTS[name].reply("gcd 12, 20", seed) for seed in range(40)]


@pytest.mark.parametrize(
    "request_text",
    [
        *("", "gcd", "gcd 12", "gcd x, y", "hello there", "sum 1 +", "sum 012 + 5", "reduce 3/0"),
        *("reduce 0/3", "solve 3*x + 4*y = 2", "solve x**9 = 2", "solve 3x = 9", "product 2 ** 9"),
        *("sum __import__('os')", "solve open = 1", "gcd " + "9" * 200 + ", 3", "sum 1 + 2; 3"),
        *("gcd 12, 18\nimport os", "sum 12 + 34 - 56 + 7 + 8 + 9 + 10", "divide 3/4", "\x00"),
    ],
)
def test_what_no_expert_can_read_gets_a_harmless_program(request_text):
    for name, expert in EXPERTS.items():
        code = code_of(expert.reply(request_text, 3))
        if parse_request(request_text) is None:
            assert code == "print(0)", name
        run_script(code)


def test_a_request_is_understood_by_its_expression_and_by_its_word_only_where_that_is_needed():
    assert parse_request("multiply 12 * 34") == ("products", "12 * 34")
    assert parse_request("sum 12 * 34") == ("products", "12 * 34")
    assert parse_request("Calculate 12 - 34") == ("chain_sum", "12 - 34")
    assert parse_request("find x + 3 = 7") == ("simple_equations", "x + 3 = 7")
    assert parse_request("LCM 12, 18") == ("lcm", "12, 18")
    assert parse_request("simplify 12/18") == ("fraction_simplification", "12/18")
    assert parse_request("take 12, 18") is None
    assert parse_request("12 + 34") is None


def test_whitespace_is_forgiven_in_a_request():
    assert parse_request("  gcd 12,  18 \n") == ("gcd", "12, 18")
    assert parse_request("sum 12 + 34 - 56") == ("chain_sum", "12 + 34 - 56")
    assert parse_request("solve 24 - 41*h = -1575") == ("simple_equations", "24 - 41*h = -1575")
    assert parse_request("solve h + 3 = 7") == ("simple_equations", "h + 3 = 7")
    assert parse_request("solve 3x = 9") is None
    assert parse_request("sum 012 + 5") is None


def test_a_fraction_that_is_one_is_written_as_a_fraction():
    reply = EXPERTS["algebra"].reply("reduce 7/7", 0)
    assert run_script(code_of(reply)) == "1/1"


def test_a_script_runs_in_process_to_what_plain_python_prints(problems):
    for seed, problem in enumerate(problems):
        for name in EXPERTS:
            code = code_of(EXPERTS[name].reply(request_for(problem), seed))
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(code, {})
            assert run_script(code) == printed.getvalue().rstrip("\n")


def test_a_reply_is_one_sentence_and_one_fenced_program():
    for expert in EXPERTS.values():
        sentence, rest = expert.reply("lcm 12, 18", 1).split("\n", 1)
        assert sentence in expert.sentences
        assert rest.startswith("```python\n") and rest.endswith("\n```") and rest.count("```") == 2
