"""A scripted engine and grader, so that the sampling loop is tested without a model."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rivet.grading.verdict import Grade
from rivet.protocol import Scanner
from rivet.rollout.types import RolloutRequest
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Author, CodeRun, ExpertCall, Trajectory


def completion(expert: str, answer: str, *, mode: str = "experts") -> list[tuple[str, Author]]:
    """Text of a complete consultation, piece by piece with its author."""
    spliced: Author = "controller" if mode == "local" else "expert"
    return [
        (f'<expert name="{expert}">gcd of 12 and 18</expert>', "controller"),
        (f'<reply name="{expert}">Use code.<python>print(6)</python>', spliced),
        ("<output>6</output>", "environment"),
        ("</reply>", spliced),
        (f"<answer>\\boxed{{{answer}}}</answer>", "controller"),
    ]


def trajectory_of(
    tokenizer: ProtocolTokenizer,
    request: RolloutRequest,
    pieces: list[tuple[str, Author]],
    *,
    ends: bool = True,
    **changes: Any,
) -> Trajectory:
    """The trajectory that the engine would give for these pieces."""
    scanner = Scanner(tokenizer)
    for text, author in pieces:
        ids = tokenizer.encode(text)
        scanner.feed(ids, author, [-0.5] * len(ids) if author == "controller" else None)
    if ends:
        scanner.feed([tokenizer.eos_id], "controller", [-0.1])
    called = [s.expert for s in scanner.spans if s.name == "expert"]
    arguments: dict[str, Any] = {
        "id": request.id,
        "problem_id": request.problem_id,
        "mode": request.mode,
        "prompt_ids": request.prompt_ids,
        "segments": scanner.segments(),
        "finish": "answer" if ends else "length",
        "well_formed": not scanner.problem(),
        "malformed_reason": scanner.problem(),
        "answer": scanner.answer(),
        "expert_calls": tuple(
            ExpertCall(name, "ok", 0.1, 10, 20, 0.001) for name in called if request.mode != "local"
        ),
        "code_runs": (CodeRun("expert", "ok", 0.01),),
        "seed": request.seed,
        "step": request.step,
        "sample_index": request.sample_index,
        "info": dict(request.info),
    }
    return Trajectory(**(arguments | changes))


class ScriptedEngine:
    """Answers right when the row's seed is even; faults, waits and failures on demand.

    Args:
        tokenizer: Encodes what it says.
        fault: Called with the request and how often it was asked before; names a fault or None.
        before: Called before each rollout; may raise.
    """

    def __init__(
        self,
        tokenizer: ProtocolTokenizer,
        *,
        fault: Callable[[RolloutRequest, int], str | None] = lambda request, asked: None,
        before: Callable[[int], None] = lambda total: None,
    ) -> None:
        self.tokenizer = tokenizer
        self.fault = fault
        self.before = before
        self.asked: Counter[str] = Counter()
        self.requests: list[RolloutRequest] = []

    async def rollout(self, request: RolloutRequest) -> Trajectory:
        """One scripted trajectory."""
        self.requests.append(request)
        self.before(self.asked.total())
        fault = self.fault(request, self.asked[request.id])
        self.asked[request.id] += 1
        for _ in range(1 + request.seed % 3):  # others overtake: completion order is not row order
            await asyncio.sleep(0)
        expert = ("numth", "calc")[request.seed // 2 % 2]
        if fault is not None:
            pieces = completion(expert, "6", mode=request.mode)[:1]
            return trajectory_of(
                self.tokenizer, request, pieces, ends=False, finish="fault", fault=fault
            )
        answer = "6" if request.seed % 2 == 0 else "7"
        return trajectory_of(self.tokenizer, request, completion(expert, answer, mode=request.mode))


class ScriptedGrader:
    """Right if the box holds the gold; the first `failures` calls time out."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.calls: list[tuple[Any, ...]] = []

    async def grade(
        self,
        answer_text: str,
        gold: Any,
        *,
        kind: str = "math",
        choices: Sequence[str] | None = None,
    ) -> Grade:
        """Grade by string comparison."""
        self.calls.append((answer_text, gold, kind, choices))
        if len(self.calls) <= self.failures:
            return Grade("timeout", None, "too slow")
        extracted = answer_text.removeprefix("\\boxed{").removesuffix("}")
        return Grade("right" if extracted == gold else "wrong", extracted, "compared", "box")
