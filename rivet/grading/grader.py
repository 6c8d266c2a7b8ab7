"""The grader: one answer text and one gold in, one `Grade` out, from any thread or event loop.

Integers, letters and exact strings are decided here; everything else goes to a worker process. An
answer that a worker could not decide is `timeout` or `died`, which are no verdicts.
"""

import asyncio
import atexit
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rivet.grading.choice import letter_of
from rivet.grading.extract import Extraction, after_thinking, answer_line, extract
from rivet.grading.local_kinds import (
    check_choice,
    decide_choice,
    decide_exact,
    decide_integer,
    is_letter,
)
from rivet.grading.normalize import MAX_LENGTH, normalize
from rivet.grading.pool import WorkerDied, WorkerOverran, WorkerPool, WorkerTimeout
from rivet.grading.reasoning_tasks import parse_entry
from rivet.grading.verdict import KINDS, MODES, BadRequest, Grade, Kind, Mode, Outcome

Gold = str | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to grade.

    Args:
        answer_text: Everything the model wrote.
        gold: The gold answer; for `reasoning_gym` the data set's entry or its JSON.
        kind: One of `KINDS`.
        choices: The options of a multiple-choice question, in the order shown.
        entry: The Reasoning Gym entry, where `gold` is its answer alone.
    """

    answer_text: str
    gold: Gold
    kind: Kind = "math"
    choices: Sequence[str] | None = None
    entry: Mapping[str, Any] | None = None

    def check(self) -> None:
        """Check everything but the answer.

        Raises:
            BadRequest: The gold, kind or choices are unusable.
        """
        if self.kind not in KINDS:
            raise BadRequest(f"kind {self.kind!r}: expected one of {', '.join(KINDS)}")
        if self.kind == "reasoning_gym":
            parse_entry(self.gold if self.entry is None else self.entry)
        elif not isinstance(self.gold, str):
            named = type(self.gold).__name__
            raise BadRequest(f"gold of kind {self.kind!r}: expected a string, got {named}")
        elif self.kind == "choice":
            check_choice(self.gold, self.choices)
        elif self.kind == "exact" and not self.gold.strip():
            raise BadRequest("gold of kind 'exact': expected a non-empty string")


class Grader:
    """Grades answers; owns its worker processes.

    Args:
        workers: The most worker processes at a time; none start before one is needed.
        timeout_s: Wall time of one comparison, after which its worker is killed.
        memory_mb: Address space of one worker.
        mode: "reward" reads boxes only; "eval" may fall back to an explicit answer line.
    """

    def __init__(
        self,
        *,
        workers: int = 2,
        timeout_s: float = 5.0,
        memory_mb: int = 1536,
        mode: Mode = "reward",
    ) -> None:
        if workers < 1 or timeout_s <= 0 or memory_mb < 256:
            raise BadRequest(
                f"workers={workers}, timeout_s={timeout_s}, memory_mb={memory_mb}: expected at "
                "least 1 worker, a positive time and at least 256 MB"
            )
        if mode not in MODES:
            raise BadRequest(f"mode {mode!r}: expected one of {', '.join(MODES)}")
        self.mode: Mode = mode
        self._workers = workers
        self._pool = WorkerPool(size=workers, timeout_s=timeout_s, memory_mb=memory_mb)
        self._executor: ThreadPoolExecutor | None = None
        self._executor_pid = 0
        self._lock = threading.Lock()

    def grade_sync(
        self,
        answer_text: str,
        gold: Gold,
        *,
        kind: Kind = "math",
        choices: Sequence[str] | None = None,
        entry: Mapping[str, Any] | None = None,
        mode: Mode | None = None,
    ) -> Grade:
        """Grade one answer and wait for the verdict.

        Raises:
            BadRequest: The gold, kind or choices are unusable; never because of the answer.
        """
        request = Request(answer_text, gold, kind, choices, entry)
        return self._grade(request, mode or self.mode)

    async def grade(
        self,
        answer_text: str,
        gold: Gold,
        *,
        kind: Kind = "math",
        choices: Sequence[str] | None = None,
        entry: Mapping[str, Any] | None = None,
        mode: Mode | None = None,
    ) -> Grade:
        """Grade one answer without blocking the event loop.

        Raises:
            BadRequest: The gold, kind or choices are unusable; never because of the answer.
        """
        request = Request(answer_text, gold, kind, choices, entry)
        step = _decide_here(request, mode or self.mode)
        if isinstance(step, Grade):
            return step
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads(), self._ask, step)

    def grade_many(self, requests: Iterable[Request], *, mode: Mode | None = None) -> list[Grade]:
        """Grade many answers over all workers and return the grades in order."""
        chosen = mode or self.mode
        return list(self._threads().map(lambda request: self._grade(request, chosen), requests))

    def check_golds(self, golds: Iterable[str]) -> list[str | None]:
        """Check golds of the kind `math` in the workers; see `intake.check_math_gold`."""
        return list(self._threads().map(self._check_gold, golds))

    def close(self) -> None:
        """End the worker processes; the grader may be used again and starts new ones."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None and self._executor_pid == os.getpid():
            executor.shutdown(wait=True)
        self._pool.close()

    def __enter__(self) -> "Grader":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_gold(self, gold: str) -> str | None:
        if len(gold) > MAX_LENGTH:
            return "too long"
        try:
            reply = self._pool.ask({"kind": "check_gold", "gold": gold})
        except (WorkerTimeout, WorkerDied) as error:
            return f"checking it failed: {error}"
        return reply.get("fault") or reply["reason"] or None

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None or self._executor_pid != os.getpid():
                self._executor = ThreadPoolExecutor(self._workers, thread_name_prefix="grader")
                self._executor_pid = os.getpid()
            return self._executor

    def _grade(self, request: Request, mode: Mode) -> Grade:
        step = _decide_here(request, mode)
        return step if isinstance(step, Grade) else self._ask(step)

    def _ask(self, task: "_Task") -> Grade:
        outcome: Outcome
        try:
            reply = self._pool.ask(task.request, warm=task.warm)
        except WorkerTimeout as error:
            outcome, reason = "timeout", str(error)
        except WorkerDied as error:
            outcome, reason = "died", str(error)
            if isinstance(error, WorkerOverran) and task.request["kind"] == "math":
                # A text that buys its way out of a verdict must not escape its 0.
                outcome, reason = "wrong", f"refused: {error}"
        else:
            if "bad_request" in reply:
                raise BadRequest(reply["bad_request"])
            outcome, reason = reply.get("outcome", "died"), reply.get("reason", "")
            if "fault" in reply:
                outcome, reason = "died", reply["fault"]
        return Grade(outcome, task.extraction.answer, reason, task.extraction.source)


@dataclass(frozen=True, slots=True)
class _Task:
    """What is left for a worker."""

    request: dict[str, Any]
    extraction: Extraction
    warm: str = ""


def _decide_here(request: Request, mode: Mode) -> Grade | _Task:
    """Grade what needs no worker; for the rest, say what to ask one."""
    request.check()
    if mode not in MODES:
        raise BadRequest(f"mode {mode!r}: expected one of {', '.join(MODES)}")
    kind, gold = request.kind, request.gold
    extraction = _extract(request, mode)
    answer = extraction.answer
    if answer is None:
        return Grade("no_answer", None, extraction.reason)
    if kind == "reasoning_gym":
        entry = parse_entry(gold if request.entry is None else request.entry)
        task = {"kind": kind, "gold": entry, "answer": answer}
        return _Task(task, extraction, warm="reasoning_gym")
    assert isinstance(gold, str)
    verdict: tuple[Outcome, str] | None
    if kind == "choice":
        verdict = decide_choice(gold, answer, request.choices)
    elif kind == "exact":
        verdict = decide_exact(gold, answer)
    elif len(answer) > MAX_LENGTH:
        verdict = ("wrong", "refused: too long")
    else:
        verdict = decide_integer(gold, answer)
    if verdict is None:
        return _Task({"kind": "math", "gold": gold, "answer": answer}, extraction)
    return Grade(verdict[0], answer, verdict[1], extraction.source)


def _extract(request: Request, mode: Mode) -> Extraction:
    found = extract(request.answer_text, mode)
    if mode == "reward" or found.source != "box" or found.answer is None:
        return found
    wants_letter = request.kind == "choice" or (
        isinstance(request.gold, str) and is_letter(request.gold)
    )
    if wants_letter and letter_of(normalize(found.answer[:MAX_LENGTH])) is None:
        line = answer_line(after_thinking(request.answer_text) or "")
        if line.answer is not None and letter_of(normalize(line.answer)) is not None:
            return line
    return found


_shared: Grader | None = None
_shared_lock = threading.Lock()


def grade(
    answer_text: str,
    gold: Gold,
    kind: Kind = "math",
    *,
    choices: Sequence[str] | None = None,
    entry: Mapping[str, Any] | None = None,
    mode: Mode = "reward",
) -> Grade:
    """Grade one answer with a grader shared by the whole process.

    Args:
        answer_text: Everything the model wrote.
        gold: The gold answer; for `reasoning_gym` the data set's entry or its JSON.
        kind: One of `KINDS`.
        choices: The options of a multiple-choice question, in the order shown.
        entry: The Reasoning Gym entry, where `gold` is its answer alone.
        mode: "reward" reads boxes only; "eval" may fall back to an explicit answer line.

    Raises:
        BadRequest: The gold, kind or choices are unusable; never because of the answer.
    """
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = Grader()
            atexit.register(_shared.close)
    return _shared.grade_sync(answer_text, gold, kind=kind, choices=choices, entry=entry, mode=mode)
