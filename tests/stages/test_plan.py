"""The planner: exact parameter counts, a memory model that measured peaks hold, every recipe."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from plan_memory_world import config_of
from pyarrow import parquet

from rivet.config import ConfigError, load_config
from rivet.runs import RunDir
from stages.cli import main as rivet
from stages.memory_use import PeakMemory
from stages.plan import PlanConfig, PlanError, plan, text
from stages.plan_memory import Step, memory, shape_of, trainable
from stages.plan_work import Assumptions, work
from stages.stage1.config import Stage1Config
from stages.stage1.training import trainer_arguments

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "stages" / "recipes"
PLANNED = sorted(
    path
    for path in RECIPES.glob("*.yaml")
    if path.stem.split("_")[0] in ("stage1", "collect", "stage2")
)


@pytest.mark.parametrize(
    ("model", "published"),
    [
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_parameter_counts_are_the_published_ones(model: str, published: int) -> None:
    assert shape_of(model).parameters == published
    assert shape_of(f"checkpoints/{model}-anything").parameters == published


def test_an_adapter_has_rank_times_the_widths_of_every_linear_layer() -> None:
    shape = shape_of("qwen3-1.7b")
    # q and o: 2048 + 2048; k and v: 2048 + 1024; gate, up and down: 2048 + 6144.
    per_layer = 2 * 4096 + 2 * 3072 + 3 * 8192
    assert trainable(shape, 16) == 16 * 28 * per_layer
    assert trainable(shape, 0) == shape.parameters


CASES: list[dict[str, Any]] = [
    # Embedding, layers, activations and the head's tiles each dominate once.
    {"hidden": 512, "mlp": 1536, "layers": 6, "vocabulary": 40_000, "rows": 2, "length": 64},
    {"hidden": 256, "mlp": 1024, "layers": 8, "vocabulary": 2_000, "rows": 8, "length": 256},
    {
        "hidden": 256, "mlp": 1024, "layers": 8, "vocabulary": 2_000, "rows": 16, "length": 256,
        "checkpointing": True,
    },
    {
        "hidden": 512, "mlp": 1536, "layers": 6, "vocabulary": 8_000, "rows": 4, "length": 256,
        "lora_r": 8,
    },
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_planned_memory_is_within_15_percent_of_the_measured_peak(
    case: dict[str, Any], tmp_path: Path
) -> None:
    config_of(case).save_pretrained(tmp_path)
    step = Step(
        tokens=case["rows"] * case["length"],
        scored=case["rows"] * (case["length"] - 1),
        lora_r=case.get("lora_r", 0),
        has_checkpointing=case.get("checkpointing", False),
        length=case["length"],
    )
    planned = memory(shape_of(str(tmp_path)), step).peak
    world = Path(__file__).with_name("plan_memory_world.py")
    done = subprocess.run(
        [sys.executable, str(world), json.dumps(case)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**PeakMemory.environment(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    measured = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"planned {planned / 1e6:.0f} MB, measured {measured / 1e6:.0f} MB")
    assert planned == pytest.approx(measured, rel=0.15)


def test_the_parts_add_up_and_react_as_they_should() -> None:
    shape = shape_of("qwen3-1.7b")
    full = memory(shape, Step(8192, 8000, has_checkpointing=True, precision="bf16", device="cuda"))
    assert full.optimizer == 8 * shape.parameters and full.gradients == 4 * shape.parameters
    # Its peak comes last: gradients, a second one of the embedding, 1 GB of the device's context.
    second = 4 * 2048 * 151_936
    assert full.peak == full.weights + full.optimizer + full.gradients + second + 1e9
    # 12 bytes of states a parameter do not fit 1.7 billion of them and 16 GB.
    assert full.peak > 20e9
    sharded = memory(
        shape,
        Step(
            8192, 8000, has_checkpointing=True, precision="bf16", device="cuda", sharding="full",
            processes=8,
        ),
    )  # fmt: skip
    assert sharded.optimizer == full.optimizer / 8 and sharded.peak < full.peak / 2
    lora = memory(
        shape,
        Step(8192, 8000, lora_r=16, has_checkpointing=True, precision="bf16", weight_bytes=2),
    )
    assert lora.optimizer < full.optimizer / 50
    without = memory(shape, Step(8192, 8000, precision="bf16"))
    assert without.activations > 5 * full.activations
    # Its peak comes as the backward pass begins, with three gradients of the MLP's width.
    working = without.activations + without.head + 3 * 8192 * 6144 * 2
    assert without.peak == without.weights + without.optimizer + working


def test_the_cache_of_the_local_engine_counts_while_it_samples(tmp_path: Path) -> None:
    shape = shape_of("qwen3-1.7b")
    # Keys and values of 28 layers and 8 heads of 128, 2 bytes each.
    for precision, size in (("bf16", 114_688), ("fp32", 229_376)):
        step = Step(100, 100, lora_r=16, precision=precision, cached_tokens=10**6)
        parts = memory(shape, step)
        assert parts.kv_cache == 10**6 * size
        # Far more than such a small step learns in; the two are not held together.
        assert parts.peak == parts.weights + parts.optimizer + parts.kv_cache
    recipe = tmp_path / "stage1_x.yaml"
    recipe.write_text(
        "model: qwen3-1.7b\nmax_completion_length: 600\nmax_steps: 1\nuse_cpu: true\n"
        "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\nnum_generations: 4\n"
    )
    # Every rollout of a process at its longest: 8 of 400 + 600 tokens; a server holds its own.
    for backend, tokens in (("local", 8000), ("vllm", 0)):
        planned = plan(PlanConfig(str(recipe), backend=backend)).memory
        assert planned is not None and planned.kv_cache == tokens * 114_688


def test_work_by_hand() -> None:
    shape = shape_of("qwen3-1.7b")
    assumed = Assumptions(
        prompt_length=100, completion_length=900, spliced_share=0.5, calls_per_rollout=2,
        request_length=100, reply_length=200, generation_tokens_per_s=1000, servers=2,
        tflops=100, utilization=0.5,
    )  # fmt: skip
    result = work(
        shape, assumed, rollouts=1000, trained_rows=1000, experts=[], lora_r=0,
        has_checkpointing=True, devices=4, checkpoints=2,
    )  # fmt: skip
    assert result.sampled_tokens == 450_000 and result.trained_tokens == 1_000_000
    assert result.expert_calls == 2000 and result.expert_tokens == 600_000 and result.usd == 0
    assert result.sampling_h == pytest.approx(450_000 / 2000 / 3600)
    # 2 forward, 4 backward, 2 again: 8 N operations a token on 4 devices of 50 TFLOPS.
    assert result.learning_h == pytest.approx(8 * shape.parameters * 1e6 / 2e14 / 3600)
    assert result.disk_gb == pytest.approx((28 * shape.parameters + 6 * 1e6) / 1e9)


def test_experts_cost_what_their_file_says(tmp_path: Path) -> None:
    recipe = tmp_path / "collect_x.yaml"
    experts = ROOT / "stages" / "launch" / "experts_api.yaml"
    recipe.write_text(f"model: qwen3-1.7b\nproblems: nowhere.jsonl\nexperts: {experts}\n")
    result = plan(PlanConfig(str(recipe), problems=1000, calls_per_rollout=2.0))
    # 300 tokens read and 600 written: 0.0054 USD of one, 0.00054 of the other.
    assert result.work.usd == pytest.approx(2000 * (0.0054 + 0.00054) / 2)
    assert result.memory is None


def rows(count: int) -> list[dict[str, str]]:
    return [{"id": str(n), "problem": f"{n} + 1?", "answer": str(n + 1)} for n in range(count)]


def test_stage1_is_planned_with_the_steps_that_it_takes(tmp_path: Path) -> None:
    (tmp_path / "problems.jsonl").write_text("\n".join(map(json.dumps, rows(11))))
    recipe = tmp_path / "stage1_x.yaml"
    recipe.write_text(
        f"model: qwen3-1.7b\nproblems: {tmp_path / 'problems.jsonl'}\nnum_train_epochs: 2.5\n"
        "num_generations: 4\nper_device_train_batch_size: 16\nuse_cpu: true\n"
    )
    # 4 problems a step, 3 of 11 are left over in each pass: 2.5 * 2 steps of 16 rollouts.
    args = load_config(Stage1Config, recipe)
    with RunDir.open(tmp_path / "run", args, stage="stage1") as run:
        assert trainer_arguments(args, run, 11).max_steps == 5
    work = plan(PlanConfig(str(recipe), completion_length=100, spliced_share=0.0)).work
    assert work.sampled_tokens == 5 * 16 * 100
    # Two devices take 8 problems a step: 1 step a pass.
    work = plan(PlanConfig(str(recipe), completion_length=100, spliced_share=0.0, devices=2)).work
    assert work.sampled_tokens == 3 * 32 * 100


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.parquet"])
def test_problems_are_counted_in_every_kind_of_file(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    if name == "x.parquet":
        parquet.write_table(pa.Table.from_pylist(rows(7)), file)
    else:
        with (gzip.open if name.endswith("gz") else open)(file, "wt") as lines:
            lines.write("\n".join(map(json.dumps, rows(7))))
    recipe = tmp_path / "collect_x.yaml"
    recipe.write_text(f"model: qwen3-1.7b\nproblems: {file}\nsamples_per_problem: 2\n")
    result = plan(PlanConfig(str(recipe), completion_length=100, spliced_share=0.0))
    assert result.work.sampled_tokens == 7 * 2 * 100
    assert not any("not there to count" in note for note in result.assumptions)


@pytest.mark.parametrize("recipe", PLANNED, ids=lambda path: path.stem)
def test_every_recipe_can_be_planned_and_says_what_was_assumed(recipe: Path) -> None:
    config = PlanConfig(str(recipe), shape="" if "_mini" not in recipe.stem else "smollm2-135m")
    result = plan(config)
    shown = text(result, config)
    assert "assumptions (planned, not measured)" in shown
    assert result.work.disk_gb > 0 and "completion_length" in shown


def test_real_recipes_fit_the_devices_that_they_name() -> None:
    for size in ("qwen3-1.7b", "qwen3-4b"):
        for stage in ("stage1", "stage2"):
            many = PlanConfig(
                str(RECIPES / f"{stage}_{size}.yaml"),
                devices=8,
                sharding="full",
                backend="vllm",
            )
            one = PlanConfig(str(RECIPES / f"{stage}_{size}-lora.yaml"))
            for config in (many, one):
                needed = plan(config).memory
                assert needed is not None
                # A fifth is left for what the plan does not know.
                assert needed.peak < 0.8 * config.device_gb * 1e9, config.recipe


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(RECIPES / "stage2_qwen3-1.7b-lora.yaml")
    assert rivet(["plan", recipe]) == 0
    assert "1,720,574,976 parameters" in capsys.readouterr().out
    assert rivet(["plan", recipe, "--json", "true"]) == 0
    assert json.loads(capsys.readouterr().out)["shape"]["parameters"] == 1_720_574_976


def test_what_cannot_be_planned_is_said(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="stage is 'eval'; expected a recipe of stage1"):
        plan(PlanConfig(str(RECIPES / "eval_mini.yaml")))
    with pytest.raises(PlanError, match="no config.json there; expected a checkpoint folder"):
        shape_of("nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(PlanError, match="model_type is 'gpt2'; expected one of llama"):
        shape_of(str(tmp_path))
    with pytest.raises(ConfigError, match="devices: got 0, expected at least 1"):
        PlanConfig("x", devices=0)
    with pytest.raises(ConfigError, match="utilization: got 35, expected at most 1"):
        PlanConfig("x", utilization=35)
    with pytest.raises(ConfigError, match="(?s)device: got gpu .*backend: got hf "):
        load_config(PlanConfig, recipe="x", device="gpu", backend="hf")


def test_the_environment_of_a_measurement_returns_freed_memory() -> None:
    environment = PeakMemory.environment()
    # glibc maps blocks of 64 KiB and more one by one, and gives back the free top of the heap.
    assert environment["MALLOC_MMAP_THRESHOLD_"] == "65536"
    assert environment["MALLOC_TRIM_THRESHOLD_"] == "0"
    assert environment["PATH"] == os.environ["PATH"]
