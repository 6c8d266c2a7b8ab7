"""Two real servers, one started by the run itself, and one killed under way."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil

from rivet.checkpoints import load_tokenizer
from rivet.rollout.backend import SamplingParams
from rivet.rollout.vllm_backend import VLLMBackend
from rivet.rollout.vllm_open import server_settings
from rivet.rollout.vllm_process import managed_server


async def test_one_of_two_servers_is_killed_and_every_trajectory_ends_once(
    server: str, checkpoint: Path
) -> None:
    tokenizer = load_tokenizer(checkpoint)
    prompt = tokenizer.encode("What is 12 + 30?")
    with managed_server(server_settings(checkpoint, max_batch=32)) as second:
        victims = psutil.Process(second.pid).children(recursive=True)
        urls = [second.base_url, server]
        async with VLLMBackend(urls, tokenizer, health_interval_s=0.2) as backend:
            ended: list[int] = []

            async def trajectory(n: int) -> list[int]:
                context = [*prompt, 7 + n]
                for _ in range(3):
                    got = await backend.generate(
                        context,
                        stop=(),
                        max_new_tokens=30,
                        sampling=SamplingParams(0.0),
                        seed=n,
                        session=str(n),
                    )
                    context += [*got.ids, 9]
                ended.append(n)
                return context

            tasks = [asyncio.create_task(trajectory(n)) for n in range(24)]
            while not any(m.in_flight for m in backend.pool._members[:1]):
                await asyncio.sleep(0.01)
            for victim in victims:
                os.kill(victim.pid, signal.SIGKILL)
            contexts = await asyncio.gather(*tasks)
            assert backend.pool.failovers > 0
            assert backend.pool.left_out() == [second.base_url.removesuffix("/v1")]
            # Greedy: what an undisturbed server makes of it.
            again = await asyncio.gather(*(trajectory(n) for n in range(24)))
    assert sorted(ended) == sorted([*range(24), *range(24)])
    assert contexts == again
