"""A language model behind vLLM's own server as an expert: asked like any provider."""

from __future__ import annotations

import sys
from pathlib import Path

from rivet.experts.config import ExpertConfig, ExpertList
from rivet.experts.pool import ExpertPool
from rivet.experts.server_process import start_server
from rivet.rollout.vllm_process import free_port

NAME = "small"


async def test_experts_serve_runs_a_chat_model_with_vllm(checkpoint: Path) -> None:
    port = free_port("127.0.0.1")
    command = [
        *(sys.executable, "-m", "stages.cli", "experts", "serve", "--hf", str(checkpoint)),
        *("--engine", "vllm", "--name", NAME, "--port", str(port), "--dtype", "float32"),
        *("--max-batch", "4", "--parent", "{parent}"),
    ]
    with start_server(command, timeout_s=300, name="vLLM") as server:
        expert = ExpertConfig(
            NAME, model=NAME, base_urls=(server.base_url,), max_tokens=12, temperature=0.0
        )
        async with ExpertPool(ExpertList([expert])) as pool:
            replies = [await pool.ask(NAME, "gcd 12, 18", sample_key=f"p#{n}") for n in range(2)]
            unknown = await pool.ask("nobody", "gcd 12, 18", sample_key="p#0")
    assert [reply.status for reply in replies] == ["ok", "ok"]
    # Greedy: another sample of the same question is the same text, and vLLM counts its tokens.
    assert replies[0].text == replies[1].text != ""
    assert all(reply.prompt_tokens > 0 < reply.completion_tokens <= 12 for reply in replies)
    assert unknown.status != "ok"
