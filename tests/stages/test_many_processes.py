"""Two processes on gloo do what one does: same loss, gradient norm and parameters.

`accelerate launch --cpu --num_processes 2` silently runs one process, so this is torchrun.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import many_processes_world as world
import pytest
import torch
from safetensors.torch import load_file
from stage2_world import save_checkpoint, trajectories

from rivet.runs import RunDir
from rivet.store import TrajectoryStore
from rivet.tokenization import ProtocolTokenizer

ROOT = Path(__file__).parents[2]
# Name -> stage and settings. The rollouts of a step are 3 groups of 4, 6 rows to a process.
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "straddling groups": ("stage1", {"route_weight": 8.0, "route_entropy": 0.08}),
    "in two parts": ("stage1", {"parts": 2, "expert_loss": "luffy"}),
    "a process with faults": ("stage1", {"rollouts": "second_has_faults"}),
    "a process all void": ("stage1", {"rollouts": "second_is_void", "parts": 2}),
    "means of trajectories": (
        "stage1",
        {"parts": 2, "loss_type": "sapo", "denominator": "all", "scale_rewards": "batch"},
    ),
    "ratio of sequences": (
        "stage1",
        {
            "loss_type": "grpo", "denominator": "all", "ratio_to": "engine",
            "importance_sampling_level": "sequence",
        },
    ),
    "an adapter": ("stage1", {"use_peft": True, "lora_r": 4}),
    "weighted SFT": ("stage2", {"format_alpha": 5.0, "expert_weight": 0.5}),
    "focal, packed, in two parts": (
        "stage2",
        {
            "rows": 16, "parts": 2, "packing": True, "format_weight": "focal", "format_alpha": 5.0,
        },
    ),
    "by tokens": ("stage2", {"normalization": "tokens", "format_alpha": 5.0}),
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tag_tokenizer: ProtocolTokenizer) -> Path:
    """A checkpoint and a store for Stage II."""
    folder = tmp_path_factory.mktemp("inputs")
    save_checkpoint(folder / "model", tag_tokenizer)
    TrajectoryStore(folder / "store").write("part-00000", trajectories(tag_tokenizer, 32))
    return folder


def jobs_in(folder: Path, inputs: Path) -> list[dict[str, Any]]:
    given = {"model": str(inputs / "model"), "trajectories": str(inputs / "store")}
    return [
        {
            "stage": stage,
            "settings": {
                "folder": str(folder / name),
                **(given if stage == "stage2" else {}),
                **settings,
            },
        }
        for name, (stage, settings) in JOBS.items()
    ]


def start(jobs: list[dict[str, Any]], folder: Path) -> subprocess.Popen[str]:
    """The jobs in two processes."""
    file = folder / "jobs.json"
    file.write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_port", "0", "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    command += [str(Path(world.__file__)), str(file)]
    paths = os.pathsep.join([str(ROOT), str(Path(world.__file__).parent)])
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def both(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Every job in one process, and in two."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    process = start(jobs_in(two, inputs), two)
    world.do(jobs_in(one, inputs))
    output, _ = process.communicate()
    assert process.returncode == 0, output[-4000:]
    return one, two


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoint" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_two_processes_give_what_one_gives(name: str, both: tuple[Path, Path]) -> None:
    one, two = (RunDir.load(folder / name) for folder in both)
    for a, b in zip(one.metrics(), two.metrics(), strict=True):
        for metric in ("loss", "grad_norm"):
            assert b[metric] == pytest.approx(a[metric], abs=1e-5), (name, metric)
        # Metrics of rollouts and authors are over all processes, so that alarms agree.
        for metric in a.keys() | b.keys():
            if metric.split("/")[0] in ("rollout", "route", "controller", "expert", "reward"):
                assert b[metric] == pytest.approx(a[metric], abs=1e-4), (name, metric)
    before, after = weights(one.path), weights(two.path)
    assert before.keys() == after.keys()
    for parameter in before:
        torch.testing.assert_close(after[parameter], before[parameter], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_two_processes_really_were_two(both: tuple[Path, Path]) -> None:
    store = TrajectoryStore(both[1] / "straddling groups" / "trajectories")
    assert store.shards() == [
        f"step-{step:05d}-rank{rank:04d}-of-0002" for step in (1, 2) for rank in (0, 1)
    ]
    halves = [store.read_shard(shard) for shard in store.shards()[:2]]
    assert [len(half) for half in halves] == [6, 6]
    # The second group straddles both.
    assert {t.problem_id for t in halves[0]} & {t.problem_id for t in halves[1]} == {"p1"}


@pytest.mark.slow
def test_a_process_that_fails_ends_the_job_with_its_reason_and_one_told_to_stop_stops_both(
    tmp_path: Path,
) -> None:
    def job(trouble: str) -> list[dict[str, Any]]:
        settings = {"folder": str(tmp_path / trouble), "trouble": trouble, "max_steps": 4}
        return [{"stage": "stage1", "settings": settings}]

    for name in ("fail", "stop"):
        (tmp_path / f"{name}.jobs").mkdir()
    failing = start(job("fail"), tmp_path / "fail.jobs")
    stopping = start(job("stop"), tmp_path / "stop.jobs")
    while not (tmp_path / "fail.trouble").exists():
        assert failing.poll() is None, failing.communicate()[0][-4000:]
        time.sleep(0.05)
    # A minute is the promise; the test allows for a machine that is doing much else.
    output, _ = failing.communicate(timeout=180)
    assert failing.returncode != 0
    assert "the scratch disk of this node is gone" in output
    output, _ = stopping.communicate()
    assert "stopped after step 2" in output, output[-4000:]
    run = RunDir.load(tmp_path / "stop")
    assert not run.is_finished and [line["step"] for line in run.metrics()] == [1, 2]
