"""The engine samples what is in flight together, and each row as if it were alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rivet.latent.cache import read_states
from rivet.latent.engine import LatentEngine
from rivet.latent.experts import FrozenExpert
from rivet.latent.policy import LatentPolicy
from rivet.latent.prompts import LatentPrompts
from rivet.latent.sampling import sample
from rivet.rollout.backend import SamplingParams
from rivet.rollout.types import RolloutRequest
from rivet.settings import ProtocolSettings
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Trajectory
from tests.rivet.latent.conftest import NUM_CONTEXT

PROBLEMS = ["What is 12 + 18?", "3", "Compute 3 + 4 * 5 and say what is 23."]
LENGTH = 5


class World:
    """An engine over three problems, and the requests to ask it."""

    def __init__(
        self, policy: LatentPolicy, tokenizer: ProtocolTokenizer, experts: list[FrozenExpert]
    ) -> None:
        self.states = read_states(experts, PROBLEMS, None)
        self.policy, self.tokenizer = policy, tokenizer
        self.prompts = LatentPrompts(
            tokenizer,
            ProtocolSettings(prompt="bare"),
            policy.config.placeholder_id,
            NUM_CONTEXT,
        )
        self.batches: list[int] = []

    def engine(self, max_batch: int = 96) -> LatentEngine:
        """An engine whose batches are counted."""
        engine = LatentEngine(
            self.policy,
            self.tokenizer,
            rows={text: n for n, text in enumerate(PROBLEMS)},
            heard={"experts": self.states},
            max_completion_length=LENGTH,
            max_batch=max_batch,
        )
        original = engine._sample

        def counted(requests: Sequence[RolloutRequest]) -> Any:
            self.batches.append(len(requests))
            return original(requests)

        engine._sample = counted  # type: ignore[method-assign]
        return engine

    def requests(self, sampling: SamplingParams, samples: int = 3) -> list[RolloutRequest]:
        """Several samples of each problem."""
        return [
            RolloutRequest(
                text, self.prompts.build(text), "experts", sampling, seed=10 * n + k, sample_index=k
            )
            for n, text in enumerate(PROBLEMS)
            for k in range(samples)
        ]

    def run(self, requests: Sequence[RolloutRequest], max_batch: int = 96) -> list[Trajectory]:
        """All of them at the same time."""

        async def together() -> list[Trajectory]:
            engine = self.engine(max_batch)
            return await asyncio.gather(*map(engine.rollout, requests))

        return asyncio.run(together())


@pytest.fixture
def world(policy: LatentPolicy, tokenizer: ProtocolTokenizer, experts: list[FrozenExpert]) -> World:
    return World(policy, tokenizer, experts)


def test_what_is_in_flight_is_sampled_in_one_batch_and_as_if_alone(world: World) -> None:
    requests = world.requests(SamplingParams())
    together = world.run(requests)
    assert world.batches == [9]
    alone = [world.run([request])[0] for request in requests]
    assert [t.completion_ids for t in together] == [t.completion_ids for t in alone]
    assert len({tuple(t.completion_ids) for t in together}) > 3
    in_parts = world.run(requests, max_batch=4)
    assert [t.completion_ids for t in in_parts] == [t.completion_ids for t in together]
    assert world.batches[-3:] == [4, 4, 1]


def test_greedy_samples_and_sampled_ones_do_not_share_a_batch(world: World) -> None:
    mixed = [*world.requests(SamplingParams(), 1), *world.requests(SamplingParams(0.0), 1)]
    done = world.run(mixed)
    assert world.batches == [3, 3]
    greedy = sample(
        world.policy,
        [request.prompt_ids for request in mixed[3:]],
        world.states,
        rows=[0, 1, 2],
        seeds=None,
        max_new_tokens=LENGTH,
        eos_ids=world.tokenizer.eos_ids,
    )
    assert [tuple(t.completion_ids) for t in done[3:]] == [s.ids for s in greedy]


def test_a_row_says_how_it_ended_and_its_text_is_the_answer(world: World) -> None:
    cut = world.run(world.requests(SamplingParams(0.0), 1))[0]
    assert (cut.finish, cut.well_formed) == ("length", False)
    assert cut.answer == world.tokenizer.decode(cut.completion_ids)
    with torch.no_grad():  # nothing but the end of the turn
        world.policy.lm_head.weight.zero_()
    first = sorted(world.tokenizer.eos_ids)[0]
    world.policy.lm_head.forward = (
        lambda hidden: torch.nn.functional.one_hot(  # type: ignore
            torch.full(hidden.shape[:-1], first), world.policy.lm_head.weight.size(0)
        ).float()
    )
    ended = world.run(world.requests(SamplingParams(0.0), 1))[0]
    assert (ended.finish, ended.well_formed, ended.answer) == ("eos", True, None)
    assert ended.completion_ids == [first]


def test_tokens_that_pad_the_embeddings_are_never_sampled(world: World) -> None:
    size = len(world.tokenizer.token_bytes)
    head = world.policy.lm_head
    padding = 100 * torch.ones(8)
    project = head.forward
    head.forward = (
        lambda hidden: torch.cat(  # type: ignore
            [project(hidden), padding.expand(*hidden.shape[:-1], 8)], -1
        )
    )
    for temperature in (0.0, 1.0):
        for row in world.run(world.requests(SamplingParams(temperature), 1)):
            assert max(row.completion_ids) < size
            assert all(logprob is not None and logprob > -50 for logprob in row.logprobs)


def test_a_failure_reaches_everybody_and_the_next_request_is_served(world: World) -> None:
    requests = world.requests(SamplingParams(), 1)
    broken = [replace(request, problem_id="unknown") for request in requests]

    async def both() -> tuple[list[Any], Trajectory]:
        engine = world.engine()
        failed = await asyncio.gather(*map(engine.rollout, broken), return_exceptions=True)
        return failed, await engine.rollout(requests[0])

    failed, served = asyncio.run(both())
    assert [type(error) for error in failed] == [KeyError] * 3
    assert served.problem_id == PROBLEMS[0]


def test_top_k_and_top_p_cut_off_unlikely_tokens(world: World) -> None:
    hot = SamplingParams(temperature=5.0)
    likeliest = world.run(world.requests(SamplingParams(0.0), 1))
    for narrow in (replace(hot, top_k=1), replace(hot, top_p=1e-9)):
        done = world.run(world.requests(narrow, 1))
        assert [t.completion_ids for t in done] == [t.completion_ids for t in likeliest]
        assert all(p == 0.0 for t in done for s in t.segments for p in s.logprobs or ())
    free = world.run(world.requests(hot, 1))
    assert [t.completion_ids for t in free] != [t.completion_ids for t in likeliest]
