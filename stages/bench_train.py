"""Training steps against TRL's, on the same tokens, taking turns in one run.

    make bench-train                 (python -m stages.bench_train)

Three comparisons: a Stage II step without weights against `SFTTrainer`; packed rows against padded
ones; a Stage I learner step on given rollouts against `GRPOTrainer`. Each pair of trainers runs its
own training loop in a thread of its own, and a baton goes to and fro after every step, so that both
see the same machine. Step n has the same rows in both, so the ratio is the median of the steps'
ratios, of CPU seconds on a CPU and of wall seconds on a GPU. Peak memory is measured in processes
of their own, over vocabularies. Last, a store of trajectories is filtered and read up to the first
batch of Stage II. The last line is one JSON object.

At the size of a published model, whose weights are random, on a CPU or a GPU:

    python -m stages.bench_train --only alone --shape qwen3-1.7b --dtype bfloat16 --lora_r 64
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from stages.bench_trainers import BUILDERS, Sizes
from stages.memory_use import PeakMemory

logger = logging.getLogger(__name__)

# Name -> (ours, theirs) or (packed, padded): builders of the trainers that take turns.
PAIRS = {
    "stage2_step": ("stage2", "trl_sft"),
    "padded_over_packed": ("padded", "packed"),
    "stage1_step": ("stage1", "trl_grpo"),
}


class Baton:
    """Lets two threads work by turns, and notes how long each turn took."""

    def __init__(self) -> None:
        self._turn = 0
        self._changed = threading.Condition()
        self._done = [False, False]

    def wait(self, who: int) -> None:
        """Block until it is this one's turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn == who)

    def give(self, who: int) -> None:
        """End a turn; with the other gone, the next is one's own again."""
        with self._changed:
            self._turn = who if self._done[1 - who] else 1 - who
            self._changed.notify_all()

    def leave(self, who: int) -> None:
        """Take no further turn."""
        with self._changed:
            self._done[who] = True
            self._turn = 1 - who
            self._changed.notify_all()


class Turns(TrainerCallback):
    """Gives the baton away at the end of each optimizer step.

    Args:
        baton: Shared by both.
        who: 0 or 1.

    Attributes:
        cpu_s, wall_s: Seconds of each step, its data included.
    """

    def __init__(self, baton: Baton, who: int) -> None:
        self.cpu_s: list[float] = []
        self.wall_s: list[float] = []
        self._baton = baton
        self._who = who
        self._started = (0.0, 0.0)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Take the first turn."""
        self._start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Note the step and hand over."""
        _synchronize()
        self.cpu_s.append(time.process_time() - self._started[0])
        self.wall_s.append(time.perf_counter() - self._started[1])
        self._baton.give(self._who)
        self._baton.wait(self._who)
        self._start()

    def _start(self) -> None:
        _synchronize()
        self._started = time.process_time(), time.perf_counter()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def compare(names: tuple[str, str], sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Train two trainers by turns.

    Returns:
        Median CPU and wall seconds of a step of each, and `ratio`: the median over steps of the
        first one's seconds over the second one's.
    """
    baton = Baton()
    turns = [Turns(baton, who) for who in range(2)]
    trainers = [
        BUILDERS[name](sizes, folder / f"{who}-{name}", [turns[who]])
        for who, name in enumerate(names)
    ]
    errors: list[BaseException] = []

    def run(who: int, trainer: Trainer) -> None:
        baton.wait(who)
        try:
            trainer.train()
        except BaseException as error:
            errors.append(error)
        finally:
            baton.leave(who)

    threads = [
        threading.Thread(target=run, args=(who, trainer)) for who, trainer in enumerate(trainers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    # The first step allocates.
    cpu = [statistics.median(t.cpu_s[1:]) for t in turns]
    wall = [statistics.median(t.wall_s[1:]) for t in turns]
    first, second = (t.wall_s if torch.cuda.is_available() else t.cpu_s for t in turns)
    # Rows differ from step to step, so a median of either series alone may be of other rows.
    ratios = [a / b for a, b in zip(first[1:], second[1:], strict=True)]
    return {
        **{f"{name}_cpu_s": round(c, 4) for name, c in zip(names, cpu, strict=True)},
        **{f"{name}_wall_s": round(w, 4) for name, w in zip(names, wall, strict=True)},
        "ratio": round(statistics.median(ratios), 4),
        "steps": len(turns[0].cpu_s),
    }


def last_step(name: str, sizes: Sizes) -> dict[str, float]:
    """Time and peak memory of a trainer's last step, above that of imports, in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", "stages.bench_train", "--last-step", name, *sizes.arguments()],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[1],
        env=PeakMemory.environment(),
    )
    if done.returncode:
        raise RuntimeError(f"measuring {name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure_last_step(name: str, sizes: Sizes) -> dict[str, float]:
    """In the fresh process: train, and say what the last step took."""
    with tempfile.TemporaryDirectory() as scratch:
        memory = PeakMemory()
        took: dict[str, float] = {}

        class LastStep(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step == sizes.steps - 1:
                    _synchronize()
                    memory.restart()
                    took.update(cpu_s=-time.process_time(), wall_s=-time.perf_counter())

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step == sizes.steps:
                    _synchronize()
                    took["cpu_s"] += time.process_time()
                    took["wall_s"] += time.perf_counter()

        trainer = BUILDERS[name](sizes, Path(scratch), [LastStep()])
        trainer.train()
        return {"peak_bytes": memory.peak(), "baseline_bytes": memory.baseline, **took}


def vocabulary_curve(sizes: Sizes) -> list[dict[str, float]]:
    """Peak memory of a Stage II step over vocabularies, beside the logits that it never holds."""
    points = []
    for vocabulary in (8192, 16_384, 32_768, 65_536):
        changed = sizes.with_(vocabulary=vocabulary, steps=3)
        peak = last_step("stage2", changed)["peak_bytes"]
        # The peak is the head's backward pass: the embedding's weight, both moments, and the sum of
        # gradients that the head works in; the gradient as an input embedding comes later.
        embedding = 4 * vocabulary * sizes.hidden * 4
        points.append(
            {
                "vocabulary": vocabulary,
                "peak_mb": round(peak / 1e6, 1),
                "without_embedding_mb": round((peak - embedding) / 1e6, 1),
                "logits_mb": round(changed.scored_tokens() * vocabulary * 4 / 1e6, 1),
            }
        )
    return points


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table and, last, one JSON object."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.ERROR)
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    sizes = Sizes.of(arguments)
    if arguments.last_step:
        print(json.dumps(measure_last_step(arguments.last_step, sizes)))
        return 0
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "sizes": sizes.described(),
    }
    parts: dict[str, Callable[[Path], Any]] = {
        name: lambda folder, pair=pair: compare(pair, sizes, folder)  # type: ignore[misc]
        for name, pair in PAIRS.items()
    }
    parts["memory"] = lambda folder: _memory(sizes)
    parts["vocabulary"] = lambda folder: vocabulary_curve(sizes)
    parts["alone"] = lambda folder: _alone(arguments.trainers, sizes)
    parts["store"] = lambda folder: _store(arguments.trajectories, folder)
    for name, part in parts.items():
        if name not in (arguments.only or set(parts) - {"alone"}):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            result[name] = part(Path(scratch))
        print(f"{name}: {json.dumps(result[name])}", flush=True)
    print(json.dumps(result))
    return 0


def _memory(sizes: Sizes) -> dict[str, Any]:
    short = sizes.with_(steps=3)
    ours, theirs = (last_step(name, short)["peak_bytes"] for name in ("stage2", "trl_sft"))
    return {
        "stage2_mb": round(ours / 1e6, 1),
        "trl_sft_mb": round(theirs / 1e6, 1),
        "ratio": round(ours / theirs, 4),
    }


def _alone(names: Sequence[str], sizes: Sizes) -> dict[str, Any]:
    """Each trainer in a process of its own, beside the memory that `rivet plan` expects of ours."""
    result: dict[str, Any] = {"planned_mb": round(sizes.planned_peak() / 1e6, 1)}
    tokens = sizes.last_step_tokens()
    for name in names:
        took = last_step(name, sizes)
        result[name] = {
            "peak_mb": round(took["peak_bytes"] / 1e6, 1),
            "imports_mb": round(took["baseline_bytes"] / 1e6, 1),
            "cpu_s": round(took["cpu_s"], 3),
            "wall_s": round(took["wall_s"], 3),
            "tokens_per_s": round(tokens / took["wall_s"], 1),
        }
    return result


def _store(count: int, folder: Path) -> dict[str, Any]:
    from stages.bench_store import measure

    return measure(count, folder)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make bench-train", description=__doc__)
    parts = ", ".join([*PAIRS, "memory", "vocabulary", "store", "alone"])
    parser.add_argument(
        "--only", nargs="*", default=[], help=f"parts, all but the last by default: {parts}"
    )
    parser.add_argument(
        "--trainers",
        nargs="*",
        choices=BUILDERS,
        default=["stage2", "stage1", "trl_sft", "trl_grpo"],
        help="of the part `alone`, each in a process of its own",
    )
    parser.add_argument("--trajectories", type=int, default=100_000, help="of the store part")
    parser.add_argument("--last-step", default="", help=argparse.SUPPRESS)
    Sizes.add_arguments(parser)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
