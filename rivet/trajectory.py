"""The trajectory: what one attempt at a problem is made of.

Token ids are the truth. A trajectory is a prompt and a list of segments; each segment is a run of
token ids with one author and one kind. Text is derived from the ids and never tokenised again, so
what a trainer sees is what was sampled. Lengths of ids, authors, kinds and log-probabilities agree
by construction. The vocabulary is that of the README's glossary; storage is `rivet.store`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Author = Literal["controller", "expert", "environment"]
Kind = Literal["reasoning", "request", "reply", "code", "output", "answer", "format", "route"]
Mode = Literal["experts", "local", "no-expert", "no-python", "plain"]
Finish = Literal["answer", "eos", "length", "fabricated_output", "malformed", "budget", "fault"]

AUTHORS: tuple[Author, ...] = get_args(Author)
KINDS: tuple[Kind, ...] = get_args(Kind)
MODES: tuple[Mode, ...] = get_args(Mode)
FINISHES: tuple[Finish, ...] = get_args(Finish)
GRADER_FAULTS = ("timeout", "died")  # outcomes that say nothing about the answer


def check_modes(name: str, modes: Sequence[str]) -> None:
    """Check a setting that lists conditions.

    Raises:
        ValueError: There are none, one comes twice, or one is unknown.
    """
    if not modes or len(set(modes)) < len(modes) or not set(modes) <= set(MODES):
        raise ValueError(f"{name} is {list(modes)}; expected different ones of {', '.join(MODES)}")


def as_float32(value: float) -> float:
    """Round to the nearest float32, so that a stored log-probability reads back unchanged."""
    return struct.unpack("f", struct.pack("f", value))[0]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens with one author and one kind.

    Attributes:
        author: Who wrote the tokens.
        kind: What they are. `route` is the expert's name inside an opening tag (the routing
            decision); `format` is the interaction structure itself (tags, `\\boxed{`, end of turn).
        ids: Token ids, never empty.
        logprobs: Natural-log probability of each token under the sampling engine; None for tokens
            that no controller sampled (spliced in, or part of a scripted trajectory).
    """

    author: Author
    kind: Kind
    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.author not in AUTHORS or self.kind not in KINDS:
            raise ValueError(f"unknown author or kind: {self.author!r}, {self.kind!r}")
        if not self.ids:
            raise ValueError("a segment holds at least one token")
        if self.logprobs is not None:
            if self.author != "controller":
                raise ValueError("only sampled (controller) tokens have log-probabilities")
            if len(self.logprobs) != len(self.ids):
                raise ValueError(f"{len(self.ids)} ids but {len(self.logprobs)} log-probabilities")
            object.__setattr__(self, "logprobs", tuple(map(as_float32, self.logprobs)))

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class ExpertCall:
    """One consultation, as it went. `status` is `ok` or the typed fault (`timeout`, ...)."""

    name: str
    status: str
    latency_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0


@dataclass(frozen=True, slots=True)
class CodeRun:
    """One program that ran in the sandbox. `author` wrote it; `status` as in `sandbox`."""

    author: Author
    status: str
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One complete attempt at one problem.

    Attributes:
        id: Unique in a run: `{problem_id}#{sample_index}@{step}`.
        problem_id: The problem's id in its data set.
        mode: The condition that it ran under (see `rivet.protocol`).
        prompt_ids: Token ids of the prompt.
        segments: The completion, in order; neighbours never share both author and kind.
        finish: Why it ended.
        well_formed: True if it follows the grammar from start to end.
        malformed_reason: First grammar violation, empty if well formed.
        answer: Text of the final answer span (between its tags), None if there is none.
        fault: Typed infrastructure fault that voids the trajectory, None if none happened.
        expert_calls: Consultations in order.
        code_runs: Programs in order, those inside replies included.
        outcome: Verdict of the grader (`right`, `wrong`, `no_answer`, `timeout`, `died`), or
            None if not graded.
        reward: The outcome reward, None if void of a verdict.
        seed: Seed that the sampling used.
        step: Optimizer step (Stage I) or 0.
        sample_index: Index in the problem's group.
        info: Small JSON-able extras (family, difficulty, gold answer, ...).
    """

    id: str
    problem_id: str
    mode: Mode
    prompt_ids: tuple[int, ...]
    segments: tuple[Segment, ...]
    finish: Finish
    well_formed: bool
    malformed_reason: str = ""
    answer: str | None = None
    fault: str | None = None
    expert_calls: tuple[ExpertCall, ...] = ()
    code_runs: tuple[CodeRun, ...] = ()
    outcome: str | None = None
    reward: float | None = None
    seed: int = 0
    step: int = 0
    sample_index: int = 0
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def completion_ids(self) -> list[int]:
        """Token ids after the prompt, all authors. Shape (T,)."""
        return [token for segment in self.segments for token in segment.ids]

    @property
    def logprobs(self) -> list[float | None]:
        """Sampling log-probability per completion token, None where spliced. Shape (T,)."""
        return [
            value
            for segment in self.segments
            for value in (segment.logprobs or (None,) * len(segment))
        ]

    @property
    def authors(self) -> list[Author]:
        """Author per completion token. Shape (T,)."""
        return [s.author for s in self.segments for _ in s.ids]

    @property
    def kinds(self) -> list[Kind]:
        """Kind per completion token. Shape (T,)."""
        return [s.kind for s in self.segments for _ in s.ids]

    @property
    def is_verified(self) -> bool:
        """Right, well formed and free of infrastructure faults."""
        return self.outcome == "right" and self.well_formed and self.fault is None

    @property
    def routes(self) -> tuple[str, ...]:
        """Names of the experts that were consulted (by interception), in order."""
        return tuple(call.name for call in self.expert_calls)


def fault_of(trajectory: Trajectory) -> str | None:
    """The fault that voids a trajectory, a failed grader's included; None if there is none.

    Nothing is scored, rewarded or trained where there is one.
    """
    if trajectory.fault is not None:
        return trajectory.fault
    return f"grader_{trajectory.outcome}" if trajectory.outcome in GRADER_FAULTS else None


def merge_runs(
    ids: Sequence[int],
    authors: Sequence[Author],
    kinds: Sequence[Kind],
    logprobs: Sequence[float | None],
) -> tuple[Segment, ...]:
    """Group per-token arrays, all of shape (T,), into segments: maximal runs of author and kind."""
    return tuple(_runs(zip(ids, authors, kinds, logprobs, strict=True)))


def _runs(tokens: Iterable[tuple[int, Author, Kind, float | None]]) -> Iterator[Segment]:
    run: list[tuple[int, float | None]] = []
    head: tuple[Author, Kind] | None = None
    for token, author, kind, logprob in tokens:
        if head is not None and head != (author, kind):
            yield _segment(head, run)
            run = []
        head = (author, kind)
        run.append((token, logprob))
    if head is not None:
        yield _segment(head, run)


def _segment(head: tuple[Author, Kind], run: list[tuple[int, float | None]]) -> Segment:
    author, kind = head
    known = [value for _, value in run if value is not None]
    if known and len(known) != len(run):
        raise ValueError("a run of tokens is either sampled throughout or not at all")
    return Segment(author, kind, tuple(token for token, _ in run), tuple(known) or None)
