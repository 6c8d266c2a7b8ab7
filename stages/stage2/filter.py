"""The verified filter: which trajectories Stage II learns from, with a count for every rule.

Rules apply in order; each sees what the ones before it kept, so the counts form a funnel. Nothing
is repaired: a trajectory is kept as it was sampled, or dropped. The order of the input decides
which of several near-duplicates, and which trajectories of one problem, are kept.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from data.decontamination import Contamination
from data.problems import Problem
from rivet.prompts import PromptBuilder
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Trajectory

Use = Literal["any", "expert", "code", "expert_or_code"]
_SHINGLE = 5  # tokens


@dataclass(frozen=True, slots=True)
class FilterRules:
    """What is demanded of a trajectory besides being verified.

    Attributes:
        use: What it must have used: an expert, code, either, or nothing in particular.
        require_code_ok: Drop it if a program failed.
        max_length: Most tokens, prompt included; None is no limit.
        near_duplicate: Share of common 5-token shingles (Jaccard, in (0, 1]) with an earlier kept
            trajectory of the same problem from which on it is a repetition.
        max_per_problem: Most trajectories kept of one problem.
    """

    use: Use = "expert_or_code"
    require_code_ok: bool = True
    max_length: int | None = None
    near_duplicate: float = 0.9
    max_per_problem: int = 4


@dataclass(frozen=True, slots=True)
class Filtered:
    """What is left.

    Attributes:
        kept: In the order of the input.
        funnel: `read`, `kept`, `rules` (rule, dropped and kept, in order), and for the kept ones
            `problems` and `routes` (experts consulted -> trajectories).
    """

    kept: tuple[Trajectory, ...]
    funnel: dict[str, Any]


def filter_trajectories(
    trajectories: Iterable[Trajectory],
    rules: FilterRules,
    *,
    is_contaminated: Callable[[Trajectory], bool] | None = None,
) -> Filtered:
    """Keep the verified trajectories that satisfy every rule.

    Args:
        trajectories: Graded ones, in an order that does not change between runs.
        rules: What is demanded.
        is_contaminated: Says whether a trajectory is about an evaluation problem.
    """
    steps = _steps(rules, is_contaminated)
    dropped: Counter[str] = Counter()
    kept: list[Trajectory] = []
    read = 0
    for trajectory in trajectories:
        read += 1
        failed = next((name for name, passes in steps if not passes(trajectory)), None)
        if failed is None:
            kept.append(trajectory)
        else:
            dropped[failed] += 1
    return Filtered(tuple(kept), _funnel(read, [name for name, _ in steps], dropped, kept))


def _steps(
    rules: FilterRules, is_contaminated: Callable[[Trajectory], bool] | None
) -> list[tuple[str, Callable[[Trajectory], bool]]]:
    """Each rule's name and test, cheapest first; the last two remember what they kept."""
    steps: list[tuple[str, Callable[[Trajectory], bool]]] = [
        ("no infrastructure fault", lambda t: t.fault is None),
        ("right answer", lambda t: t.outcome == "right"),
        ("well formed", lambda t: t.well_formed),
        ("no fabricated output", lambda t: not has_fabricated_output(t)),
        (_USE_NAMES[rules.use], lambda t: _uses(t, rules.use)),
    ]
    if rules.require_code_ok:
        steps.append(("code ran", lambda t: all(run.status == "ok" for run in t.code_runs)))
    if rules.max_length is not None:
        limit = rules.max_length
        steps.append((f"at most {limit} tokens", lambda t: length_of(t) <= limit))
    if is_contaminated is not None:
        steps.append(("no evaluation problem", lambda t: not is_contaminated(t)))
    steps.append(("no near-duplicate", _NoNearDuplicate(rules.near_duplicate)))
    steps.append((f"at most {rules.max_per_problem} per problem", _Cap(rules.max_per_problem)))
    return steps


_USE_NAMES: dict[Use, str] = {
    "any": "any use",
    "expert": "used an expert",
    "code": "ran code",
    "expert_or_code": "used an expert or code",
}


def has_fabricated_output(trajectory: Trajectory) -> bool:
    """Whether somebody else than the environment wrote a program's output."""
    return trajectory.finish == "fabricated_output" or any(
        s.kind == "output" and s.author != "environment" for s in trajectory.segments
    )


def length_of(trajectory: Trajectory) -> int:
    """Tokens of prompt and completion."""
    return len(trajectory.prompt_ids) + sum(map(len, trajectory.segments))


def _uses(trajectory: Trajectory, use: Use) -> bool:
    # Without interception nobody is called, but the request and the reply are there.
    asked = any(s.kind == "request" for s in trajectory.segments)
    ran = bool(trajectory.code_runs)
    return {"any": True, "expert": asked, "code": ran, "expert_or_code": asked or ran}[use]


class _NoNearDuplicate:
    """Compares with what was kept of the same problem."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._seen: dict[str, list[tuple[list[int], frozenset[tuple[int, ...]]]]] = defaultdict(
            list
        )

    def __call__(self, trajectory: Trajectory) -> bool:
        ids = trajectory.completion_ids
        shingles = frozenset(
            tuple(ids[n : n + _SHINGLE]) for n in range(max(1, len(ids) - _SHINGLE + 1))
        )
        earlier = self._seen[trajectory.problem_id]
        for other_ids, other in earlier:
            if self._threshold >= 1:
                if ids == other_ids:
                    return False
            elif len(shingles & other) >= self._threshold * len(shingles | other):
                return False
        earlier.append((ids, shingles))
        return True


class _Cap:
    """Counts what was kept of each problem. The last rule: what it passes is kept."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: Counter[str] = Counter()

    def __call__(self, trajectory: Trajectory) -> bool:
        self._counts[trajectory.problem_id] += 1
        return self._counts[trajectory.problem_id] <= self._limit


class EvaluationProblems:
    """Tells whether a trajectory is about an evaluation problem, from its prompt.

    Args:
        problems: The evaluation problems.
        prompts: Builds prompts as the trajectories' controller was asked.
        tokenizer: Reads prompts.
    """

    def __init__(
        self, problems: Sequence[Problem], prompts: PromptBuilder, tokenizer: ProtocolTokenizer
    ) -> None:
        self._problems = problems
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._words = Contamination(p.problem for p in problems)
        self._whole: dict[str, Contamination] = {}
        self._known: dict[tuple[int, ...], bool] = {}

    def __call__(self, trajectory: Trajectory) -> bool:
        prompt = trajectory.prompt_ids
        if prompt not in self._known:
            text = self._tokenizer.decode(prompt)
            whole = self._prompts_of(trajectory)
            self._known[prompt] = whole.equals(text) or self._words.overlaps(text)
        return self._known[prompt]

    def _prompts_of(self, trajectory: Trajectory) -> Contamination:
        """The evaluation problems' own prompts in the mode of this trajectory."""
        mode = trajectory.mode
        if mode not in self._whole:
            built = (self._prompts.build(p.problem, mode) for p in self._problems)
            self._whole[mode] = Contamination(self._tokenizer.decode(ids) for ids in built)
        return self._whole[mode]


def _funnel(
    read: int, names: Sequence[str], dropped: Counter[str], kept: Sequence[Trajectory]
) -> dict[str, Any]:
    left = read
    rows = []
    for name in names:
        left -= dropped[name]
        rows.append({"rule": name, "dropped": dropped[name], "kept": left})
    routes = Counter(" ".join(t.routes) or "none" for t in kept)
    return {
        "read": read,
        "kept": len(kept),
        "rules": rows,
        "problems": len({t.problem_id for t in kept}),
        "routes": dict(sorted(routes.items())),
    }


def funnel_text(funnel: dict[str, Any]) -> str:
    """The funnel as a small table."""
    lines = [f"{'read':<36} {funnel['read']:>8}"]
    for row in funnel["rules"]:
        lines.append(f"{row['rule']:<36} {row['kept']:>8}  (-{row['dropped']})")
    return "\n".join(lines)
