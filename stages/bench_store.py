"""From a store of trajectories to the first batch of Stage II: time and memory.

The trajectories are copies of a few under names of their own, so that every rule of the filter has
its work, near-duplicates included, and nothing is dropped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rivet.store import SCHEMA, TrajectoryStore
from rivet.trajectory import CodeRun, ExpertCall, Segment, Trajectory
from stages.memory_use import PeakMemory

_SHARD = 1000
_PER_PROBLEM = 2


def measure(count: int, folder: Path) -> dict[str, Any]:
    """Seconds and peak memory for `count` trajectories and for a tenth of them.

    Returns:
        `wall_s`, `cpu_s`, `peak_mb` of the larger, `peak_tenth_mb`, and `tokens`.
    """
    large = _in_fresh_process(write_store(folder / "large", count))
    small = _in_fresh_process(write_store(folder / "small", count // 10))
    return {
        "trajectories": count,
        **large,
        "peak_tenth_mb": small["peak_mb"],
        "growth_mb": round(large["peak_mb"] - small["peak_mb"], 1),
    }


def write_store(folder: Path, count: int, length: int = 200) -> Path:
    """A store of `count` verified trajectories of about `length` tokens."""
    random = np.random.default_rng(0)
    store = TrajectoryStore(folder / "store")
    path = store.write("pattern", [_trajectory(random, n, length) for n in range(_SHARD)])
    pattern = pq.read_table(path)
    path.unlink()
    for start in range(0, count, _SHARD):
        rows = min(_SHARD, count - start)
        numbers = range(start, start + rows)
        problems = [f"p{n // _PER_PROBLEM}" for n in numbers]
        ids = [f"{p}#{n % _PER_PROBLEM}@0" for p, n in zip(problems, numbers, strict=True)]
        table = pattern.slice(0, rows)
        for name, values in (("id", ids), ("problem_id", problems)):
            table = table.set_column(SCHEMA.get_field_index(name), name, pa.array(values))
        table = table.cast(SCHEMA)
        pq.write_table(table, store.folder / f"part-{start:08d}.parquet", compression="zstd")
    return store.folder


def _trajectory(random: np.random.Generator, n: int, length: int) -> Trajectory:
    def ids(share: float) -> tuple[int, ...]:
        return tuple(random.integers(2, 600, int(length * share * random.uniform(0.5, 1.5))))

    request, answer = ids(0.2), ids(0.1)
    return Trajectory(
        id=f"{n}",
        problem_id=f"{n}",
        mode="experts",
        prompt_ids=ids(0.2),
        segments=(
            Segment("controller", "request", request, tuple(-0.5 for _ in request)),
            Segment("expert", "reply", ids(0.2)),
            Segment("expert", "code", ids(0.2)),
            Segment("environment", "output", ids(0.1)),
            Segment("controller", "answer", answer, tuple(-0.5 for _ in answer)),
        ),
        finish="answer",
        well_formed=True,
        answer="1",
        expert_calls=(ExpertCall("calc", "ok"),),
        code_runs=(CodeRun("expert", "ok"),),
        outcome="right",
        reward=1.0,
    )


def _in_fresh_process(store: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "stages.bench_store", str(store)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[1],
        # The copy that datasets maps into memory belongs to this measurement alone.
        env={**PeakMemory.environment(), "HF_DATASETS_CACHE": str(store.parent / "cache")},
    )
    if done.returncode:
        raise RuntimeError(f"reading {store} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def first_batch(store: Path) -> dict[str, Any]:
    """Filter a store, write the dataset, map it, collate the first batch; say what that took."""
    import time

    from stages.stage2.batching import LengthBucketSampler, WeightedCollator
    from stages.stage2.candidates import problem_counts, read_candidates
    from stages.stage2.dataset import read_dataset, write_dataset
    from stages.stage2.filter import Filter, FilterRules
    from stages.stage2.objective import Objective

    memory = PeakMemory()
    cpu, wall = time.process_time(), time.perf_counter()
    trajectories = TrajectoryStore(store)
    passes = Filter(FilterRules(max_length=2048), counts=problem_counts(trajectories))
    kept = (c for c in read_candidates(trajectories) if passes(c))
    target = store.parent / "dataset"
    write_dataset(target, kept, funnel=lambda: passes.funnel, source=str(store))
    dataset = read_dataset(target)
    sampler = LengthBucketSampler(dataset.with_format("numpy")["length"][:], 32, seed=0)
    rows = dataset.with_format("numpy")
    first = [rows[n] for n, _ in zip(iter(sampler), range(32), strict=False)]
    batch = WeightedCollator(Objective(), pad_token_id=0)(first)
    seconds = time.process_time() - cpu, time.perf_counter() - wall
    return {
        "kept": len(dataset),
        "tokens": int(np.sum(rows["length"][:])),
        "batch": list(batch["input_ids"].shape),
        "cpu_s": round(seconds[0], 2),
        "wall_s": round(seconds[1], 2),
        "peak_mb": round(memory.peak() / 1e6, 1),
    }


if __name__ == "__main__":
    print(json.dumps(first_batch(Path(sys.argv[1]))))
