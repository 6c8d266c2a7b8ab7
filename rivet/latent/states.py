"""Hidden states of several experts over many problems, as one table.

Experts differ in width, so the table is as wide as the widest and narrower states end in zeros;
the adapter reads of each expert only its own width. One tensor instead of a list of tensors goes
through `generate`, batch splits and data parallelism like any other input.

Shapes: N = problems, E = experts, S = slots per expert (layers x last tokens), W = greatest width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ProblemStates:
    """What one expert makes of some problems.

    Attributes:
        values: Hidden states, shape (N, S, width); zeros where `mask` is False.
        mask: True where there is a state, shape (N, S): a short problem has fewer tokens.
    """

    values: Tensor
    mask: Tensor

    def __post_init__(self) -> None:
        if self.values.shape[:2] != self.mask.shape:
            raise ValueError(
                f"states of shape {tuple(self.values.shape)} with a mask of shape "
                f"{tuple(self.mask.shape)}; expected (N, S, width) and (N, S)"
            )


@dataclass(frozen=True, slots=True)
class ExpertStates:
    """H of every problem.

    Attributes:
        names: The experts, in order.
        widths: Their widths.
        values: Shape (N, E, S, W), in float32.
        mask: True where there is a state, shape (N, E, S).
    """

    names: tuple[str, ...]
    widths: tuple[int, ...]
    values: Tensor
    mask: Tensor

    @classmethod
    def of(cls, experts: Mapping[str, ProblemStates]) -> ExpertStates:
        """Join what several experts make of the same problems.

        Raises:
            ValueError: There are no experts, or they read different numbers of problems.
        """
        if len({len(s.values) for s in experts.values()}) != 1:
            counts = {name: len(s.values) for name, s in experts.items()}
            raise ValueError(f"expected one or more experts over the same problems, got {counts}")
        widths = [s.values.size(2) for s in experts.values()]
        slots = max(s.values.size(1) for s in experts.values())
        n, most = len(next(iter(experts.values())).values), max(widths)
        values = torch.zeros(n, len(experts), slots, most)
        mask = torch.zeros(n, len(experts), slots, dtype=torch.bool)
        for e, states in enumerate(experts.values()):
            used, width = states.values.shape[1:]
            values[:, e, :used, :width] = states.values.float()
            mask[:, e, :used] = states.mask
        return cls(tuple(experts), tuple(widths), values, mask)

    def __len__(self) -> int:
        return len(self.values)

    def rows(self, rows: Tensor | Sequence[int]) -> ExpertStates:
        """The states of some problems, in the order given."""
        chosen = torch.as_tensor(rows, dtype=torch.long)
        return replace(self, values=self.values[chosen], mask=self.mask[chosen])

    def without(self, name: str) -> ExpertStates:
        """The same states with one expert masked: the adapter cannot see it.

        Raises:
            ValueError: There is no such expert.
        """
        if name not in self.names:
            raise ValueError(f"no expert {name!r}; expected one of {', '.join(self.names)}")
        mask = self.mask.clone()
        mask[:, self.names.index(name)] = False
        return replace(self, mask=mask)

    def only(self, name: str) -> ExpertStates:
        """The same states with every other expert masked.

        Raises:
            ValueError: There is no such expert.
        """
        if name not in self.names:
            raise ValueError(f"no expert {name!r}; expected one of {', '.join(self.names)}")
        states = self
        for other in self.names:
            if other != name:
                states = states.without(other)
        return states
