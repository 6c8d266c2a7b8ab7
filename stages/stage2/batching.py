"""Batches of weighted trajectories: padded or packed, in buckets of like length.

A row holds token ids with their author and kind codes (`stages.stage2.objective`). Packing lays the
trajectories of one batch end to end in rows of at most `max_length`, so a packed batch holds the
same trajectories as a padded one and gives the same loss and gradient; what differs is the padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from stages.stage2.objective import Objective, token_weights

IGNORED = -100  # label of a token that is not trained
PAD_CODE = 255  # author and kind of padding
_SLACK = 1.05  # tokens, padding included, over the fewest possible


class WeightedCollator:
    """Turns rows into tensors; right padding needs no attention mask, as nothing looks ahead.

    Args:
        objective: Gives the weights.
        pad_token_id: What fills the rows up.
        pack_length: Pack trajectories into rows of at most this many tokens; None pads each.
    """

    def __init__(
        self, objective: Objective, *, pad_token_id: int, pack_length: int | None = None
    ) -> None:
        self._table = objective.table()
        self._pad_token_id = pad_token_id
        self._pack_length = pack_length

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Collate rows.

        Returns:
            `input_ids`, `labels`, `weights`, `authors`, `kinds`, all (B, T), and `position_ids` if
            packed. The label of a token of weight 0 is -100.
        """
        documents = [self._document(row) for row in rows]
        lengths = [len(document[0]) for document in documents]
        if self._pack_length is None:
            bins = [[n] for n in range(len(documents))]
        else:
            bins = pack(lengths, self._pack_length)
        width = max(sum(lengths[n] for n in members) for members in bins)
        shape = (len(bins), width)
        ids = np.full(shape, self._pad_token_id, np.int64)
        weights = np.zeros(shape, np.float32)
        authors = np.full(shape, PAD_CODE, np.uint8)
        kinds = np.full(shape, PAD_CODE, np.uint8)
        arrays: tuple[np.ndarray, ...] = (ids, weights, authors, kinds)
        positions = np.tile(np.arange(width), (len(bins), 1))
        for row, members in enumerate(bins):
            start = 0
            for n in members:
                end = start + lengths[n]
                for target, values in zip(arrays, documents[n], strict=True):
                    target[row, start:end] = values
                positions[row, start:end] = np.arange(lengths[n])
                start = end
            positions[row, start:] = np.arange(width - start)
        batch = {
            "input_ids": ids,
            "labels": np.where(weights > 0, ids, IGNORED),
            "weights": weights,
            "authors": authors,
            "kinds": kinds,
        }
        if self._pack_length is not None:
            batch["position_ids"] = positions
        return {name: torch.from_numpy(array) for name, array in batch.items()}

    def _document(self, row: dict[str, Any]) -> tuple[np.ndarray, ...]:
        authors, kinds = np.asarray(row["authors"]), np.asarray(row["kinds"])
        weights = token_weights(self._table, authors, kinds, float(row.get("expert_scale", 1.0)))
        return np.asarray(row["input_ids"]), weights, authors, kinds


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices grouped into the rows of a batch, which is as wide as its fullest row.

    Filling row after row up to the capacity leaves the last ones empty while the batch stays as
    wide, so each number of rows is tried with rows filled evenly: the longest of what is left goes
    to the emptiest row. Of those that are within `_SLACK` of the fewest tokens, padding included,
    the one with most rows is taken, because attention costs a row's length squared.

    Args:
        lengths: Tokens of each trajectory.
        capacity: Most tokens of a row; something longer gets a row of its own.

    >>> pack([5, 3, 4, 2], 7)
    [[0, 3], [2, 1]]
    """
    longest_first = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    found: list[tuple[int, list[list[int]]]] = []  # tokens, rows
    for count in range(1, len(lengths) + 1):
        rows: list[list[int]] = [[] for _ in range(count)]
        filled = [0] * count
        for n in longest_first:
            emptiest = filled.index(min(filled))
            rows[emptiest].append(n)
            filled[emptiest] += lengths[n]
        if all(total <= capacity or len(row) == 1 for row, total in zip(rows, filled, strict=True)):
            found.append((count * max(filled), rows))
    fewest = min(tokens for tokens, _ in found)
    return next(rows for tokens, rows in reversed(found) if tokens <= _SLACK * fewest)


class LengthBucketSampler(Sampler[int]):
    """Shuffled indices in batches of like length; the order depends on seed and epoch alone.

    transformers' own `group_by_length` draws from the global generator, so a run that resumes in a
    later epoch sees another order. This one does not.

    Args:
        lengths: Tokens of each row.
        batch_size: Rows of one batch, over all processes.
        seed: Same seed, same order.
        pool: Batches whose rows are sorted together; more means less padding and less mixing.
    """

    def __init__(
        self, lengths: Sequence[int], batch_size: int, *, seed: int, pool: int = 16
    ) -> None:
        self._lengths = np.asarray(lengths)
        self._batch_size = batch_size
        self._seed = seed
        self._pool = pool
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        random = np.random.default_rng([self._seed, self._epoch])
        order = random.permutation(len(self._lengths))
        size = self._batch_size * self._pool
        pools = [order[start : start + size] for start in range(0, len(order), size)]
        order = np.concatenate([p[np.argsort(-self._lengths[p], kind="stable")] for p in pools])
        # Only whole batches change places: the last, shorter one must stay last.
        whole = len(order) // self._batch_size
        batches = order[: whole * self._batch_size].reshape(whole, self._batch_size)
        yield from batches[random.permutation(whole)].reshape(-1).tolist()
        yield from order[whole * self._batch_size :].tolist()
