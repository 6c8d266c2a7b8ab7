"""The server backend and the local one sample from one distribution, and stop at one token."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from rivet.checkpoints import load_model, load_tokenizer
from rivet.rollout.backend import Generation, SamplingParams
from rivet.rollout.local import LocalBackend
from rivet.rollout.vllm_backend import VLLMBackend
from stages.stage1.weight_sync import score

QUESTIONS = ["What is 12 + 30?", "Find the GCD of 252 and 198.", "7 * 8 = ?", "x + 3 = 10"]
# What the engine stops at, what ends inside a token of this vocabulary, what is common.
STOPS = [(), ("</expert>", "</python>", "<output>"), ("e",), ("12", "a", "\n")]


@pytest.mark.parametrize("stop", STOPS)
async def test_greedy_decoding_gives_identical_tokens(
    server: str, checkpoint: Path, stop: tuple[str, ...]
) -> None:
    tokenizer, model = load_tokenizer(checkpoint), load_model(checkpoint)
    async with VLLMBackend([server], tokenizer) as remote, LocalBackend(model, tokenizer) as local:
        for text in QUESTIONS:
            one, other = await asyncio.gather(
                *(
                    backend.generate(
                        tokenizer.encode(text),
                        stop=stop,
                        max_new_tokens=40,
                        sampling=SamplingParams(0.0),
                        seed=0,
                    )
                    for backend in (remote, local)
                )
            )
            assert (one.ids, one.finish_reason) == (other.ids, other.finish_reason)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(0.7), SamplingParams(1.0, 0.9), SamplingParams(top_k=5)],
)
async def test_logprobs_are_those_of_the_distribution_that_was_drawn_from(
    server: str, checkpoint: Path, sampling: SamplingParams
) -> None:
    """Against the local model's logits, transformed as the local backend transforms them."""
    from rivet.rollout.sampling import truncate

    tokenizer, model = load_tokenizer(checkpoint), load_model(checkpoint)
    prompt = tokenizer.encode(QUESTIONS[0])
    async with VLLMBackend([server], tokenizer) as backend:
        got = await backend.generate(
            prompt, stop=(), max_new_tokens=60, sampling=sampling, seed=11, banned_ids=(5, 6)
        )
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *got.ids]])).logits[0, len(prompt) - 1 : -1]
    logits = logits.float() / sampling.temperature
    logits[:, [5, 6]] = -math.inf
    wanted = truncate(logits, sampling.top_k, sampling.top_p).log_softmax(-1)
    wanted = wanted.gather(-1, torch.tensor(got.ids)[:, None])[:, 0]
    assert got.logprobs == pytest.approx(wanted.tolist(), abs=1e-3)


async def test_first_tokens_are_drawn_from_the_models_distribution(
    server: str, checkpoint: Path
) -> None:
    """Chi-square over the tokens that are expected at least five times."""
    tokenizer, model = load_tokenizer(checkpoint), load_model(checkpoint)
    prompt, draws = tokenizer.encode(QUESTIONS[1]), 800
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].softmax(-1) * draws
    async with VLLMBackend([server], tokenizer) as backend:

        async def draw(seed: int) -> Generation:
            return await backend.generate(
                prompt, stop=(), max_new_tokens=1, sampling=SamplingParams(), seed=seed
            )

        counts = Counter(await draw_all(draw, draws))
    cells = [i for i in range(len(expected)) if expected[i] >= 5]
    assert len(cells) > 10
    rest = draws - sum(counts[i] for i in cells)
    pairs = [(counts[i], expected[i].item()) for i in cells]
    pairs.append((rest, draws - sum(e for _, e in pairs)))
    statistic = sum((n - e) ** 2 / e for n, e in pairs)
    freedom = len(pairs) - 1
    # Wilson-Hilferty: (X / k)^(1/3) is about normal; 3.7 sigma is 1 in 10,000.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 3.7, (statistic, freedom)


async def draw_all(draw: object, draws: int) -> list[int]:
    gate = asyncio.Semaphore(64)

    async def one(seed: int) -> int:
        async with gate:
            return (await draw(seed)).ids[0]  # type: ignore[operator]

    return await asyncio.gather(*(one(seed) for seed in range(draws)))


async def test_a_seed_gives_the_same_tokens_and_calls_of_one_trajectory_differ(
    server: str, checkpoint: Path
) -> None:
    tokenizer = load_tokenizer(checkpoint)
    prompt = tokenizer.encode(QUESTIONS[0])
    async with VLLMBackend([server], tokenizer) as backend:

        async def draw(ids: list[int], seed: int) -> list[int]:
            got = await backend.generate(
                ids, stop=(), max_new_tokens=12, sampling=SamplingParams(), seed=seed
            )
            return got.ids

        assert await draw(prompt, 3) == await draw(prompt, 3)
        assert await draw(prompt, 3) != await draw(prompt, 4)


async def test_scores_are_the_models(server: str, checkpoint: Path) -> None:
    tokenizer, model = load_tokenizer(checkpoint), load_model(checkpoint)
    ids = tokenizer.encode(" ".join(QUESTIONS))
    async with VLLMBackend([server], tokenizer) as backend:
        (theirs,) = (await backend.score(ids)).values()
    assert theirs == pytest.approx(score(model, ids, "cpu").tolist(), abs=1e-3)
