"""The caller's side: one FIFO queue, N slots, from asyncio and from threads alike.

A call takes a free slot, or waits its turn; it then talks to that slot directly over the slot's
own socket. There is no helper thread and no event loop of its own. The zygote is asked only to
start and to kill slots.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict

from sandbox import fresh, kernel, wire
from sandbox.exchange import Reply, SlotHandle, SlotLost
from sandbox.jail import LAYERS
from sandbox.launch import SOURCE, ZygoteProcess, clean_environment
from sandbox.replies import to_result
from sandbox.result import ExecutionResult, SandboxError, SandboxLimits

logger = logging.getLogger(__name__)

_GRACE_S = 30.0  # past the limits that the slot itself enforces
_ATTEMPTS = 3


class PythonSandbox:
    """Runs Python code in isolated processes, safely and many thousand times.

    Use it as `async with PythonSandbox() as box: result = await box.run(code)` or, from any
    number of threads, as `with PythonSandbox() as box: result = box.run_sync(code)`. Both forms
    share one first-in-first-out queue.

    Args:
        limits: the limits of each call.
        slots: how many calls run at the same time; by default the cores of this process.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        slots: int | None = None,
        *,
        _disabled: Sequence[str] = (),
        _use_huge_pages: bool = True,
        _is_fresh: bool = not kernel.IS_LINUX,
    ) -> None:
        if slots is not None and slots < 1:
            raise ValueError(f"slots is {slots}; expected at least 1")
        self.limits = limits or SandboxLimits()
        self.slots = slots or _cores()
        self.layers: dict | None = None
        self._disabled = tuple(_disabled)
        self._use_huge_pages = _use_huge_pages
        self._is_fresh = _is_fresh
        self._lock = threading.Lock()
        self._zygote: ZygoteProcess | None = None
        self._free: deque[SlotHandle] = deque()
        self._all: set[SlotHandle] = set()
        self._waiting: deque[Future[SlotHandle]] = deque()
        self._next_number = 0
        self._pid = os.getpid()
        self._is_open = False

    # -- life -------------------------------------------------------------------------------

    def __enter__(self) -> PythonSandbox:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> PythonSandbox:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def start(self) -> None:
        """Start the processes and wait until one slot is ready.

        Raises:
            SandboxError: when they do not come up.
        """
        with self._lock:
            if self._is_open:
                return
            self._is_open, self._pid = True, os.getpid()
            if self._is_fresh:
                logger.warning("%s", fresh.MESSAGE)
                self.layers = {"missing": dict.fromkeys(LAYERS, "not Linux"), "landlock_abi": 0}
        try:
            result = self.run_sync("None")  # starts what is missing: everything
            if result.status != "ok":
                raise SandboxError(f"the sandbox did not start: {result.error}")
        except BaseException:
            self.close()
            raise
        if not self._is_fresh:
            self._warn_about_missing_layers()

    def close(self) -> None:
        """End every process and fail the calls that still wait."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            waiting, self._waiting = self._waiting, deque()
            self._drop_zygote()
        _fail(waiting, SandboxError("the sandbox was closed"))

    # -- calls ------------------------------------------------------------------------------

    async def run(self, code: str, *, prelude: Sequence[str] = ()) -> ExecutionResult:
        """Run `code` in a fresh state and return what came of it; never raises for the code.

        Args:
            code: the program; its last expression is echoed.
            prelude: earlier cells, run before it in the same state, their output thrown away.

        Raises:
            SandboxError: when the sandbox is not open.
        """
        frame = self._frame(code, prelude)
        if isinstance(frame, ExecutionResult):
            return frame
        failure = ""
        for _ in range(_ATTEMPTS):
            try:
                slot = await self._acquire_async()
            except SlotLost as error:
                failure = str(error)
                continue
            try:
                result = await self._exchange_async(slot, frame, self._patience_s(prelude))
            except (SlotLost, OSError, TimeoutError) as error:
                failure = self._discard(slot, error)
                continue
            except BaseException:  # cancelled: the slot is in the middle of a call
                self._discard(slot, None)
                raise
            if result.status != "sandbox_failure":
                return result
            failure = result.error
        return _failure(failure)

    def run_sync(self, code: str, *, prelude: Sequence[str] = ()) -> ExecutionResult:
        """Do what `run` does, for callers without an event loop; safe from several threads."""
        frame = self._frame(code, prelude)
        if isinstance(frame, ExecutionResult):
            return frame
        failure = ""
        for _ in range(_ATTEMPTS):
            try:
                slot = self._acquire_sync()
            except SlotLost as error:
                failure = str(error)
                continue
            try:
                result = self._exchange(slot, frame, self._patience_s(prelude))
            except (SlotLost, OSError) as error:
                failure = self._discard(slot, error)
                continue
            except BaseException:
                self._discard(slot, None)
                raise
            if result.status != "sandbox_failure":
                return result
            failure = result.error
        return _failure(failure)

    def _frame(self, code: str, prelude: Sequence[str]) -> bytes | ExecutionResult:
        if isinstance(prelude, str) or not isinstance(code, str):
            raise TypeError("code is one string and prelude a sequence of strings")
        frame = wire.pack_request(code, prelude)
        if len(frame) > self.limits.code_bytes:
            text = f"the code is {len(frame)} bytes long; at most {self.limits.code_bytes} are run"
            return ExecutionResult("error", stderr=text, error=text)
        return frame

    def _patience_s(self, prelude: Sequence[str]) -> float:
        return self.limits.wall_s * (1 + len(prelude)) + _GRACE_S

    # -- the queue --------------------------------------------------------------------------

    def _acquire(self) -> Future[SlotHandle]:
        """Return the next free slot, now or later, in order of asking; SlotLost if none starts."""
        future: Future[SlotHandle] = Future()
        with self._lock:
            self._check_open()
            if self._free and not self._waiting:
                future.set_result(self._free.popleft())
            else:
                self._waiting.append(future)
            is_short = len(self._all) < self.slots
        if is_short:
            self._refill()
        return future

    def _acquire_sync(self) -> SlotHandle:
        future = self._acquire()
        try:
            return future.result()
        except BaseException:
            self._give_up(future)
            raise

    def _give_up(self, future: Future[SlotHandle]) -> None:
        """Leave the queue, passing on a slot that was handed over in the meantime."""
        if not future.cancel() and future.exception() is None:
            self._release(future.result())

    async def _acquire_async(self) -> SlotHandle:
        future = self._acquire()
        if future.done():
            return future.result()
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._give_up(future)
            raise

    def _release(self, slot: SlotHandle) -> None:
        """Hand the slot to the longest waiting call."""
        with self._lock:
            if not self._is_open or slot not in self._all:
                return
            while self._waiting:
                future = self._waiting.popleft()
                if future.set_running_or_notify_cancel():
                    break
            else:
                self._free.append(slot)
                return
        future.set_result(slot)

    def _check_open(self) -> None:
        if not self._is_open:
            raise SandboxError("the sandbox is not open; use it in a `with` or `async with` block")
        if self._pid != os.getpid():
            raise SandboxError(
                "this sandbox was opened by the parent process; open one of its own after a fork"
            )

    # -- one exchange with a slot -----------------------------------------------------------

    def _exchange(self, slot: SlotHandle, frame: bytes, patience_s: float) -> ExecutionResult:
        if slot.connection is None:
            return self._finish(slot, *self._run_fresh(frame))
        return self._finish(slot, *slot.exchange(frame, patience_s))

    async def _exchange_async(
        self, slot: SlotHandle, frame: bytes, patience_s: float
    ) -> ExecutionResult:
        if slot.connection is None:
            return self._finish(slot, *await asyncio.to_thread(self._run_fresh, frame))
        return self._finish(slot, *await slot.exchange_async(frame, patience_s))

    def _run_fresh(self, frame: bytes) -> Reply:
        cells = wire.unpack_cells(frame[wire.REQUEST.size : -len(wire.REQUEST_END)])
        return fresh.run(cells, self.limits, str(SOURCE), clean_environment())

    def _finish(self, slot: SlotHandle, header: wire.ReplyHeader, body: bytes) -> ExecutionResult:
        """Turn a reply into a result and put the slot, or its successor, back to work."""
        self.layers = slot.layers or self.layers
        if header.is_retiring:
            self._replace(slot)
        else:
            self._release(slot)
        return to_result(header, body, self.limits)

    # -- zygote and slots -------------------------------------------------------------------

    def _start_zygote(self) -> None:
        self._zygote = ZygoteProcess(
            {
                "limits": asdict(self.limits),
                "disabled": self._disabled,
                "use_huge_pages": self._use_huge_pages,
            }
        )

    def _drop_zygote(self) -> None:
        """End the zygote and its slots; the lock is held."""
        free, self._free = set(self._free), deque()
        for slot in self._all:
            if slot in free:
                slot.close()
            else:  # its call sees the end and closes it
                slot.shut()
        self._all.clear()
        if self._zygote is not None:
            self._zygote.close()
        self._zygote = None

    def _new_slot(self) -> SlotHandle:
        """Ask the zygote for one more slot; the lock is held. It need not be ready yet."""
        self._next_number += 1
        if self._is_fresh:
            slot = SlotHandle(self._next_number, None)
        else:
            assert self._zygote is not None
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            slot = SlotHandle(self._next_number, ours)
            with theirs:
                self._zygote.tell(f"slot {slot.number}", theirs.fileno())
        self._all.add(slot)
        return slot

    def _replace(self, slot: SlotHandle) -> None:
        """Put a new slot in the place of one that ended or must end."""
        slot.close()
        with self._lock:
            self._all.discard(slot)
        self._refill()

    def _discard(self, slot: SlotHandle, error: BaseException | None) -> str:
        """Get rid of a slot whose state is unknown; return what is known about the failure."""
        text = f"{type(error).__name__}: {error}" if error is not None else ""
        with self._lock:
            if self._is_open and self._zygote is not None:
                if self._zygote.is_dead():
                    text += f"; {self._zygote.obituary()}"
                    self._drop_zygote()
                elif slot in self._all:
                    self._zygote.tell(f"kill {slot.number}")
        logger.debug("sandbox slot %d lost: %s", slot.number, text)
        self._replace(slot)
        return text

    def _refill(self) -> None:
        """Start what is missing, zygote and slots; without any slot nobody waits for one.

        A shortage of descriptors or processes leaves slots missing; the next call tries again.
        """
        started: list[SlotHandle] = []
        stranded: deque[Future[SlotHandle]] = deque()
        why = ""
        with self._lock:
            if not self._is_open:
                return
            try:
                if self._zygote is None and not self._is_fresh:
                    self._start_zygote()
                while len(self._all) < self.slots:
                    started.append(self._new_slot())
            except OSError as error:
                why = f"no slot could be started: {type(error).__name__}: {error}"
                logger.warning("%d of %d slots: %s", len(self._all), self.slots, why)
            if not self._all:
                stranded, self._waiting = self._waiting, stranded
        for slot in started:
            self._release(slot)
        _fail(stranded, SlotLost(why))

    def _warn_about_missing_layers(self) -> None:
        missing = (self.layers or {}).get("missing", {})
        if missing:
            logger.warning(
                "the sandbox runs without: %s; `python -m sandbox doctor` says what that means",
                ", ".join(f"{layer} ({reason})" for layer, reason in missing.items()),
            )


def _fail(futures: Iterable[Future[SlotHandle]], error: Exception) -> None:
    """Give an error to everyone who waits."""
    for future in futures:
        if future.set_running_or_notify_cancel():
            future.set_exception(error)


def _failure(reason: str) -> ExecutionResult:
    text = f"sandbox failure, not the code's fault: {reason}"
    logger.error("%s", text)
    return ExecutionResult("sandbox_failure", stderr=text, error=text)


def _cores() -> int:
    """Return how many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1
