"""Summaries of attention, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rivet.latent.adapter import expert_shares
from rivet.latent.attention import differences, listening, spearman


def test_shares_add_the_slots_of_each_expert() -> None:
    # Two experts with two slots each, then the empty slot.
    shares = expert_shares(torch.tensor([0.1, 0.2, 0.3, 0.1, 0.3]), 2)
    torch.testing.assert_close(shares, torch.tensor([0.3, 0.4, 0.3]))


def test_heads_that_disagree_have_a_low_entropy_each_and_a_high_one_together() -> None:
    attention = torch.zeros(1, 1, 2, 1, 3)
    attention[0, 0, 0, 0, 0] = attention[0, 0, 1, 0, 1] = 1.0  # one expert per head
    found = listening(attention, 2)
    assert found.per_head == pytest.approx(0.0, abs=1e-6)
    assert found.head_averaged == pytest.approx(math.log(2))
    assert found.by_expert == pytest.approx([0.5, 0.5, 0.0])
    assert found.specialisation == pytest.approx(0.5)


def test_rank_correlation_sees_order_alone_and_shares_ranks_of_ties() -> None:
    assert spearman([1, 2, 3, 4], [1, 10, 100, 1000]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    # Ranks 0.5, 0.5, 2 against 0, 1, 2: 1.5 / sqrt(1.5 * 2).
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(1.5 / math.sqrt(3))
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    assert spearman([1, 2], [1, 2]) is None
    with pytest.raises(ValueError, match="3 values against 2"):
        spearman([1, 2, 3], [1, 2])


def test_a_shared_drift_correlates_while_its_differences_need_not() -> None:
    x, y = [0.0, 1.0, 2.0, 3.5, 4.0], [0.0, 2.0, 3.0, 4.0, 6.0]
    assert spearman(x, y) == pytest.approx(1.0)
    assert differences(x) == [1.0, 1.0, 1.5, 0.5]
    # Ranks 1.5, 1.5, 3, 0 against 2.5, 0.5, 0.5, 2.5.
    assert spearman(differences(x), differences(y)) == pytest.approx(-3 / math.sqrt(18))
