"""Load an export in this fresh process and compare it with what the original gave.

    python -m stages.export_check FOLDER REFERENCE.safetensors

Run by `stages.export`, so that nothing in memory can stand in for a missing file. Logits come from
plain transformers; greedy trajectories from the rollout engine, one after the other. Prints one
JSON line.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from rivet.settings import ProtocolSettings
    from rivet.tokenization import ProtocolTokenizer


def reference_of(
    model: Any,
    tokenizer: ProtocolTokenizer,
    settings: ProtocolSettings,
    *,
    probes: Sequence[str],
    problems: Sequence[str],
    max_tokens: int,
) -> dict[str, torch.Tensor]:
    """What the original gives: prompt ids, logits (T, V) and plain encodings of each probe, and
    the completion of each problem."""
    import torch

    from rivet.prompts import PromptBuilder

    prompts = PromptBuilder(tokenizer, settings)
    tensors = {}
    for n, probe in enumerate(probes):
        ids = torch.tensor(prompts.build(probe, "local"))
        tensors[f"ids.{n}"] = ids
        tensors[f"text.{n}"] = torch.tensor(list(probe.encode()))
        tensors[f"text_ids.{n}"] = torch.tensor(
            tokenizer.hf(probe, add_special_tokens=False).input_ids
        )
        with torch.inference_mode():
            tensors[f"logits.{n}"] = model(ids[None]).logits[0].float().contiguous()
    completions = greedy_completions(model, tokenizer, settings, problems, max_tokens)
    for n, (problem, completion) in enumerate(zip(problems, completions, strict=True)):
        tensors[f"problem.{n}"] = torch.tensor(list(problem.encode()))
        tensors[f"completion.{n}"] = torch.tensor(completion)
    return tensors


def greedy_completions(
    model: Any,
    tokenizer: ProtocolTokenizer,
    settings: ProtocolSettings,
    problems: Sequence[str],
    max_tokens: int,
) -> list[list[int]]:
    """Token ids of the greedy attempt at each problem, one at a time so that no batch differs."""
    return asyncio.run(_greedy(model, tokenizer, settings, problems, max_tokens))


async def _greedy(
    model: Any,
    tokenizer: ProtocolTokenizer,
    settings: ProtocolSettings,
    problems: Sequence[str],
    max_tokens: int,
) -> list[list[int]]:
    from rivet.prompts import PromptBuilder
    from rivet.rollout.backend import SamplingParams
    from rivet.rollout.engine import RolloutEngine
    from rivet.rollout.local import LocalBackend
    from rivet.rollout.types import RolloutRequest
    from sandbox import PythonSandbox

    if not problems:
        return []
    length = min(max_tokens, settings.limits.max_completion_length)
    limits = replace(settings.limits, max_completion_length=length)
    prompts = PromptBuilder(tokenizer, settings)
    completions = []
    async with (
        PythonSandbox(slots=1) as box,
        LocalBackend(model, tokenizer, max_batch=1) as backend,
    ):
        engine = RolloutEngine(backend, tokenizer, settings, sandbox=box, limits=limits)
        for problem in problems:
            request = RolloutRequest(
                problem, prompts.build(problem, "local"), "local", SamplingParams(temperature=0.0)
            )
            trajectory = await engine.rollout(request)
            if trajectory.fault is not None:
                raise RuntimeError(f"the check was lost to a fault ({trajectory.fault}); try again")
            completions.append(trajectory.completion_ids)
    return completions


def main(argv: list[str] | None = None) -> int:
    """Compare; the caller judges the numbers.

    Args:
        argv: Export folder and reference file.
    """
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from rivet.settings import ProtocolSettings
    from rivet.tokenization import ProtocolTokenizer

    folder, reference, max_tokens = sys.argv[1:] if argv is None else argv
    saved = load_file(reference)
    tokenizer = ProtocolTokenizer.from_pretrained(folder)
    # An adapter's folder loads with its base: transformers finds both.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    worst, tokens_differ = 0.0, False
    for n in range(sum(name.startswith("ids.") for name in saved)):
        text = bytes(saved[f"text.{n}"].tolist()).decode()
        ids = tokenizer.hf(text, add_special_tokens=False).input_ids
        tokens_differ |= ids != saved[f"text_ids.{n}"].tolist()
        with torch.inference_mode():
            logits = model(saved[f"ids.{n}"][None]).logits[0].float()
        # NaN compares as different: max() would hide it.
        difference = (logits - saved[f"logits.{n}"]).abs().nan_to_num(nan=float("inf"))
        worst = max(worst, difference.max().item())
    count = sum(name.startswith("problem.") for name in saved)
    problems = [bytes(saved[f"problem.{n}"].tolist()).decode() for n in range(count)]
    completions = greedy_completions(
        model,
        tokenizer,
        ProtocolSettings.load(Path(folder)),
        problems,
        int(max_tokens),
    )
    differing = [
        problems[n]
        for n, completion in enumerate(completions)
        if completion != saved[f"completion.{n}"].tolist()
    ]
    report = {"max_difference": worst, "tokens_differ": tokens_differ, "differing": differing}
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
