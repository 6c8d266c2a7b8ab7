"""The report of latent runs: accuracies, what interventions leave, attention, entropy and reward.

One HTML page that works offline, with the charts of `eval.plots`. What it shows is what
`rivet latent` and `rivet latent-study` leave in a folder:

RUN/results.json    of an arm, {"arm", "rows", ...}; of a run with controls, {"arms": [...]}; of a
                    study, {"runs", "rows", "gates", ...}, which has a page for each seed as well
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from eval.gather import ReportError, read_metrics
from eval.page import cards, page, settings
from eval.plots import Bar, interval_chart, line_chart
from eval.results_file import (
    NUMBER,
    RESULTS_FILE,
    check_form,
    read_json,
    require,
    stage_of,
)
from rivet.files import atomic_write_text
from rivet.runs import CONFIG_FILE

Result = Mapping[str, Any]

AS_TRAINED, HARD = "as trained", "hard"  # a condition and a family in rows of results
_CORRELATIONS = ("per_head", "per_head_differences", "head_averaged", "head_averaged_differences")
_CASE = {"condition": str, "family": str, "accuracy": NUMBER}
_ARM = {
    "arm": str,
    "expert?": str,
    "rows": [{**_CASE, "ci_low": NUMBER, "ci_high": NUMBER}],
    "attention?": {"experts?": [str], "families?": {str: {"shares": [[[[NUMBER]]]]}}},
    "correlations?": {f"{name}?": NUMBER for name in _CORRELATIONS},
}
_ARMS = {"arms": [_ARM]}
_STUDY = {
    "runs": [{**_ARM, "seed": int}],
    "rows": [{**_CASE, "arm": str, "half_width?": NUMBER}],
    "gates": [{"claim": str, "value": NUMBER, "bound": str, "holds": bool}],
    "failures?": [{"arm": str, "seed": int, "error": str}],
}


def is_latent_run(folder: Path) -> bool:
    """Whether a folder is that of a study, or holds results of an arm or of several."""
    return stage_of(folder) == "latent-study" or _form_of(_results(folder)) is not None


def _form_of(found: Mapping[str, Any]) -> Any:
    """The form that results of ours must have, see `eval.results_file`; None of others."""
    names = {("runs", "gates"): _STUDY, ("arms",): _ARMS, ("arm", "rows"): _ARM}
    return next((form for keys, form in names.items() if found.keys() >= set(keys)), None)


def _results(folder: Path) -> dict[str, Any]:
    """What a folder's own file says, or without one, as in a seed's folder, its arms' files."""
    if found := _read(folder / RESULTS_FILE):
        return found
    below = {path.parent.name: _read(path) for path in sorted(folder.glob(f"*/{RESULTS_FILE}"))}
    arms = [
        {**arm, "name": name, "folder": name}
        for name, arm in below.items()
        if _form_of(arm) is _ARM
    ]
    return {"arms": arms} if arms else {}


def _read(path: Path) -> dict[str, Any]:
    found = read_json(path)
    return check_form(path, found, _form_of(found) or dict)


def write_latent_report(folder: Path, out: Path | None = None) -> Path:
    """Write `report.html` of a latent run, of a study also one for each seed.

    Args:
        folder: The run folder.
        out: Where the page goes; None: into the run folder.

    Returns:
        Path of the page.

    Raises:
        ReportError: The folder holds no latent results.
        eval.results_file.ResultsError: They are missing, or broken.
    """
    out = out or folder
    found = _results(folder)
    if not found and stage_of(folder) == "latent-study":
        require(folder / RESULTS_FILE)
    if _form_of(found) is None:
        raise ReportError(
            f"{folder}/{RESULTS_FILE}: no results of `rivet latent` or `rivet latent-study`"
        )
    if "gates" not in found:
        runs = found["arms"] if "arms" in found else [{**found, "folder": "."}]
        return _write_arms(folder, runs, out)
    seeds = list(dict.fromkeys(run["seed"] for run in found["runs"]))
    for seed in seeds:
        name = f"seed-{seed}"
        _write_arms(folder / name, [r for r in found["runs"] if r["seed"] == seed], out / name)
    sections = {
        "Accuracy over seeds": _mean_accuracy(found["rows"]),
        "What the policy uses": _mean_interventions(found["rows"]),
        "Claims": _claims(found["gates"]),
        "Entropy and reward": _correlations(
            [{**run, "name": f"{label_of(run)}, seed {run['seed']}"} for run in found["runs"]]
        ),
        "Seeds": _seed_links(seeds, found.get("failures", [])),
        "Settings": settings(read_json(folder / CONFIG_FILE)),
    }
    return _write_page(out, folder, sections)


def _write_arms(folder: Path, results: Sequence[Result], out: Path) -> Path:
    """The page of arms that lie below a folder (or are it)."""
    config = read_json(run_folder(folder, results[0]) / CONFIG_FILE) if results else {}
    sections = {
        "Accuracy": _accuracy(results),
        "What the policy uses": _interventions(results),
        "Reward": _curves(folder, results, {"reward": "reward/mean"}, is_share=True),
        "Entropy of attention": _entropy(folder, results),
        "Whom it listens to": _shares(folder, results),
        "Heads and latents": _heads(results),
        "Entropy and reward": _correlations(results),
        "Settings": settings(config),
    }
    return _write_page(out, folder, sections)


def label_of(result: Result) -> str:
    """Name of an arm in charts."""
    if result.get("name"):
        return str(result["name"])
    return f"one {result['expert']}" if result.get("expert") else str(result["arm"])


def run_folder(folder: Path, result: Result) -> Path:
    """Where an arm's run lies."""
    if "folder" in result:
        return folder / str(result["folder"])
    return folder / (f"one-{result['expert']}" if result.get("expert") else str(result["arm"]))


def _mean_accuracy(rows: Sequence[Result]) -> str:
    """A chart per family, a bar per arm: means over seeds as they were trained."""
    as_trained = [row for row in rows if row["condition"] == AS_TRAINED]
    charts = {}
    for family in dict.fromkeys(row["family"] for row in as_trained):
        bars = _mean_bars(row for row in as_trained if row["family"] == family)
        charts[family] = interval_chart(bars, label=f"accuracy on {family}, mean over seeds")
    return cards(charts)


def _mean_interventions(rows: Sequence[Result]) -> str:
    """A chart per arm with interventions: its conditions on the hard families."""
    charts = {}
    for arm in dict.fromkeys(row["arm"] for row in rows):
        part = [row for row in rows if (row["arm"], row["family"]) == (arm, HARD)]
        if len(part) > 2:  # more than the warm start and what was trained
            bars = _mean_bars(part, name="condition")
            title = f"{arm}: hard families"
            charts[title] = interval_chart(bars, label=f"{title}, mean over seeds")
    return cards(charts)


def _mean_bars(rows: Iterable[Result], name: str = "arm") -> list[Bar]:
    """Means over seeds with their 95% intervals, cut off at 0 and 1; one seed has none."""
    bars = []
    for n, row in enumerate(rows):
        mean, half = row["accuracy"], row.get("half_width")
        interval = None if half is None else (max(0.0, mean - half), min(1.0, mean + half))
        bars.append(Bar(str(row[name]), mean, interval, n))
    return bars


def _claims(gates: Sequence[Result]) -> str:
    if not gates:
        return ""
    rows = "".join(
        f"<tr><td>{escape(gate['claim'])}</td>"
        f'<td class="num">{gate["value"]:.3f}</td><td class="num">{escape(gate["bound"])}</td>'
        f"<td>{'yes' if gate['holds'] else 'no'}</td></tr>"
        for gate in gates
    )
    head = '<th>claim</th><th class="num">measured</th><th class="num">held to</th><th>holds</th>'
    return f'<div class="card"><table><tr>{head}</tr>{rows}</table></div>'


def _seed_links(seeds: Sequence[int], failures: Sequence[Result]) -> str:
    links = "".join(
        f'<li><a href="seed-{seed}/report.html">seed {seed}: every arm, attention, curves</a></li>'
        for seed in seeds
    )
    failed = "".join(
        f"<li>failed: {escape(x['arm'])}, seed {x['seed']}: {escape(x['error'])}</li>"
        for x in failures
    )
    return f'<ul class="card">{links}{failed}</ul>'


def _accuracy(results: Sequence[Result]) -> str:
    families = list(dict.fromkeys(r["family"] for x in results for r in x["rows"]))
    charts = {}
    for family in families:
        bars = [
            Bar(label_of(x), r["accuracy"], (r["ci_low"], r["ci_high"]), n)
            for n, x in enumerate(results)
            for r in x["rows"]
            if r["family"] == family and r["condition"] == AS_TRAINED
        ]
        charts[family] = interval_chart(bars, label=f"accuracy on {family}")
    return cards(charts)


def _interventions(results: Sequence[Result]) -> str:
    charts = {}
    for result in results:
        rows = [r for r in result["rows"] if r["family"] == HARD] or result["rows"]
        if len(rows) < 3:
            continue
        charts[f"{label_of(result)}: hard families"] = interval_chart(
            [Bar(r["condition"], r["accuracy"], (r["ci_low"], r["ci_high"])) for r in rows],
            label=f"{label_of(result)} under interventions",
        )
        experts = result.get("attention", {}).get("experts", [])
        for name in experts:
            part = [r for r in result["rows"] if r["condition"] == f"without {name}"]
            charts[f"{label_of(result)} without {name}"] = interval_chart(
                [Bar(r["family"], r["accuracy"], (r["ci_low"], r["ci_high"])) for r in part],
                label=f"families without {name}",
            )
    return cards(charts)


def _curves(
    folder: Path, results: Sequence[Result], names: Mapping[str, str], *, is_share: bool = False
) -> str:
    """One chart per metric, a line per arm."""
    lines = {label_of(x): read_metrics(run_folder(folder, x) / "metrics.jsonl") for x in results}
    charts = {}
    for title, metric in names.items():
        series = {
            label: [(x["step"], x[metric]) for x in found if x.get(metric) is not None]
            for label, found in lines.items()
        }
        series = {label: points for label, points in series.items() if points}
        charts[title] = line_chart(series, label=title, is_share=is_share) if series else ""
    return cards(charts)


def _entropy(folder: Path, results: Sequence[Result]) -> str:
    return _curves(
        folder,
        results,
        {
            "per head, nats": "attention/entropy_per_head",
            "head-averaged, nats": "attention/entropy_head_averaged",
            "specialisation": "attention/specialisation",
        },
    )


def _shares(folder: Path, results: Sequence[Result]) -> str:
    """For every arm that listens and every family: attention of each expert over training."""
    charts = {}
    for result in results:
        attention = result.get("attention") or {}
        lines = read_metrics(run_folder(folder, result) / "metrics.jsonl")
        for family in attention.get("families", {}):
            series = {
                name: [(x["step"], x[key]) for x in lines if x.get(key) is not None]
                for name in attention.get("experts", [])
                for key in [f"attention/share/{family}/{name}"]
            }
            series = {name: points for name, points in series.items() if points}
            if series:
                title = f"{label_of(result)}: {family}"
                charts[title] = line_chart(series, label=title, is_share=True)
    return cards(charts)


def _heads(results: Sequence[Result]) -> str:
    """A table per arm and family: share of each expert by block, head and latent, held out."""
    parts = []
    for result in results:
        attention = result.get("attention") or {}
        for family, found in attention.get("families", {}).items():
            names = [*attention.get("experts", []), "none"]
            head = "".join(f"<th>{escape(n)}</th>" for n in names)
            rows = []
            for b, block in enumerate(found["shares"]):
                for h, heads in enumerate(block):
                    for k, shares in enumerate(heads):
                        cells = "".join(
                            f'<td class="num" style="background:rgba(0,114,178,{share:.2f})">'
                            f"{100 * share:.0f}</td>"
                            for share in shares
                        )
                        rows.append(f"<tr><td>{b + 1} / {h + 1} / {k + 1}</td>{cells}</tr>")
            title = f"{label_of(result)}: {family}"
            parts.append(
                f'<details class="card"><summary>{escape(title)}</summary><table><tr>'
                f"<th>block / head / latent</th>{head}</tr>{''.join(rows)}</table></details>"
            )
    return "".join(parts)


def _correlations(results: Sequence[Result]) -> str:
    """Spearman correlation of entropy with reward, of values and of first differences."""
    rows = []
    for result in results:
        found = result.get("correlations") or {}
        if any(found.get(name) is not None for name in _CORRELATIONS):
            cells = "".join(
                f'<td class="num">{_number(found.get(name))}</td>' for name in _CORRELATIONS
            )
            rows.append(f"<tr><td>{escape(label_of(result))}</td>{cells}</tr>")
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in _CORRELATIONS)
    return (
        f'<div class="card"><table><tr><th>arm</th>{head}</tr>{"".join(rows)}</table>'
        '<p class="note">Spearman, over training steps. Two curves that both drift correlate '
        "whatever causes them: the columns of differences and the arm <i>shuffled</i>, which "
        "hears nothing of use, say how much that is.</p></div>"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"


def _write_page(out: Path, folder: Path, sections: Mapping[str, str]) -> Path:
    title = f"rivet latent: {folder.resolve().name}"
    out.mkdir(parents=True, exist_ok=True)
    return atomic_write_text(out / "report.html", page(title, sections))
