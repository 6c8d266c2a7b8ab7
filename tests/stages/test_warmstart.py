"""The warm start: honest material, laid out as the engine does it, and held to a gate."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from data.miniworld.dialogues import Dialogue, code_of, scripted_dialogues, tokenizer_corpus
from data.miniworld.experts import EXPERTS, run_script
from data.miniworld.tasks import build_split, request_for
from rivet.checkpoints import CheckpointError
from rivet.config import load_config
from rivet.experts.types import ExpertReply
from rivet.prompts import PromptBuilder
from rivet.rollout.backend import Generation
from rivet.rollout.engine import RolloutEngine
from rivet.rollout.types import RolloutRequest
from rivet.settings import ExpertCard, ProtocolSettings
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Trajectory
from sandbox import PythonSandbox
from stages import warmstart
from stages.mini_controller import TAGS, build_model, build_tokenizer
from stages.stage2.batching import WeightedCollator
from stages.stage2.dataset import to_dataset
from stages.stage2.objective import AUTHOR_CODES, KIND_CODES, Objective
from stages.warmstart import GateError, WarmstartConfig, copied_share, render, run, span_scales

SETTINGS = ProtocolSettings(prompt="bare", after_tag="")


@pytest.fixture(scope="module")
def mini_tokenizer() -> ProtocolTokenizer:
    return build_tokenizer(tokenizer_corpus(300), words=list(EXPERTS))


@pytest.fixture(scope="module")
def dialogues() -> list[Dialogue]:
    return list(itertools.islice(scripted_dialogues(build_split("train", 10, 0), 0), 60))


def rendered(
    dialogues: Sequence[Dialogue],
    tokenizer: ProtocolTokenizer,
    settings: ProtocolSettings = SETTINGS,
) -> list[Trajectory]:
    prompts = PromptBuilder(tokenizer, settings)
    return [render(d, n, tokenizer, settings, prompts) for n, d in enumerate(dialogues)]


def test_every_tag_is_one_token_and_digits_come_in_ones_and_twos(
    mini_tokenizer: ProtocolTokenizer,
) -> None:
    assert all(len(mini_tokenizer.encode(tag)) == 1 for tag in TAGS)

    def pieces(text: str) -> list[str]:
        return [mini_tokenizer.decode([i]) for i in mini_tokenizer.encode_untrusted(text)]

    assert pieces("12345+678") == ["12", "34", "5", "+", "67", "8"]
    assert pieces("gcd(907)")[-3:] == ["90", "7", ")"]


def test_an_experts_name_is_one_token_between_two_tags(mini_tokenizer: ProtocolTokenizer) -> None:
    for name in EXPERTS:
        ids = mini_tokenizer.encode(f'<expert name="{name}">')
        assert [mini_tokenizer.decode([i]) for i in ids] == ['<expert name="', name, '">']


def test_tokenizer_is_the_same_every_time() -> None:
    first, second = (
        build_tokenizer(tokenizer_corpus(100), words=list(EXPERTS)).token_bytes for _ in range(2)
    )
    assert first == second


def test_vocabulary_too_small_for_pairs_of_digits_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size 300 is too small: .* is not one token"):
        build_tokenizer(tokenizer_corpus(100), vocab_size=300)


def test_model_has_half_a_million_parameters_and_the_tokenizers_end(
    mini_tokenizer: ProtocolTokenizer,
) -> None:
    model = build_model(mini_tokenizer, seed=1)
    assert 0.4e6 < sum(p.numel() for p in model.parameters()) < 0.6e6
    assert model.generation_config.eos_token_id == mini_tokenizer.eos_id
    again, other = build_model(mini_tokenizer, seed=1), build_model(mini_tokenizer, seed=2)
    assert torch.equal(model.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)


class Player:
    """A backend that plays a controller's turns."""

    def __init__(self, turns: list[list[int]]) -> None:
        self._turns = turns

    async def generate(self, prompt_ids: Sequence[int], **_: Any) -> Generation:
        ids = self._turns.pop(0)
        return Generation(ids, [-1.0] * len(ids), "stop" if self._turns else "eos")

    async def release(self, session: str) -> None:
        pass


class Reader:
    """An expert that reads a dialogue's reply out."""

    names = tuple(EXPERTS)

    def __init__(self, reply: str) -> None:
        self._reply = reply

    async def ask(self, name: str, request: str, *, sample_key: str = "") -> ExpertReply:
        return ExpertReply(name, "ok", self._reply)


async def played(
    trajectory: Trajectory, dialogue: Dialogue, tokenizer: ProtocolTokenizer, sandbox: PythonSandbox
) -> Trajectory:
    """The trajectory that the real engine makes of the same turns, reply and program."""
    turns: list[list[int]] = []
    last = ""
    for segment in trajectory.segments:
        if segment.author == "controller":
            if last != "controller":
                turns.append([])
            turns[-1] += segment.ids
        last = segment.author
    engine = RolloutEngine(
        Player(turns), tokenizer, SETTINGS, experts=Reader(dialogue.reply), sandbox=sandbox
    )
    return (await engine.rollouts([RolloutRequest("p", trajectory.prompt_ids)]))[0]


async def test_dialogues_are_laid_out_as_the_engine_splices_them(
    mini_tokenizer: ProtocolTokenizer, dialogues: list[Dialogue]
) -> None:
    # An output that no program gave cannot be had from the sandbox.
    possible = [d for d in dialogues if d.is_failing or d.output == run_script(code_of(d.reply))]
    trajectories = rendered(possible[:24], mini_tokenizer)
    async with PythonSandbox() as sandbox:
        sampled = await asyncio.gather(
            *(
                played(t, d, mini_tokenizer, sandbox)
                for t, d in zip(trajectories, possible[:24], strict=True)
            )
        )
    for scripted, real in zip(trajectories, sampled, strict=True):
        assert [(s.author, s.kind, s.ids) for s in scripted.segments] == [
            (s.author, s.kind, s.ids) for s in real.segments
        ]
        assert real.well_formed and scripted.answer == real.answer


def test_answers_are_copied_from_the_output_and_never_from_the_gold(
    mini_tokenizer: ProtocolTokenizer, dialogues: list[Dialogue]
) -> None:
    wrong = 0
    for dialogue, trajectory in zip(dialogues, rendered(dialogues, mini_tokenizer), strict=True):
        if dialogue.is_failing:
            assert trajectory.answer == "\\boxed{?}"
            continue
        outputs = [s for s in trajectory.segments if s.kind == "output"]
        printed = mini_tokenizer.decode([i for s in outputs for i in s.ids])
        assert trajectory.answer == f"\\boxed{{{printed}}}"
        wrong += printed != dialogue.problem.answer
    assert wrong > len(dialogues) / 3  # most experts do not know most families


def test_gate_problems_share_no_operands_with_those_trained_on() -> None:
    trained = {p.id for p in build_split("train", 200, 1)}
    assert not trained & {p.id for p in build_split("validation", 100, 1)}


def test_controller_and_tags_are_always_trained_and_the_experts_words_in_the_chosen_share(
    mini_tokenizer: ProtocolTokenizer, dialogues: list[Dialogue]
) -> None:
    trajectories = rendered(dialogues, mini_tokenizer)
    scales = span_scales(len(trajectories), 0.05, seed=1)
    assert sum(scales) == 3 and set(scales) == {0.0, 1.0}
    assert scales == span_scales(len(trajectories), 0.05, seed=1)
    assert scales != span_scales(len(trajectories), 0.05, seed=2)
    dataset = to_dataset(trajectories, expert_scales=scales)
    batch = WeightedCollator(Objective(), pad_token_id=0)(list(dataset))
    weights, authors = batch["weights"], batch["authors"]
    assert (weights[authors == AUTHOR_CODES.index("controller")] == 1).all()
    assert (weights[authors == AUTHOR_CODES.index("environment")] == 0).all()
    is_expert, kinds = authors == AUTHOR_CODES.index("expert"), batch["kinds"]
    for content in ("reply", "code"):
        trained = torch.where(kinds == KIND_CODES.index(content), weights, 0).amax(-1)
        assert trained.tolist() == scales
    for form in ("format", "route"):
        assert (weights[is_expert & (kinds == KIND_CODES.index(form))] == 1).all()


class Copier:
    """A backend in the place of `LocalBackend` that copies exactly, but for one family."""

    def __init__(self, _: Any, tokenizer: ProtocolTokenizer) -> None:
        self._tokenizer = tokenizer
        prompts = PromptBuilder(tokenizer, SETTINGS)
        self._requests = {
            prompts.build(p.problem): request_for(p) for p in build_split("validation", 5, 0)
        }

    async def __aenter__(self) -> Copier:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def generate(self, prompt_ids: tuple[int, ...], **_: Any) -> Generation:
        request = self._requests[prompt_ids].replace("gcd ", "gcd 1")
        ids = self._tokenizer.encode(f'<expert name="sage">{request}</expert>')
        return Generation(ids, [0.0] * len(ids), "stop")


def test_gate_counts_exact_copies(
    mini_tokenizer: ProtocolTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmstart, "LocalBackend", Copier)
    prompts = PromptBuilder(mini_tokenizer, SETTINGS)
    share = copied_share(None, mini_tokenizer, prompts, build_split("validation", 5, 0))  # type: ignore[arg-type]
    assert share == pytest.approx(5 / 6)


def config_of(output: Path, **overrides: Any) -> WarmstartConfig:
    return load_config(
        WarmstartConfig,
        None,
        output_dir=str(output), dialogues=48, problems_per_family=8, max_steps=2, gate=0.0,
        gate_problems=2, per_device_train_batch_size=8, learning_rate=1e-3, hidden_size=32,
        num_hidden_layers=1, gradient_checkpointing=False, report_to="none", disable_tqdm=True,
        use_cpu=True, dataloader_pin_memory=False, **overrides,
    )  # fmt: skip


def test_run_leaves_a_checkpoint_that_knows_its_experts_and_limits(tmp_path: Path) -> None:
    checkpoint = run(config_of(tmp_path / "run"))
    assert checkpoint == tmp_path / "run" / "checkpoint"
    settings = ProtocolSettings.load(checkpoint)
    assert (settings.prompt, settings.after_tag) == ("bare", "")
    assert settings.experts == tuple(ExpertCard(e.name, e.skill) for e in EXPERTS.values())
    results = json.loads((tmp_path / "run" / "finished.json").read_text())["results"]
    assert 0 <= results["copied_requests"] <= 1
    run(config_of(tmp_path / "again"))
    first, second = (
        load_file(tmp_path / name / "checkpoint" / "model.safetensors") for name in ("run", "again")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_below_its_gate_fails_and_stays_unfinished(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run")
    config.gate = 0.85
    with pytest.raises(GateError, match="are exact copies, expected at least 85%"):
        run(config)
    assert not (tmp_path / "run" / "finished.json").exists()


def test_a_pretrained_checkpoint_with_plain_text_tags_can_be_the_start(
    tmp_path: Path, qwen_tokenizer: ProtocolTokenizer
) -> None:
    torch.manual_seed(0)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(qwen_tokenizer.hf), hidden_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=32,
            tie_word_embeddings=True,
        )
    ).save_pretrained(tmp_path / "base")  # fmt: skip
    qwen_tokenizer.hf.save_pretrained(tmp_path / "base")
    checkpoint = run(config_of(tmp_path / "run", model=str(tmp_path / "base"), max_length=4096))
    settings = ProtocolSettings.load(checkpoint)
    assert (settings.prompt, settings.after_tag) == ("instruct", "\n")
    tokenizer = ProtocolTokenizer.from_pretrained(checkpoint)
    assert "algebra" in PromptBuilder(tokenizer, settings).system_message("experts")
    bare = run(config_of(tmp_path / "bare", model=str(tmp_path / "base"), prompt="bare"))
    assert ProtocolSettings.load(bare).prompt == "bare"


def test_a_model_that_is_nowhere_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_: object) -> ProtocolTokenizer:
        raise OSError("no connection\nCheck your internet connection")

    monkeypatch.setattr(ProtocolTokenizer, "from_pretrained", nothing)
    with pytest.raises(CheckpointError, match="model: models/none: no such folder, and the Hub"):
        run(config_of(tmp_path / "run", model="models/none"))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_killed_warm_start_resumes_to_the_same_weights(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "dialogues": 48, "problems_per_family": 8, "max_steps": 6, "gate": 0, "gate_problems": 2,
        "per_device_train_batch_size": 8, "hidden_size": 32, "num_hidden_layers": 1,
        "gradient_checkpointing": "false", "report_to": "none", "use_cpu": "true", "save_steps": 2,
    }  # fmt: skip
    arguments = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    root = Path(__file__).parents[2]

    def command(output: Path) -> list[str]:
        return [
            sys.executable,
            "-m",
            "stages.warmstart",
            "--output_dir",
            str(output),
            *arguments,
        ]

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command(tmp_path / "whole"), cwd=root, env=environment, check=True)
    process = subprocess.Popen(command(tmp_path / "killed"), cwd=root, env=environment)
    while process.poll() is None and not (tmp_path / "killed/trainer/checkpoint-2").exists():
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    subprocess.run(command(tmp_path / "killed"), cwd=root, env=environment, check=True)
    whole, killed = (
        load_file(tmp_path / name / "checkpoint" / "model.safetensors")
        for name in ("whole", "killed")
    )
    assert all(torch.equal(whole[name], killed[name]) for name in whole)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"dialogues": 0}, "dialogues is 0; expected at least 1"),
        ({"expert_span_share": 1.5}, "expert_span_share is 1.5; expected 0 to 1"),
        ({"dialoges": 3}, "dialogues"),
        ({"prompt": "short"}, "prompt: got short"),
        ({"families": ["gcd", "gdc"]}, "families is gcd, gdc; expected different ones of"),
    ],
)
def test_bad_settings_fail_before_anything_starts(
    tmp_path: Path, overrides: dict[str, Any], message: str
) -> None:
    settings = {"output_dir": str(tmp_path / "run"), "report_to": "none", **overrides}
    with pytest.raises(ValueError, match=message):
        load_config(WarmstartConfig, None, **settings)
    assert not (tmp_path / "run").exists()
