"""Draws: the right distribution, the right log-probability, and one draw per seed and position."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rivet.rollout.backend import SamplingParams
from rivet.rollout.sampling import Draw, Sampler, invert, truncate, uniforms

CPU = torch.device("cpu")


def draw_many(
    logits: list[float], params: SamplingParams, n: int = 20_000, banned: tuple[int, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    sampler = Sampler([Draw(params, seed, banned) for seed in range(n)], CPU)
    return sampler(torch.tensor([logits] * n), np.full(n, 17))


def test_frequencies_follow_the_softmax_at_the_temperature() -> None:
    logits = [0.0, 1.0, -1.0, 2.0, -torch.inf]
    for temperature in (1.0, 0.5, 2.0):
        ids, logprobs = draw_many(logits, SamplingParams(temperature=temperature))
        expected = (torch.tensor(logits) / temperature).softmax(-1)
        seen = torch.bincount(ids, minlength=5) / len(ids)
        torch.testing.assert_close(seen, expected, atol=0.015, rtol=0)
        torch.testing.assert_close(logprobs, expected.log()[ids])


def test_uniforms_are_even_over_seeds_and_over_positions() -> None:
    n = 50_000
    ramp, same = np.arange(n, dtype=np.uint64), np.full(n, 3, dtype=np.uint64)
    for values in (uniforms(ramp, same), uniforms(same, ramp)):
        assert values.min() >= 0 and values.max() < 1
        counts, _ = np.histogram(values, bins=20, range=(0, 1))
        assert np.abs(counts - n / 20).max() < 6 * np.sqrt(n / 20)
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.02


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    draws = [Draw(SamplingParams(), seed) for seed in (5, 6, 7, 8, 9)]
    positions = np.array([3, 40, 7, 8, 2000])
    together, _ = Sampler(draws, CPU)(logits, positions)
    for n in range(5):
        alone, _ = Sampler([draws[n]], CPU)(logits[n : n + 1], positions[n : n + 1])
        assert alone[0] == together[n]


def test_greedy_takes_the_best_and_reports_its_probability_at_temperature_1() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    ids, logprobs = Sampler([Draw(SamplingParams(temperature=0), 1)], CPU)(logits, np.array([1]))
    assert ids.tolist() == [1]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[0, [1]])


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]] * 2)
    draws = [Draw(SamplingParams(temperature=0), 1), Draw(SamplingParams(temperature=0.01), 1)]
    ids, logprobs = Sampler(draws, CPU)(logits, np.array([1, 1]))
    assert ids.tolist() == [1, 1]
    assert logprobs[0] < -0.1 and logprobs[1] > -1e-3


def test_truncation_keeps_the_smallest_nucleus_and_renormalises() -> None:
    probabilities = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    kept = truncate(probabilities.log(), 0, 0.6).softmax(-1)  # 0.4 and 0.3 reach 0.6
    torch.testing.assert_close(kept, torch.tensor([[0.0, 4 / 7, 0.0, 3 / 7]]))
    kept = truncate(probabilities.log(), 3, 1.0).softmax(-1)
    torch.testing.assert_close(kept, torch.tensor([[0.0, 4 / 9, 2 / 9, 3 / 9]]))
    kept = truncate(probabilities.log(), 2, 0.5).softmax(-1)  # top_k first: 4/7 reaches 0.5
    torch.testing.assert_close(kept, torch.tensor([[0.0, 1.0, 0.0, 0.0]]))
    kept = truncate(probabilities.log(), 0, 1e-9).softmax(-1)
    torch.testing.assert_close(kept, torch.tensor([[0.0, 1.0, 0.0, 0.0]]))


@pytest.mark.parametrize("params", [SamplingParams(top_p=0.6), SamplingParams(top_k=2)])
def test_truncated_draws_stay_inside_and_report_the_renormalised_probability(params) -> None:
    ids, logprobs = draw_many(torch.tensor([0.1, 0.4, 0.2, 0.3]).log().tolist(), params)
    assert set(ids.tolist()) == {1, 3}
    expected = torch.tensor([0.0, 4 / 7, 0.0, 3 / 7]).log()
    torch.testing.assert_close(logprobs, expected[ids])


def test_banned_tokens_have_no_mass_even_when_all_others_are_unlikely() -> None:
    ids, logprobs = draw_many([30.0, 0.0, 0.0], SamplingParams(), banned=(0,))
    assert set(ids.tolist()) == {1, 2}
    torch.testing.assert_close(logprobs, torch.full_like(logprobs, 0.5).log())


def test_logits_are_left_as_they_were() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    Sampler([Draw(SamplingParams(top_k=1), 0, (2,))], CPU)(logits, np.array([0]))
    assert logits.tolist() == [[1.0, 2.0, 3.0]]


def test_a_large_vocabulary_never_yields_a_token_without_mass() -> None:
    """Rounding of the cumulative sum may not push a draw past the last possible token."""
    logits = torch.full((512, 50_000), -torch.inf)
    logits[:, 100:200] = torch.randn(512, 100, generator=torch.Generator().manual_seed(1))
    sampler = Sampler([Draw(SamplingParams(), seed) for seed in range(512)], CPU)
    ids, logprobs = sampler(logits, np.arange(512))
    assert int(ids.min()) >= 100 and int(ids.max()) < 200
    assert torch.isfinite(logprobs).all()


def test_a_uniform_number_that_rounds_to_one_draws_the_last_token_with_mass() -> None:
    mass = torch.tensor([[0.0, 2.0, 1.0, 0.0], [0.5, 0.0, 0.0, 0.0], [0.1, 0.7, 0.2, 1e-30]])
    uniform = torch.full((3,), 1 - 2.0**-26, dtype=torch.float64).float()
    assert uniform.tolist() == [1.0] * 3
    ids, total = invert(mass, uniform)
    assert ids[:, 0].tolist() == [2, 0, 2]
    torch.testing.assert_close(total[:, 0], mass.sum(-1))


@pytest.mark.parametrize("temperature", [float("nan"), float("inf"), -1.0])
def test_a_temperature_that_is_no_number_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="expected finite temperature >= 0"):
        SamplingParams(temperature=temperature)


@pytest.mark.parametrize("value", [1e-7, 1e-300, 5e-324])
def test_a_vanishing_temperature_or_nucleus_takes_the_best_token(value: float) -> None:
    logits = [0.0, 3.0, 1.0, 2.9]
    for params in (SamplingParams(temperature=value), SamplingParams(top_p=value)):
        ids, logprobs = draw_many(logits, params)
        assert set(ids.tolist()) == {1}
        assert bool(torch.isfinite(logprobs).all())
