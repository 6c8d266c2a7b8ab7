"""Trajectories that Stage II tests are made of, under the test tokenizer with a token per tag."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rivet.prompts import PromptBuilder
from rivet.protocol import parse
from rivet.settings import ProtocolSettings
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Author, CodeRun, ExpertCall, Trajectory

SETTINGS = ProtocolSettings(prompt="bare", after_tag="")


def trajectory(
    tokenizer: ProtocolTokenizer,
    a: int,
    b: int,
    *,
    sample: int = 0,
    expert: str = "calc",
    sentence: str = "Just calculate it.",
    outcome: str = "right",
) -> Trajectory:
    """A consultation about `a + b`, as the engine would splice it."""
    pieces: list[tuple[Author, str]] = [
        ("controller", f'<expert name="{expert}">{a} + {b}</expert>'),
        ("expert", f'<reply name="{expert}">{sentence}<python>print({a} + {b})</python>'),
        ("environment", f"<output>{a + b}</output>"),
        ("expert", "</reply>"),
        ("controller", f"<answer>\\boxed{{{a + b}}}</answer>"),
    ]
    ids: list[int] = []
    authors: list[Author] = []
    for author, text in pieces:
        tokens = tokenizer.encode(text)
        ids += tokens
        authors += [author] * len(tokens)
    ids.append(tokenizer.eos_id)
    authors.append("controller")
    scanner = parse(tokenizer, ids, authors)
    assert not scanner.problem(), scanner.problem()
    return Trajectory(
        id=f"{a}+{b}#{sample}@0",
        problem_id=f"{a}+{b}",
        mode="experts",
        prompt_ids=PromptBuilder(tokenizer, SETTINGS).build(f"What is {a} + {b}?"),
        segments=scanner.segments(),
        finish="eos",
        well_formed=True,
        answer=scanner.answer(),
        expert_calls=(ExpertCall(expert, "ok"),),
        code_runs=(CodeRun("expert", "ok"),),
        outcome=outcome,
        reward=float(outcome == "right"),
        sample_index=sample,
    )


def trajectories(tokenizer: ProtocolTokenizer, count: int) -> list[Trajectory]:
    """Verified trajectories of different problems and lengths."""
    return [
        trajectory(
            tokenizer,
            n,
            10 * n + 1,
            expert=("calc", "sage")[n % 2],
            sentence="Just calculate it." * (1 + n % 3),
        )
        for n in range(1, count + 1)
    ]


def faulty(base: Trajectory) -> dict[str, Trajectory]:
    """Trajectories that each break one rule of the filter, by the rule's name."""
    controller_output = replace(base.segments[-1], kind="output")
    return {
        "no infrastructure fault": replace(base, fault="expert_timeout", outcome=None),
        "right answer": replace(base, outcome="wrong"),
        "well formed": replace(base, well_formed=False),
        "no fabricated output": replace(base, segments=(*base.segments, controller_output)),
        "used an expert or code": replace(
            base,
            segments=tuple(s for s in base.segments if s.kind != "request"),
            code_runs=(),
        ),
        "code ran": replace(base, code_runs=(CodeRun("expert", "ok"), CodeRun("expert", "error"))),
        "at most 150 tokens": replace(base, prompt_ids=base.prompt_ids * 90),
    }


def save_checkpoint(folder: Path, tokenizer: ProtocolTokenizer, seed: int = 0) -> None:
    """A tiny random controller as a checkpoint folder."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer.hf), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, intermediate_size=24, tie_word_embeddings=True,
        initializer_range=0.2, eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.eos_id,
        bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.hf.save_pretrained(folder)
    SETTINGS.save(folder)


def ids_of(kept: Sequence[Trajectory]) -> list[str]:
    return [t.id for t in kept]
