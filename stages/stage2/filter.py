"""The verified filter: which trajectories Stage II learns from, with a count for every rule.

Rules apply in order; each sees what the ones before it kept, so the counts form a funnel. Nothing
is repaired: a trajectory is kept as it was sampled, or dropped. The order of the input decides
which of several near-duplicates, and which trajectories of one problem, are kept.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from data.decontamination import Contamination
from data.problems import Problem
from rivet.prompts import PromptBuilder
from rivet.trajectory import AUTHORS, KINDS
from stages.stage2.candidates import Candidate

Use = Literal["any", "expert", "code", "expert_or_code"]
_SHINGLE = 5  # tokens
_MIX = np.uint64(0x9E3779B97F4A7C15)
_ENVIRONMENT, _OUTPUT = AUTHORS.index("environment"), KINDS.index("output")
_REQUEST = KINDS.index("request")


@dataclass(frozen=True, slots=True)
class FilterRules:
    """What is demanded of a trajectory besides being verified.

    Attributes:
        require_right: Drop it unless its answer was graded right. False is the ablation that shows
            what verifying adds; a fault is dropped all the same.
        use: What it must have used: an expert, code, either, or nothing in particular.
        require_code_ok: Drop it if a program failed.
        max_length: Most tokens, prompt included; None is no limit.
        near_duplicate: Share of common 5-token shingles (Jaccard, in (0, 1]) with an earlier kept
            trajectory of the same problem from which on it is a repetition.
        max_per_problem: Most trajectories kept of one problem.
        max_trajectories: Most trajectories kept in all; None is no limit.
    """

    require_right: bool = True
    use: Use = "expert_or_code"
    require_code_ok: bool = True
    max_length: int | None = None
    near_duplicate: float = 0.9
    max_per_problem: int = 4
    max_trajectories: int | None = None


class Filter:
    """Says of one trajectory after the other whether it is kept, and counts.

    Args:
        rules: What is demanded.
        is_contaminated: Says whether a trajectory is about an evaluation problem.
        counts: Problem id -> trajectories of it that will be asked about. Where it is known, only
            what may still be repeated is remembered.
    """

    def __init__(
        self,
        rules: FilterRules,
        *,
        is_contaminated: Callable[[Candidate], bool] | None = None,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        self._repetition = _NoNearDuplicate(rules.near_duplicate)
        self._steps = _steps(rules, is_contaminated, self._repetition)
        self._left = None if counts is None else Counter(counts)
        self._dropped: Counter[str] = Counter()
        self._routes: Counter[str] = Counter()
        self._problems: set[str] = set()
        self._read = self._kept = 0

    def __call__(self, candidate: Candidate) -> bool:
        """Whether it is kept. Ask once about each, in an order that does not change."""
        self._read += 1
        failed = next((name for name, passes in self._steps if not passes(candidate)), None)
        problem = candidate.problem_id
        if self._left is not None:
            self._left[problem] -= 1
            if self._left[problem] <= 0:
                self._repetition.forget(problem)
        if failed is not None:
            self._dropped[failed] += 1
            return False
        self._kept += 1
        self._problems.add(problem)
        self._routes[" ".join(candidate.routes) or "none"] += 1
        return True

    @property
    def funnel(self) -> dict[str, Any]:
        """`read`, `kept`, `rules` (rule, dropped and kept, in order), and for the kept ones
        `problems` and `routes` (experts consulted -> trajectories)."""
        left, rows = self._read, []
        for name, _ in self._steps:
            left -= self._dropped[name]
            rows.append({"rule": name, "dropped": self._dropped[name], "kept": left})
        return {
            "read": self._read,
            "kept": self._kept,
            "rules": rows,
            "problems": len(self._problems),
            "routes": dict(sorted(self._routes.items())),
        }


def _steps(
    rules: FilterRules,
    is_contaminated: Callable[[Candidate], bool] | None,
    repetition: Callable[[Candidate], bool],
) -> list[tuple[str, Callable[[Candidate], bool]]]:
    """Each rule's name and test, cheapest first; the last ones remember what they kept."""
    steps: list[tuple[str, Callable[[Candidate], bool]]] = [
        ("no infrastructure fault", lambda t: t.fault is None),
        ("well formed", lambda t: t.well_formed),
        ("no fabricated output", lambda t: not has_fabricated_output(t)),
        (_USE_NAMES[rules.use], lambda t: _uses(t, rules.use)),
    ]
    if rules.require_right:
        steps.insert(1, ("right answer", lambda t: t.outcome == "right"))
    if rules.require_code_ok:
        steps.append(("code ran", lambda t: all(s == "ok" for s in t.code_statuses)))
    if rules.max_length is not None:
        limit = rules.max_length
        steps.append((f"at most {limit} tokens", lambda t: len(t) <= limit))
    if is_contaminated is not None:
        steps.append(("no evaluation problem", lambda t: not is_contaminated(t)))
    steps.append(("no near-duplicate", repetition))
    steps.append((f"at most {rules.max_per_problem} per problem", _Cap(rules.max_per_problem)))
    if rules.max_trajectories is not None:
        counter, total = itertools.count(1), rules.max_trajectories
        steps.append((f"at most {total} in all", lambda _: next(counter) <= total))
    return steps


_USE_NAMES: dict[Use, str] = {
    "any": "any use",
    "expert": "used an expert",
    "code": "ran code",
    "expert_or_code": "used an expert or code",
}


def has_fabricated_output(candidate: Candidate) -> bool:
    """Whether somebody else than the environment wrote a program's output."""
    is_output = candidate.kinds == _OUTPUT
    return candidate.finish == "fabricated_output" or bool(
        (is_output & (candidate.authors != _ENVIRONMENT)).any()
    )


def _uses(candidate: Candidate, use: Use) -> bool:
    # Without interception nobody is called, but the request and the reply are there.
    asked = bool((candidate.kinds == _REQUEST).any())
    ran = bool(candidate.code_statuses)
    return {"any": True, "expert": asked, "code": ran, "expert_or_code": asked or ran}[use]


class _NoNearDuplicate:
    """Compares with what was kept of the same problem."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._seen: dict[str, list[np.ndarray]] = defaultdict(list)
        self._shingles: dict[str, list[np.ndarray]] = defaultdict(list)

    def forget(self, problem_id: str) -> None:
        """Nothing of this problem will come any more."""
        self._seen.pop(problem_id, None)
        self._shingles.pop(problem_id, None)

    def __call__(self, candidate: Candidate) -> bool:
        ids, earlier = candidate.completion_ids, self._seen[candidate.problem_id]
        if any(np.array_equal(ids, other) for other in earlier):
            return False
        if self._threshold < 1 and earlier:
            known = self._shingles[candidate.problem_id]
            known += [shingles(other) for other in earlier[len(known) :]]
            mine = shingles(ids)
            if any(_overlap(mine, other) >= self._threshold for other in known):
                return False
        # A view would keep its whole batch alive.
        earlier.append(ids.copy())
        return True


def shingles(ids: np.ndarray) -> np.ndarray:
    """Sorted 64-bit digests of the runs of 5 tokens in some ids, each once."""
    padded = np.concatenate([ids, np.full(max(0, _SHINGLE - len(ids)), -1)])
    digests = np.zeros(len(padded) - _SHINGLE + 1, np.uint64)
    for n in range(_SHINGLE):
        part = padded[n : n + len(digests)].astype(np.uint64) + np.uint64(2)
        digests = (digests ^ part) * _MIX
        digests ^= digests >> np.uint64(29)
    return np.unique(digests)


def _overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Jaccard index of two sets of digests."""
    both = len(np.intersect1d(a, b, assume_unique=True))
    return both / (len(a) + len(b) - both)


class _Cap:
    """Counts what was passed of each problem. Only a limit of all comes after it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: Counter[str] = Counter()

    def __call__(self, candidate: Candidate) -> bool:
        self._counts[candidate.problem_id] += 1
        return self._counts[candidate.problem_id] <= self._limit


class EvaluationProblems:
    """Tells whether a trajectory is about an evaluation problem, from its prompt.

    Args:
        problems: The evaluation problems.
        prompts: Reads prompts, those of other experts included: they differ in their cards alone.
    """

    def __init__(self, problems: Sequence[Problem], prompts: PromptBuilder) -> None:
        self._prompts = prompts
        self._held = Contamination(p.problem for p in problems)
        self._known: dict[str, tuple[bytes, bool]] = {}  # of each problem, of its last prompt

    def __call__(self, candidate: Candidate) -> bool:
        prompt = candidate.prompt_ids.tobytes()
        known, verdict = self._known.get(candidate.problem_id, (b"", False))
        if known != prompt:
            ids = candidate.prompt_ids.tolist()
            texts = [self._prompts.tokenizer.decode(ids), *self._prompts.statements_in(ids)]
            verdict = any(map(self._held.holds, texts))
            self._known[candidate.problem_id] = (prompt, verdict)
        return verdict


def funnel_text(funnel: dict[str, Any]) -> str:
    """The funnel as a small table."""
    lines = [f"{'read':<36} {funnel['read']:>8}"]
    for row in funnel["rules"]:
        lines.append(f"{row['rule']:<36} {row['kept']:>8}  (-{row['dropped']})")
    return "\n".join(lines)
