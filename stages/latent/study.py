"""Every arm of latent collaboration over seeds, with intervals and the claims that they support.

    rivet latent-study stages/recipes/latent-study_mini.yaml

Arms run one after another in one process, each over all seeds; a killed study goes on where it
was, and after every run, failed ones too, the results so far are on disk.

    OUTPUT_DIR/seed-1/full/...     one run folder per arm and seed
    OUTPUT_DIR/results.json        {"runs": [...], "rows": [...], "gates": [...], ...}
    OUTPUT_DIR/table.md            accuracy of each arm and condition, mean over seeds
    OUTPUT_DIR/report.html         the same with charts, and seed-1/report.html of each seed
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.latent_report import AS_TRAINED, HARD, write_latent_report
from eval.metrics import half_width
from eval.table import markdown_cell
from rivet.config import ConfigError, load_config, parse_config
from rivet.files import atomic_write_json, atomic_write_text
from rivet.runs import RunDir
from stages.latent.config import UNINFORMED, LatentConfig
from stages.latent.evaluate import SHUFFLED, WARM

logger = logging.getLogger(__name__)

# What the method is held to, in shares of held-out problems.
BEATS_CONTROLS, RL_ADDS, NO_GAIN, CONTROL_LEVEL = 0.2, 0.15, 0.05, 0.1

Case = tuple[str, str]  # condition and family
Accuracies = dict[Case, dict[int, float]]  # by seed


@dataclass
class LatentStudyConfig:
    """Settings of `rivet latent-study`."""

    base: str = field(
        default="stages/recipes/latent_mini.yaml",
        metadata={"help": "Recipe of `rivet latent` that every arm starts from."},
    )
    output_dir: str = field(default="runs/latent-study", metadata={"help": "The run folder."})
    overwrite: bool = field(default=False, metadata={"help": "Start again from nothing."})
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3], metadata={"help": "One or more."})
    arms: dict[str, Any] = field(
        default_factory=lambda: {"full": {}},
        metadata={"help": "Name of each arm and its settings on top of the recipe."},
    )
    settings: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Settings of every arm on top of the recipe."}
    )

    def __post_init__(self) -> None:
        if not self.seeds or not self.arms:
            raise ValueError("seeds and arms: expected at least one of each")
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds are {self.seeds}; expected each once")

    def arm(self, name: str, seed: int, folder: Path) -> LatentConfig:
        """The settings of one run.

        Raises:
            ConfigError: They are wrong.
        """
        given = {**self.settings, **(self.arms[name] or {})}
        given |= {"seed": seed, "controls": [], "output_dir": str(folder / f"seed-{seed}" / name)}
        return load_config(LatentConfig, self.base, **given)


def run(config: LatentStudyConfig) -> dict[str, Any]:
    """Run every arm of every seed, or what is left of them.

    Returns:
        The content of `results.json`.

    Raises:
        ConfigError: An arm's settings are wrong; nothing has started.
        rivet.runs.RunFinishedError: It is finished and `overwrite` is False.
    """
    folder = Path(config.output_dir)
    faults = []
    for name in config.arms:
        try:
            config.arm(name, config.seeds[0], folder)
        except ConfigError as error:
            faults += [f"arms: {name}: {fault}" for fault in error.faults]
    if faults:
        raise ConfigError(faults)
    with RunDir.open(folder, config, stage="latent-study", overwrite=config.overwrite) as run_dir:
        results = _run_arms(config, folder)
        if not results["failures"]:
            run_dir.finish({"runs": len(results["runs"])})
    return results


def _run_arms(config: LatentStudyConfig, folder: Path) -> dict[str, Any]:
    from stages.latent.main import finished_or_run

    runs: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    results: dict[str, Any] = {}
    # Arm by arm, so that an unfinished study has the same seeds of those that it has.
    for name in config.arms:
        for seed in config.seeds:
            logger.info("%s, seed %d", name, seed)
            try:
                result = finished_or_run(config.arm(name, seed, folder))
            except Exception as error:  # one arm that fails takes none of the others with it
                logger.error("%s, seed %d failed: %s", name, seed, error)
                failures.append({"seed": seed, "arm": name, "error": str(error)})
            else:
                runs.append({**result, "name": name, "folder": name})
            results = summary(runs, failures, list(config.arms))
            atomic_write_json(folder / "results.json", results)
            atomic_write_text(folder / "table.md", table(results) + "\n")
            write_latent_report(folder)
    return results


def summary(
    runs: Sequence[Mapping[str, Any]],
    failures: Sequence[Mapping[str, Any]],
    order: Sequence[str],
) -> dict[str, Any]:
    """Rows with means over seeds, the claims, and correlations."""
    return {
        "rows": mean_rows(runs, order),
        "gates": gates(runs),
        "correlations": {
            name: [run["correlations"] for run in runs if run["name"] == name]
            for name in order
            if any(run["name"] == name for run in runs)
        },
        "failures": list(failures),
        "runs": list(runs),
    }


def mean_rows(runs: Sequence[Mapping[str, Any]], order: Sequence[str]) -> list[dict[str, Any]]:
    """Mean over seeds of each arm, condition and family.

    Returns:
        Rows with `accuracy`, each seed's `values`, and `half_width` of the 95% interval over
        seeds (Student's t), None with one seed.
    """
    groups: dict[tuple[str, str, str], list[float]] = {}
    for name in order:
        for run in runs:
            if run["name"] == name:
                for row in run["rows"]:
                    key = (name, row["condition"], row["family"])
                    groups.setdefault(key, []).append(row["accuracy"])
    return [
        {
            "arm": arm,
            "condition": condition,
            "family": family,
            "accuracy": statistics.mean(values),
            "values": values,
            "half_width": half_width(values),
        }
        for (arm, condition, family), values in groups.items()
    ]


def gates(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The claims that the method is held to, as far as the runs so far can say.

    Arms are compared over the seeds that both have. The best setting of a control counts as that
    control, which favours it.

    Returns:
        Rows with `claim`, `value`, `bound` and `holds`.
    """
    arm_of = {run["name"]: run["arm"] for run in runs}
    full = next((name for name, arm in arm_of.items() if arm == "full"), None)
    ours, as_trained = _accuracies(runs, full), (AS_TRAINED, HARD)
    if as_trained not in ours:
        return []
    controls: dict[str, list[Accuracies]] = {}
    for name, arm in arm_of.items():
        if arm in UNINFORMED:
            controls.setdefault(arm, []).append(_accuracies(runs, name))
    found = [
        _gate(f"full beats {kind} on the hard families by", best - other, ">=", BEATS_CONTROLS)
        for kind in UNINFORMED
        for best, other in _closest(ours, as_trained, controls.get(kind, []))
    ]
    everyone = [control for settings in controls.values() for control in settings]
    if pairs := _means(ours, (SHUFFLED, HARD), everyone):
        shuffled, other = max(pairs, key=lambda pair: pair[1])
        level = other + CONTROL_LEVEL
        found.append(_gate("full, shuffled at evaluation, falls to", shuffled, "<=", level))
    mean = {case: statistics.mean(seeds.values()) for case, seeds in ours.items()}
    gain = mean[as_trained] - mean[WARM, HARD]
    found.append(_gate("RL adds to the warm start", gain, ">=", RL_ADDS))
    for (condition, family), masked in mean.items():
        if condition == f"without {family}":
            share = masked / max(mean[AS_TRAINED, family], 1e-9)
            found.append(_gate(f"without {family}, left of its own family", share, "<=", 0.5))
    # Experts add nothing where the policy alone is right already.
    found += [
        _gate("full gains on the saturated family at most", best - other, "<=", NO_GAIN)
        for best, other in _closest(ours, (AS_TRAINED, "reading"), controls.get("single", []))
    ]
    return found


def _accuracies(runs: Sequence[Mapping[str, Any]], name: str | None) -> Accuracies:
    """What an arm has by condition and family, and then by seed."""
    found: Accuracies = {}
    for run in runs:
        for row in run["rows"] if run["name"] == name else ():
            case = found.setdefault((row["condition"], row["family"]), {})
            case[run["seed"]] = row["accuracy"]
    return found


def _means(
    ours: Accuracies, case: Case, controls: Sequence[Accuracies]
) -> list[tuple[float, float]]:
    """Ours in a case and a control's as trained, over their common seeds, of each that has some."""
    pairs = []
    for control in controls:
        a, b = ours.get(case, {}), control.get((AS_TRAINED, case[1]), {})
        if common := a.keys() & b.keys():
            mine, theirs = (statistics.mean(x[seed] for seed in common) for x in (a, b))
            pairs.append((mine, theirs))
    return pairs


def _closest(
    ours: Accuracies, case: Case, controls: Sequence[Accuracies]
) -> list[tuple[float, float]]:
    """Of these pairs the one with the smallest difference; none where there is no pair."""
    return sorted(_means(ours, case, controls), key=lambda pair: pair[0] - pair[1])[:1]


def _gate(claim: str, value: float, relation: str, bound: float) -> dict[str, Any]:
    holds = value >= bound if relation == ">=" else value <= bound
    return {
        "claim": claim,
        "value": value,
        "bound": f"{relation} {bound:.3f}",
        "holds": bool(holds),
    }


def table(results: Mapping[str, Any]) -> str:
    """Accuracies and claims as Markdown, in percent."""
    rows = results["rows"]
    families = list(dict.fromkeys(row["family"] for row in rows))
    lines = [
        f"| arm | condition | {' | '.join(map(markdown_cell, families))} | seeds |",
        "|---|---|" + "---:|" * (len(families) + 1),
    ]
    keys = list(dict.fromkeys((row["arm"], row["condition"]) for row in rows))
    for arm, condition in keys:
        part = {r["family"]: r for r in rows if (r["arm"], r["condition"]) == (arm, condition)}
        cells = " | ".join(_cell(part.get(family)) for family in families)
        seeds = max(len(r["values"]) for r in part.values())
        lines.append(f"| {markdown_cell(arm)} | {markdown_cell(condition)} | {cells} | {seeds} |")
    lines += ["", "| claim | measured | held to | holds |", "|---|---:|---:|---|"]
    for gate in results["gates"]:
        held = "yes" if gate["holds"] else "no"
        lines.append(f"| {gate['claim']} | {gate['value']:.3f} | {gate['bound']} | {held} |")
    return "\n".join([*lines, *_correlation_lines(results.get("correlations", {}))])


def _correlation_lines(correlations: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Spearman correlation of attention's entropy with reward: mean over seeds, and each seed."""
    names = ("per_head", "per_head_differences", "head_averaged", "head_averaged_differences")
    lines = []
    for arm, seeds in correlations.items():
        cells = []
        for name in names:
            values = [found[name] for found in seeds if found.get(name) is not None]
            each = "/".join(f"{value:+.2f}" for value in values)
            cells.append(f"{statistics.mean(values):+.2f} ({each})" if values else "-")
        if any(cell != "-" for cell in cells):
            lines.append(f"| {arm} | {' | '.join(cells)} |")
    if not lines:
        return []
    head = " | ".join(name.replace("_", " ") for name in names)
    return ["", f"| entropy and reward, Spearman | {head} |", "|---|---:|---:|---:|---:|", *lines]


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    text = f"{100 * row['accuracy']:.1f}"
    return text if row["half_width"] is None else f"{text} ± {100 * row['half_width']:.1f}"


def main(argv: Sequence[str] | None = None) -> int:
    """`rivet latent-study RECIPE.yaml [--name value ...]`; prints the table and the claims."""
    config = parse_config(
        LatentStudyConfig,
        argv,
        prog="rivet latent-study",
        description="Every arm of latent collaboration over seeds.",
    ).config
    results = run(config)
    if results["runs"]:
        print(table(results))
    for failure in results["failures"]:
        print(f"failed: seed {failure['seed']}, {failure['arm']}: {failure['error']}")
    print(f"results: {Path(config.output_dir) / 'results.json'}")
    return 1 if results["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
