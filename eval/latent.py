"""Opens a latent policy for evaluation: what its conditions are, whom it hears, what samples it.

experts     it hears its frozen experts, those that its configuration names and no others
no-expert   it hears nobody: every expert is masked, and only the empty slot is left

The prompts of both are the same, so that they can be compared as they are.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from data.problems import Problem
from eval.config import EvalConfig
from eval.runtime import Runtime, weights_fingerprint
from rivet.checkpoints import Dtype, OpenedCheckpoint, check_checkpoint
from rivet.grading import Grader
from rivet.trajectory import Mode

if TYPE_CHECKING:
    from rivet.latent.experts import FrozenExpert
    from rivet.latent.policy import LatentPolicy
    from rivet.latent.policy_config import LatentPolicyConfig
    from rivet.latent.states import ExpertStates

STATES = "states"  # in the run folder: what the experts made of the problems
# What a row depends on, of what a policy's configuration says of an expert.
_IDENTITY = ("name", "layers", "last_k", "dtype", "reading", "fingerprint", "is_heard")


class LatentEvalError(ValueError):
    """A latent policy cannot be evaluated as asked; the message says what can be."""


@dataclass(frozen=True, slots=True)
class OpenedLatent(OpenedCheckpoint):
    """A checked latent policy, short of its weights.

    Attributes:
        config: Its configuration.
        experts: Those that it needs, loaded and checked; none where no condition needs them.
    """

    config: LatentPolicyConfig
    experts: list[FrozenExpert]


def check_latent(folder: Path, asked: EvalConfig) -> OpenedLatent:
    """Open a latent policy short of its weights, and its experts.

    Args:
        folder: Its checkpoint, or its export.
        asked: How it will be evaluated.

    Raises:
        LatentEvalError: A condition that it does not have, or another sampler.
        rivet.latent.experts.ExpertError: An expert is missing, or is another revision.
        rivet.checkpoints.CheckpointError: It is no checkpoint.
    """
    from rivet.latent.needed import check_named, load_needed
    from rivet.latent.policy import register
    from rivet.latent.policy_config import LatentPolicyConfig

    register()
    opened = check_checkpoint(folder)
    config = LatentPolicyConfig.from_pretrained(folder)
    check_named(config, folder)
    known = ("experts", "no-expert") if config.experts else ("no-expert",)
    wrong = [condition for condition in asked.conditions if condition not in known]
    if wrong:
        why = "has no tags and no programs" if config.experts else "was trained without experts"
        raise LatentEvalError(
            f"conditions: {wrong[0]} is none of {folder}, a latent policy, which {why}; expected "
            f"{' and '.join(known)}"
        )
    if asked.ray or asked.backend != "local":
        raise LatentEvalError(
            f"ray is {asked.ray}, backend is {asked.backend}: a latent policy is sampled in this "
            "process; expected 0 and local"
        )
    paths = asked.expert_paths
    experts = load_needed(config, paths, device=_device()) if "experts" in asked.conditions else []
    return OpenedLatent(opened.folder, opened.settings, opened.tokenizer, config, experts)


@asynccontextmanager
async def open_latent(
    checkpoint: OpenedLatent,
    problems: Sequence[Problem],
    *,
    run_dir: Path,
    max_completion_length: int | None = None,
    max_batch: int = 96,
    grading: Literal["reward", "eval"] = "reward",
    dtype: Dtype = "auto",
) -> AsyncIterator[Runtime]:
    """Open a latent policy for sampling; its experts read the problems first.

    Args:
        checkpoint: From `check_latent`.
        problems: What will be asked.
        run_dir: Keeps what the experts made of the problems, so that a run that goes on hears the
            same.
        max_completion_length: Replaces the checkpoint's limit.
        max_batch: Samples at the same time.
        grading: As in `eval.runtime.open_runtime`.
        dtype: Number format of the policy; `auto` keeps its own.

    Raises:
        rivet.checkpoints.CheckpointError: The weights are broken.
        rivet.latent.cache.CacheError: The states in the run folder are not these experts'.
    """
    from rivet.latent.engine import LatentEngine
    from rivet.latent.needed import hear, silence
    from rivet.latent.prompts import LatentPrompts

    settings, config = checkpoint.settings, checkpoint.config
    if max_completion_length is not None:
        limits = replace(settings.limits, max_completion_length=max_completion_length)
        settings = replace(settings, limits=limits)
    policy = _load(checkpoint.folder, dtype)
    heard: dict[Mode, ExpertStates | None] = {"no-expert": silence(config, len(problems))}
    if checkpoint.experts:
        texts = [problem.problem for problem in problems]
        heard["experts"] = hear(config, checkpoint.experts, texts, run_dir / STATES)
    engine = LatentEngine(
        policy,
        checkpoint.tokenizer,
        rows={problem.id: n for n, problem in enumerate(problems)},
        heard=heard,
        max_completion_length=settings.limits.max_completion_length,
        max_batch=max_batch,
    )
    with Grader(mode=grading) as grader:
        yield Runtime(
            engine,
            grader,
            LatentPrompts(
                checkpoint.tokenizer, settings, config.placeholder_id, config.num_context_tokens
            ),
            checkpoint.tokenizer,
            settings,
            weights_fingerprint(checkpoint.folder),
            str(policy.dtype).removeprefix("torch."),
            [{key: given.get(key, True) for key in _IDENTITY} for given in config.experts],
        )


def _load(folder: Path, dtype: Dtype) -> LatentPolicy:
    import torch

    from rivet.latent.policy import load_policy

    given: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
    policy = load_policy(folder, dtype=given)
    torch.nn.Module.to(policy, _device())
    return policy


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
