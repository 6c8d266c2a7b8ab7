"""A latent run of seconds: random experts and policy, verdicts that depend on the tokens sampled.

A random policy is never right, so whether an answer is right is decided by its token ids here.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from data.problems import Problem
from rivet.config import load_config
from rivet.rollout.types import RolloutLimits
from rivet.settings import ProtocolSettings
from rivet.trajectory import Trajectory
from stages.latent.config import LatentConfig
from stages.latent.source import LatentSource
from stages.mini_controller import build_model, build_tokenizer
from tests.rivet.latent.conftest import tiny_llama

FAMILIES = ("small", "large")
VERDICTS = (("right", 1.0), ("wrong", 0.0))


def write_latent_world(folder: Path) -> Path:
    """Problems, two experts of different kinds and a policy, each in its folder."""
    texts = [f"Calculate {a} + {b}." for a in range(10) for b in range(10)]
    tokenizer = build_tokenizer(texts)
    settings = ProtocolSettings(prompt="bare", limits=RolloutLimits(max_completion_length=4))
    policy = build_model(tokenizer, seed=3, hidden_size=32, num_hidden_layers=1, head_dim=8)
    policy.save_pretrained(folder / "policy")
    tokenizer.hf.save_pretrained(folder / "policy")
    settings.save(folder / "policy")
    tiny_llama(len(tokenizer.hf), width=24, seed=1).save_pretrained(folder / "llama")
    torch.manual_seed(2)
    config = GPT2Config(
        vocab_size=len(tokenizer.hf), n_embd=16, n_layer=1, n_head=2, n_positions=64, n_inner=16
    )
    GPT2LMHeadModel(config).save_pretrained(folder / "gpt")
    for name in ("llama", "gpt"):
        tokenizer.hf.save_pretrained(folder / name)
    for split, offset in (("train", 0), ("test", 5)):
        lines = [
            json.dumps(
                {
                    "id": f"{split}/{n}",
                    "problem": f"Calculate {n + offset} + {n}.",
                    "answer": str(2 * n + offset),
                    "meta": {"family": FAMILIES[n % 2]},
                }
            )
            for n in range(8)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def scripted_grades(
    self: LatentSource, problems: Sequence[Problem], trajectories: Sequence[Trajectory]
) -> list[Trajectory]:
    """Instead of `LatentSource._graded`: half of all first tokens are right."""
    verdicts = [VERDICTS[t.completion_ids[0] % 2] for t in trajectories]
    return [
        replace(t, answer="said", outcome=outcome, reward=reward)
        for t, (outcome, reward) in zip(trajectories, verdicts, strict=True)
    ]


def latent_config(world: Path, run: Path, **changes: Any) -> LatentConfig:
    """Settings of a run of two steps."""
    given: dict[str, Any] = {
        "model": str(world / "policy"),
        "experts": [
            {"name": "llama", "path": str(world / "llama"), "last_k": 2},
            {"name": "gpt", "path": str(world / "gpt"), "last_k": 3, "reading": "chat"},
        ],
        "problems": str(world / "train.jsonl"),
        "test_problems": str(world / "test.jsonl"),
        "cache": str(run.parent / "cache"),
        "output_dir": str(run),
        "max_completion_length": 4,
        "max_steps": 2,
        "num_generations": 4,
        "per_device_train_batch_size": 16,
        "adapter_width": 16,
        "adapter_heads": 2,
        "num_context_tokens": 2,
        "warm_steps": 1,
        "warm_batch_size": 4,
        "adapter_first_steps": 1,
        "learning_rate": 1e-3,
        "adapter_learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "save_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "max_fault_rate": 1.0,
    }
    return load_config(LatentConfig, **{**given, **changes})


def main() -> None:
    """`latent_world.py WORLD RUN`: a run that torchrun may start in several processes."""
    from stages.latent.run import run_arm

    torch.set_num_threads(1)
    LatentSource._graded = scripted_grades  # type: ignore[method-assign]
    world, run = map(Path, sys.argv[1:])
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    run_arm(latent_config(world, run, per_device_train_batch_size=16 // processes))


if __name__ == "__main__":
    main()
