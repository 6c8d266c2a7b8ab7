"""The stages in order, for one seed and one set of choices: what the demo and the study share.

A pipeline owns a folder and runs each phase in a sub-folder of it. Each phase resumes by itself, so
an interrupted pipeline goes on when it is run again; a phase that is finished is read, not run. The
phases' settings come from the recipes `<phase>_<size>.yaml` and from overrides on top of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from rivet.config import ConfigError, load_config
from rivet.experts.config import ExpertConfig
from rivet.files import atomic_write_json, atomic_write_text
from rivet.runs import RunDir, RunFinishedError
from rivet.trajectory import Mode

logger = logging.getLogger(__name__)

RECIPES = Path(__file__).parent / "recipes"
PHASES_FILE = "phases.json"
CONDITIONS: tuple[Mode, ...] = ("experts", "local")


def _overrides(phase: str) -> Any:
    return field(
        default_factory=dict,
        metadata={
            "help": f"Settings of {phase} on top of its recipe, as quoted JSON: '{{\"seed\": 2}}'."
        },
    )


@dataclass
class PipelineConfig:
    """Settings that the demo and each arm of a study share."""

    seed: int = field(default=1, metadata={"help": "Seed of every phase, at least 0."})
    size: str = field(
        default="mini", metadata={"help": "Which recipes: stages/recipes/<phase>_<size>.yaml."}
    )
    warmstart: dict[str, Any] = _overrides("the warm start")
    stage1: dict[str, Any] = _overrides("Stage I")
    collect: dict[str, Any] = _overrides("collection")
    solutions: dict[str, Any] = _overrides("the experts' own solutions, for a baseline")
    stage2: dict[str, Any] = _overrides("Stage II")
    eval: dict[str, Any] = _overrides("evaluation")

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; expected at least 0")
        missing = [p for p in PHASES if not self.recipe(p).is_file()]
        if missing:
            raise ValueError(
                f"size is {self.size!r}, but there is no {self.recipe(missing[0])}; expected a "
                "size that every phase has a recipe for, such as mini"
            )

    def recipe(self, phase: str) -> Path:
        """The recipe of a phase."""
        return RECIPES / f"{phase}_{self.size}.yaml"


# Each phase, and the settings by which a pipeline joins it to the others.
PHASES = {
    "warmstart": (),
    "stage1": ("model", "experts"),
    "collect": ("model", "experts"),
    "solutions": ("model", "experts"),
    "stage2": ("model", "trajectories"),
    "eval": ("model", "experts", "label", "conditions"),
}
_COLLECTS = ("collect", "solutions")
_OF_EVERY_PHASE = ("output_dir", "overwrite")


def check_overrides(config: PipelineConfig) -> None:
    """Check the settings of every phase: a typing error in a late one must not cost the early ones.

    Raises:
        rivet.config.ConfigError: Any setting of any phase is wrong; all faults at once.
    """
    from eval.config import EvalConfig
    from stages.collect import CollectConfig
    from stages.solutions import SolutionsConfig
    from stages.stage1.config import Stage1Config
    from stages.stage2.config import Stage2Config
    from stages.warmstart import WarmstartConfig

    classes = (
        WarmstartConfig,
        Stage1Config,
        CollectConfig,
        SolutionsConfig,
        Stage2Config,
        EvalConfig,
    )
    faults: list[str] = []
    for (phase, wired), config_class in zip(PHASES.items(), classes, strict=True):
        settings = getattr(config, phase)
        faults += [
            f"{phase}: {name}: set by what runs the phases; expected other settings here"
            for name in (*_OF_EVERY_PHASE, *wired)
            if name in settings
        ]
        try:
            load_config(config_class, config.recipe(phase), **settings)
        except ConfigError as error:
            faults += [f"{phase}: {fault}" for fault in error.faults]
    if faults:
        raise ConfigError(faults)


class Pipeline:
    """Runs phases into sub-folders of one folder, and keeps their times.

    Args:
        folder: Where the phases' folders go.
        config: Recipes, overrides and seed.
        experts: Path of the experts.yaml that every phase asks.
    """

    def __init__(self, folder: Path, config: PipelineConfig, *, experts: Path) -> None:
        self.folder = folder
        self.config = config
        self.experts = experts
        self.phases = Phases.load(folder / PHASES_FILE)

    def warmstart(self, name: str = "warm") -> Path:
        """Build and train the starting point; gives its checkpoint."""
        from stages import warmstart

        return self._run("warmstart", name, warmstart.WarmstartConfig, warmstart.run)

    def stage1(self, start: Path, name: str = "stage1", **overrides: Any) -> Path:
        """Stage I from a checkpoint; gives its checkpoint."""
        from stages.stage1 import config, main

        return self._run(
            "stage1",
            name,
            config.Stage1Config,
            main.run,
            model=str(start),
            experts=str(self.experts),
            **overrides,
        )

    def collect(self, checkpoint: Path, name: str = "collect", **overrides: Any) -> Path:
        """Sample and grade training problems; gives the folder of trajectories."""
        from stages import collect

        return self._run(
            "collect",
            name,
            collect.CollectConfig,
            collect.run,
            model=str(checkpoint),
            experts=str(self.experts),
            **overrides,
        )

    def solutions(self, checkpoint: Path, name: str = "solutions", **overrides: Any) -> Path:
        """Ask the experts for whole solutions; gives the folder of trajectories."""
        from stages import solutions

        return self._run(
            "solutions",
            name,
            solutions.SolutionsConfig,
            solutions.run,
            model=str(checkpoint),
            experts=str(self.experts),
            **overrides,
        )

    def stage2(
        self, start: Path, trajectories: Path, name: str = "stage2", **overrides: Any
    ) -> Path:
        """Stage II from a checkpoint on a folder of trajectories; gives its checkpoint."""
        from stages.stage2 import config, main

        return self._run(
            "stage2",
            name,
            config.Stage2Config,
            main.run,
            model=str(start),
            trajectories=str(trajectories),
            **overrides,
        )

    def evaluate(
        self, checkpoint: Path, label: str, conditions: Sequence[Mode] = CONDITIONS
    ) -> list[dict[str, Any]]:
        """Evaluate a checkpoint, by default with experts and after their removal.

        Accuracy and form are those of greedy decoding. Routing is that of sampling at temperature
        1: greedy decoding of a controller that has no preference yet still names one and the same
        expert for all problems of a kind, which looks like a choice and is none. The greedy figure
        is kept as `route_accuracy_greedy`.

        Returns:
            The result rows, one for each condition.
        """
        rows = self._evaluate(checkpoint, label, label, conditions=list(conditions))
        if "experts" not in conditions:
            return rows
        sampled = self._evaluate(
            checkpoint, label, f"{label}-sampled", conditions=["experts"], temperature=1.0
        )[0]
        for row in rows:
            row["route_accuracy_greedy"] = row["route_accuracy"]
            if row["condition"] == "experts":
                for name in ("route_accuracy", "route_accuracy_ci", "route_shares"):
                    row[name] = sampled[name]
        return rows

    def _evaluate(
        self, checkpoint: Path, label: str, folder: str, **wiring: Any
    ) -> list[dict[str, Any]]:
        from eval.config import EvalConfig
        from eval.main import run as run_eval
        from eval.results_file import RESULTS_FILE, read_json, require

        name = f"eval/{folder}"
        wiring |= {"model": str(checkpoint), "label": label, "experts": str(self.experts)}
        self._run("eval", name, EvalConfig, run_eval, **wiring)
        path = self.folder / name / RESULTS_FILE
        require(path)
        return read_json(path, {"rows": [dict]})["rows"]

    def _run(self, phase: str, name: str, config_class: Any, run: Any, **wiring: Any) -> Any:
        """Run a phase unless it is finished; gives what it made: a path, or what `run` returns."""
        output = self.folder / name
        settings = {"seed": self.config.seed, **getattr(self.config, phase), **wiring}
        config = load_config(
            config_class, self.config.recipe(phase), output_dir=str(output), **settings
        )
        with self.phases.timed(name):
            try:
                return run(config)
            except RunFinishedError:
                logger.info("%s is finished; reading it", output)
            finally:
                give_memory_back()
        return output / "trajectories" if phase in _COLLECTS else RunDir.load(output).checkpoint


@dataclass(slots=True)
class Phases:
    """Wall and CPU seconds of each phase, kept in a file so that a resumed run adds up.

    Attributes:
        path: Where they are kept.
        seconds: Name of the phase -> [wall, CPU].
    """

    path: Path
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Phases:
        """Continue the record of an interrupted run; one that is broken is begun anew."""
        if not path.is_file():
            return cls(path)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            seconds = {name: [float(wall), float(cpu)] for name, (wall, cpu) in found.items()}
        except (ValueError, TypeError, AttributeError) as error:
            logger.warning("%s: broken (%s); times count from now on", path, error)
            return cls(path)
        return cls(path, seconds)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add what happens inside to a phase's time."""
        logger.info("phase: %s", name)
        wall, cpu = time.monotonic(), cpu_seconds()
        try:
            yield
        finally:
            spent = self.seconds.setdefault(name, [0.0, 0.0])
            spent[0] += time.monotonic() - wall
            # A descendant that was killed, not waited for, takes its time with it.
            spent[1] += max(0.0, cpu_seconds() - cpu)
            atomic_write_json(self.path, self.seconds)

    def rows(self) -> list[dict[str, Any]]:
        """For `results.json`: name, wall_s, cpu_s."""
        return [
            {"name": name, "wall_s": round(wall, 1), "cpu_s": round(cpu, 1)}
            for name, (wall, cpu) in self.seconds.items()
        ]


def give_memory_back() -> None:
    """Hand what a phase has freed back to the system: the C library keeps gigabytes of it."""
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # not every C library has it
            ctypes.CDLL(None).malloc_trim(0)


def cpu_seconds() -> float:
    """CPU time of this process, its living descendants and those that it has waited for."""
    me = psutil.Process()
    mine = me.cpu_times()
    total = mine.user + mine.system + mine.children_user + mine.children_system
    for child in me.children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:  # it ended meanwhile
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def write_experts_file(path: Path, configs: list[ExpertConfig]) -> Path:
    """Write the experts.yaml of experts that are being served, for every phase to read."""
    keys = ("name", "skill", "model", "timeout_s", "max_concurrency", "max_tokens", "send_seed")
    experts: list[Mapping[str, Any]] = [
        {key: getattr(config, key) for key in keys} | {"base_urls": list(config.base_urls)}
        for config in configs
    ]
    return atomic_write_text(path, yaml.safe_dump({"experts": experts}, sort_keys=False))
