"""The local backend: samples from a `transformers` model in this process, many rollouts at a time.

One thread owns the model and a key-value cache of slots. A decode step takes one token of every
active row; new prompts and what was spliced into old ones are prefilled between steps, as soon as
they arrive, without disturbing the others. A session keeps its slot between calls, so that only the
tokens that the slot has not seen are computed, and prompts with a common beginning share its
computation; idle sessions give way when slots run out.

Covered: causal language models with attention in every layer (Qwen3, Llama, SmolLM2, Gemma 3, ...;
a sliding window bounds the context), on the device where the model is, plain or wrapped by PEFT.
The weights may be changed in place between rollouts; call `reset` afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from rivet.rollout.backend import BackendError, Generation, SamplingParams, room_for
from rivet.rollout.decoder import SlotDecoder, prefill_groups
from rivet.rollout.sampling import Draw
from rivet.rollout.slots import Call, Slot, SlotTable, split_shared
from rivet.rollout.stops import StopStrings
from rivet.tokenization import ProtocolTokenizer

logger = logging.getLogger(__name__)


class LocalBackend:
    """Implements `rivet.rollout.backend.Backend` with a model of this process.

    Args:
        model: A causal language model with attention in every layer, plain or a PEFT model.
        tokenizer: Gives the bytes of tokens (for stop strings) and the end-of-turn ids. Only its
            tokens are sampled; a trainer's log-probabilities share their mass with those that pad
            the model's embeddings, which is next to none in a trained model.
        max_batch: Slots: rollouts that are sampled at the same time.
        max_completion_length: What the context must hold beside the prompt, where the model (or
            its sliding window) allows as much. Memory is taken as contexts grow.
        device: Move the model there first. Default: where it is.
        dtype: Convert the model to it first. Default: as it is.

    Raises:
        ValueError: The model has layers without attention, or a prompt-learning adapter.
    """

    streams = True  # `generate` takes `on_token`

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: ProtocolTokenizer,
        *,
        max_batch: int = 96,
        max_completion_length: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch is {max_batch}; expected at least 1")
        if device is not None or dtype is not None:
            model.to(device=device, dtype=dtype)
        self._tokenizer = tokenizer
        self._decoder = SlotDecoder(
            model, len(tokenizer.token_bytes), max_batch, max_completion_length
        )
        self.max_context = self._decoder.max_context
        self._table = SlotTable(max_batch)
        self._waiting: deque[Call] = deque()
        self._admitted: list[Call] = []  # have a slot, not yet prefilled
        self._active: list[Call] = []
        self._done: list[tuple[Call, Generation | BackendError]] = []
        self._fresh: list[tuple[Call, int]] = []  # sampled tokens that somebody watches
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        self._epoch_of_weights = 0
        # Shared with the callers' threads, under the condition:
        self._condition = threading.Condition()
        self._arrived: list[Call] = []
        self._released: list[str] = []
        self._epoch = 0
        self._is_closed = False
        self._is_idle = threading.Event()
        self._is_idle.set()
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
        on_token: Callable[[int], None] | None = None,
    ) -> Generation:
        """Sample a continuation; see `rivet.rollout.backend.Backend.generate`.

        At the end of the context (`max_context`) it stops with finish_reason `length`.
        """
        room = room_for(
            prompt_ids,
            max_new_tokens,
            self.max_context,
            remedy="shorten it, or take a model with a longer context",
        )
        loop = asyncio.get_running_loop()
        call = Call(
            list(prompt_ids),
            self._stop_strings(tuple(stop)),
            min(max_new_tokens, room),
            Draw(sampling, seed, tuple(banned_ids)),
            session,
            loop.create_future(),
            loop,
            on_token,
        )
        with self._condition:
            if self._is_closed:
                raise BackendError("the backend is closed")
            self._start()
            self._arrived.append(call)
            self._is_idle.clear()
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

    async def idle(self) -> None:
        """Wait until no call is under way; the model is as its owner left it then.

        A cancelled call ends with the step that it is part of: wait before the model is used.
        """
        await asyncio.to_thread(self._is_idle.wait)

    async def close(self) -> None:
        """Stop the thread; calls under way fail with `BackendError`. Closing twice is fine."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
            thread = self._thread
        if thread is not None:
            await asyncio.to_thread(thread.join)

    def _stop_strings(self, stop: tuple[str, ...]) -> StopStrings:
        if stop not in self._stops:
            self._stops[stop] = StopStrings(stop, self._tokenizer.token_bytes)
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
                logger.exception("the local backend failed; every call under way gets the error")
                self._fail(f"{type(error).__name__}: {error}")
            self._deliver()
        self._fail("the backend was closed")
        self._deliver()
        self._is_idle.set()

    def _collect(self) -> bool:
        """Take what has arrived; wait if there is nothing to do. False if closed."""
        with self._condition:
            while not (self._arrived or self._waiting or self._active or self._is_closed):
                self._is_idle.set()
                self._condition.wait()
            arrived, self._arrived = self._arrived, []
            released, self._released = self._released, []
            is_closed = self._is_closed
        for session in released:
            self._table.forget(session)
        # Who comes back with a session goes first: it finishes sooner and frees its slot.
        arrived.sort(key=lambda call: not self._table.holds(call.session))
        back = sum(self._table.holds(call.session) for call in arrived)
        self._waiting.extendleft(reversed(arrived[:back]))
        self._waiting.extend(arrived[back:])
        return not is_closed

    def _iterate(self) -> None:
        self._decoder.enter_eval()
        if self._epoch != self._epoch_of_weights:
            self._epoch_of_weights = self._epoch
            self._decoder.weights_changed()
        while self._waiting:
            call = self._waiting[0]
            if not call.is_cancelled:
                if not self._table.admit(call, self._epoch):
                    break
                self._admitted.append(call)
            self._waiting.popleft()
        remaining = self._admitted
        while remaining:
            self._copy_prefixes(remaining)
            now, remaining = split_shared(remaining)
            self._prefill(now)
        if self._active:
            self._decoder.gather(self._active, self._table)
            self._take(self._active, *self._decoder.decode(self._active))

    def _copy_prefixes(self, calls: Sequence[Call]) -> None:
        """Copy what other slots already hold of these calls' prompts."""
        copies: dict[tuple[Slot, int], list[Slot]] = {}
        for call in calls:
            found = self._table.donor(call)
            if found is not None:
                copies.setdefault(found, []).append(call.slot)
        for (source, length), targets in copies.items():
            self._decoder.copy_prefix(source, length, targets)

    def _prefill(self, calls: Sequence[Call]) -> None:
        for group in prefill_groups(calls):
            sampled = self._decoder.prefill(group)
            for call in group:
                self._table.list_prefix(call)
            started = set(group)
            self._admitted = [call for call in self._admitted if call not in started]
            self._active = [*self._active, *group]
            self._take(group, *sampled)

    def _take(self, calls: Sequence[Call], tokens: list[int], logprobs: list[float]) -> None:
        """Append sampled tokens; calls that are done leave the batch."""
        finished: set[Call] = set()
        for call, token, logprob in zip(calls, tokens, logprobs, strict=True):
            call.ids.append(token)
            call.logprobs.append(logprob)
            if call.on_token is not None:
                self._fresh.append((call, token))
            reason = self._finish_reason(call)
            if reason is not None:
                self._done.append((call, Generation(call.ids, call.logprobs, reason)))
            if reason is not None or call.is_cancelled:
                finished.add(call)
                call.slot.is_busy = False
        if finished:
            self._active = [call for call in self._active if call not in finished]

    def _finish_reason(self, call: Call) -> Literal["stop", "eos", "length"] | None:
        if call.ids[-1] in self._tokenizer.eos_ids:
            return "eos"
        if call.stop.completed_by_last(call.ids):
            return "stop"
        return "length" if len(call.ids) >= call.max_new_tokens else None

    def _fail(self, why: str) -> None:
        """Give every unfinished call an error and forget all state."""
        unfinished = (*self._active, *self._admitted, *self._waiting)
        self._done += [(call, BackendError(why)) for call in unfinished]
        self._active, self._admitted = [], []
        self._waiting.clear()
        self._table.clear()
        self._decoder.clear()

    def _deliver(self) -> None:
        """Hand results to the event loops that wait for them."""
        if not (self._active or self._waiting):
            self._decoder.leave_eval()  # first: a trainer goes on as soon as it has the last one
        fresh, self._fresh = self._fresh, []
        done, self._done = self._done, []
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Call, Any]]] = {}
        for call, result in (*fresh, *done):
            by_loop.setdefault(call.loop, []).append((call, result))
        for loop, results in by_loop.items():
            try:
                loop.call_soon_threadsafe(_resolve, results)
            except RuntimeError:  # the loop was closed: nobody waits there any more
                pass


def _resolve(results: list[tuple[Call, Any]]) -> None:
    """Hand over tokens (ints) and results, in the order in which they came."""
    for call, result in results:
        if call.future.done():
            continue
        if isinstance(result, int):
            _show(call, result)
        elif isinstance(result, BaseException):
            call.future.set_exception(result)
        else:
            call.future.set_result(result)


def _show(call: Call, token: int) -> None:
    """Hand a token to who watches; what that raises ends this call, and no other."""
    assert call.on_token is not None
    try:
        call.on_token(token)
    except Exception as error:  # the boundary around a caller's function
        call.is_cancelled = True
        call.future.set_exception(error)
