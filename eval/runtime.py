"""Opens everything that sampling from a checkpoint needs, in one way for every caller.

A checkpoint folder gives the model, the tokenizer and the protocol's settings; around them come the
backend, the sandbox, the grader, the experts where a condition needs them, and the engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from eval.generate import Rollouts
from rivet.checkpoints import (
    CheckpointError,
    Dtype,
    OpenedCheckpoint,
    check_checkpoint,
    check_weights,
    load_model,
)
from rivet.experts.types import Experts
from rivet.grading import Grader
from rivet.prompts import PromptBuilder
from rivet.rollout.backend import Backend
from rivet.rollout.backend_settings import BackendSettings
from rivet.settings import FILE_NAME, ExpertCard, ProtocolSettings
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
        dtype: Number format that they were computed in.
        experts: What is known of the experts, JSON-able; empty without any.
    """

    engine: Rollouts
    grader: Grader
    prompts: PromptBuilder
    tokenizer: ProtocolTokenizer
    settings: ProtocolSettings
    fingerprint: str
    dtype: str
    experts: list[Any]

    def describe(self, mode: Mode) -> dict[str, Any]:
        """What rows depend on besides problem, prompt and sampling, for `sample(settings=...)`."""
        return {
            "weights": self.fingerprint,
            "dtype": self.dtype,
            "limits": asdict(self.settings.limits),
            "after_tag": self.settings.after_tag,
            "grading": self.grader.mode,
            "experts": self.experts if mode == "experts" else [],
        }


@asynccontextmanager
async def open_runtime(
    checkpoint: str | Path | OpenedCheckpoint,
    *,
    experts: Experts | str | Path | None = None,
    max_completion_length: int | None = None,
    max_batch: int = 96,
    grading: Literal["reward", "eval"] = "reward",
    device: str | None = None,
    dtype: Dtype = "auto",
    run_dir: Path | None = None,
    sampler: BackendSettings | None = None,
) -> AsyncIterator[Runtime]:
    """Open a checkpoint for sampling; everything is closed at the end.

    Args:
        checkpoint: Folder with weights, tokenizer and `rivet.json`, or one that was opened
            already.
        experts: Whom the controller may consult: an open pool, an experts.yaml, or None. An open
            pool is the caller's to close.
        max_completion_length: Replaces the checkpoint's limit.
        max_batch: Trajectories that the backend samples at the same time.
        grading: `reward` reads boxes only; `eval` may fall back to an explicit answer line.
        device: Where the model goes; None takes a GPU if there is one.
        dtype: Number format of the weights; `auto` keeps theirs.
        run_dir: Where what is spent on experts is booked; None books nothing.
        sampler: What samples; None: the model in this process.

    Raises:
        rivet.rollout.backend.BackendError: No vLLM, no answer, or servers of other weights.
        rivet.checkpoints.CheckpointError: Something is missing, broken, or does not fit.
        rivet.settings.SettingsError: It has no `rivet.json`, or one of another version.
        rivet.experts.pool.ExpertsUnavailableError: An endpoint does not answer.
        rivet.experts.ledger.BudgetExceededError: The budget for experts is spent.
    """
    from rivet.experts.config import load_experts
    from rivet.experts.pool import ExpertPool
    from rivet.rollout.engine import RolloutEngine
    from sandbox import PythonSandbox

    opened = (
        checkpoint if isinstance(checkpoint, OpenedCheckpoint) else check_checkpoint(checkpoint)
    )
    settings, tokenizer = opened.settings, opened.tokenizer
    if max_completion_length is not None:
        limits = replace(settings.limits, max_completion_length=max_completion_length)
        settings = replace(settings, limits=limits)
    fingerprint = weights_fingerprint(opened.folder)
    sampler = sampler or BackendSettings()
    opened_backend, number_format = _backend(
        sampler, replace(opened, settings=settings), max_batch, dtype, device
    )
    async with AsyncExitStack() as stack:
        if isinstance(experts, (str, Path)):
            experts = await stack.enter_async_context(ExpertPool(load_experts(experts)))
        if isinstance(experts, ExpertPool):
            if run_dir is not None:
                experts.keep_ledger(run_dir)
            await experts.preflight()
        sandbox = await stack.enter_async_context(PythonSandbox())
        grader = stack.enter_context(Grader(mode=grading))
        backend = await stack.enter_async_context(opened_backend)
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
            number_format,
            _describe_experts(experts),
        )


def _backend(
    sampler: BackendSettings,
    checkpoint: OpenedCheckpoint,
    max_batch: int,
    dtype: Dtype,
    device: str | None,
) -> tuple[AbstractAsyncContextManager[Backend], str]:
    """What samples, not yet open, and the number format that it computes in."""
    import torch

    from rivet.rollout.local import LocalBackend
    from rivet.rollout.vllm_open import open_vllm, resolve_dtype

    if sampler.backend == "vllm":
        dtype_name = resolve_dtype(checkpoint.folder, dtype)
        backend = open_vllm(
            checkpoint.folder,
            checkpoint.tokenizer,
            urls=sampler.vllm_urls,
            arguments=sampler.vllm_args,
            dtype=dtype_name,
            max_completion_length=checkpoint.settings.limits.max_completion_length,
            max_batch=max_batch,
        )
        return backend, dtype_name
    model = load_model(checkpoint.folder, dtype=dtype)
    where = device or ("cuda" if torch.cuda.is_available() else None)
    local = LocalBackend(
        model,
        checkpoint.tokenizer,
        max_batch=max_batch,
        max_completion_length=checkpoint.settings.limits.max_completion_length,
        device=where,
    )
    return local, str(model.dtype).removeprefix("torch.")


def find_model(name: str | Path) -> Path:
    """The folder of a model: a folder, that of a run, or a model of the Hub or its cache.

    A name that can only be a folder is given back whether it is there or not.

    Raises:
        CheckpointError: There is no such folder, and the Hub or its cache do not give it out.
    """
    folder = Path(name)
    if not (folder / FILE_NAME).is_file() and (folder / "checkpoint" / FILE_NAME).is_file():
        return folder / "checkpoint"
    owner, _, model = str(name).partition("/")
    is_hub_name = bool(owner and model) and "/" not in model and owner not in (".", "..")
    if folder.exists() or not is_hub_name or Path(owner).exists():
        return folder
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(str(name), allow_patterns=wanted))
    except (OSError, ValueError) as error:  # what the Hub's client raises for all of its failures
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{name}: no such folder, and it cannot be had as a model of the Hub ({why}); expected "
            "a checkpoint folder, or the name of a model that the Hub or its cache has"
        ) from error


def expert_cards(experts: Experts | str | Path) -> tuple[ExpertCard, ...]:
    """How experts are presented to a model that was never taught the protocol.

    Raises:
        rivet.experts.config.ExpertsFileError: The experts file is broken.
    """
    from rivet.experts.config import load_experts

    configs: Any = (
        load_experts(experts)
        if isinstance(experts, (str, Path))
        else getattr(experts, "configs", None) or []
    )
    return tuple(ExpertCard(c.name, getattr(c, "skill", "") or "") for c in configs)


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
