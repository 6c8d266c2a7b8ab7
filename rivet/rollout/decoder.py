"""Running a `transformers` model over the slots of a cache: prefill, decode steps, sampling.

The model's own forward is used, with our cache, mask, position ids and attention function, so that
rows at different positions share a batch. Nothing of the model is changed beyond a call: its
attention setting and its training mode are put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rivet.rollout.backend import context_for
from rivet.rollout.fast_step import FastStep, is_supported
from rivet.rollout.kv_cache import ATTENTION, SlotCache
from rivet.rollout.sampling import Sampler
from rivet.rollout.slots import Call, Slot, SlotTable

# Tokens of one prefill forward, padding included; bounds its memory and its delay for others.
_PREFILL_TOKENS = 4096
# Decode steps that one attention mask serves.
_AHEAD = 32


class SlotDecoder:
    """A causal language model that reads and writes the slots of a cache.

    Args:
        model: With attention in every layer; plain or a PEFT model. Sliding windows bound the
            context: what fits into one is seen whole.
        vocab_size: V, tokens that can be sampled. Models pad their embeddings beyond the tokenizer;
            what is there has no text.
        max_batch: Slots.
        max_completion_length: What the context must hold beside the prompt, where the model allows.

    Raises:
        ValueError: The model cannot be served this way.
    """

    def __init__(
        self, model: torch.nn.Module, vocab_size: int, max_batch: int, max_completion_length: int
    ) -> None:
        self._model = _unwrap(model)
        self._vocab_size = vocab_size
        self._config = self._model.config.get_text_config()
        self.max_context = context_for(max_completion_length, _longest_context(self._config))
        weight = self._model.get_input_embeddings().weight
        self._device = weight.device
        self._cache = SlotCache(
            max_batch, self.max_context, device=weight.device, dtype=weight.dtype
        )
        self._fast = FastStep(self._model, self.max_context) if is_supported(self._model) else None
        self._batch: _Batch | None = None
        self._was_training: list[torch.nn.Module] = []

    def clear(self) -> None:
        """Empty the cache."""
        self._cache.clear()
        self._batch = None

    def weights_changed(self) -> None:
        """Read the weights anew."""
        if self._fast is not None:
            self._fast.forget()
        self._batch = None

    def gather(self, calls: list[Call], table: SlotTable) -> None:
        """Bring the slots of these calls to the front of the cache, in their order.

        A batch in one block is read in place; elsewhere every step would copy all of it.
        """
        if [call.slot.row for call in calls] == list(range(len(calls))):
            return
        inside = [call for call in calls if call.slot.row < len(calls)]
        outside = [call for call in calls if call.slot.row >= len(calls)]
        holes = sorted(set(range(len(calls))) - {call.slot.row for call in inside})
        pairs = list(zip(holes, (call.slot.row for call in outside), strict=True))
        length = max(table.swap(one, other) for one, other in pairs) if pairs else 0
        if length:
            self._cache.swap(pairs, length)
        calls.sort(key=lambda call: call.slot.row)

    def copy_prefix(self, source: Slot, length: int, targets: Sequence[Slot]) -> None:
        """Let slots hold what another holds of its first tokens."""
        self._cache.copy(source.row, [slot.row for slot in targets], length)
        for slot in targets:
            slot.seen = source.seen[:length]

    def prefill(self, calls: Sequence[Call]) -> tuple[list[int], list[float]]:
        """Compute what the slots have not seen of the prompts; sample the first token of each."""
        news = [call.new_ids for call in calls]
        width = max(map(len, news))
        # Padding goes left, so that the last column is the last token of every row.
        ids = torch.zeros(len(calls), width, dtype=torch.long)
        positions = torch.zeros(len(calls), width, dtype=torch.long)
        is_real = torch.zeros(len(calls), width, dtype=torch.bool)
        for n, (call, new) in enumerate(zip(calls, news, strict=True)):
            ids[n, width - len(new) :] = torch.tensor(new)
            positions[n, width - len(new) :] = torch.arange(len(call.slot.seen), len(call.prompt))
            is_real[n, width - len(new) :] = True
        position_ids = positions.to(self._device)
        mask = self._cache.begin(
            [call.slot.row for call in calls],
            position_ids,
            is_real=is_real.to(self._device),
            length=max(len(call.prompt) for call in calls),
        )
        logits = self._forward(ids.to(self._device), position_ids, mask)
        for call in calls:
            call.slot.seen = call.prompt.copy()
        sampler = Sampler([call.draw for call in calls], self._device)
        tokens, logprobs = sampler(
            logits[:, : self._vocab_size], np.array([len(call.prompt) for call in calls])
        )
        return tokens.tolist(), logprobs.tolist()

    def decode(self, calls: list[Call]) -> tuple[list[int], list[float]]:
        """One more token of every call. The same list means the same rows as in the last step."""
        batch = self._batch
        mask = None
        if batch is None or batch.calls is not calls:
            batch = self._batch = _Batch(calls, self._device)
            if self._fast is not None:
                self._fast.refresh()
        else:
            mask = self._cache.advance()
        if mask is None:
            mask = self._cache.begin(
                batch.rows,
                batch.positions,
                is_real=batch.is_real,
                length=batch.length,
                ahead=_AHEAD,
            )
        if self._fast is not None:
            logits = self._fast(batch.ids, batch.positions, mask, self._cache)
        else:
            logits = self._forward(batch.ids, batch.positions, mask)
        for call in calls:
            call.slot.seen.append(call.ids[-1])
        tokens, logprobs = batch.sampler(logits[:, : self._vocab_size], batch.positions_to_sample)
        batch.advance(tokens)
        return tokens.tolist(), logprobs.tolist()

    def _forward(
        self, ids: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Logits of the last column, shape (B, V)."""
        previous = self._config._attn_implementation
        self._config._attn_implementation = ATTENTION
        head = self._model.get_output_embeddings()
        hook = head.register_forward_pre_hook(_as_one_block) if head is not None else None
        # Not through autocast, in which `Accelerator.prepare` wraps a model's forward: the cache
        # and the fast step keep the weights' own type.
        forward = getattr(self._model, "_original_forward", self._model.forward)
        try:
            output = forward(
                input_ids=ids,
                attention_mask=mask,
                position_ids=position_ids,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        finally:
            self._config._attn_implementation = previous
            if hook is not None:
                hook.remove()
        return output.logits[:, -1]

    def enter_eval(self) -> None:
        """Switch the model to evaluation, remembering which parts were training."""
        if self._model.training and not self._was_training:
            self._was_training = [m for m in self._model.modules() if m.training]
            self._model.eval()

    def leave_eval(self) -> None:
        """Switch back what `enter_eval` switched."""
        for module in self._was_training:
            module.training = True
        self._was_training = []


def _as_one_block(head: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """Copy the last column out of the hidden states before the LM head reads it.

    On a CPU a product with a strided view takes many times as long: 24 rows of SmolLM2's head in
    bfloat16 took 3.6 s instead of 13 ms.
    """
    return (inputs[0].clone(memory_format=torch.contiguous_format), *inputs[1:])


class _Batch:
    """The tensors of a decode step for a fixed list of calls, moved on by one token a step."""

    def __init__(self, calls: list[Call], device: torch.device) -> None:
        starts = [len(call.slot.seen) for call in calls]
        self.calls = calls
        self.rows = [call.slot.row for call in calls]
        self.ids = torch.tensor([[call.ids[-1]] for call in calls], device=device)
        self.positions = torch.tensor(starts, device=device)[:, None]
        self.is_real = torch.ones_like(self.positions, dtype=torch.bool)
        self.length = max(starts) + 1
        self.positions_to_sample = np.array(starts) + 1
        self.sampler = Sampler([call.draw for call in calls], device)

    def advance(self, tokens: torch.Tensor) -> None:
        """Make the sampled tokens, shape (B,), the next input."""
        self.ids = tokens[:, None]
        self.positions = self.positions + 1
        self.positions_to_sample = self.positions_to_sample + 1
        self.length += 1


def prefill_groups(calls: Sequence[Call]) -> Iterator[list[Call]]:
    """Calls that are prefilled together: of similar length, within the token budget."""
    group: list[Call] = []
    shortest = 0
    for call in sorted(calls, key=lambda call: len(call.new_ids)):
        width = len(call.new_ids)
        fits = width * (len(group) + 1) <= _PREFILL_TOKENS
        if group and not (fits and width <= 2 * shortest + 32):
            yield group
            group = []
        if not group:
            shortest = width
        group.append(call)
    if group:
        yield group


def _unwrap(model: Any) -> Any:
    """The causal language model itself, adapters in place; refuse what the cache cannot serve."""
    if hasattr(model, "get_base_model"):
        if getattr(model.active_peft_config, "is_prompt_learning", False):
            raise ValueError("a prompt-learning adapter cannot be sampled here; use LoRA")
        model = model.get_base_model()
    config = model.config.get_text_config()
    kinds = _layer_types(config)
    if not kinds <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"{type(model).__name__} has layers of type {', '.join(sorted(kinds))}; the local "
            "backend serves attention to the whole context only: use a server backend for this "
            "model"
        )
    return model


def _layer_types(config: Any) -> set[str]:
    return set(getattr(config, "layer_types", None) or ["full_attention"])


def _longest_context(config: Any) -> int | None:
    """Tokens up to which every layer sees the whole context: a sliding window is as long."""
    limits = [getattr(config, "max_position_embeddings", None)]
    if "sliding_attention" in _layer_types(config):
        limits.append(config.sliding_window)
    return min((limit for limit in limits if limit), default=None)
