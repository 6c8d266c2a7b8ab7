"""Settings of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from data.miniworld.tasks import check_families
from eval.sampling_config import SamplingConfig
from rivet.checkpoints import Dtype
from rivet.config import setting
from rivet.trajectory import Mode, check_modes


@dataclass
class EvalConfig(SamplingConfig):
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
    expert_paths: dict[str, str] = field(
        default_factory=dict,
        metadata={
            "help": "Where a latent policy's frozen experts lie now, by name; empty: where its "
            "config.json says."
        },
    )
    grading: Literal["reward", "eval"] = setting(
        "reward", "`reward` reads boxes only; `eval` may fall back to a final `Answer:` line."
    )
    dtype: Dtype = setting("auto", "Number format of the weights; `auto` keeps theirs.")

    def __post_init__(self) -> None:
        check_modes("conditions", self.conditions)
        self.check_sampling()
        if self.problems_per_family < 1:
            raise ValueError(
                f"problems_per_family is {self.problems_per_family}; expected at least 1"
            )
        check_families(self.families)
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit is {self.limit}; expected at least 1, or null")
        if not self.problem_sets():
            raise ValueError("problems is empty; expected at least one set")
        if self.samples_per_problem > 1 and self.temperature == 0:
            raise ValueError(
                f"samples_per_problem is {self.samples_per_problem} at temperature 0, which gives "
                "the same sample each time; expected a temperature above 0"
            )

    def problem_sets(self) -> list[str]:
        """What `problems` names, as a list."""
        return [self.problems] if isinstance(self.problems, str) else list(self.problems)

    def checkpoint_label(self) -> str:
        """The checkpoint's name in tables: `runs/x/stage1/checkpoint` is `stage1`."""
        path = Path(self.model)
        return self.label or (path.parent.name if path.name == "checkpoint" else path.name)
