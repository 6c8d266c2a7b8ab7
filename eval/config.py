"""Settings of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from data.miniworld.tasks import check_families
from eval.generate import SampleSpec
from rivet.checkpoints import Dtype
from rivet.config import setting
from rivet.rollout.backend import SamplingParams
from rivet.rollout.backend_settings import BackendSettings
from rivet.trajectory import Mode, check_modes


@dataclass
class EvalConfig(BackendSettings):
    """Settings of an evaluation."""

    model: str = setting(
        "",
        "Checkpoint folder, or a pretrained chat model: its folder or its name on the Hub. "
        "Required.",
    )
    output_dir: str = setting("runs/eval", "The run folder.")
    overwrite: bool = setting(False, "Replace an evaluation that is there.")
    label: str = setting("", "The checkpoint's name in tables; empty takes it from its folder.")
    conditions: list[Mode] = field(
        default_factory=lambda: ["experts", "local"],
        metadata={"help": "Conditions to evaluate under, in order."},
    )
    problems: str | list[str] = setting(
        "miniworld",
        "Test problems, one or several of: `miniworld`, benchmarks and suites (`rivet benchmarks` "
        "lists them), files (.jsonl, .jsonl.gz, .parquet).",
    )
    data_dir: str | None = setting(
        None, "Folder with copies of the benchmarks; null takes the Hub, or its cache offline."
    )
    skip: list[str] = field(
        default_factory=list, metadata={"help": "Benchmarks to leave out of the suites."}
    )
    problems_per_family: int = setting(100, "Test problems of each mini-world family, at least 1.")
    families: list[str] = setting(
        [], "Families of the mini-world that are asked about; empty: all."
    )
    split: Literal["test", "validation"] = setting("test", "Split of the mini-world.")
    limit: int | None = setting(
        None,
        "So many problems of each set only, at least 1: the first of a file, a fixed choice of a "
        "benchmark.",
    )
    experts: str = setting(
        "embedded", "An experts.yaml, or `embedded`: the mini-world's own experts, on loopback."
    )
    expert_paths: dict[str, str] = field(
        default_factory=dict,
        metadata={
            "help": "Where a latent policy's frozen experts lie now, by name; empty: where its "
            "config.json says."
        },
    )
    samples_per_problem: int = setting(1, "k: samples of each problem, at least 1.")
    temperature: float = setting(0.0, "Sampling temperature, at least 0; 0 is greedy.")
    top_p: float = setting(1.0, "Nucleus mass in (0, 1].")
    top_k: int = setting(0, "Sample from the k most likely tokens only; 0 from all.")
    seed: int = setting(0, "Seed of the samples.")
    problems_seed: int = setting(0, "Seed that the mini-world's problems are drawn with.")
    max_completion_length: int | None = setting(
        None, "Tokens of a whole completion, spliced ones included; null: the checkpoint's limit."
    )
    grading: Literal["reward", "eval"] = setting(
        "reward", "`reward` reads boxes only; `eval` may fall back to a final `Answer:` line."
    )
    dtype: Dtype = setting("auto", "Number format of the weights; `auto` keeps theirs.")
    batch_size: int = setting(96, "Trajectories in flight, at least 1.")
    shard_size: int = setting(256, "Rows per shard of the store, at least 1.")
    max_attempts: int = setting(3, "Tries of a row that infrastructure voids, at least 1.")
    max_fault_rate: float = setting(
        0.1, "Share of attempts that infrastructure may void before the run stops, in [0, 1]."
    )
    ray: int = setting(
        0,
        "Ray actors that share the rows out, each with an engine and a sandbox of its own; 0: this "
        "process alone.",
    )

    def __post_init__(self) -> None:
        check_modes("conditions", self.conditions)
        for name in ("problems_per_family", "samples_per_problem", "batch_size", "shard_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        check_families(self.families)
        if self.max_attempts < 1 or (self.limit is not None and self.limit < 1):
            raise ValueError("max_attempts and limit: expected at least 1")
        if not 0 <= self.max_fault_rate <= 1:
            raise ValueError(f"max_fault_rate is {self.max_fault_rate}; expected 0 to 1")
        if self.ray < 0:
            raise ValueError(f"ray is {self.ray}; expected a number of actors, or 0")
        self.check_backend()
        if not self.problem_sets():
            raise ValueError("problems is empty; expected at least one set")
        if self.samples_per_problem > 1 and self.temperature == 0:
            raise ValueError(
                f"samples_per_problem is {self.samples_per_problem} at temperature 0, which gives "
                "the same sample each time; expected a temperature above 0"
            )
        self.sampling()  # checks the rest

    def sampling(self) -> SamplingParams:
        """How the controller samples."""
        return SamplingParams(self.temperature, self.top_p, self.top_k)

    def problem_sets(self) -> list[str]:
        """What `problems` names, as a list."""
        return [self.problems] if isinstance(self.problems, str) else list(self.problems)

    def how(self, mode: Mode) -> SampleSpec:
        """How the rows of a condition are sampled."""
        return SampleSpec(
            mode,
            self.sampling(),
            samples_per_problem=self.samples_per_problem,
            seed=self.seed,
            shard_size=self.shard_size,
            concurrency=self.batch_size,
            max_attempts=self.max_attempts,
            max_fault_rate=self.max_fault_rate,
        )

    def checkpoint_label(self) -> str:
        """The checkpoint's name in tables: `runs/x/stage1/checkpoint` is `stage1`."""
        path = Path(self.model)
        return self.label or (path.parent.name if path.name == "checkpoint" else path.name)
