"""An evaluation from a checkpoint folder to results: files, conditions, resume, refusals."""

from __future__ import annotations

import json
import shutil
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import save_file
from scripted import ScriptedEngine, ScriptedGrader
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import eval.main
import eval.regrade
from data.benchmarks import BenchmarkError
from data.problems import ProblemFileError
from eval.compare import CompareError, compare
from eval.conditions import ConditionError, read_condition
from eval.config import EvalConfig
from eval.generate import FaultRateError
from eval.main import EvalError, main, open_checkpoint, run
from eval.regrade import main as regrade
from eval.runtime import Runtime, find_model, open_runtime, weights_fingerprint
from rivet.checkpoints import CheckpointError, check_weights, find_checkpoint
from rivet.config import load_config
from rivet.experts.config import ExpertsFileError
from rivet.experts.pool import ExpertsUnavailableError
from rivet.experts.types import ExpertReply
from rivet.prompts import PromptBuilder
from rivet.rollout.backend import SamplingParams
from rivet.rollout.types import RolloutLimits
from rivet.runs import RunDirError, RunFinishedError
from rivet.settings import ExpertCard, ProtocolSettings, SettingsError
from rivet.tokenization import TokenizerError

PROMISED = [
    "checkpoint",
    "condition",
    "accuracy",
    "ci_low",
    "ci_high",
    "n",
    "well_formed",
    "route_accuracy",
]


class EchoExperts:
    """Replies to everything with the request."""

    names = ("calc", "numth")

    async def ask(self, name: str, request: str, *, sample_key: str = "") -> ExpertReply:
        """Reply at once."""
        return ExpertReply(name, "ok", request)


@pytest.fixture(scope="module")
def checkpoint(tag_tokenizer, tmp_path_factory) -> Path:
    """A random controller of 50k parameters with tokenizer and protocol settings."""
    folder = tmp_path_factory.mktemp("stage") / "checkpoint"
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tag_tokenizer.token_bytes),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=512,
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(folder)
    tag_tokenizer.hf.save_pretrained(folder)
    cards = (ExpertCard("calc", "adds"), ExpertCard("numth", "divides"))
    limits = RolloutLimits(max_completion_length=24)
    ProtocolSettings(prompt="bare", after_tag="", experts=cards, limits=limits).save(folder)
    return folder


@pytest.fixture
def problems_file(tmp_path: Path) -> Path:
    """Ten problems as JSONL."""
    path = tmp_path / "problems.jsonl"
    rows = [
        {"id": f"p{n}", "problem": f"gcd of {n} and 12", "answer": "6", "source": "toy"}
        for n in range(10)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def scripted_runtime(monkeypatch: pytest.MonkeyPatch, prompts):
    """Replaces the model by the scripted engine; gives the engines that were opened."""
    opened: list[ScriptedEngine] = []

    @asynccontextmanager
    async def open_scripted(model: str, **_: Any):
        engine = ScriptedEngine(prompts.tokenizer)
        opened.append(engine)
        grader: Any = ScriptedGrader()
        grader.mode = "reward"
        settings = ProtocolSettings(prompt="bare")
        yield Runtime(
            engine, grader, prompts, prompts.tokenizer, settings, "weights", "float32", ["calc"]
        )

    monkeypatch.setattr(eval.main, "open_runtime", open_scripted)
    monkeypatch.setattr(eval.main, "open_checkpoint", lambda config, experts: None)
    return opened


def config_of(tmp_path: Path, problems_file: Path, **changes: Any) -> EvalConfig:
    values: dict[str, Any] = {
        "model": "runs/x/stage1/checkpoint",
        "output_dir": str(tmp_path / "run"),
        "problems": str(problems_file),
        "experts": "experts.yaml",
    }
    return EvalConfig(**(values | changes))


def test_an_evaluation_of_a_real_checkpoint_covers_every_condition(
    checkpoint, problems_file, tmp_path
) -> None:
    config = config_of(
        tmp_path,
        problems_file,
        model=str(checkpoint),
        conditions=["experts", "local", "no-expert", "no-python", "plain"],
        temperature=1.0,
        samples_per_problem=2,
    )
    results = run(config, experts=EchoExperts())
    assert [row["condition"] for row in results["rows"]] == config.conditions
    for row in results["rows"]:
        assert list(row)[: len(PROMISED)] == PROMISED
        assert row["checkpoint"] == checkpoint.parent.name
        assert (row["n"], row["samples"]) == (10, 20)
        assert sum(row["outcomes"].values()) == 20
        for name in ("accuracy", "ci_low", "ci_high", "well_formed", "fabricated_output_rate"):
            assert 0 <= row[name] <= 1
        condition = read_condition(tmp_path / "run" / row["condition"])
        assert condition.results == json.loads(json.dumps(row))
        assert len(condition.store.load()) == 20
    assert results["comparisons"][0]["name"] == "expert-removal gap"
    assert json.loads((tmp_path / "run" / "results.json").read_text()) == json.loads(
        json.dumps(results)
    )
    files = {p.name for p in (tmp_path / "run" / "local").iterdir()}
    assert files == {"results.json", "scores.json", "trajectories"}


def test_the_controller_samples_as_the_settings_say(
    scripted_runtime, problems_file, tmp_path
) -> None:
    run(config_of(tmp_path, problems_file, temperature=0.7, top_p=0.9, top_k=5))
    requests = scripted_runtime[0].requests
    assert requests and {r.sampling for r in requests} == {SamplingParams(0.7, 0.9, 5)}


def test_a_finished_evaluation_is_replaced_only_when_told(
    scripted_runtime, problems_file, tmp_path
) -> None:
    first = run(config_of(tmp_path, problems_file))
    with pytest.raises(RunFinishedError, match="--overwrite"):
        run(config_of(tmp_path, problems_file))
    assert len(scripted_runtime) == 1
    assert run(config_of(tmp_path, problems_file, overwrite=True)) == first
    assert sum(scripted_runtime[1].asked.values()) == 20


def test_an_interrupted_evaluation_goes_on_where_it_was(
    scripted_runtime, problems_file, tmp_path, monkeypatch
) -> None:
    whole = run(config_of(tmp_path, problems_file, output_dir=str(tmp_path / "whole")))
    with monkeypatch.context() as patch:
        patch.setattr(eval.main, "write_condition", _raise_at_second(eval.main.write_condition))
        with pytest.raises(KeyboardInterrupt):
            run(config_of(tmp_path, problems_file))
    again = run(config_of(tmp_path, problems_file))
    assert again == whole
    assert not scripted_runtime[-1].asked  # every row was in the store already


def _raise_at_second(write: Any) -> Any:
    calls = []

    def interrupted(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        write(*args)

    return interrupted


def test_other_settings_are_not_mixed_into_a_run(scripted_runtime, problems_file, tmp_path) -> None:
    run(config_of(tmp_path, problems_file))
    (tmp_path / "run" / "finished.json").unlink()
    with pytest.raises(RunDirError, match="seed was 0, is 1"):
        run(config_of(tmp_path, problems_file, seed=1))
    assert run(config_of(tmp_path, problems_file, batch_size=7, max_attempts=1))["rows"]


def test_limit_label_and_a_single_condition(scripted_runtime, problems_file, tmp_path) -> None:
    config = config_of(tmp_path, problems_file, limit=4, label="mine", conditions=["local"])
    results = run(config)
    assert [(row["checkpoint"], row["n"]) for row in results["rows"]] == [("mine", 4)]
    assert results["comparisons"] == []


def test_the_mini_world_is_graded_with_routes(scripted_runtime, tmp_path, monkeypatch) -> None:
    config = config_of(tmp_path, Path("miniworld"), problems_per_family=2, conditions=["local"])
    row = run(config)["rows"][0]
    assert row["n"] == 12 and len(row["by"]["family"]) == 6
    assert 0 <= row["route_accuracy"] <= 1


def test_the_command_prints_the_table_and_passes_the_experts_on(
    scripted_runtime, problems_file, tmp_path, capsys
) -> None:
    asked = []

    class Opened:
        def __enter__(self) -> EchoExperts:
            return EchoExperts()

        def __exit__(self, *_: object) -> None:
            asked.append("closed")

    def open_experts(name: str) -> Any:
        asked.append(name)
        return Opened()

    argv = ["--model", "runs/x/stage1/checkpoint", "--output_dir", str(tmp_path / "run")]
    argv += ["--problems", str(problems_file)]
    assert main(argv, open_experts=open_experts) == 0
    assert asked == ["embedded", "closed"]
    out = capsys.readouterr().out
    assert "| stage1     | experts   |" in out and "expert-removal gap" in out


def test_impossible_settings_fail_before_anything_starts(
    checkpoint, tmp_path, problems_file
) -> None:
    for change, message in [
        ({"conditions": ["remote"]}, "conditions is"),
        ({"conditions": []}, "conditions is"),
        ({"samples_per_problem": 2}, "temperature 0"),
        ({"samples_per_problem": 0}, "samples_per_problem is 0"),
        ({"limit": 0}, "limit"),
        ({"max_fault_rate": 2.0}, "max_fault_rate"),
        ({"top_p": 0.0}, "top_p"),
    ]:
        with pytest.raises(ValueError, match=message):
            config_of(tmp_path, problems_file, **change)
    with pytest.raises(EvalError, match="model is not set"):
        run(config_of(tmp_path, problems_file, model=""))
    with pytest.raises(EvalError, match="needs experts"):
        run(config_of(tmp_path, problems_file, experts="embedded"))
    with pytest.raises(CheckpointError, match="no such folder"):
        run(config_of(tmp_path, problems_file))
    model = str(checkpoint)
    with pytest.raises(ExpertsFileError, match="no such file"):
        run(config_of(tmp_path, problems_file, model=model))
    with pytest.raises(ProblemFileError, match="no such file"):
        run(config_of(tmp_path, tmp_path / "missing", model=model, conditions=["local"]))
    with pytest.raises(BenchmarkError, match="did you mean math-500"):
        run(config_of(tmp_path, Path("math-5000"), model=model, conditions=["local"]))
    assert not (tmp_path / "run").exists()


async def test_a_folder_that_is_no_checkpoint_is_refused(checkpoint, tmp_path) -> None:
    with pytest.raises(SettingsError, match=r"rivet\.json: no such file"):
        async with open_runtime(tmp_path):
            pass
    ProtocolSettings().save(tmp_path)
    with pytest.raises(CheckpointError, match=r"no weights; expected \*\.safetensors$"):
        async with open_runtime(tmp_path):
            pass
    for arm in "abcd":
        (tmp_path / "study" / arm / "checkpoint").mkdir(parents=True)
        ProtocolSettings().save(tmp_path / "study" / arm / "checkpoint")
    named = f"did you mean one of {tmp_path}/study/a/checkpoint, .*/c/checkpoint \\(4 in all\\)"
    for refuse in (check_weights, find_checkpoint):
        with pytest.raises(CheckpointError, match=named):
            refuse(tmp_path / "study")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors", b"{cut", "model.safetensors: broken weights"),
        ("model.safetensors.index.json", b"{cut", "index.json: cannot be read"),
        ("model.safetensors.index.json", b"[]", "index.json: cannot be read"),
        ("tokenizer.json", b"{", "its tokenizer cannot be loaded"),
        ("tokenizer.json", None, "its tokenizer cannot be loaded"),
        ("config.json", b"{", "cannot be"),
    ],
)
def test_a_broken_checkpoint_is_refused_before_anything_is_written(
    checkpoint, problems_file, tmp_path, file: str, content: bytes | None, message: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    if content is None:
        (model / file).unlink()
    else:
        (model / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        run(config_of(tmp_path, problems_file, model=str(model), conditions=["local"]))
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_larger_than_the_model_is_refused(checkpoint, problems_file, tmp_path) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 10}))
    with pytest.raises(CheckpointError, match="the model 10; expected the tokenizer"):
        run(config_of(tmp_path, problems_file, model=str(model), conditions=["local"]))


async def test_the_context_holds_completions_as_long_as_asked_for(checkpoint, tmp_path) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40_960}))
    async with open_runtime(model, max_completion_length=8192) as runtime:
        assert runtime.engine.max_context == 8192 + 2048


async def test_rows_depend_on_weights_limits_and_experts(checkpoint, tmp_path) -> None:
    async with open_runtime(checkpoint, experts=EchoExperts(), max_completion_length=20) as runtime:
        described = runtime.describe("experts")
        assert described["limits"]["max_completion_length"] == 20
        assert described["experts"] == ["calc", "numth"]
        assert runtime.describe("local")["experts"] == []
        assert described["weights"] == weights_fingerprint(checkpoint)
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert weights_fingerprint(tmp_path) != described["weights"]


@pytest.fixture(scope="module")
def pretrained(qwen_tokenizer, tmp_path_factory) -> Path:
    """A random chat model as others publish one: plain-text tags, no rivet.json."""
    folder = tmp_path_factory.mktemp("hub") / "tiny-chat"
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(qwen_tokenizer.token_bytes),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=1024,
        )
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    qwen_tokenizer.hf.save_pretrained(folder)
    return folder


def test_a_pretrained_model_is_evaluated_on_benchmarks_as_it_is(
    pretrained, qwen_tokenizer, tmp_path
) -> None:
    copies = tmp_path / "copies"
    copies.mkdir()
    for stem, count in (("math_500", 3), ("gsm8k_test", 4)):
        rows = [
            {"id": f"{stem}/{n}", "problem": f"{stem} {n}?", "answer": "6"} for n in range(count)
        ]
        (copies / f"{stem}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = EvalConfig(
        model=str(pretrained),
        output_dir=str(tmp_path / "run"),
        problems=["math-500", "gsm8k"],
        data_dir=str(copies),
        limit=2,
        conditions=["plain", "no-expert", "no-python", "local"],
        max_completion_length=16,
    )
    results = run(config)
    assert [row["condition"] for row in results["rows"]] == config.conditions
    for row in results["rows"]:
        assert row["n"] == 4 and set(row["by"]["source"]) == {"math-500", "gsm8k"}
        assert row["checkpoint"] == "tiny-chat"
    prompts = {
        condition: qwen_tokenizer.decode(
            next(iter(read_condition(tmp_path / "run" / condition).store)).prompt_ids
        )
        for condition in config.conditions
    }
    assert "<python>" not in prompts["plain"] and "\\boxed{...}" in prompts["plain"]
    assert "<python>code</python>" in prompts["no-expert"]
    assert "<python>" not in prompts["no-python"] and "<answer>" in prompts["no-python"]
    settings = read_condition(tmp_path / "run" / "plain").settings["settings"]
    assert settings["dtype"] == "bfloat16" and settings["after_tag"] == "\n"


def test_samples_are_graded_again_under_other_rules_without_sampling(
    scripted_runtime, problems_file, tmp_path, capsys
) -> None:
    first = run(config_of(tmp_path, problems_file, conditions=["local"], limit=6))
    out = tmp_path / "again"
    assert regrade([str(tmp_path / "run"), "--out", str(out), "--grading", "eval"]) == 0
    assert len(scripted_runtime) == 1 and "again/results.json" in capsys.readouterr().out
    again = read_condition(out / "local")
    assert again.results["accuracy"] == first["rows"][0]["accuracy"]  # the answers are in boxes
    assert again.results["right_by_source"] == {"box": again.results["outcomes"]["right"]}
    assert again.settings["settings"]["grading"] == "eval"
    before = read_condition(tmp_path / "run" / "local")
    assert compare(before, again)["overall"]["difference"] == 0
    before.store.write("part-00001", before.store.load()[:1])
    with pytest.raises(ConditionError, match=r"7 rows, but .*results\.json counts 6: shards were"):
        regrade([str(tmp_path / "run"), "--out", str(tmp_path / "odd"), "--grading", "eval"])
    (tmp_path / "run" / "finished.json").unlink()
    with pytest.raises(RunDirError, match="not finished"):
        regrade([str(tmp_path / "run"), "--out", str(tmp_path / "more"), "--grading", "eval"])


class _FailingGrader(ScriptedGrader):
    """A scripted grader in place of the real one, as `rivet regrade` opens it."""

    def __enter__(self) -> ScriptedGrader:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


def test_regrading_gives_the_rows_and_the_gap_that_the_evaluation_would_have_given(
    scripted_runtime, problems_file, tmp_path, monkeypatch, capsys
) -> None:
    config = config_of(tmp_path, problems_file, samples_per_problem=2, temperature=1.0)
    first = run(config)
    monkeypatch.setattr(eval.regrade, "Grader", lambda mode: _FailingGrader(failures=2))
    command = [str(tmp_path / "run"), "--grading", "reward", "--out"]
    regrade([*command, str(tmp_path / "again")])
    again = json.loads((tmp_path / "again" / "results.json").read_text())
    assert again["rows"][0].pop("faulted_attempts") == {"grader_timeout": 2}
    assert first["rows"][0].pop("faulted_attempts") == {}
    assert again == json.loads(json.dumps(first))
    assert "expert-removal gap" in capsys.readouterr().out
    for file in ("local/results.json", "local/scores.json", "local/trajectories/settings.json"):
        assert (tmp_path / "again" / file).read_text() == (tmp_path / "run" / file).read_text()
    with pytest.raises(RunDirError, match="expected another folder"):
        regrade([*command, str(tmp_path / "run"), "--overwrite"])
    assert read_condition(tmp_path / "run" / "local").store.count() == 20


def test_a_grader_that_fails_stops_regrading_and_what_it_left_is_replaced(
    scripted_runtime, problems_file, tmp_path, monkeypatch
) -> None:
    run(config_of(tmp_path, problems_file, conditions=["local"], max_attempts=1))
    command = [str(tmp_path / "run"), "--grading", "reward", "--out", str(tmp_path / "again")]
    monkeypatch.setattr(eval.regrade, "Grader", lambda mode: _FailingGrader(failures=2))
    with pytest.raises(FaultRateError, match=r"2 of 10 .*grader_timeout 2.*max_fault_rate 0\.1"):
        regrade(command)
    with monkeypatch.context() as patch:
        patch.setattr(eval.regrade, "Grader", lambda mode: _FailingGrader(failures=1))
        patch.setattr(eval.regrade, "finish_run", _raise_keyboard_interrupt)
        with pytest.raises(KeyboardInterrupt):
            regrade(command)
    assert read_condition(tmp_path / "again" / "local").store.shards() == ["faults", "part-00000"]
    monkeypatch.setattr(eval.regrade, "Grader", lambda mode: _FailingGrader())
    regrade(command)
    again = read_condition(tmp_path / "again" / "local")
    assert again.store.shards() == ["part-00000"] and again.store.count() == 10
    assert again.results["outcomes"]["fault"] == 0


def _raise_keyboard_interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_golds_that_changed_are_graded_against_and_no_longer_compared(
    scripted_runtime, problems_file, tmp_path, caplog
) -> None:
    run(config_of(tmp_path, problems_file, conditions=["local"]))
    command = [str(tmp_path / "run"), "--grading", "reward", "--out"]
    text = problems_file.read_text()
    problems_file.write_text(text.replace('"answer": "6"', '"answer": "7"'))
    regrade([*command, str(tmp_path / "again")])
    assert "10 problems, such as p0, have another gold now" in caplog.text
    before, again = (read_condition(tmp_path / name / "local") for name in ("run", "again"))
    assert again.results["accuracy"] == pytest.approx(1 - before.results["accuracy"])
    assert {t.info["gold"] for t in again.store} == {"7"}
    with pytest.raises(CompareError, match="the problems or their golds"):
        compare(before, again)
    problems_file.write_text(text.replace("gcd", "lcm"))
    with pytest.raises(ConditionError, match="expected no change but of their golds"):
        regrade([*command, str(tmp_path / "other")])
    problems_file.write_text(text[: text.index("\n") + 1])
    with pytest.raises(ConditionError, match="9 problems, such as p1, are not in the sets"):
        regrade([*command, str(tmp_path / "fewer")])


def test_a_pretrained_model_without_a_chat_template_is_refused(pretrained, tmp_path) -> None:
    model = tmp_path / "base"
    shutil.copytree(pretrained, model)
    (model / "chat_template.jinja").unlink()
    with pytest.raises(TokenizerError, match="base has no chat template"):
        run(EvalConfig(model=str(model), output_dir=str(tmp_path / "run"), conditions=["plain"]))
    assert not (tmp_path / "run").exists()


def test_a_pretrained_model_is_told_of_the_experts_that_it_may_ask(pretrained, tmp_path) -> None:
    file = tmp_path / "experts.yaml"
    file.write_text(
        "experts:\n- {name: sums, skill: adds numbers, model: m, base_urls: ['http://x:1/v1']}\n"
    )
    config = EvalConfig(model=str(pretrained), experts=str(file), conditions=["experts", "local"])
    opened = open_checkpoint(config)
    prompts = PromptBuilder(opened.tokenizer, opened.settings)
    assert "- sums: adds numbers" in prompts.system_message("experts")
    assert "Experts:" not in prompts.system_message("no-expert")


def test_the_model_of_a_run_folder_and_of_the_hub_s_cache_are_found(
    checkpoint, tmp_path, monkeypatch
) -> None:
    assert find_model(checkpoint.parent) == checkpoint
    assert find_model(checkpoint) == checkpoint
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="owner/none: no such folder, and it cannot be had"):
        find_model("owner/none")
    cached = tmp_path / "models--owner--tiny" / "snapshots" / "0"
    shutil.copytree(checkpoint, cached)
    (tmp_path / "models--owner--tiny" / "refs").mkdir()
    (tmp_path / "models--owner--tiny" / "refs" / "main").write_text("0")
    assert find_model("owner/tiny") == cached


@pytest.mark.parametrize("name", ["nosuch", "./nosuch", "runs/a/b"])
def test_a_model_that_is_neither_a_folder_nor_a_name_of_the_hub_is_called_missing(name) -> None:
    with pytest.raises(CheckpointError, match=f"^{name}: no such folder; expected"):
        open_checkpoint(EvalConfig(model=name))


def test_every_eval_recipe_loads() -> None:
    recipes = sorted(Path("stages/recipes").glob("eval_*.yaml"))
    assert recipes
    for recipe in recipes:
        config = load_config(EvalConfig, recipe)
        assert config.conditions


async def test_an_endpoint_that_does_not_answer_stops_a_run_before_it_samples(
    checkpoint, tmp_path
) -> None:
    file = tmp_path / "experts.yaml"
    file.write_text(
        "experts:\n- {name: calc, model: m, base_urls: ['http://127.0.0.1:9/v1'], max_retries: 0}\n"
    )
    with pytest.raises(ExpertsUnavailableError, match=r"calc at http://127.0.0.1:9/v1"):
        async with open_runtime(checkpoint, experts=file):
            pass
