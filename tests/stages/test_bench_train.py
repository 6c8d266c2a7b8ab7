"""The training benchmark compares like with like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stages.bench_train import compare, last_step
from stages.bench_trainers import BUILDERS, Sizes

TINY = Sizes(
    hidden=64, layers=1, mlp=64, vocabulary=700, rows=4, prompt=8, shortest=8, longest=32, steps=2
)


@pytest.mark.parametrize("pair", [("stage2", "trl_sft"), ("padded", "packed")])
def test_both_of_a_pair_learn_the_same_from_the_same_tokens(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    losses = []
    for name in pair:
        trainer: Any = BUILDERS[name](TINY, tmp_path / name, [])
        trainer.train()
        losses.append(trainer.state.log_history[-1]["train_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_trainers_take_turns_to_the_end(tmp_path: Path) -> None:
    result = compare(("stage1", "trl_grpo"), TINY, tmp_path)
    assert result["steps"] == TINY.steps and result["ratio"] > 0


def test_a_last_step_has_its_time_and_the_memory_of_an_adapter(tmp_path: Path) -> None:
    # In a process of its own: this one may have freed more than the step takes.
    took = last_step("stage2", TINY.with_(dtype="bfloat16", lora_r=4))
    assert 0 < took["cpu_s"] and 0 < took["wall_s"] and took["peak_bytes"] > 0


def test_a_published_shape_takes_the_place_of_the_sizes() -> None:
    sizes = Sizes(shape="qwen3-1.7b", dtype="bfloat16", lora_r=64, rows=2)
    assert sizes.described()["parameters"] == 1_720_574_976
    # The frozen weights alone take two bytes a parameter.
    assert 2 * 1_720_574_976 < sizes.planned_peak() < Sizes(shape="qwen3-1.7b").planned_peak() / 3
