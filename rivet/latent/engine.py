"""Rollouts of a latent policy, in the place of `rivet.rollout.engine`: what is in flight, at once.

The policy answers in one turn without tags, so a trajectory is its completion alone and the whole
text is the answer, as in the condition `plain` of the rollout engine. A condition is what is heard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from rivet.latent.policy import LatentPolicy
from rivet.latent.sampling import Sample, sample
from rivet.latent.states import ExpertStates
from rivet.rollout.backend import SamplingParams
from rivet.rollout.types import RolloutRequest
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Mode, Segment, Trajectory


class LatentEngine:
    """Samples trajectories of given problems.

    Args:
        policy: On its device, in evaluation mode.
        tokenizer: The policy's.
        rows: Problem id -> its row in what is heard.
        heard: H of all problems by condition; None where there are no experts.
        max_completion_length: Most tokens of a completion, at least 1.
        max_batch: Most samples at the same time.
    """

    def __init__(
        self,
        policy: LatentPolicy,
        tokenizer: ProtocolTokenizer,
        *,
        rows: Mapping[str, int],
        heard: Mapping[Mode, ExpertStates | None],
        max_completion_length: int,
        max_batch: int = 96,
    ) -> None:
        self._policy = policy
        self._tokenizer = tokenizer
        self._rows = rows
        self._heard = heard
        self._max_completion_length = max_completion_length
        self._max_batch = max_batch
        self._waiting: list[tuple[RolloutRequest, asyncio.Future[Trajectory]]] = []
        self._worker: asyncio.Task[None] | None = None

    @property
    def max_context(self) -> int | None:
        """Longest context in tokens, prompt included; None if the model does not say."""
        return getattr(self._policy.config.text_config, "max_position_embeddings", None)

    async def rollout(self, request: RolloutRequest) -> Trajectory:
        """Sample one trajectory, together with those that others wait for."""
        future: asyncio.Future[Trajectory] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        """Sample batch after batch until nobody waits."""
        await asyncio.sleep(0)  # all who are about to ask come into one batch
        while batch := self._next_batch():
            requests = [request for request, _ in batch]
            try:
                samples = await asyncio.to_thread(self._sample, requests)
                done = list(map(self._trajectory, requests, samples))
            except Exception as error:  # whoever waits for it gets it, and nobody waits for ever
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), trajectory in zip(batch, done, strict=True):
                if not future.done():
                    future.set_result(trajectory)

    def _next_batch(self) -> list[tuple[RolloutRequest, asyncio.Future[Trajectory]]]:
        """Take those who wait for the same kind of sampling as the first, in order."""
        waiting = [pair for pair in self._waiting if not pair[1].done()]
        alike = [pair for pair in waiting if _kind(pair[0]) == _kind(waiting[0][0])]
        batch = alike[: self._max_batch]
        taken = {id(future) for _, future in batch}
        self._waiting = [pair for pair in waiting if id(pair[1]) not in taken]
        return batch

    def _sample(self, requests: Sequence[RolloutRequest]) -> list[Sample]:
        """Completions of requests that are sampled alike; each prompt is read once."""
        mode, sampling, length = _kind(requests[0])
        prompts = {request.problem_id: request.prompt_ids for request in requests}
        place = {problem: n for n, problem in enumerate(prompts)}
        heard, is_greedy = self._heard[mode], sampling.temperature == 0
        truncated = {} if is_greedy else {"top_k": sampling.top_k, "top_p": sampling.top_p}
        return sample(
            self._policy,
            list(prompts.values()),
            None if heard is None else heard.rows([self._rows[problem] for problem in prompts]),
            rows=[place[request.problem_id] for request in requests],
            seeds=None if is_greedy else [request.seed for request in requests],
            max_new_tokens=min(self._max_completion_length, length or self._max_completion_length),
            eos_ids=self._tokenizer.eos_ids,
            vocab_size=len(self._tokenizer.token_bytes),
            temperature=1.0 if is_greedy else sampling.temperature,
            **truncated,  # type: ignore[arg-type]
        )

    def _trajectory(self, request: RolloutRequest, drawn: Sample) -> Trajectory:
        eos_ids = self._tokenizer.eos_ids
        text = self._tokenizer.decode([i for i in drawn.ids if i not in eos_ids])
        ended = "answer" if text else "eos"
        return Trajectory(
            id=request.id,
            problem_id=request.problem_id,
            mode=request.mode,
            prompt_ids=tuple(request.prompt_ids),
            segments=(Segment("controller", "answer", drawn.ids, drawn.logprobs),),
            finish=ended if drawn.is_finished else "length",  # type: ignore[arg-type]
            well_formed=drawn.is_finished,
            malformed_reason="" if drawn.is_finished else "no end of turn",
            answer=text or None,
            seed=request.seed,
            step=request.step,
            sample_index=request.sample_index,
            info=dict(request.info),
        )


def _kind(request: RolloutRequest) -> tuple[Mode, SamplingParams, int | None]:
    """What the samples of one batch share."""
    return request.mode, request.sampling, request.max_completion_length
