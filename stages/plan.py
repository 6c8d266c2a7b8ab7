"""What a recipe will need, before it is run: GPU memory by part, tokens, expert calls, USD, hours.

    rivet plan stages/recipes/stage1_qwen3-1.7b.yaml --devices 8 --sharding full

Nothing is loaded and nobody is asked. What follows from the recipe and the model's shape is
computed; what does not is an assumption, a setting of this command, and printed with the result.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from data.problems import load_problems
from rivet.config import ConfigError, load_config, parse_config, setting
from rivet.experts.config import ExpertConfig, load_experts
from rivet.rollout.backend_settings import BackendName
from stages.plan_memory import Memory, PlanError, Precision, Shape, Sharding, Step, memory, shape_of
from stages.plan_work import Assumptions, Work, work

STAGES = ("stage1", "collect", "stage2")


@dataclass
class PlanConfig:
    """Settings of `rivet plan`; all but the recipe are assumptions about the run."""

    recipe: str = field(metadata={"help": "Recipe of stage1, collect or stage2."})
    stage: str = setting("", "Which of them it is; empty: the first word of its name.")
    shape: str = setting(
        "",
        "Model folder, config.json, or one of qwen3-1.7b, qwen3-4b, smollm2-135m; empty: the "
        "recipe's `model`.",
    )
    devices: int = setting(1, "Devices that train, one process each, at least 1.")
    device: Literal["cuda", "cpu"] = setting("cuda", "`cuda`, or `cpu`.")
    device_gb: float = setting(80.0, "Memory of a device in 10^9 bytes, above 0.")
    sharding: Sharding = setting(
        "none", "`full` spreads weights, gradients and optimizer over the devices (FSDP, ZeRO-3)."
    )
    backend: BackendName | None = setting(
        None, "What samples: `local` or `vllm`; null: as the recipe says."
    )
    precision: Precision = setting("bf16", "Of the arithmetic: `bf16` or `fp32`.")
    prompt_length: int = setting(400, "Tokens of a prompt, at least 1.")
    completion_length: int = setting(
        2500, "Mean tokens of a completion, spliced ones included, at least 1."
    )
    spliced_share: float = setting(
        0.35, "Share of them that experts and the sandbox write, in [0, 1)."
    )
    calls_per_rollout: float = setting(1.5, "Consultations of a trajectory, at least 0.")
    request_length: int = setting(300, "Tokens that an expert reads in one, at least 0.")
    reply_length: int = setting(600, "Tokens that an expert writes in one, at least 0.")
    rows: int = setting(
        50_000, "Trajectories that Stage II learns from where their folder is not there yet."
    )
    problems: int = setting(
        10_000, "Problems of the recipe's file where it is not there yet, at least 1."
    )
    generation_tokens_per_s: float = setting(
        4000.0, "Tokens that one server samples in a second, above 0."
    )
    servers: int = setting(1, "Servers that sample at the same time, at least 1.")
    tflops: float = setting(989.0, "Dense 16-bit peak of one device, in 10^12 a second, above 0.")
    utilization: float = setting(0.35, "Share of it that training reaches, in (0, 1].")
    json: bool = setting(False, "Print the plan as one JSON object.")

    def __post_init__(self) -> None:
        faults = [
            f"{name}: got {getattr(self, name)}, expected at least {low}"
            for name, low in _AT_LEAST.items()
            if getattr(self, name) < low
        ]
        faults += [
            f"{name}: got {getattr(self, name)}, expected above 0"
            for name in ("device_gb", "generation_tokens_per_s", "tflops", "utilization")
            if getattr(self, name) <= 0
        ]
        if self.utilization > 1:
            faults.append(f"utilization: got {self.utilization}, expected at most 1")
        if not 0 <= self.spliced_share < 1:
            faults.append(f"spliced_share: got {self.spliced_share}, expected 0 to below 1")
        if faults:
            raise ConfigError(faults)


_AT_LEAST = {
    "devices": 1, "prompt_length": 1, "completion_length": 1, "calls_per_rollout": 0,
    "request_length": 0, "reply_length": 0, "rows": 1, "problems": 1, "servers": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will need.

    Attributes:
        stage: Which.
        shape: Of the controller.
        memory: Of one process; None where nothing is trained.
        work: Totals.
        assumptions: What was assumed, one sentence each.
    """

    stage: str
    shape: Shape
    memory: Memory | None
    work: Work
    assumptions: tuple[str, ...]


def plan(config: PlanConfig) -> Plan:
    """Plan a recipe.

    Raises:
        PlanError: The recipe is of no stage that can be planned, or the model's shape is unknown.
        rivet.config.ConfigError: The recipe is wrong.
        data.problems.ProblemFileError: Its file of problems is there and broken.
    """
    stage = config.stage or Path(config.recipe).stem.split("_")[0]
    if stage not in STAGES:
        raise PlanError(
            f"{config.recipe}: stage is {stage!r}; expected a recipe of {', '.join(STAGES)}, or "
            "--stage"
        )
    recipe = load_config(_config_class(stage), config.recipe)
    notes: list[str] = []
    shape = shape_of(config.shape or recipe.model)
    if not Path(config.shape or recipe.model).exists():
        notes.append(f"the shape is the published one: {recipe.model} is not there")
    assumed = Assumptions(**{f.name: getattr(config, f.name) for f in fields(Assumptions)})
    given = {"stage1": _stage1, "collect": _collect, "stage2": _stage2}[stage](
        config, recipe, shape, notes
    )
    step: Step | None = given.pop("step")
    experts = _experts(recipe, notes) if given["rollouts"] else []
    totals = work(shape, assumed, experts=experts, devices=config.devices, **given)
    return Plan(
        stage,
        shape,
        None if step is None else memory(shape, step),
        totals,
        (*notes, *_stated(config)),
    )


def _config_class(stage: str) -> type[Any]:
    from stages.collect import CollectConfig
    from stages.stage1.config import Stage1Config
    from stages.stage2.config import Stage2Config

    return {"stage1": Stage1Config, "collect": CollectConfig, "stage2": Stage2Config}[stage]


def _step(
    config: PlanConfig, recipe: Any, length: int, scored: int, cached: int, rows: int
) -> Step:
    given = recipe.model_init_kwargs if isinstance(recipe.model_init_kwargs, dict) else {}
    return Step(
        tokens=rows * length,
        scored=scored,
        length=length,
        lora_r=recipe.lora_r if recipe.use_peft else 0,
        has_checkpointing=recipe.gradient_checkpointing,
        precision=config.precision,
        weight_bytes=2 if str(given.get("dtype", "float32")).endswith("16") else 4,
        sharding=config.sharding,
        processes=config.devices,
        cached_tokens=cached,
        device=config.device,
    )


def _training(recipe: Any, step: Step) -> dict[str, Any]:
    return {
        "step": step,
        "lora_r": step.lora_r,
        "has_checkpointing": step.has_checkpointing,
        "checkpoints": recipe.save_total_limit or 1,
        "weight_bytes": step.weight_bytes,
    }


def _stage1(config: PlanConfig, recipe: Any, shape: Shape, notes: list[str]) -> dict[str, Any]:
    per_process = recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps
    rollouts = per_process * config.devices
    steps = recipe.max_steps
    if steps <= 0:
        from stages.stage1.training import count_steps

        problems = _number_of_problems(config, recipe, notes)
        steps = count_steps(recipe.num_train_epochs, problems, rollouts // recipe.num_generations)
    longest = recipe.max_completion_length or config.completion_length
    micro = recipe.per_device_train_batch_size
    notes.append(f"a micro-batch is padded to {config.prompt_length} + {longest} tokens a row")
    is_local = (config.backend or recipe.backend) == "local"
    cached = per_process * (config.prompt_length + longest) if is_local else 0
    length = config.prompt_length + longest
    step = _step(config, recipe, length, micro * longest, cached, rows=micro)
    return {
        "rollouts": steps * rollouts,
        "trained_rows": steps * rollouts,
        **_training(recipe, step),
    }


def _stage2(config: PlanConfig, recipe: Any, shape: Shape, notes: list[str]) -> dict[str, Any]:
    rows_a_step = (
        recipe.per_device_train_batch_size * recipe.gradient_accumulation_steps * config.devices
    )
    if recipe.max_steps > 0:
        rows = recipe.max_steps * rows_a_step
    else:
        rows = recipe.num_train_epochs * config.rows
        notes.append(f"{config.rows} trajectories pass the filter")
    mean = config.prompt_length + config.completion_length
    micro = recipe.per_device_train_batch_size
    longest = min(recipe.max_length or mean, mean) if recipe.packing else recipe.max_length or mean
    notes.append(f"a micro-batch holds {micro} rows of {longest} tokens at most")
    scored = round(micro * longest * config.completion_length / mean)
    step = _step(config, recipe, longest, scored, 0, rows=micro)
    return {"rollouts": 0, "trained_rows": rows, **_training(recipe, step)}


def _collect(config: PlanConfig, recipe: Any, shape: Shape, notes: list[str]) -> dict[str, Any]:
    problems = _number_of_problems(config, recipe, notes)
    return {
        "rollouts": min(problems, recipe.limit or problems) * recipe.samples_per_problem,
        "trained_rows": 0,
        "step": None,
        "lora_r": 0,
        "has_checkpointing": False,
        "checkpoints": 0,
    }


def _number_of_problems(config: PlanConfig, recipe: Any, notes: list[str]) -> int:
    if recipe.problems == "miniworld":
        from data.miniworld.tasks import FAMILIES

        return recipe.problems_per_family * len(recipe.families or FAMILIES)
    path = Path(recipe.problems)
    if path.is_file():
        return len(load_problems(path))
    notes.append(f"{config.problems} problems: {recipe.problems} is not there to count")
    return config.problems


def _experts(recipe: Any, notes: list[str]) -> list[ExpertConfig]:
    """The experts with their prices; what cannot be read is free, and said."""
    path = Path(recipe.experts)
    if not path.is_file():
        if recipe.experts != "embedded":
            notes.append(f"experts cost nothing: {recipe.experts} is not there")
        return []
    # A plan asks nobody, so it needs no key.
    listed = list(load_experts(path, environ=_AnyKey()))
    if not any(expert.has_price for expert in listed):
        notes.append(f"experts cost nothing: {recipe.experts} gives no price")
    return listed


class _AnyKey(dict[str, str]):
    """An environment in which every key is set."""

    def __missing__(self, name: str) -> str:
        return "unset"

    def get(self, name: str, default: Any = None) -> Any:
        """A value for every name."""
        return "unset"

    def __contains__(self, name: object) -> bool:
        return True


def _stated(config: PlanConfig) -> list[str]:
    """Every assumption that is a setting, as `name value: what it means`."""
    skipped = {"recipe", "stage", "shape", "backend", "json", "rows", "problems"}
    return [
        f"{f.name} {getattr(config, f.name)}: {f.metadata['help']}"
        for f in fields(config)
        if f.name not in skipped
    ]


def text(result: Plan, config: PlanConfig) -> str:
    """The plan for people."""
    lines = [
        f"{config.recipe}: {result.stage} of {result.shape.name}, "
        f"{result.shape.parameters:,} parameters",
        "",
    ]
    if result.memory is not None:
        lines.append(f"memory of each of {config.devices} process(es), 10^9 bytes")
        for name, value in asdict(result.memory).items():
            lines.append(f"  {name.replace('_', ' '):<24}{value / 1e9:>10.2f}")
        room = config.device_gb - result.memory.peak / 1e9
        lines.append(
            f"  {'left of the device' if room >= 0 else 'TOO LITTLE by':<24}{abs(room):>10.2f}"
        )
        lines.append("")
    lines.append("the run")
    for name, value in asdict(result.work).items():
        lines.append(f"  {name.replace('_', ' '):<24}{_number(value):>16}")
    lines += ["", "assumptions (planned, not measured)"]
    lines += [f"  - {note}" for note in result.assumptions]
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """`rivet plan RECIPE [--name value ...]`; prints the plan."""
    config = parse_config(
        PlanConfig,
        argv,
        prog="rivet plan",
        description="What a recipe will need: memory, tokens, expert calls, USD, hours, disk.",
        positional=("recipe",),
    ).config
    result = plan(config)
    if config.json:
        print(json.dumps(asdict(result)))
    else:
        print(text(result, config))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
