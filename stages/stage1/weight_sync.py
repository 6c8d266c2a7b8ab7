"""Keeping vLLM servers at the trainer's weights, and proof after each time that they are.

Before the rollouts of every step the current weights go to all servers: with an adapter as a new
LoRA version, which is loaded by name and shares nothing with the version before; without one by
TRL's own weight sync over NCCL, which needs GPUs. Then a canary: fixed texts are scored by the
trainer and by every server, and the run stops where they differ. Servers can keep old weights and
report success; rollouts from those would be trained on without anybody noticing.

What remains, rounding above all, is corrected token by token in the objective (`importance_clip`).
Written against vLLM 0.31 and TRL 1.16.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate.utils import broadcast_object_list
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rivet.files import atomic_folder, remove
from rivet.rollout.vllm_backend import VLLMBackend
from stages.stage1.sampling import EngineSource

logger = logging.getLogger(__name__)

# Mean difference per token that is only rounding. Measured in float32: below 1e-5.
_TOLERANCE = {torch.float32: 1e-3}
_TOLERANCE_16_BIT = 0.05
_GROUP_PORT = 51216  # TRL's default; further servers take the ports behind it


class WeightSyncError(RuntimeError):
    """The servers do not have the trainer's weights."""


class Sender(Protocol):
    """Brings the trainer's weights to the servers. Every process calls it."""

    def send(self, trainer: Trainer, step: int) -> None:
        """Send the weights that the rollouts of a step are to be sampled with."""
        ...


@dataclass(frozen=True, slots=True)
class CanaryError:
    """Difference of log-probabilities over the canary's tokens, of the server that is worst.

    Attributes:
        mean: Mean of the absolute differences, in nats per token.
        largest: The largest of them, in nats.
        url: The server.
    """

    mean: float
    largest: float
    url: str


class WeightSync(TrainerCallback):
    """Sends the weights before each step's rollouts, then compares; stops the run on a difference.

    Args:
        source: Holds the open backend.
        sender: Sends.
        canary: Texts as token ids, at least two tokens each.
        tolerance: Mean difference above which the run stops, in nats per token; None: by dtype.
    """

    def __init__(
        self,
        source: EngineSource,
        sender: Sender,
        canary: Sequence[Sequence[int]],
        tolerance: float | None = None,
    ) -> None:
        self._source = source
        self._sender = sender
        self._canary = [list(ids) for ids in canary]
        self._tolerance = tolerance
        self._trainer: Any = None

    def attach(self, trainer: Trainer) -> None:
        """Become a callback of the trainer."""
        self._trainer = trainer
        trainer.add_callback(self)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Before a step samples; also before one that is replayed, so that all processes agree."""
        started = time.perf_counter()
        step = state.global_step + 1
        self._sender.send(self._trainer, step)
        error = self.compare()
        tolerance = self._tolerance
        if tolerance is None:
            tolerance = _default_tolerance(self._trainer)
        if not error.mean <= tolerance:  # also not a number
            raise WeightSyncError(
                f"step {step}: after the weights were sent, {error.url} differs from the trainer "
                f"by {error.mean:.3g} nats a token (up to {error.largest:.3g}); expected at most "
                f"{tolerance:g}. It has other or old weights, or another number format: start it "
                "with the checkpoint and dtype of this run, or set canary_tolerance"
            )
        metrics = self._trainer._metrics["train"]
        metrics["sync/canary_error"].append(error.mean)
        metrics["sync/canary_largest"].append(error.largest)
        metrics["sync/time_s"].append(time.perf_counter() - started)

    def compare(self) -> CanaryError:
        """Score the canary with the trainer and with every server."""
        backend = backend_of(self._source)
        gaps: dict[str, list[torch.Tensor]] = {}
        for ids in self._canary:
            mine = score(self._trainer.model_wrapped, ids, self._trainer.accelerator.device)
            for url, theirs in self._source.call(backend.score(ids)).items():
                gaps.setdefault(url, []).append((mine - torch.tensor(theirs)).abs())
        errors = []
        for url, parts in gaps.items():
            gap = torch.cat(parts).double()
            errors.append(CanaryError(gap.mean().item(), gap.max().item(), url))
        return max(errors, key=lambda e: float("inf") if e.mean != e.mean else e.mean)


class AdapterSender:
    """Writes the adapter as a new version and has every server load it.

    Args:
        source: Holds the open backend.
        folder: Where versions are written; the servers must see it under the same path.
    """

    def __init__(self, source: EngineSource, folder: Path) -> None:
        self._source = source
        self._folder = folder
        self._run = ""

    def send(self, trainer: Trainer, step: int) -> None:
        """See `Sender`. The main process writes; the others use what it wrote."""
        accelerator = trainer.accelerator
        if not self._run:
            # New for each start: a server that runs on may still know the names of the last one.
            token = [secrets.token_hex(4)]
            broadcast_object_list(token)
            self._run = token[0]
        name = f"rivet-{self._run}-{step:05d}"
        target = (self._folder / f"step-{step:05d}").resolve()
        state = None
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            state = accelerator.get_state_dict(trainer.model_wrapped)
        backend = backend_of(self._source)
        if accelerator.is_main_process:
            model: Any = accelerator.unwrap_model(trainer.model)
            with atomic_folder(target) as temporary:
                model.save_pretrained(temporary, state_dict=state, save_embedding_layers=False)
            self._source.call(backend.use_adapter(name, str(target)))
            self._clean(target)
        accelerator.wait_for_everyone()
        if not accelerator.is_main_process:
            self._source.call(backend.use_adapter(name, str(target), load=False))

    def _clean(self, current: Path) -> None:
        """Keep this version, for servers that come back."""
        for path in self._folder.glob("step-*"):
            if path.resolve() != current:
                remove(path)


class FullSender:
    """TRL's own weight sync, for all weights: NCCL from the trainer's GPU to each server's.

    The servers need `--weight-transfer-config '{"backend": "nccl"}'` and VLLM_SERVER_DEV_MODE=1,
    as `rivet vllm --weight_transfer` sets them. Not measured: it needs GPUs.

    A server that is lost is not used again, and the next send ends the run: started anew it has its
    first weights and no link to the trainer, and NCCL would wait for it for ever.

    Args:
        source: Holds the open backend.
        urls: The servers.
    """

    def __init__(self, source: EngineSource, urls: Sequence[str]) -> None:
        self._pool = backend_of(source).pool
        self._pool.takes_back = False
        self._urls = list(urls)
        self._links: list[Any] = []

    def send(self, trainer: Trainer, step: int) -> None:
        """See `Sender`. Gathering weights that are spread over processes is collective.

        Raises:
            WeightSyncError: A server was lost.
        """
        if lost := self._pool.left_out():
            raise WeightSyncError(
                f"step {step}: lost {', '.join(lost)}; expected every server that the run began "
                "with: start it anew, then run the same command to go on"
            )
        if not self._links:
            from trl.generation.vllm_generation import VLLMGeneration

            model: Any = trainer.model
            tokenizer: Any = trainer.processing_class
            self._links = [
                VLLMGeneration(
                    model=model,
                    accelerator=trainer.accelerator,
                    processing_class=tokenizer,
                    mode="server",
                    server_base_url=url.rstrip("/").removesuffix("/v1"),
                    group_port=_GROUP_PORT + n,
                )
                for n, url in enumerate(self._urls)
            ]
        for link in self._links:
            link.sync_weights()
        # TRL's transfer holds the main process alone: the others would sample with old weights.
        trainer.accelerator.wait_for_everyone()


def backend_of(source: EngineSource) -> VLLMBackend:
    """The open backend, which must be vLLM's."""
    backend = source.backend
    assert isinstance(backend, VLLMBackend)
    return backend


@torch.no_grad()
def score(model: torch.nn.Module, ids: Sequence[int], device: torch.device | str) -> torch.Tensor:
    """Log-probability of each token but the first under the model, at temperature 1.

    Args:
        model: Gives logits; evaluated without dropout.
        ids: Shape (n,).
        device: Where the model is.

    Returns:
        float32 on the CPU, shape (n - 1,).
    """
    was_training = model.training
    model.eval()
    try:
        tokens = torch.tensor([list(ids)], device=device)  # (1, n)
        logits = model(input_ids=tokens).logits[0, :-1].float()  # (n - 1, V)
        return logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0].cpu()
    finally:
        model.train(was_training)


def _default_tolerance(trainer: Trainer) -> float:
    if trainer.args.bf16 or trainer.args.fp16:
        return _TOLERANCE_16_BIT
    model: Any = trainer.model
    return _TOLERANCE.get(model.dtype, _TOLERANCE_16_BIT)
