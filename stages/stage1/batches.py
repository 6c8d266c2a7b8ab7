"""From graded trajectories to the rows and masks of a training batch.

Shapes: B = prompts, G = generations per prompt, T = completion tokens.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Trajectory
from stages.stage1.objective import TokenRoles


def is_void(trajectory: Trajectory) -> bool:
    """True if it holds neither an answer nor an action: there is nothing to reinforce."""
    return not (trajectory.answer or trajectory.expert_calls or trajectory.code_runs)


def problem_order(
    count: int,
    per_step: int,
    steps: int,
    *,
    seed: int,
    shuffle: bool,
    strata: Sequence[str] | None = None,
) -> list[int]:
    """Rows of the problems of every step, `per_step` distinct ones each, flat.

    Each pass over the problems has its own order, fixed by the seed; what is left at its end and
    does not fill a step is skipped.

    Args:
        count: Problems.
        per_step: Problems of a step.
        steps: Steps.
        seed: Fixes the order.
        shuffle: Whether there is one other than that of the rows.
        strata: What each problem is of; every step has problems of each in proportion.

    Raises:
        ValueError: There are fewer problems than one step needs.
    """
    if count < per_step:
        raise ValueError(f"{count} problems, but one step takes {per_step}; add problems")
    order: list[int] = []
    epoch = 0
    while len(order) < steps * per_step:
        rows = list(range(count))
        if shuffle:
            random.Random(f"{seed}\x1f{epoch}").shuffle(rows)
        if strata is not None:
            rows = _spread(rows, strata)
        order += rows[: count - count % per_step]
        epoch += 1
    return order[: steps * per_step]


def _spread(rows: Sequence[int], strata: Sequence[str]) -> list[int]:
    """The rows with those of each stratum evenly over the whole, in their order."""
    sizes = Counter(strata[row] for row in rows)
    met = Counter[str]()
    place: dict[int, float] = {}
    for row in rows:
        place[row] = (met[strata[row]] + 0.5) / sizes[strata[row]]
        met[strata[row]] += 1
    return sorted(rows, key=place.__getitem__)


def roles_of(
    trajectories: Sequence[Trajectory],
    length: int,
    tokenizer: ProtocolTokenizer,
    experts: Collection[str],
    *,
    device: torch.device | str = "cpu",
) -> TokenRoles:
    """Masks of shape (B*G, length) from the trajectories' authors and kinds.

    What follows `<expert name="` is a choice of an expert even where no name comes of it: if only
    valid names counted as choices, a name that is made up would be punished less than a real one
    that does not know the answer, and the controller would flee into nonsense.
    """
    codes = torch.zeros(len(trajectories), length, dtype=torch.int8)  # 0: environment, padding
    for row, trajectory in enumerate(trajectories):
        start = 0
        for segment in trajectory.segments:
            end = start + len(segment)
            if segment.author == "expert":
                codes[row, start:end] = 2
            elif segment.author == "controller":
                codes[row, start:end] = 3 if segment.kind == "route" else 1
            start = end
        for n, name in choices(trajectory, tokenizer):
            codes[row, n] = 3 if name in experts else 4
    codes = codes.to(device)
    route = codes >= 3
    return TokenRoles((codes == 1) | route, codes == 2, route, codes == 4)


def choices(trajectory: Trajectory, tokenizer: ProtocolTokenizer) -> list[tuple[int, str]]:
    """The controller's choices of an expert, whatever became of them.

    Returns:
        For each `<expert name="` the index of the token that holds the first byte behind it, if the
        controller wrote that, and what stands there up to the next quote or tag.
    """
    pieces = [tokenizer.bytes_of((i,)) for i in trajectory.completion_ids]
    authors = trajectory.authors
    found: list[tuple[int, str]] = []
    token, token_end = -1, 0
    for match in re.finditer(rb'<expert name="([^"<>]*)', b"".join(pieces)):
        while token_end <= match.start(1) and token + 1 < len(pieces):
            token += 1
            token_end += len(pieces[token])
        if token_end > match.start(1) and authors[token] == "controller":
            found.append((token, match[1].decode("utf-8", "replace")))
    return found


def without_idle_rows(
    batch: dict[str, Any], is_trained: Tensor, num_parts: int, most: int | None = None
) -> dict[str, Any]:
    """The batch without rows that train nothing, and without the padding that they needed.

    Rows of flat groups, faults and void trajectories cost a forward and a backward pass and
    change nothing. As many are kept as it takes to split the batch into equal parts, of at least
    one row each.

    Args:
        batch: The trainer's tensors: rows first, then columns of the prompt or the completion.
        is_trained: z_i, shape (B*G,).
        num_parts: Parts that the batch will be split into.
        most: Trained rows of the process that has most of them: all keep as many rows, because TRL
            gathers a metric of each row. None is this process alone.
    """
    most = int(is_trained.sum()) if most is None else most
    rows = max(math.ceil(most / num_parts), 1) * num_parts
    # A stable sort keeps the order of the rows that stay.
    return _rows_of(batch, torch.argsort(~is_trained, stable=True)[:rows])


def parts_of_like_length(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts of one optimizer step with their rows sorted, the longest first, and trimmed.

    A step's gradient is the sum over its rows, in whatever part each is; but a part costs as much
    as its longest row. The longest come first, so that a step too large for the memory fails at
    once.

    Args:
        parts: As the trainer splits a batch: equally many rows each.
    """
    count = len(parts)
    together = {
        name: torch.cat([part[name] for part in parts]) if _is_table(value) else value
        for name, value in parts[0].items()
    }
    longest_first = together["completion_mask"].sum(1).argsort(descending=True, stable=True)
    return [_rows_of(together, rows) for rows in longest_first.chunk(count)]


def _rows_of(batch: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    """Some rows of a batch, without the padding that only others need."""
    width = int(batch["completion_mask"][rows].sum(1).max())
    prompt_width = int(batch["prompt_mask"][rows].sum(1).max())
    result: dict[str, Any] = {}
    for name, value in batch.items():
        if not _is_table(value):
            result[name] = value
        elif name in ("prompt_ids", "prompt_mask"):
            result[name] = value[rows][:, value.size(1) - prompt_width :]
        else:
            result[name] = value[rows][:, :width]
    return result


def _is_table(value: Any) -> bool:
    """True of what has a row for each trajectory."""
    return isinstance(value, Tensor) and value.dim() > 0
