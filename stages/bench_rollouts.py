"""Wall time of a batch of rollouts that wait for experts, beside TRL's own tool loop.

    python -m stages.bench_rollouts [--rows 64] [--scale 1] [--rounds 1] [--picture FILE.png]

Every arm samples the same tokens of the same model from the same prompts, and waits for experts as
long (`stages.bench_load`); latencies are log-normal with median 1 s and 99th percentile 8 s, times
`--scale`. Arms are run in turn, round by round, so that a busy machine hits all of them:

- `rivet`: the rollout engine over the local backend;
- `trl`: `GRPOTrainer(tools=[...])` with an asynchronous tool, its best supported form;
- `lock_step`: TRL's loop, if it made all calls of a turn at once;
- `work`: rivet without latencies: what sampling alone takes;
- `longest`: the trajectory that takes longest, alone.

The lower bound is the longer of the last two: no order of work can beat either. Ratios are medians
over rounds. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch

import rivet.rollout.decoder
from rivet.experts.types import ExpertReply
from rivet.rollout.backend import Generation
from rivet.rollout.bench import mini_model
from rivet.rollout.engine import RolloutEngine
from rivet.rollout.local import LocalBackend
from rivet.rollout.sampling import Sampler
from rivet.rollout.types import RolloutLimits, RolloutRequest
from rivet.settings import ProtocolSettings
from rivet.trajectory import Trajectory
from sandbox import ExecutionResult
from stages.bench_load import EXPERT, Load, Row, build_tokenizer, draw_rows

Span = tuple[int, str, float, float]  # row, what, from, to
_LENGTHS = (48, 112)
_CONTEXT = 4096
_CANDIDATES = 2  # trajectories that may be the one that takes longest, by what it waits


class Recording:
    """The engine's backend and experts, with the times at which each row was with whom."""

    names = (EXPERT,)

    def __init__(self, backend: LocalBackend, load: Load) -> None:
        self._backend = backend
        self._load = load
        self.max_context = backend.max_context
        self.spans: list[Span] = []

    async def generate(self, prompt_ids: Sequence[int], **arguments: Any) -> Generation:
        """Sample, and note when."""
        start = time.perf_counter()
        got = await self._backend.generate(prompt_ids, **arguments)
        self.spans.append((arguments["seed"], "sampling", start, time.perf_counter()))
        return got

    async def release(self, session: str) -> None:
        """Pass it on."""
        await self._backend.release(session)

    async def ask(self, name: str, request: str, *, sample_key: str = "") -> ExpertReply:
        """Reply when the call's latency is over."""
        row, turn = self._load.row_of_call(int(request))
        start = time.perf_counter()
        await asyncio.sleep(self._load.rows[row].latencies_s[turn])
        self.spans.append((row, "expert", start, time.perf_counter()))
        return ExpertReply(name, "ok", self._load.reply)


class NoSandbox:
    """The load runs no program."""

    async def run(self, code: str) -> ExecutionResult:
        """Never called."""
        raise AssertionError("the load holds no program")


@contextmanager
def prescribed(load: Load) -> Iterator[None]:
    """Let the local backend draw as always, and then take the load's tokens."""
    width = max(map(len, load.prompts)) + load.longest_completion
    scripts = np.zeros((len(load.rows), width), np.int64)
    for n, row in enumerate(load.rows):
        position = len(load.prompts[n])
        for turn, length in enumerate(row.lengths):
            scripts[n, position : position + length] = load.expert_script(n, turn)
            position += length + load.spliced

    class Prescribing(Sampler):
        """Writes row `seed` of the scripts."""

        def __call__(
            self, logits: torch.Tensor, positions: np.ndarray
        ) -> tuple[torch.Tensor, torch.Tensor]:
            ids, logprobs = super().__call__(logits, positions)
            forced = scripts[self._seeds.astype(np.int64), positions]
            return torch.from_numpy(forced).to(ids.device), logprobs

    original = rivet.rollout.decoder.Sampler
    rivet.rollout.decoder.Sampler = Prescribing  # type: ignore[misc]
    try:
        yield
    finally:
        rivet.rollout.decoder.Sampler = original  # type: ignore[misc]


def run_rivet(model: torch.nn.Module, load: Load, rows: Sequence[int]) -> tuple[float, list[Span]]:
    """Sample some rows with the rollout engine; seconds, and who was where when.

    Raises:
        RuntimeError: A trajectory is not the one that the load prescribes.
    """
    return asyncio.run(_run_rivet(model, load, rows))


async def _run_rivet(
    model: torch.nn.Module, load: Load, rows: Sequence[int]
) -> tuple[float, list[Span]]:
    requests = [
        RolloutRequest(str(n), tuple(load.prompts[n]), seed=n, sample_index=n) for n in rows
    ]
    async with LocalBackend(model, load.tokenizer, max_batch=len(rows)) as backend:
        recording = Recording(backend, load)
        engine = RolloutEngine(
            recording,
            load.tokenizer,
            ProtocolSettings(after_tag=""),
            experts=recording,
            sandbox=NoSandbox(),
            limits=RolloutLimits(max_completion_length=load.longest_completion),
        )
        start = time.perf_counter()
        trajectories = await engine.rollouts(requests)
        seconds = time.perf_counter() - start
    _check(load, rows, trajectories)
    return seconds, [(n, what, a - start, b - start) for n, what, a, b in recording.spans]


def _check(load: Load, rows: Sequence[int], trajectories: Sequence[Trajectory]) -> None:
    for n, trajectory in zip(rows, trajectories, strict=True):
        length, calls = len(trajectory.completion_ids), len(trajectory.expert_calls)
        wanted = load.completion_length(n), len(load.rows[n].latencies_s)
        if trajectory.finish != "answer" or (length, calls) != wanted:
            raise RuntimeError(
                f"row {n} ended as {trajectory.finish} with {length} tokens and {calls} calls; "
                f"expected an answer, {wanted[0]} and {wanted[1]}"
            )


def build_arms(
    model: torch.nn.Module, load: Load, names: Sequence[str]
) -> dict[str, Callable[[], tuple[float, list[Span]]]]:
    """Every arm as a function that runs it once."""
    everyone = range(len(load.rows))
    at_once = replace(load, rows=[Row(r.lengths, (0.0,) * len(r.latencies_s)) for r in load.rows])
    waits = sorted(everyone, key=lambda n: -sum(load.rows[n].latencies_s))[:_CANDIDATES]

    def longest() -> tuple[float, list[Span]]:
        return max((run_rivet(model, load, [n]) for n in waits), key=lambda result: result[0])

    arms = {
        "rivet": lambda: run_rivet(model, load, everyone),
        "work": lambda: run_rivet(model, at_once, everyone),
        "longest": longest,
    }
    for name in names:
        arms[name] = _trl_arm(name, model, load)
    return arms


def _trl_arm(
    name: str, model: torch.nn.Module, load: Load
) -> Callable[[], tuple[float, list[Span]]]:
    from stages.bench_trl import LockStepTrainer, ToolTrainer

    trainer = (ToolTrainer if name == "trl" else LockStepTrainer)(model, load)

    def run() -> tuple[float, list[Span]]:
        start = time.perf_counter()
        trainer.run()
        seconds = time.perf_counter() - start
        return seconds, [(n, what, a - start, b - start) for n, what, a, b in trainer.spans]

    return run


def measure(
    arms: dict[str, Callable[[], tuple[float, list[Span]]]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, list[Span]]]:
    """Seconds on the clock and of CPU per arm and round, and the spans of each arm's last round."""
    clock: dict[str, list[float]] = {name: [] for name in arms}
    cpu: dict[str, list[float]] = {name: [] for name in arms}
    spans: dict[str, list[Span]] = {}
    for _ in range(rounds):
        for name, run in arms.items():
            start = time.process_time()
            seconds, spans[name] = run()
            clock[name].append(seconds)
            cpu[name].append(time.process_time() - start)
    return clock, cpu, spans


def summarise(clock: dict[str, list[float]], cpu: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and the ratios that count, each taken round by round."""
    bounds = list(map(max, clock["work"], clock["longest"]))
    figures: dict[str, Any] = {
        "wall_s": {name: round(median(values), 3) for name, values in clock.items()},
        "cpu_s": {name: round(median(values), 3) for name, values in cpu.items()},
        "bound_s": round(median(bounds), 3),
        "to_bound": round(median(a / b for a, b in zip(clock["rivet"], bounds, strict=True)), 3),
    }
    for name in ("trl", "lock_step"):
        if name in clock:
            pairs = zip(clock[name], clock["rivet"], strict=True)
            figures[f"faster_than_{name}"] = round(median(a / b for a, b in pairs), 2)
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table and one JSON object, draw the picture."""
    parser = argparse.ArgumentParser(prog="stages.bench_rollouts", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rows", type=int, default=64, help="trajectories (default: 64)")
    parser.add_argument("--max_calls", type=int, default=3, help="calls of one (default: 3)")
    parser.add_argument("--scale", type=float, default=1.0, help="of latencies (default: 1)")
    parser.add_argument("--rounds", type=int, default=1, help="measured rounds (default: 1)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, lengths and latencies")
    parser.add_argument("--picture", help="draw the last round's timeline into this .png or .svg")
    args = parser.parse_args(argv)
    if min(args.rows, args.rounds, args.threads) < 1 or not 1 <= args.max_calls <= 3:
        parser.error("--rows, --rounds and --threads are at least 1, --max_calls 1 to 3")
    if args.scale <= 0 or args.rows % 2 or args.rows > 300:
        parser.error("--scale is above 0, --rows even and at most 300")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    warnings.filterwarnings("ignore", category=UserWarning)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model, _ = mini_model(tokenizer, context=_CONTEXT)
    rows = draw_rows(
        args.rows,
        max_calls=args.max_calls,
        lengths=_LENGTHS,
        scale=args.scale,
        seed=args.seed,
    )
    load = Load(rows, tokenizer)
    with prescribed(load):
        arms = build_arms(model, load, ["trl", "lock_step"])
        measure({name: arms[name] for name in ("work", "longest")}, 1)  # warms up
        clock, cpu, spans = measure(arms, args.rounds)
    figures = summarise(clock, cpu)
    print(f"{'arm':<12}{'wall s':>9}{'CPU s':>9}")
    for name in clock:
        print(f"{name:<12}{figures['wall_s'][name]:>9.2f}{figures['cpu_s'][name]:>9.2f}")
    if args.picture:
        from stages.bench_timeline import draw

        draw({name: spans[name] for name in ("rivet", "lock_step", "trl")}, args.picture)
        print(f"picture: {args.picture}")
    calls = sum(len(row.latencies_s) for row in rows)
    facts = {"rows": args.rows, "calls": calls, "scale": args.scale, "rounds": args.rounds}
    print(json.dumps(figures | facts | {"sampled": load.sampled, "threads": args.threads}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
