"""Settings of a study: its arms and variants, checked before anything starts."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rivet.checkpoints import check_checkpoint
from rivet.config import ConfigError, load_config
from rivet.config_help import shown
from rivet.runs import RunDir, RunDirError
from rivet.trajectory import Mode, check_modes
from stages.pipeline import CONDITIONS, PipelineConfig, check_overrides

# Names are folders, rows of tables and labels of plots.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")


@dataclass
class Arm:
    """What an arm does after its start.

    Attributes:
        start: Checkpoint that it starts from, `{seed}` standing for the seed; empty: the study's.
        stage1: Settings of Stage I; None leaves it out.
        collect: Settings of the collection.
        solutions: Settings of the experts' own solutions; None collects the controller's.
        trajectories: What Stage II learns instead of anything collected, `{seed}` as in `start`.
        stage2: Variants of Stage II, each trained on the same trajectories.
    """

    start: str = ""
    stage1: dict[str, Any] | None = None
    collect: dict[str, Any] | None = None
    solutions: dict[str, Any] | None = None
    trajectories: str = ""
    stage2: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.stage1 is None and not self.stage2:
            raise ValueError("nothing to do; expected stage1, stage2 or both")
        sources = [name for name in ("collect", "solutions", "trajectories") if self.of(name)]
        if len(sources) > 1:
            raise ValueError(f"{' and '.join(sources)}: expected one source of trajectories")
        if len(set(self.stage2)) < len(self.stage2):
            raise ValueError(f"stage2 is {self.stage2}; expected each variant once")

    def of(self, name: str) -> bool:
        """Whether a part of it is given; `{}` is."""
        return getattr(self, name) not in (None, "")

    def overrides(self) -> dict[str, dict[str, Any]]:
        """Settings of each phase on top of the study's."""
        phases = ("stage1", "collect", "solutions")
        return {name: getattr(self, name) for name in phases if self.of(name)}


def parse_arms(given: Mapping[str, Any], variants: Collection[str]) -> dict[str, Arm]:
    """The arms as a recipe has them, each by its name.

    Raises:
        rivet.config.ConfigError: Any is wrong; all faults at once.
    """
    arms: dict[str, Arm] = {}
    # A seed's warm start and its evaluation lie beside the arms.
    faults = name_faults("arms", given, taken=("warm", "eval"))
    for name, value in given.items():
        if wrong := _mapping_faults(f"arms: {name}", value):
            faults += wrong
            continue
        try:
            arms[name] = load_config(Arm, **value)
        except ConfigError as error:
            faults += [f"arms: {name}: {fault}" for fault in error.faults]
            continue
        if unknown := [v for v in arms[name].stage2 if v not in variants]:
            faults.append(
                f"arms: {name}: stage2: no variant {', '.join(unknown)}; expected some of "
                f"{', '.join(variants) or 'none, for there are no variants'}"
            )
    if faults:
        raise ConfigError(faults)
    return arms


def _mapping_faults(where: str, value: Any) -> list[str]:
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return []
    return [f"{where}: got {shown(value)}, expected a mapping with text as keys"]


def name_faults(what: str, names: Collection[str], *, taken: Collection[str] = ()) -> list[str]:
    """What is wrong with names that become folders.

    Args:
        what: The setting that has them.
        names: The names.
        taken: Those of other folders beside them.
    """
    faults = [
        f"{what}: {name!r} is no name for a folder; expected up to 64 letters, digits and ._+-, "
        "the first a letter or a digit"
        for name in names
        if not _NAME.fullmatch(name)
    ]
    faults += [
        f"{what}: {name}: taken; expected another name than {', '.join(taken)}"
        for name in names
        if name in taken
    ]
    return faults


def path_of_seed(path: str, seed: int, where: str) -> Path:
    """A path in which `{seed}` stands for the seed.

    Raises:
        ValueError: It has something else in braces.
    """
    try:
        return Path(path.format(seed=seed))
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{where} is {path!r}; expected a path in which {{seed}} stands for the seed"
        ) from error


@dataclass
class StudyConfig(PipelineConfig):
    """Settings of a study."""

    output_dir: str = field(default="runs/study", metadata={"help": "The run folder."})
    overwrite: bool = field(default=False, metadata={"help": "Start again from nothing."})
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3], metadata={"help": "One or more."})
    arms: dict[str, Any] = field(
        default_factory=dict,
        metadata={
            "help": "Name of each arm: {stage1: settings, collect: settings, stage2: [variants]}; "
            "without stage1 the arm goes from its start to collection. With `solutions: settings` "
            "Stage II learns the experts' own solutions instead of what is collected. With "
            "`start: path` the arm starts from there, with `trajectories: path` Stage II learns "
            "those; `{seed}` in a path stands for the seed."
        },
    )
    start: str = field(
        default="",
        metadata={
            "help": "Checkpoint that arms start from, `{seed}` standing for the seed: "
            "runs/study/seed-{seed}/warm/checkpoint. Empty: a warm start of this study's own."
        },
    )
    variants: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Name of each Stage II variant: its settings."}
    )
    conditions: list[Mode] = field(
        default_factory=lambda: list(CONDITIONS),
        metadata={"help": "Conditions that checkpoints are evaluated under."},
    )
    stage2_conditions: list[Mode] | None = field(
        default=None, metadata={"help": "The same for the checkpoints of Stage II; null: as all."}
    )
    jobs: int = field(
        default_factory=lambda: os.cpu_count() or 1,
        metadata={"help": "Processes at a time, one thread each, at least 1."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds are {self.seeds}; expected different ones, each at least 0")
        if self.jobs < 1:
            raise ValueError(f"jobs is {self.jobs}; expected at least 1")
        if not self.arms:
            raise ValueError("arms is empty; expected at least one, as in study_mini.yaml")
        check_modes("conditions", self.conditions)
        if self.stage2_conditions is not None:
            check_modes("stage2_conditions", self.stage2_conditions)
        faults = name_faults("variants", self.variants)
        for name, own in self.variants.items():
            faults += _mapping_faults(f"variants: {name}", own)
        # `stage2-NAME-sampled` is the folder of the sampled evaluation of NAME.
        faults += [
            f"variants: {name}: expected a name that does not end in -sampled"
            for name in self.variants
            if name.endswith("-sampled")
        ]
        if faults:
            raise ConfigError(faults)
        for seed in self.seeds:
            self.starts(seed)
            self.trajectories(seed)

    def parsed_arms(self) -> dict[str, Arm]:
        """The arms by name.

        Raises:
            rivet.config.ConfigError: Any is wrong; all faults at once.
        """
        return parse_arms(self.arms, self.variants)

    def starts(self, seed: int) -> dict[str, Path | None]:
        """Where each arm of a seed starts; None is the study's own warm start.

        Raises:
            ValueError: A path has something else than `{seed}` in braces.
        """
        paths = {name: arm.start or self.start for name, arm in self.parsed_arms().items()}
        return {
            name: path_of_seed(path, seed, f"arms: {name}: start") if path else None
            for name, path in paths.items()
        }

    def trajectories(self, seed: int) -> dict[str, Path]:
        """What each arm that collects nothing itself has Stage II learn, for a seed.

        Raises:
            ValueError: A path has something else than `{seed}` in braces.
        """
        return {
            name: path_of_seed(arm.trajectories, seed, f"arms: {name}: trajectories")
            for name, arm in self.parsed_arms().items()
            if arm.trajectories
        }


def check_arms(config: StudyConfig) -> None:
    """Check the settings of every phase, arm and variant before the first one starts.

    Raises:
        rivet.config.ConfigError: Any of them is wrong; all faults at once, each with its arm.
    """
    check_overrides(config)  # alone first: every arm would repeat what is wrong with the phases
    layers = [(f"arms: {name}", arm.overrides()) for name, arm in config.parsed_arms().items()]
    layers += [(f"variants: {name}", {"stage2": own}) for name, own in config.variants.items()]
    faults: list[str] = []
    for where, own in layers:
        merged = {phase: getattr(config, phase) | settings for phase, settings in own.items()}
        try:
            check_overrides(dataclasses.replace(config, **merged))
        except ConfigError as error:
            faults += [f"{where}: {fault}" for fault in error.faults]
    if faults:
        raise ConfigError(faults)


def check_starts(config: StudyConfig) -> None:
    """Check that the checkpoints and trajectories that arms take from elsewhere are there.

    Raises:
        rivet.config.ConfigError: Some are not.
    """
    faults: set[str] = set()
    for seed in config.seeds:
        for start in set(config.starts(seed).values()) - {None}:
            assert start is not None
            try:
                check_checkpoint(start)
            except ValueError as error:
                faults.add(f"start: {error}")
        faults |= {
            f"trajectories: {path}: no parquet shard there; expected the trajectories of a "
            "collection that has ended (rivet collect, rivet study)"
            for path in config.trajectories(seed).values()
            if not any(path.glob("*.parquet"))
        }
    if faults:
        raise ConfigError(sorted(faults))


def check_unchanged(config: StudyConfig) -> None:
    """Check that arms and variants that have begun are what they were.

    Raises:
        rivet.config.ConfigError: Some are not. Their phases would refuse, each when it comes.
    """
    folder = Path(config.output_dir)
    try:
        before = RunDir.load(folder, stage="study").manifest["config"]
    except RunDirError:
        return  # nothing there, or nothing of ours: the run folder says so
    faults = []
    for kind, pattern in (("arms", "seed-*/{}"), ("variants", "seed-*/*/stage2-{}")):
        for name, new in getattr(config, kind).items():
            old = before[kind].get(name, new)
            # More variants may be asked of an arm.
            old, new = ({k: v for k, v in own.items() if k != "stage2"} for own in (old, new))
            if old != new and (begun := sorted(folder.glob(pattern.format(name)))):
                faults.append(
                    f"{kind}: {name}: was {shown(old)}, is {shown(new)}, and {begun[0]} has begun; "
                    "give what is new a name of its own, or remove the folders of that name"
                )
    if faults:
        raise ConfigError(faults)
