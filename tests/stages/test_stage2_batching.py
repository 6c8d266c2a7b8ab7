"""Batches: packing, padding, and an order that depends on seed and epoch alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.stage2.batching import IGNORED, PAD_CODE, LengthBucketSampler, WeightedCollator, pack
from stages.stage2.objective import PROMPT_AUTHOR, PROMPT_KIND, Objective


def row(length: int, start: int = 0) -> dict[str, np.ndarray]:
    """A prompt token and then the controller's request."""
    authors = np.zeros(length, np.uint8)
    kinds = np.ones(length, np.uint8)
    authors[0], kinds[0] = PROMPT_AUTHOR, PROMPT_KIND
    return {"input_ids": np.arange(start, start + length), "authors": authors, "kinds": kinds}


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(20, 60))
@settings(max_examples=100, deadline=None)
def test_packing_places_everything_once_and_overfills_no_row(
    lengths: list[int], capacity: int
) -> None:
    groups = pack(lengths, capacity)
    assert sorted(n for group in groups for n in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or sum(lengths[n] for n in group) <= capacity


def test_padding_is_marked_and_never_trained() -> None:
    batch = WeightedCollator(Objective(), pad_token_id=7)([row(2), row(4, 10)])
    assert batch["input_ids"].tolist() == [[0, 1, 7, 7], [10, 11, 12, 13]]
    assert batch["labels"].tolist() == [[IGNORED, 1, IGNORED, IGNORED], [IGNORED, 11, 12, 13]]
    assert (batch["authors"][0, 2:] == PAD_CODE).all()
    assert "position_ids" not in batch


def test_packed_rows_restart_their_positions() -> None:
    collator = WeightedCollator(Objective(), pad_token_id=7, pack_length=6)
    batch = collator([row(2), row(4, 10), row(3, 20)])
    assert batch["input_ids"].tolist() == [[10, 11, 12, 13, 7], [20, 21, 22, 0, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0], [0, 1, 2, 0, 1]]
    # What follows a document's end is not predicted from it.
    assert batch["labels"][1].tolist() == [IGNORED, 21, 22, IGNORED, 1]


def test_packed_rows_are_filled_evenly_so_that_the_batch_is_narrow() -> None:
    # Row after row up to 10 would give 10, 10 and 4: 30 tokens for 24.
    lengths = [6, 4, 6, 4, 2, 2]
    rows = pack(lengths, 10)
    assert [sum(lengths[n] for n in row) for row in rows] == [6, 6, 6, 6]


def test_packing_takes_short_rows_where_they_cost_no_padding() -> None:
    # One row of 40 holds no padding, nor do four of 10; attention over 40 costs four times as much.
    assert len(pack([10, 10, 10, 10], 100)) == 4
    # Two rows would be 13 wide, 26 tokens for 18.
    assert len(pack([13, 2, 3], 100)) == 1


@pytest.fixture
def lengths() -> np.ndarray:
    return np.random.default_rng(0).integers(5, 500, 203)


def test_every_row_comes_once_an_epoch(lengths: np.ndarray) -> None:
    sampler = LengthBucketSampler(lengths, 8, seed=1)
    assert sorted(sampler) == list(range(203)) and len(sampler) == 203


def test_order_depends_on_seed_and_epoch_alone(lengths: np.ndarray) -> None:
    first, second = (LengthBucketSampler(lengths, 8, seed=1) for _ in range(2))
    list(first)  # an epoch before, as in an undisturbed run
    first.set_epoch(1)
    second.set_epoch(1)  # as in a run that resumes here
    np.random.default_rng().random(5)
    assert list(first) == list(second)
    second.set_epoch(2)
    assert list(first) != list(second)
    assert list(first) != list(LengthBucketSampler(lengths, 8, seed=2))


def test_batches_hold_rows_of_like_length(lengths: np.ndarray) -> None:
    def padded(order: list[int]) -> int:
        batches = [lengths[order[n : n + 8]] for n in range(0, len(order), 8)]
        return sum(len(batch) * int(batch.max()) for batch in batches)

    bucketed = padded(list(LengthBucketSampler(lengths, 8, seed=1)))
    shuffled = padded(np.random.default_rng(1).permutation(203).tolist())
    assert bucketed < 1.15 * lengths.sum() < shuffled
