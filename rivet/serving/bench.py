"""Load on a server: many clients for a while; latency, throughput, errors and memory.

    python -m rivet.serving.bench runs/mini/export --clients 64 --seconds 60

Starts `rivet serve` on the checkpoint as a child process, or measures a running one (`--url`). Each
client asks one arithmetic problem after another, every second one as a stream, and checks that the
reply is whole. Memory is that of the server's process, once a second, from /proc. The last line
printed is the result as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from rivet.experts.server_process import start_server

_TEMPLATES = ("Find the GCD of {a}, {b}.", "What is {a} + {b}?", "Calculate {a} * {b}.")


@dataclass(slots=True)
class Load:
    """What the clients saw.

    Attributes:
        seconds: Duration of each request that was answered.
        errors: What went wrong, and how often.
        answered: Replies that hold a final answer.
        tokens: Completion tokens.
        memory_mb: Resident memory of the server over time.
    """

    seconds: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    answered: int = 0
    tokens: int = 0
    memory_mb: list[float] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the load; 1 if any request failed."""
    arguments = _parser().parse_args(argv)
    with _server(arguments) as (url, pid):
        load, wall_s, cpu_s = asyncio.run(_run(url, pid, arguments))
    result = summary(load, wall_s)
    result |= {"clients": arguments.clients, "server_cpu_s": cpu_s}
    for name, value in result.items():
        print(f"{name:20} {value}")
    print(json.dumps(result))
    return 1 if load.errors else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rivet.serving.bench", description=__doc__)
    parser.add_argument("checkpoint", nargs="?", default="runs/demo/export", help="what to serve")
    parser.add_argument("--url", default="", help="a running server, such as http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=64, help="at the same time (default 64)")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the problems (default 0)")
    return parser


@contextmanager
def _server(arguments: argparse.Namespace) -> Iterator[tuple[str, int | None]]:
    """The address of the server, and its process where it is ours."""
    if arguments.url:
        yield arguments.url.rstrip("/"), None
        return
    command = [sys.executable, "-m", "stages.cli", "serve", arguments.checkpoint, "--port", "0"]
    command += ["--parent_pid", "{parent}", "--max_queue", str(arguments.clients)]
    with start_server(command, timeout_s=600) as server:
        yield server.base_url.removesuffix("/v1"), server.pid


async def _run(
    url: str, pid: int | None, arguments: argparse.Namespace
) -> tuple[Load, float, float | None]:
    load = Load()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits, trust_env=False) as http:
        models = (await http.get("/v1/models")).raise_for_status().json()
        model = models["data"][0]["id"]
        await _ask(http, model, "What is 1 + 1?", False, Load())  # the first call warms up
        started, cpu_before = time.monotonic(), _cpu_s(pid)
        until = started + arguments.seconds
        watch = asyncio.create_task(_watch(pid, load))
        await asyncio.gather(
            *(
                _client(http, model, random.Random(f"{arguments.seed}/{n}"), until, load)
                for n in range(arguments.clients)
            )
        )
        watch.cancel()
        wall_s, cpu_after = time.monotonic() - started, _cpu_s(pid)
    used = None if cpu_before is None or cpu_after is None else round(cpu_after - cpu_before, 2)
    return load, wall_s, used


async def _client(
    http: httpx.AsyncClient, model: str, rng: random.Random, until: float, load: Load
) -> None:
    """Ask until the time is over."""
    stream = rng.random() < 0.5
    while time.monotonic() < until:
        template = rng.choice(_TEMPLATES)
        problem = template.format(a=rng.randint(10, 999), b=rng.randint(10, 999))
        stream = not stream
        started = time.monotonic()
        try:
            await _ask(http, model, problem, stream, load)
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            load.errors[f"{type(error).__name__}: {error}"[:200]] += 1
        else:
            load.seconds.append(time.monotonic() - started)


async def _ask(http: httpx.AsyncClient, model: str, problem: str, stream: bool, load: Load) -> None:
    """One request; raises where the reply is not whole."""
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": problem}]}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    response = await http.post("/v1/chat/completions", json=body)
    if response.status_code != 200:
        raise ValueError(f"status {response.status_code}: {response.text[:150]}")
    text, usage = (_read_stream if stream else _read_whole)(response)
    load.answered += bool(text)
    load.tokens += usage["completion_tokens"]


def _read_whole(response: httpx.Response) -> tuple[str, dict[str, int]]:
    reply = response.json()
    return reply["choices"][0]["message"]["content"], reply["usage"]


def _read_stream(response: httpx.Response) -> tuple[str, dict[str, int]]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    if lines[-1] != "[DONE]":
        raise ValueError("the stream was cut")
    chunks = [json.loads(line) for line in lines[:-1]]
    if "error" in chunks[-1]:
        raise ValueError(chunks[-1]["error"]["message"])
    parts = [c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]]
    return "".join(parts), chunks[-1]["usage"]


async def _watch(pid: int | None, load: Load) -> None:
    while pid is not None and (memory := memory_mb(pid)) is not None:
        load.memory_mb.append(memory)
        await asyncio.sleep(1.0)


def memory_mb(pid: int) -> float | None:
    """Resident memory of a process in MB, None where /proc does not say."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024
    except (OSError, IndexError, ValueError):
        return None


def _cpu_s(pid: int | None) -> float | None:
    """CPU-seconds of a process, its own threads included."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None


def summary(load: Load, wall_s: float) -> dict[str, Any]:
    """The figures of a load.

    Memory is compared between the second and the last quarter: the first one fills caches.
    """
    ordered = sorted(load.seconds)
    memory, quarter = load.memory_mb, len(load.memory_mb) // 4
    second, last = memory[quarter : 2 * quarter], memory[len(memory) - quarter :]
    return {
        "requests": len(ordered),
        "errors": sum(load.errors.values()),
        "error_kinds": dict(load.errors.most_common(5)),
        "answered": load.answered,
        "wall_s": round(wall_s, 2),
        "requests_per_s": round(len(ordered) / wall_s, 2),
        "tokens_per_s": round(load.tokens / wall_s, 1),
        "p50_s": percentile(ordered, 0.5),
        "p90_s": percentile(ordered, 0.9),
        "p99_s": percentile(ordered, 0.99),
        "memory_first_mb": round(memory[0], 1) if memory else None,
        "memory_second_quarter_mb": round(sum(second) / len(second), 1) if second else None,
        "memory_last_quarter_mb": round(sum(last) / len(last), 1) if last else None,
    }


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that at least a share of the values do not exceed; None of nothing.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5)
    2.0
    """
    if not ordered:
        return None
    return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 4)


if __name__ == "__main__":
    raise SystemExit(main())
