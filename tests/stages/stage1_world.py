"""A tiny controller and scripted rollouts, so that Stage I can be tested without sampling.

Run as a program, it is a Stage I run that a test can kill: `python stage1_world.py FOLDER STEPS`.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from data.problems import Problem
from rivet.runs import RunDir
from rivet.settings import ProtocolSettings
from rivet.store import TrajectoryStore
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Author, ExpertCall, Kind, Segment, Trajectory
from stages.stage1.config import Stage1Config
from stages.stage1.rollouts import Asked, StepRollouts
from stages.stage1.trainer import Stage1Trainer
from stages.stage1.training import Start, train, trainer_arguments

torch.set_num_threads(1)
# The trainer collects garbage when it starts: seconds in a process full of test modules.
gc.freeze()

VOCAB = 258  # two control tokens and the bytes
EOS, PAD = 0, 1
PROBLEMS = [Problem(f"p{n}", f"problem {n}", "4", "tests") for n in range(8)]
# Author and kind of each run of a completion: consult, be answered, answer.
CONSULT: list[tuple[Author, Kind, int]] = [
    ("controller", "format", 1),
    ("controller", "route", 2),
    ("controller", "request", 3),
    ("expert", "format", 1),
    ("expert", "route", 1),
    ("expert", "reply", 4),
    ("expert", "code", 3),
    ("environment", "output", 3),
    ("expert", "format", 1),
    ("controller", "answer", 3),
]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    pieces = ["<eos>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({piece: n for n, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )


def build_model(seed: int = 0) -> Qwen3ForCausalLM:
    """The mini-world's architecture, smaller."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            tie_word_embeddings=True,
            max_position_embeddings=128,
            bos_token_id=None,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
    )


def scripted(asked: Asked, *, reward: float | None = None, **fields: Any) -> Trajectory:
    """A rollout that depends on nothing but what was asked."""
    rng = random.Random(asked.id)
    segments = []
    for author, kind, longest in CONSULT:
        ids = tuple(rng.randrange(2, VOCAB) for _ in range(rng.randint(1, longest)))
        logprobs = tuple(-rng.random() * 4 for _ in ids) if author == "controller" else None
        segments.append(Segment(author, kind, ids, logprobs))
    segments.append(Segment("controller", "format", (EOS,), (-0.1,)))
    value = float(rng.random() < 0.5) if reward is None else reward
    row = int(asked.problem.id[1:])
    values: dict[str, Any] = {
        "id": asked.id,
        "problem_id": asked.problem.id,
        "mode": "experts",
        "prompt_ids": (2 + row, *(3 for _ in range(1 + row % 3))),
        "segments": tuple(segments),
        "finish": "answer",
        "well_formed": True,
        "answer": "4",
        "expert_calls": (ExpertCall(rng.choice(["calc", "sage"]), "ok"),),
        "outcome": "right" if value > 0 else "wrong",
        "reward": value,
        "step": asked.step,
        "sample_index": asked.sample_index,
    }
    return Trajectory(**(values | fields))


class ScriptedSource:
    """A rollout source that remembers which steps it was asked for."""

    def __init__(self, make: Callable[[Asked], Trajectory] = scripted) -> None:
        self.steps: list[int] = []
        self._make = make

    def sample(self, asked: Sequence[Asked]) -> list[Trajectory]:
        self.steps.append(asked[0].step)
        return [self._make(one) for one in asked]


def build_config(folder: Path, **changes: Any) -> Stage1Config:
    """Two prompts x 4 generations a step, in two micro-batches."""
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "model": "tiny",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_steps": 4,
        "save_steps": 2,
        "learning_rate": 1e-2,
        "max_completion_length": 64,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        "seed": 5,
    }
    return Stage1Config(**(values | changes))


def build_trainer(
    folder: Path,
    *,
    source: Any = None,
    model: Qwen3ForCausalLM | None = None,
    callbacks: Any = None,
    **changes: Any,
) -> Stage1Trainer:
    """A trainer over scripted rollouts."""
    return Stage1Trainer(
        model=model or build_model(),
        args=build_config(folder, **changes),
        problems=PROBLEMS,
        rollouts=StepRollouts(source or ScriptedSource(), TrajectoryStore(folder / "trajectories")),
        tokenizer=ProtocolTokenizer(build_tokenizer()),
        experts=["calc", "sage"],
        right_experts={p.id: "calc" for p in PROBLEMS},
        callbacks=callbacks,
    )


def parameters(model: Any) -> dict[str, torch.Tensor]:
    """Copies of a model's parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def build_start() -> Start:
    """What a whole run begins with."""
    return Start(
        build_model(),
        ProtocolTokenizer(build_tokenizer()),
        ProtocolSettings(prompt="bare", after_tag=""),
        PROBLEMS,
        {p.id: "calc" for p in PROBLEMS},
    )


def run(folder: Path, source: Any = None, **changes: Any) -> Path:
    """A whole run in a run folder, over scripted rollouts."""
    config = build_config(folder, **changes)
    with RunDir.open(folder, config, stage="stage1", overwrite=config.overwrite) as opened:
        args = trainer_arguments(config, opened, len(PROBLEMS))
        return train(opened, args, build_start(), source or ScriptedSource())


if __name__ == "__main__":
    run(Path(sys.argv[1]), max_steps=int(sys.argv[2]))
