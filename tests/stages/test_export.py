"""Export: whole, verified in another process, described by measured numbers only, or refused."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from learnt import PROBLEMS, PROGRAMS, script
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from eval.runtime import weights_fingerprint
from rivet.checkpoints import CheckpointError
from rivet.config import ConfigError
from rivet.files import atomic_write_json
from rivet.prompts import PromptBuilder
from rivet.protocol import Scanner
from rivet.rollout.types import RolloutLimits
from rivet.runs import RunDir
from rivet.settings import ExpertCard, ProtocolSettings, SettingsError
from rivet.tokenization import ProtocolTokenizer
from stages import export, export_check, export_verify
from stages.export import ExportConfig, ExportError
from stages.export_files import with_protocol
from stages.export_licences import LicenceError, Licences
from stages.measurements import ResultsError, read_results
from stages.model_card import licence_data

SETTINGS = ProtocolSettings(
    prompt="bare",
    after_tag="",
    experts=(ExpertCard("calc", "sums"),),
    limits=RolloutLimits(max_completion_length=96, max_code_runs=3),
)
ROWS = [
    {
        "checkpoint": name,
        "condition": condition,
        "accuracy": accuracy,
        "ci_low": accuracy - 0.04,
        "ci_high": accuracy + 0.03,
        "n": 600,
        "well_formed": 0.98,
        "route_accuracy": None,
    }
    for name, condition, accuracy in [
        ("warm", "local", 0.06),
        ("stage2", "local", 0.63258),
        ("stage2", "experts", 0.87),
    ]
]


def tiny_model(tokenizer: ProtocolTokenizer) -> Qwen3ForCausalLM:
    """A random model of a few thousand parameters."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer.hf),
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            intermediate_size=32,
            tie_word_embeddings=True,
            initializer_range=0.3,
            eos_token_id=tokenizer.eos_id,
        )
    ).eval()


def save(folder: Path, model: Any, tokenizer: ProtocolTokenizer) -> Path:
    """A checkpoint as the stages leave it."""
    model.save_pretrained(folder)
    tokenizer.hf.save_pretrained(folder)
    SETTINGS.save(folder)
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path, tag_tokenizer: ProtocolTokenizer) -> Path:
    """A full checkpoint."""
    return save(tmp_path / "checkpoint", tiny_model(tag_tokenizer), tag_tokenizer)


def unverified(*_: Any, **__: Any) -> float:
    """Stands in for the verification where a test is about something else."""
    return 0.0


def adapter(tmp_path: Path, tokenizer: ProtocolTokenizer) -> tuple[PeftModel, Path]:
    """A base model, and a checkpoint that is an adapter of it."""
    base = tiny_model(tokenizer)
    base.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    return adapted, save(tmp_path / "adapter", adapted, tokenizer)


def logits_of(model: Any, tokenizer: ProtocolTokenizer) -> torch.Tensor:
    """Logits of one prompt, shape (T, V)."""
    ids = torch.tensor([PromptBuilder(tokenizer, SETTINGS).build("gcd of 12 and 18", "local")])
    with torch.inference_mode():
        return model(ids).logits[0].float()


def test_an_export_holds_everything_and_gives_the_same_logits(
    checkpoint: Path, tmp_path: Path, tag_tokenizer: ProtocolTokenizer
) -> None:
    atomic_write_json(tmp_path / "results.json", {"rows": ROWS})
    with RunDir.open(tmp_path / "run", {"seed": 3}, stage="stage2") as run:
        run.finish()
    target = export.run(
        ExportConfig(
            checkpoint=str(checkpoint),
            output_dir=str(tmp_path / "out"),
            name="mini",
            results=[str(tmp_path / "results.json")],
            results_checkpoint="stage2",
            benchmark="two sums",
            runs=[str(tmp_path / "run")],
        )
    )
    assert {p.name for p in target.iterdir()} == {
        "LICENSE",
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "rivet.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    model = AutoModelForCausalLM.from_pretrained(target)
    original = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert torch.equal(logits_of(model, tag_tokenizer), logits_of(original, tag_tokenizer))
    assert ProtocolSettings.load(target) == SETTINGS
    assert AutoTokenizer.from_pretrained(target).chat_template == tag_tokenizer.hf.chat_template
    generation = GenerationConfig.from_pretrained(target)
    assert generation.eos_token_id == [tag_tokenizer.eos_id]
    assert (generation.max_new_tokens, generation.do_sample) == (96, False)

    card = ModelCard.load(target / "README.md")
    assert card.data.license == "apache-2.0" and card.data.model_name == "mini"
    measured = {r.metric_args["condition"]: r for r in card.data.eval_results}
    assert measured["local"].metric_value == 0.6326 and measured["experts"].metric_value == 0.87
    assert measured["local"].metric_args["ci95"] == [0.5926, 0.6626]
    assert len(card.data.eval_results) == 2  # the warm checkpoint's row is not this model's
    assert "| two sums | local | 63.3 | 59.3 to 66.3 | 600 | 98.0 |" in card.text
    assert "| stage2 |" in card.text and "| 3 |" in card.text
    assert "```\n\n**With vLLM**" in card.text and "```\n\nThe prompt is" in card.text


def test_an_adapter_is_merged(
    tmp_path: Path, tag_tokenizer: ProtocolTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "verify", unverified)
    adapted, source = adapter(tmp_path, tag_tokenizer)
    assert not (source / "model.safetensors").exists()
    target = export.run(
        ExportConfig(checkpoint=str(source), output_dir=str(tmp_path / "out"), base_license="mit")
    )
    card = ModelCard.load(target / "README.md")
    assert card.data.license == "mit" and card.data.base_model is None  # a path is no name
    assert f"- base model, {tmp_path / 'base'}: mit" in card.text
    assert not (target / "adapter_config.json").exists()
    merged = logits_of(AutoModelForCausalLM.from_pretrained(target), tag_tokenizer)
    assert torch.allclose(merged, logits_of(adapted, tag_tokenizer), atol=1e-4)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert not torch.allclose(merged, logits_of(plain, tag_tokenizer), atol=1e-2)
    assert isinstance(adapted, PeftModel)


def test_a_turn_that_ends_by_the_generation_config_alone_is_exported_and_verified(
    checkpoint: Path, tmp_path: Path, tag_tokenizer: ProtocolTokenizer
) -> None:
    model = tiny_model(tag_tokenizer)
    problems = export_verify.problems_to_verify(1)
    attempt = export_check.greedy_completions(model, tag_tokenizer, SETTINGS, problems, 9)[0]
    ends = sorted({tag_tokenizer.eos_id, attempt[3]})
    GenerationConfig(eos_token_id=ends).save_pretrained(checkpoint)
    target = export.run(
        ExportConfig(
            checkpoint=str(checkpoint), output_dir=str(tmp_path / "out"), verify_problems=1
        )
    )
    assert ProtocolTokenizer.from_pretrained(target).eos_ids == set(ends)


@pytest.mark.parametrize("adapter_only", [False, True])
def test_an_exported_adapter_ends_its_turn_as_its_base_does(
    adapter_only: bool,
    tmp_path: Path,
    tag_tokenizer: ProtocolTokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(export, "verify", unverified)
    _, source = adapter(tmp_path, tag_tokenizer)
    ends = sorted({tag_tokenizer.eos_id, 5})
    GenerationConfig(eos_token_id=ends).save_pretrained(tmp_path / "base")
    target = export.run(
        ExportConfig(
            checkpoint=str(source),
            output_dir=str(tmp_path / "out"),
            adapter_only=adapter_only,
            base_license="mit",
        )
    )
    assert ProtocolTokenizer.from_pretrained(target).eos_ids == set(ends)


def test_without_measurements_the_card_says_so(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "verify", unverified)
    target = export.run(ExportConfig(checkpoint=str(checkpoint), output_dir=str(tmp_path / "out")))
    card = ModelCard.load(target / "README.md")
    assert card.data.eval_results is None and "Not measured." in card.text


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: {"logits.1": t["logits.1"] + 1e-3}, "logits differ by 0.001 after loading"),
        (lambda t: {"completion.1": t["completion.1"][:-1]}, "1 of 2 greedy attempts differ"),
        (lambda t: {"text_ids.0": t["text_ids.0"] + 1}, "reads the probes otherwise"),
    ],
)
def test_an_export_that_gives_something_else_gets_no_name(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    message: str,
) -> None:
    def shifted(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        tensors = reference(*args, **kwargs)
        return {**tensors, **spoil(tensors)}

    def in_this_process(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = export_check.main(command[-3:])
        return subprocess.CompletedProcess(command, code, out.getvalue(), "")

    reference = export_verify.reference_of
    monkeypatch.setattr(export_verify, "reference_of", shifted)
    monkeypatch.setattr(export_verify.subprocess, "run", in_this_process)
    target = tmp_path / "out"
    config = ExportConfig(checkpoint=str(checkpoint), output_dir=str(target), verify_problems=2)
    with pytest.raises(ExportError, match=message):
        export.run(config)
    assert not target.exists() and not list(tmp_path.glob(".out*"))


def test_an_export_is_replaced_only_when_asked_and_a_foreign_folder_never(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "verify", unverified)
    config = {"checkpoint": str(checkpoint), "output_dir": str(tmp_path / "out")}
    export.run(ExportConfig(**config))
    with pytest.raises(ExportError, match="--overwrite true"):
        export.run(ExportConfig(**config))
    export.run(ExportConfig(**config, name="second", overwrite=True))
    assert ModelCard.load(tmp_path / "out" / "README.md").text.startswith("\n# second")
    with pytest.raises(ExportError, match="no export of ours"):
        export.run(
            ExportConfig(checkpoint=str(checkpoint), output_dir=str(checkpoint), overwrite=True)
        )


def test_what_a_killed_export_left_is_removed_by_the_next(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "verify", unverified)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    killed = tmp_path / f".out.tmp-{ended.pid}"
    others = [tmp_path / f".out.tmp-{os.getppid()}", tmp_path / f".output.tmp-{ended.pid}"]
    for folder in (killed, *others):
        folder.mkdir()
        (folder / "model.safetensors").touch()
    export.run(ExportConfig(checkpoint=str(checkpoint), output_dir=str(tmp_path / "out")))
    assert not killed.exists() and all(folder.exists() for folder in others)


def test_a_terminated_export_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminated(*_: Any, **__: Any) -> float:
        assert list(tmp_path.glob(".out.tmp-*"))
        signal.raise_signal(signal.SIGTERM)
        return 0.0

    monkeypatch.setattr(export, "verify", terminated)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        export.main([str(checkpoint), "--to", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    assert signal.getsignal(signal.SIGTERM) is before


def cut(path: Path) -> None:
    """Lose the second half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (
            lambda c: cut(c / "model.safetensors"),
            CheckpointError,
            "model.safetensors: broken weights",
        ),
        (lambda c: (c / "model.safetensors").unlink(), CheckpointError, "no weights"),
        (lambda c: (c / "rivet.json").unlink(), CheckpointError, "no checkpoint here"),
        (lambda c: cut(c / "rivet.json"), SettingsError, "rivet.json: cannot be read"),
        (lambda c: cut(c / "config.json"), CheckpointError, "config file.*not a valid JSON"),
    ],
)
def test_a_broken_checkpoint_is_named(
    checkpoint: Path,
    tmp_path: Path,
    spoil: Callable[[Path], Any],
    error: type[Exception],
    message: str,
) -> None:
    spoil(checkpoint)
    with pytest.raises(error, match=message):
        export.run(ExportConfig(checkpoint=str(checkpoint), output_dir=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_missing_weights_are_not_filled_with_random_ones(checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match="1 weights are missing, model.layers.1.mlp.down_proj"
    ):
        export.run(ExportConfig(checkpoint=str(checkpoint), output_dir=str(tmp_path / "out")))


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        export.run(ExportConfig(checkpoint=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ('{"no": 1}', "cannot be read"),
        (json.dumps({"rows": [{**ROWS[0], "accuracy": 63.2}]}), r"row 1: .*\[0, 1\]"),
        (json.dumps({"rows": [{"condition": "local"}]}), "row 1: KeyError"),
        (json.dumps({"rows": ROWS[1:]}), "no row of checkpoint 'warm'; it has stage2"),
    ],
)
def test_results_that_are_no_measurements_are_refused(
    checkpoint: Path, tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    config = ExportConfig(
        checkpoint=str(checkpoint),
        output_dir=str(tmp_path / "out"),
        results=[str(path)],
        results_checkpoint="warm",
        benchmark="two sums",
    )
    with pytest.raises(ResultsError, match=message):
        export.run(config)


def evaluation(
    folder: Path, weights: str, problems: str | list[str] = "data/sums.jsonl", **more: Any
) -> Path:
    """What an evaluation on files of problems leaves."""
    with RunDir.open(folder, {"problems": problems}, stage="eval") as run:
        run.write_json("results.json", {"rows": [ROWS[1] | more]})
        store = folder / "local" / "trajectories"
        store.mkdir(parents=True)
        atomic_write_json(store / "settings.json", {"weights": weights})
        run.finish()
    return folder / "results.json"


def test_the_benchmark_is_that_of_the_evaluation(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "verify", unverified)
    results = evaluation(tmp_path / "eval", weights_fingerprint(checkpoint))
    target = export.run(
        ExportConfig(
            checkpoint=str(checkpoint), output_dir=str(tmp_path / "out"), results=[str(results)]
        )
    )
    measured = ModelCard.load(target / "README.md").data.eval_results
    assert [(r.dataset_name, r.dataset_type) for r in measured] == [("sums.jsonl", "sums-jsonl")]


def test_an_evaluation_of_several_sets_is_a_row_for_each_on_the_card(
    checkpoint: Path, tmp_path: Path
) -> None:
    sets = {
        "aime-2025": {"value": 0.25, "ci": [0.1, 0.5], "n": 30},
        "sums": {"value": 0.75, "ci": [0.5, 0.9], "n": 20},
    }
    weights, names = weights_fingerprint(checkpoint), ["aime-2025", "data/sums.jsonl"]
    path = evaluation(tmp_path / "several", weights, names, by={"source": sets})
    rows = read_results(path)
    assert [(r.benchmark, r.accuracy, r.ci_low, r.ci_high, r.n) for r in rows] == [
        ("aime-2025", 0.25, 0.1, 0.5, 30),
        ("sums", 0.75, 0.5, 0.9, 20),
    ]
    assert {(r.condition, r.checkpoint, r.well_formed) for r in rows} == {("local", "stage2", None)}


def test_an_evaluation_of_several_sets_under_several_conditions_is_on_the_card(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "verify", unverified)
    sets = {
        "sums": {"value": 0.75, "ci": [0.5, 0.9], "n": 20},
        "aime-2025": {"value": 0.25, "ci": [0.1, 0.5], "n": 30},
    }
    rows = [row | {"by": {"source": sets}} for row in ROWS[1:]]
    atomic_write_json(tmp_path / "results.json", {"rows": rows})
    target = export.run(
        ExportConfig(
            checkpoint=str(checkpoint),
            output_dir=str(tmp_path / "out"),
            results=[str(tmp_path / "results.json")],
            benchmark="both",
        )
    )
    measured = ModelCard.load(target / "README.md").data.eval_results
    assert [(r.dataset_name, r.metric_args["condition"], r.metric_value) for r in measured] == [
        ("sums", "local", 0.75),
        ("sums", "experts", 0.75),
        ("aime-2025", "local", 0.25),
        ("aime-2025", "experts", 0.25),
    ]


@pytest.mark.parametrize(
    ("problems", "benchmark"),
    [
        (["data/sums.jsonl"], "sums.jsonl"),
        (["data/sums.jsonl", "more/sums.parquet"], "sums.jsonl, sums.parquet"),
        (["miniworld"], "rivet mini-world, test split"),
    ],
)
def test_sets_that_are_not_told_apart_are_named_together(
    tmp_path: Path, problems: list[str], benchmark: str
) -> None:
    one = {"source": {"sums": {"value": 0.5, "ci": [0.1, 0.9], "n": 20}}}
    path = evaluation(tmp_path / "eval", "0123", problems, by=one)
    assert [row.benchmark for row in read_results(path)] == [benchmark]


def test_another_models_results_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    results = evaluation(tmp_path / "eval", "0123")
    config = ExportConfig(
        checkpoint=str(checkpoint), output_dir=str(tmp_path / "out"), results=[str(results)]
    )
    with pytest.raises(ResultsError, match="condition local was measured on other weights"):
        export.run(config)


def test_results_without_a_benchmark_ask_for_one(checkpoint: Path, tmp_path: Path) -> None:
    atomic_write_json(tmp_path / "results.json", {"rows": ROWS})
    config = ExportConfig(
        checkpoint=str(checkpoint),
        output_dir=str(tmp_path / "out"),
        results=[str(tmp_path / "results.json")],
    )
    with pytest.raises(ResultsError, match="row 1: .*names no benchmark; set --benchmark"):
        export.run(config)


def test_the_command_prints_the_folder(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(export, "verify", unverified)
    run = tmp_path / "run"
    with RunDir.open(run, {"seed": 3}, stage="stage1"):
        checkpoint.rename(run / "checkpoint")
    assert export.main([str(run), "--output_dir", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}\n"
    assert "| stage1 |" in (tmp_path / "out" / "README.md").read_text()


def test_an_adapter_can_be_exported_alone(
    tmp_path: Path, tag_tokenizer: ProtocolTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "verify", unverified)
    _, source = adapter(tmp_path, tag_tokenizer)
    run = tmp_path / "run"
    run.mkdir()
    source.rename(run / "adapter")
    save(run / "checkpoint", tiny_model(tag_tokenizer), tag_tokenizer)
    target = export.run(
        ExportConfig(
            checkpoint=str(run),
            output_dir=str(tmp_path / "out"),
            adapter_only=True,
            base_model=str(tmp_path / "base"),
            base_license="mit",
        )
    )
    names = {path.name for path in target.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "rivet.json"} <= names
    assert not any(name.startswith("model") for name in names)
    loaded = AutoModelForCausalLM.from_pretrained(target)
    original = AutoModelForCausalLM.from_pretrained(run / "adapter")
    assert torch.equal(logits_of(loaded, tag_tokenizer), logits_of(original, tag_tokenizer))
    card = ModelCard.load(target / "README.md")
    assert card.data.library_name == "peft" and "LoRA adapter" in card.text
    assert "vllm" not in card.text  # which wants whole weights


def test_an_adapter_is_exported_with_the_base_that_was_named_instead_of_its_own(
    tmp_path: Path, tag_tokenizer: ProtocolTokenizer
) -> None:
    adapted, source = adapter(tmp_path, tag_tokenizer)
    moved = (tmp_path / "base").rename(tmp_path / "moved")
    target = export.run(
        ExportConfig(
            checkpoint=str(source),
            output_dir=str(tmp_path / "out"),
            adapter_only=True,
            base_model=str(moved),
            base_license="mit",
            verify_problems=1,
            verify_tokens=4,
        )
    )
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert torch.equal(logits_of(loaded, tag_tokenizer), logits_of(adapted, tag_tokenizer))


def test_an_adapter_of_a_run_is_no_export_though_peft_gives_it_a_card(
    tmp_path: Path, tag_tokenizer: ProtocolTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "verify", unverified)
    pushed = []
    monkeypatch.setattr(export, "push", lambda folder, *_, **__: pushed.append(folder))
    _, source = adapter(tmp_path, tag_tokenizer)
    assert (source / "README.md").is_file() and (source / "rivet.json").is_file()
    with pytest.raises(ExportError, match="no export of ours"):
        export.run(ExportConfig(checkpoint=str(source), output_dir=str(source), overwrite=True))
    monkeypatch.chdir(tmp_path)
    export.main([str(source), "--push", "me/mine", "--base_license", "mit"])
    assert pushed == [Path("exports/controller")] and Path(pushed[0], "config.json").is_file()


def test_settings_that_a_push_of_an_export_would_ignore_are_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "verify", unverified)
    monkeypatch.setattr(export, "push", lambda *_, **__: pytest.fail("it was pushed"))
    made = export.run(ExportConfig(checkpoint=str(checkpoint), output_dir=str(tmp_path / "out")))
    asked = [str(made), "--push", "me/mine", "--license", "mit", "--private", "true"]
    for more in ([], ["--dry-run"]):
        with pytest.raises(ConfigError, match=r"license: has no effect: .*out is an export") as one:
            export.main([*asked, *more])
        assert "private: " not in str(one.value)


def test_whole_weights_have_no_adapter_to_export(checkpoint: Path, tmp_path: Path) -> None:
    config = ExportConfig(
        checkpoint=str(checkpoint), output_dir=str(tmp_path / "out"), adapter_only=True
    )
    with pytest.raises(ExportError, match="no LoRA adapter here"):
        export.run(config)


def base_with_card(folder: Path, card: str | None) -> str:
    """A folder that stands for a base model."""
    folder.mkdir()
    if card is not None:
        (folder / "README.md").write_text(card)
    return str(folder)


@pytest.mark.parametrize(
    ("card", "message"),
    [
        (None, "the base model has no card; state it with --base_license"),
        ("# A model\n", "names no licence; state it with --base_license"),
        ("---\nlicense: [\n---\n", "cannot be read for the licence"),
    ],
)
def test_a_base_model_without_a_licence_is_refused_before_the_work(
    checkpoint: Path, tmp_path: Path, card: str | None, message: str
) -> None:
    config = ExportConfig(
        checkpoint=str(checkpoint),
        output_dir=str(tmp_path / "out"),
        base_model=base_with_card(tmp_path / "base", card),
    )
    with pytest.raises(LicenceError, match=message) as caught:
        export.run(config)
    assert str(caught.value).count("--base_license") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", ["lots", "5", "0GB", "-1GB", ""])
def test_a_size_that_is_none_is_refused_before_the_work(size: str) -> None:
    with pytest.raises(ConfigError, match="max_shard_size: got .* such as 5GB"):
        ExportConfig(checkpoint="c", max_shard_size=size)
    assert ExportConfig(checkpoint="c", max_shard_size="1.5GB").max_shard_size == "1.5GB"


def test_licences_of_base_and_data_are_on_the_card(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "verify", unverified)
    card = "---\nlicense: other\nlicense_name: qwen-research\n---\n"
    target = export.run(
        ExportConfig(
            checkpoint=str(checkpoint),
            output_dir=str(tmp_path / "out"),
            base_model=base_with_card(tmp_path / "base", card),
            license="cc-by-4.0",
            data=["me/sums: mit", "our own problems: cc0-1.0"],
        )
    )
    card_read = ModelCard.load(target / "README.md")
    assert card_read.data.license == "cc-by-4.0" and card_read.data.datasets == ["me/sums"]
    assert "base: qwen-research" in card_read.text
    assert "- data, our own problems: cc0-1.0" in card_read.text
    assert not (target / "LICENSE").exists()  # ours is not theirs


@pytest.mark.parametrize("there", ["models/smollm2", "./smollm2", "../smollm2"])
def test_only_a_name_on_the_hub_is_a_base_model_in_the_cards_metadata(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "models" / "smollm2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert licence_data(Licences("mit", there, "mit"))["base_model"] is None
    assert licence_data(Licences("mit", "me/smollm2", "mit"))["base_model"] == "me/smollm2"
    data = licence_data(Licences("mit", data=(("models/smollm2", "mit"), ("me/sums", "mit"))))
    assert data["datasets"] == ["me/sums"]


def test_a_licence_of_the_base_without_its_model_is_refused(
    checkpoint: Path, tmp_path: Path
) -> None:
    config = ExportConfig(
        checkpoint=str(checkpoint), output_dir=str(tmp_path / "out"), base_license="llama3.2"
    )
    with pytest.raises(LicenceError, match=r"'llama3.2' without a base model; .* --base_model"):
        export.run(config)


def test_the_number_format_of_an_adapter_cannot_be_chosen() -> None:
    with pytest.raises(ConfigError, match="dtype: got 'float16', expected auto with adapter_only"):
        ExportConfig("checkpoint", adapter_only=True, dtype="float16")


def test_a_licence_of_data_is_a_pair(checkpoint: Path, tmp_path: Path) -> None:
    config = ExportConfig(
        checkpoint=str(checkpoint), output_dir=str(tmp_path / "out"), data=["sums"]
    )
    with pytest.raises(LicenceError, match="'sums', expected NAME: LICENCE"):
        export.run(config)


def test_a_target_that_cannot_be_written_is_named_before_the_work(
    checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    for target in (tmp_path / "file" / "out", Path("/proc/rivet/out")):
        with pytest.raises(ExportError, match="cannot be written .*choose another --to"):
            export.run(ExportConfig(checkpoint=str(checkpoint), output_dir=str(target)))


def test_a_checkpoint_of_another_protocol_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    settings = json.loads((checkpoint / "rivet.json").read_text())
    (checkpoint / "rivet.json").write_text(json.dumps({**settings, "protocol_version": 99}))
    with pytest.raises(SettingsError, match="protocol_version is 99, this rivet speaks 1"):
        export.run(ExportConfig(checkpoint=str(checkpoint), output_dir=str(tmp_path / "out")))


def test_large_weights_are_sharded(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "verify", unverified)
    target = export.run(
        ExportConfig(
            checkpoint=str(checkpoint), output_dir=str(tmp_path / "out"), max_shard_size="20KB"
        )
    )
    assert len(list(target.glob("model-*.safetensors"))) > 1
    assert (target / "model.safetensors.index.json").is_file()


@pytest.mark.parametrize("prompt", ["bare", "instruct"])
def test_the_template_asks_as_rivet_does(prompt: Any, qwen_tokenizer: ProtocolTokenizer) -> None:
    card = ExpertCard("calc", 'sums "exactly", \U0001d465\u2208\u211d \\ and \U0001f9ee')
    settings = ProtocolSettings(prompt=prompt, experts=(card,))
    template = with_protocol(qwen_tokenizer, settings)
    rendered = qwen_tokenizer.hf.apply_chat_template(
        [{"role": "user", "content": "1 + 1"}],
        chat_template=template,
        add_generation_prompt=True,
        tokenize=False,
    )
    asked = PromptBuilder(qwen_tokenizer, settings).build("1 + 1", "local")
    assert qwen_tokenizer.encode(rendered) == list(asked)


def test_the_template_renders_attempts_that_parse_again(
    qwen_tokenizer: ProtocolTokenizer, tag_tokenizer: ProtocolTokenizer
) -> None:
    for tokenizer, settings in (
        (tag_tokenizer, SETTINGS),
        (qwen_tokenizer, ProtocolSettings(experts=SETTINGS.experts)),
    ):
        for (problem, answer), program in zip(PROBLEMS.items(), PROGRAMS.values(), strict=True):
            pieces = [*script(program, answer)]
            text = "".join(piece for piece, _ in pieces).removesuffix("<|im_end|>")
            messages = [
                {"role": "user", "content": problem},
                {"role": "assistant", "content": text},
            ]
            rendered = tokenizer.hf.apply_chat_template(
                messages, chat_template=with_protocol(tokenizer, settings), tokenize=False
            )
            start = rendered.index(text)
            scanner = Scanner(tokenizer)
            for piece, is_own in pieces:
                author = "controller" if is_own else "environment"
                scanner.feed(tokenizer.encode(piece), author)
            again = tokenizer.encode(rendered[start:].rstrip("\n"))
            assert tokenizer.decode(again) == text + "<|im_end|>"
            assert scanner.problem() == "" and scanner.answer() == f"\\boxed{{{answer}}}"


def test_transformers_alone_writes_a_well_formed_attempt_up_to_the_first_program(
    learnt_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "verify", unverified)
    target = export.run(
        ExportConfig(checkpoint=str(learnt_checkpoint), output_dir=str(tmp_path / "out"))
    )
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target)
    for problem, program in PROGRAMS.items():
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": problem}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        ids = model.generate(**prompt, stop_strings=["</python>"], tokenizer=tokenizer)
        scanner = Scanner(ProtocolTokenizer(tokenizer))
        scanner.feed(ids[0, prompt.input_ids.shape[1] :].tolist(), "controller")
        assert scanner.violation == "" and scanner.trailing == ""
        assert [span.name for span in scanner.spans] == ["expert", "reply", "python"]
        assert scanner.spans[-1].is_closed and scanner.text(scanner.spans[-1]) == program
