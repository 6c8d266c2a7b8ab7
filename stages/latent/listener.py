"""What a policy hears in each arm: the experts' states of a problem, of another, or none.

full         H of the problem itself
shuffled     H of another problem of the same family, drawn anew for every step
one-expert   H of one expert alone
static       H, mixed in one learned way whatever the problem (see `rivet.latent.adapter`)
constant, single   nothing
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from data.problems import Problem
from rivet.latent.states import ExpertStates
from stages.latent.config import Arm


class Listener:
    """The states that go with problems.

    Args:
        problems: All problems of a run, in the order of the states' rows.
        states: H of all of them; None where the arm hears nothing.
        arm: Which arm.
        expert: The only one that is heard in the arm `one-expert`.
        seed: Of the shuffling.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        states: ExpertStates | None,
        *,
        arm: Arm,
        expert: str = "",
        seed: int = 0,
    ) -> None:
        self._arm, self._seed = arm, seed
        self._ids = [problem.id for problem in problems]
        self._family = [str(problem.meta.get("family", "")) for problem in problems]
        # A prompt tells only the text, so problems of one text are one row: the first of them.
        first: dict[str, int] = {}
        self._first = [first.setdefault(problem.problem, n) for n, problem in enumerate(problems)]
        self._row = dict(zip(self._ids, self._first, strict=True))
        self._members: dict[str, list[int]] = {}
        self._place: dict[int, int] = {}  # of each row among its family's
        for row in first.values():
            members = self._members.setdefault(self._family[row], [])
            self._place[row] = len(members)
            members.append(row)
        self._states = states.only(expert) if states is not None and expert else states

    @property
    def states(self) -> ExpertStates | None:
        """H of all problems, as this arm may see it."""
        return self._states

    def row(self, problem_id: str) -> int:
        """Row of a problem: of the first that has its text."""
        return self._row[problem_id]

    def family(self, row: int) -> str:
        """Family of a problem."""
        return self._family[row]

    def hear(self, rows: Sequence[int], step: int) -> ExpertStates | None:
        """States that go with some problems at a step, in order; None where nothing is heard."""
        if self._states is None:
            return None
        if self._arm == "shuffled":
            rows = [self.partner(row, step) for row in rows]
        return self._states.rows(list(rows))

    def partner(self, row: int, step: int) -> int:
        """A problem of the same family and another text; the same for all samples of a step.

        Raises:
            ValueError: The family has one problem only.
        """
        row = self._first[row]
        others = self._members[self._family[row]]
        if len(others) < 2:
            raise ValueError(
                f"{self._ids[row]}: the only problem of its family {self._family[row]!r}; expected "
                "more, or states cannot be shuffled"
            )
        text = f"{self._seed}\x1f{step}\x1f{self._ids[row]}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        chosen = random.Random(int.from_bytes(digest, "big")).randrange(len(others) - 1)
        return others[(self._place[row] + 1 + chosen) % len(others)]
