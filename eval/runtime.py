"""Opens everything that sampling from a checkpoint needs, in one way for every caller.

A checkpoint folder gives the model, the tokenizer and the protocol's settings; around them come the
backend, the sandbox, the grader, the experts where a condition needs them, and the engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from eval.generate import Rollouts
from rivet.checkpoints import check_checkpoint, check_weights, load_model, load_tokenizer
from rivet.experts.types import Experts
from rivet.grading import Grader
from rivet.prompts import PromptBuilder
from rivet.settings import ProtocolSettings
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Mode

_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Runtime:
    """What is open.

    Attributes:
        engine: Samples trajectories.
        grader: Grades them.
        prompts: Builds prompts for the checkpoint.
        tokenizer: The checkpoint's.
        settings: The protocol as the checkpoint speaks it, with this run's limits.
        fingerprint: Digest of the weights.
        experts: What is known of the experts, JSON-able; empty without any.
    """

    engine: Rollouts
    grader: Grader
    prompts: PromptBuilder
    tokenizer: ProtocolTokenizer
    settings: ProtocolSettings
    fingerprint: str
    experts: list[Any]

    def describe(self, mode: Mode) -> dict[str, Any]:
        """What rows depend on besides problem, prompt and sampling, for `sample(settings=...)`."""
        return {
            "weights": self.fingerprint,
            "limits": asdict(self.settings.limits),
            "after_tag": self.settings.after_tag,
            "grading": self.grader.mode,
            "experts": self.experts if mode == "experts" else [],
        }


@asynccontextmanager
async def open_runtime(
    checkpoint: str | Path,
    *,
    experts: Experts | str | Path | None = None,
    max_completion_length: int | None = None,
    max_batch: int = 96,
    grading: Literal["reward", "eval"] = "reward",
    device: str | None = None,
) -> AsyncIterator[Runtime]:
    """Open a checkpoint for sampling; everything is closed at the end.

    Args:
        checkpoint: Folder with weights, tokenizer and `rivet.json`.
        experts: Whom the controller may consult: an open pool, an experts.yaml, or None. An open
            pool is the caller's to close.
        max_completion_length: Replaces the checkpoint's limit.
        max_batch: Trajectories that the backend samples at the same time.
        grading: `reward` reads boxes only; `eval` may fall back to an explicit answer line.
        device: Where the model goes; None takes a GPU if there is one.

    Raises:
        rivet.checkpoints.CheckpointError: Something is missing, broken, or does not fit.
        rivet.settings.SettingsError: It has no `rivet.json`, or one of another version.
        rivet.experts.pool.ExpertsUnavailableError: An endpoint does not answer.
    """
    import torch

    from rivet.experts.config import load_experts
    from rivet.experts.pool import ExpertPool
    from rivet.rollout.engine import RolloutEngine
    from rivet.rollout.local import LocalBackend
    from sandbox import PythonSandbox

    settings = check_checkpoint(checkpoint)
    if max_completion_length is not None:
        limits = replace(settings.limits, max_completion_length=max_completion_length)
        settings = replace(settings, limits=limits)
    fingerprint = weights_fingerprint(checkpoint)
    tokenizer = load_tokenizer(Path(checkpoint))
    model = load_model(Path(checkpoint))
    async with AsyncExitStack() as stack:
        if isinstance(experts, (str, Path)):
            experts = await stack.enter_async_context(ExpertPool(load_experts(experts)))
        if isinstance(experts, ExpertPool):
            await experts.preflight()
        sandbox = await stack.enter_async_context(PythonSandbox())
        grader = stack.enter_context(Grader(mode=grading))
        backend = await stack.enter_async_context(
            LocalBackend(
                model,
                tokenizer,
                max_batch=max_batch,
                device=device or ("cuda" if torch.cuda.is_available() else None),
            )
        )
        engine = RolloutEngine(
            backend, tokenizer, settings=settings, experts=experts, sandbox=sandbox
        )
        yield Runtime(
            engine,
            grader,
            PromptBuilder(tokenizer, settings),
            tokenizer,
            settings,
            fingerprint,
            _describe_experts(experts),
        )


def weights_fingerprint(checkpoint: str | Path) -> str:
    """Digest of a checkpoint's weights: equal for equal weights, wherever they lie.

    Raises:
        rivet.checkpoints.CheckpointError: There are none, or broken ones.
    """
    state = hashlib.blake2b(digest_size=16)
    check_weights(Path(checkpoint))
    for path in sorted(Path(checkpoint).glob("*.safetensors")):
        with open(path, "rb") as file:
            while block := file.read(_BLOCK):
                state.update(block)
    return state.hexdigest()


def _describe_experts(experts: Experts | None) -> list[Any]:
    """Names and models, never addresses or keys: the same experts may move to another port."""
    configs = getattr(experts, "configs", None)
    if configs is None:
        return list(experts.names) if experts is not None else []
    keys = ("name", "model", "system", "temperature", "max_tokens")
    return [{key: getattr(config, key) for key in keys} for config in configs]
