"""The local backend: samples from a `transformers` model in this process, many rollouts at a time.

One thread owns the model and a key-value cache of slots. A decode step takes one token of every
active row; new prompts and what was spliced into old ones are prefilled between steps, as soon as
they arrive, without disturbing the others. A session keeps its slot between calls, so that only the
tokens that the slot has not seen are computed; idle sessions give way when slots run out.

Covered: causal language models with full attention in every layer (Qwen3, Llama, SmolLM2, ...), on
the device where the model is, plain or wrapped by PEFT. The weights may be changed in place between
rollouts; call `reset` afterwards.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from rivet.rollout.backend import BackendError, Generation, SamplingParams
from rivet.rollout.kv_cache import ATTENTION, SlotCache
from rivet.rollout.sampling import Draw, Sampler
from rivet.tokenization import ProtocolTokenizer

# Tokens of one prefill forward, padding included; bounds its memory and its delay for others.
_PREFILL_TOKENS = 4096


@dataclass(slots=True, eq=False)
class _Call:
    """One `generate` call on its way."""

    prompt: list[int]
    stop: _StopStrings
    max_new_tokens: int
    draw: Draw
    session: str | None
    future: asyncio.Future[Generation]
    loop: asyncio.AbstractEventLoop
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    slot: _Slot | None = None
    is_cancelled: bool = False


@dataclass(slots=True, eq=False)
class _Slot:
    """One row of the cache. `seen` are the ids whose keys it holds."""

    row: int
    seen: list[int] = field(default_factory=list)
    session: str | None = None
    epoch: int = 0
    last_used: int = 0
    is_busy: bool = False


class _StopStrings:
    """Finds stop strings in sampled bytes, looking only at tokens that can complete one."""

    def __init__(self, stop: Sequence[str], token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._stop = tuple(s.encode() for s in stop)
        if not all(self._stop):
            raise ValueError("a stop string is empty")
        last = {s[-1] for s in self._stop}
        self._candidates = frozenset(
            i for i, piece in enumerate(token_bytes) if not last.isdisjoint(piece)
        )
        self._longest = max(map(len, self._stop), default=0)

    def completed_by_last(self, ids: list[int]) -> bool:
        """Whether the last token of `ids` completes a stop string."""
        if ids[-1] not in self._candidates:
            return False
        tail = self._token_bytes[ids[-1]]
        wanted = len(tail) + self._longest - 1
        for token in reversed(ids[:-1]):
            if len(tail) >= wanted:
                break
            tail = self._token_bytes[token] + tail
        return any(s in tail for s in self._stop)


class LocalBackend:
    """Implements `rivet.rollout.backend.Backend` with a model of this process.

    Args:
        model: A causal language model with full attention, plain or a PEFT model.
        tokenizer: Gives the bytes of tokens (for stop strings) and the end-of-turn ids.
        max_batch: Slots: rollouts that are sampled at the same time.
        max_context: Longest context in tokens, prompt included. Default: what the model allows, at
            most 4096. Memory is taken as contexts grow.
        device: Move the model there first. Default: where it is.
        dtype: Convert the model to it first. Default: as it is.

    Raises:
        ValueError: The model has layers that are not full attention, or a prompt-learning adapter.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: ProtocolTokenizer,
        *,
        max_batch: int = 96,
        max_context: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch is {max_batch}; expected at least 1")
        if device is not None or dtype is not None:
            model.to(device=device, dtype=dtype)
        self._model = _unwrap(model)
        self._tokenizer = tokenizer
        config = self._model.config.get_text_config()
        allowed = getattr(config, "max_position_embeddings", None) or 4096
        self.max_context = min(allowed, 4096) if max_context is None else max_context
        if not 2 <= self.max_context <= allowed:
            raise ValueError(f"max_context is {max_context}; expected 2 to {allowed} tokens")
        self._config = config
        weight = self._model.get_input_embeddings().weight
        self._device = weight.device
        self._cache = SlotCache(
            max_batch, self.max_context, device=weight.device, dtype=weight.dtype
        )
        self._slots = [_Slot(row) for row in range(max_batch)]
        self._by_session: dict[str, _Slot] = {}
        self._waiting: deque[_Call] = deque()
        self._admitted: list[_Call] = []  # have a slot, not yet prefilled
        self._active: list[_Call] = []
        self._batch: _Batch | None = None
        self._done: list[tuple[_Call, Generation | BackendError]] = []
        self._clock = 0
        self._was_training: list[torch.nn.Module] = []
        self._stops: dict[tuple[str, ...], _StopStrings] = {}
        # Shared with the callers' threads, under the condition:
        self._condition = threading.Condition()
        self._arrived: list[_Call] = []
        self._released: list[str] = []
        self._epoch = 0
        self._is_closed = False
        self._thread: threading.Thread | None = None

    async def __aenter__(self) -> LocalBackend:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        stop: Sequence[str],
        max_new_tokens: int,
        sampling: SamplingParams,
        seed: int,
        banned_ids: Sequence[int] = (),
        session: str | None = None,
    ) -> Generation:
        """Sample a continuation; see `rivet.rollout.backend.Backend.generate`.

        At the end of the context (`max_context`) it stops with finish_reason `length`.
        """
        if not prompt_ids or max_new_tokens < 1:
            raise ValueError(
                f"got {len(prompt_ids)} prompt tokens and max_new_tokens {max_new_tokens}; "
                "expected at least 1 of each"
            )
        room = self.max_context - len(prompt_ids)
        if room < 1:
            raise BackendError(
                f"the prompt has {len(prompt_ids)} tokens; expected less than {self.max_context}: "
                "raise max_context, or lower the limits of the rollout"
            )
        loop = asyncio.get_running_loop()
        call = _Call(
            list(prompt_ids),
            self._stop_strings(tuple(stop)),
            min(max_new_tokens, room),
            Draw(sampling, seed, tuple(banned_ids)),
            session,
            loop.create_future(),
            loop,
        )
        with self._condition:
            if self._is_closed:
                raise BackendError("the backend is closed")
            self._start()
            self._arrived.append(call)
            self._condition.notify()
        try:
            return await call.future
        except asyncio.CancelledError:
            call.is_cancelled = True
            raise

    async def release(self, session: str) -> None:
        """Forget a session's state; its slot is free for others."""
        with self._condition:
            self._released.append(session)

    def reset(self) -> None:
        """Forget every session's state: call it after the weights have changed.

        Calls under way go on; what they computed with the old weights is not used again.
        """
        with self._condition:
            self._epoch += 1

    async def close(self) -> None:
        """Stop the thread; calls under way fail with `BackendError`. Closing twice is fine."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
            thread = self._thread
        if thread is not None:
            await asyncio.to_thread(thread.join)

    def _stop_strings(self, stop: tuple[str, ...]) -> _StopStrings:
        if stop not in self._stops:
            self._stops[stop] = _StopStrings(stop, self._tokenizer.token_bytes)
        return self._stops[stop]

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rivet-local", daemon=True)
            self._thread.start()

    # Everything below runs in the backend's thread.

    def _run(self) -> None:
        while self._collect():
            try:
                with torch.inference_mode():
                    self._iterate()
            except Exception as error:  # the one boundary: whatever happened, nobody waits for ever
                self._fail(f"{type(error).__name__}: {error}")
            self._deliver()
        self._fail("the backend was closed")
        self._deliver()

    def _collect(self) -> bool:
        """Take what has arrived; wait if there is nothing to do. False if closed."""
        with self._condition:
            while not (self._arrived or self._waiting or self._active or self._is_closed):
                self._condition.wait()
            if self._is_closed:
                self._waiting.extend(self._arrived)
                return False
            # Who comes back with a session goes first: it finishes sooner and frees its slot.
            for call in self._arrived:
                if call.session in self._by_session:
                    self._waiting.appendleft(call)
                else:
                    self._waiting.append(call)
            released, self._released = self._released, []
            self._arrived = []
        for session in released:
            self._forget(session)
        return True

    def _iterate(self) -> None:
        self._enter_eval()
        self._admit()
        for group in list(_groups(self._admitted)):
            self._prefill(group)
        if self._active:
            self._decode()

    def _admit(self) -> None:
        """Give slots to waiting calls, in order, while there are any."""
        while self._waiting:
            call = self._waiting[0]
            if call.is_cancelled:
                self._waiting.popleft()
                continue
            slot = self._slot_for(call.session)
            if slot is None:
                return
            self._waiting.popleft()
            self._clock += 1
            slot.is_busy, slot.last_used, call.slot = True, self._clock, slot
            if slot.epoch != self._epoch:
                slot.seen, slot.epoch = [], self._epoch
            # The last prompt token is always computed: its logits are needed.
            del slot.seen[_common_prefix(slot.seen, call.prompt[:-1]) :]
            self._admitted.append(call)

    def _slot_for(self, session: str | None) -> _Slot | None:
        """The session's own slot, else a free one, else that of the longest idle session."""
        own = self._by_session.get(session) if session is not None else None
        if own is not None and not own.is_busy:
            return own
        idle = [slot for slot in self._slots if not slot.is_busy]
        if not idle:
            return None
        # Low rows first: rows in a block at the front are read without a copy.
        slot = min(idle, key=lambda s: (s.last_used if s.session is not None else 0, s.row))
        if slot.session is not None:
            del self._by_session[slot.session]
        slot.session, slot.seen = None, []
        if session is not None and own is None:
            slot.session = session
            self._by_session[session] = slot
        return slot

    def _forget(self, session: str) -> None:
        slot = self._by_session.pop(session, None)
        if slot is not None:
            slot.session = None

    def _prefill(self, calls: list[_Call]) -> None:
        """Compute what these calls' slots have not seen, and sample the first token of each."""
        news = [call.prompt[len(_slot(call).seen) :] for call in calls]
        width = max(map(len, news))
        # Padding goes left, so that the last column is the last token of every row.
        ids = torch.zeros(len(calls), width, dtype=torch.long)
        positions = torch.zeros(len(calls), width, dtype=torch.long)
        is_real = torch.zeros(len(calls), width, dtype=torch.bool)
        for n, (call, new) in enumerate(zip(calls, news, strict=True)):
            ids[n, width - len(new) :] = torch.tensor(new)
            positions[n, width - len(new) :] = torch.arange(len(_slot(call).seen), len(call.prompt))
            is_real[n, width - len(new) :] = True
        step = self._cache.begin(
            [_slot(call).row for call in calls],
            positions.to(self._device),
            is_real=is_real.to(self._device),
            length=max(len(call.prompt) for call in calls),
        )
        logits = self._forward(ids.to(self._device), step.position_ids, step.attention_mask)
        sampler = Sampler([call.draw for call in calls], self._device)
        tokens, logprobs = sampler(logits, np.array([len(call.prompt) for call in calls]))
        for call in calls:
            _slot(call).seen = call.prompt.copy()
        started = set(map(id, calls))
        self._admitted = [call for call in self._admitted if id(call) not in started]
        self._active += calls
        self._take(calls, tokens.tolist(), logprobs.tolist())
        self._batch = None

    def _decode(self) -> None:
        """One more token of every active row."""
        if self._batch is None:
            self._active.sort(key=lambda call: _slot(call).row)
            self._batch = _Batch(self._active, self._device)
        batch = self._batch
        step = self._cache.begin(
            batch.rows, batch.positions, is_real=batch.is_real, length=batch.length
        )
        logits = self._forward(batch.ids, step.position_ids, step.attention_mask)
        for call in self._active:
            _slot(call).seen.append(call.ids[-1])
        tokens, logprobs = batch.sampler(logits, batch.positions_to_sample)
        batch.advance(tokens)
        self._take(self._active, tokens.tolist(), logprobs.tolist())

    def _forward(
        self, ids: torch.Tensor, position_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        """Logits of the last column, shape (B, V)."""
        previous = self._config._attn_implementation
        self._config._attn_implementation = ATTENTION
        try:
            output = self._model(
                input_ids=ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        finally:
            self._config._attn_implementation = previous
        return output.logits[:, -1]

    def _take(self, calls: list[_Call], tokens: list[int], logprobs: list[float]) -> None:
        """Append sampled tokens; calls that are done leave the batch."""
        eos_ids = self._tokenizer.eos_ids
        finished = []
        for call, token, logprob in zip(calls, tokens, logprobs, strict=True):
            call.ids.append(token)
            call.logprobs.append(logprob)
            reason: Literal["eos", "stop", "length"]
            if token in eos_ids:
                reason = "eos"
            elif call.stop.completed_by_last(call.ids):
                reason = "stop"
            elif len(call.ids) >= call.max_new_tokens:
                reason = "length"
            elif call.is_cancelled:
                finished.append(call)
                continue
            else:
                continue
            finished.append(call)
            self._done.append((call, Generation(call.ids, call.logprobs, reason)))
        if finished:
            self._retire(finished)

    def _retire(self, calls: list[_Call]) -> None:
        for call in calls:
            _slot(call).is_busy = False
        gone = set(map(id, calls))
        self._active = [call for call in self._active if id(call) not in gone]
        self._batch = None

    def _fail(self, why: str) -> None:
        """Give every unfinished call an error and forget all state."""
        unfinished = (*self._active, *self._admitted, *self._waiting)
        self._done += [(call, BackendError(why)) for call in unfinished]
        self._active, self._admitted, self._batch = [], [], None
        self._waiting.clear()
        self._by_session.clear()
        self._cache.clear()
        self._slots = [_Slot(slot.row) for slot in self._slots]

    def _deliver(self) -> None:
        """Hand results to the event loops that wait for them."""
        if not (self._active or self._waiting):
            self._leave_eval()  # first: a trainer may go on as soon as it has the last result
        done, self._done = self._done, []
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Call, Any]]] = {}
        for call, result in done:
            by_loop.setdefault(call.loop, []).append((call, result))
        for loop, results in by_loop.items():
            try:
                loop.call_soon_threadsafe(_resolve, results)
            except RuntimeError:  # the loop was closed: nobody waits there any more
                pass

    def _enter_eval(self) -> None:
        if self._model.training and not self._was_training:
            self._was_training = [m for m in self._model.modules() if m.training]
            self._model.eval()

    def _leave_eval(self) -> None:
        for module in self._was_training:
            module.training = True
        self._was_training = []


class _Batch:
    """The tensors of a decode step for a fixed list of calls, moved on by one token a step."""

    def __init__(self, calls: list[_Call], device: torch.device) -> None:
        starts = [len(_slot(call).seen) for call in calls]
        self.rows = [_slot(call).row for call in calls]
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


def _slot(call: _Call) -> _Slot:
    assert call.slot is not None
    return call.slot


def _resolve(results: list[tuple[_Call, Any]]) -> None:
    for call, result in results:
        if call.future.done():
            continue
        if isinstance(result, BaseException):
            call.future.set_exception(result)
        else:
            call.future.set_result(result)


def _common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return next(n for n in range(shorter) if a[n] != b[n])


def _groups(calls: list[_Call]) -> Iterator[list[_Call]]:
    """Calls that are prefilled together: of similar length, within the token budget."""
    length: Callable[[_Call], int] = lambda call: len(call.prompt) - len(_slot(call).seen)  # noqa: E731
    group: list[_Call] = []
    for call in sorted(calls, key=length):
        width = length(call)
        fits = width * (len(group) + 1) <= _PREFILL_TOKENS
        similar = not group or width <= 2 * length(group[0]) + 32
        if group and not (fits and similar):
            yield group
            group = []
        group.append(call)
    if group:
        yield group


def _unwrap(model: Any) -> Any:
    """The causal language model itself, adapters in place; refuse what the cache cannot serve."""
    if hasattr(model, "get_base_model"):
        if getattr(model, "active_peft_config", None) is not None:
            if model.active_peft_config.is_prompt_learning:
                raise ValueError("a prompt-learning adapter cannot be sampled here; use LoRA")
        model = model.get_base_model()
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(
            f"{type(model).__name__} has layers of type {', '.join(sorted(kinds))}; the local "
            "backend serves full attention only: use a server backend for this model"
        )
    return model
