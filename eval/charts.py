"""Which charts a report shows, and of what: results, outcomes, curves, time, differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from eval.page import cards
from eval.plots import Bar, interval_chart, line_chart, stacked_bars, stacked_shares
from eval.summary import RESULTS

Metrics = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart of learning curves.

    Attributes:
        title: Its heading.
        metrics: Names of metrics; one that ends in `/` takes all below it.
        kind: `share` (0 to 100%), `value`, `stack` (shares that add up), or `rare` (a share that is
            shown only where it is not 0 throughout).
        unless: Not shown where this metric is: it says the same in more detail.
    """

    title: str
    metrics: tuple[str, ...]
    kind: str = "value"
    unless: str = ""


# In the order shown; a panel without data is left out.
PANELS = (
    Panel("Reward and right answers", ("reward/mean", "rollout/right"), "share"),
    Panel(
        "Structure",
        ("rollout/well_formed", "rollout/truncated", "rollout/fabricated_output"),
        "share",
    ),
    Panel("Route accuracy", ("route/accuracy",), "share"),
    Panel("Whom the controller consults first", ("route/share/",), "stack"),
    Panel("Loss", ("loss", "eval_loss")),
    Panel("Loss by author, nats per token", ("loss/",)),
    Panel("Token accuracy", ("mean_token_accuracy",), "share"),
    Panel(
        "Log-likelihood by author, nats per token", ("controller/logp", "expert/logp", "route/logp")
    ),
    Panel("Entropy by author, nats", ("controller/entropy", "expert/entropy", "route/entropy")),
    Panel(
        "Share of the gradient on tokens with p < 0.01, by author",
        ("controller/rare_gradient", "expert/rare_gradient", "route/rare_gradient"),
        "share",
    ),
    Panel("Entropy, nats", ("entropy",), unless="controller/entropy"),
    Panel("Gradient norm", ("grad_norm",)),
    Panel("Infrastructure faults", ("rollout/fault_rate",), "rare"),
)


def result_charts(rows: Sequence[Mapping[str, Any]]) -> str:
    """Accuracy, well-formed and route shares with their intervals, a colour per condition."""
    conditions = list(dict.fromkeys(str(row["condition"]) for row in rows))

    def bars(value: str, bounds: Any) -> list[Bar]:
        found = []
        for row in rows:
            share = row.get(value)
            if share is not None:
                label = f"{row['checkpoint']} / {row['condition']}"
                color = conditions.index(str(row["condition"]))
                found.append(Bar(label, share, bounds(row), color))
        return found

    charts = {
        "Accuracy": bars("accuracy", lambda r: (r["ci_low"], r["ci_high"])),
        "Well-formed": bars("well_formed", lambda r: r.get("well_formed_ci")),
        "Route accuracy": bars("route_accuracy", lambda r: r.get("route_accuracy_ci")),
    }
    return cards(
        {
            name: interval_chart(found, label=f"{name} with 95% intervals", legend=conditions)
            for name, found in charts.items()
        }
    )


def outcome_chart(rows: Sequence[Mapping[str, Any]]) -> str:
    """How the samples of each row ended, and the accuracy by family."""
    outcomes = {
        f"{row['checkpoint']} / {row['condition']}": {n: row["outcomes"].get(n, 0) for n in RESULTS}
        for row in rows
        if row.get("outcomes")
    }
    charts = {
        "How samples ended": stacked_bars(
            outcomes, label="Outcomes", classes=[f"o-{name}" for name in RESULTS]
        )
    }
    return cards(charts) + _by_family(rows)


def curve_panels(metrics: Mapping[str, Metrics]) -> str:
    """Every panel that has data, stage by stage; where an alarm went off, each is marked."""
    parts = []
    for stage, lines in metrics.items():
        charts = {panel.title: _panel(panel, lines) for panel in PANELS}
        shown = cards(charts)
        if shown:
            notes = "".join(
                f'<p class="note alarm">Alarm at step {step:g} (dashed): {escape(reason)}.</p>'
                for step, reason in _alarms(lines)
            )
            parts.append(f'<h3 class="part">{escape(stage)}</h3>{notes}{shown}')
    return "".join(parts)


def phase_table(phases: Sequence[Mapping[str, Any]]) -> str:
    """Wall and CPU seconds of each phase, with bars."""
    if not phases:
        return ""
    longest = max(max(p["wall_s"], p["cpu_s"]) for p in phases) or 1.0
    body = ""
    for p in phases:
        meters = "".join(
            f'<div><span class="meter{css}" style="width:{220 * p[key] / longest:.0f}px">'
            "</span></div>"
            for key, css in (("wall_s", ""), ("cpu_s", " cpu"))
        )
        body += (
            f"<tr><td>{escape(str(p['name']))}</td><td class='num'>{p['wall_s']:.1f}</td>"
            f"<td class='num'>{p['cpu_s']:.1f}</td><td>{meters}</td></tr>"
        )
    wall, cpu = (sum(p[key] for p in phases) for key in ("wall_s", "cpu_s"))
    return (
        '<div class="card scroll"><table><thead><tr><th>phase</th><th class="num">wall s</th>'
        '<th class="num">CPU s</th><th>wall (upper), CPU (lower)</th></tr></thead>'
        f"<tbody>{body}<tr class='first'><td>total</td><td class='num'>{wall:.1f}</td>"
        f"<td class='num'>{cpu:.1f}</td><td></td></tr></tbody></table></div>"
    )


def comparison_table(comparisons: Sequence[Mapping[str, Any]]) -> str:
    """Paired differences with intervals and p-values."""
    if not comparisons:
        return ""
    body = ""
    for c in comparisons:
        for name, d in {"all problems": c["overall"], **c.get("by_source", {})}.items():
            verdict = "real" if d["is_real"] else "cannot be told from 0"
            body += (
                f"<tr><td>{escape(c['name'])}</td><td>{escape(c['a'])}</td>"
                f"<td>{escape(c['b'])}</td><td>{escape(name)}</td>"
                f"<td class='num'>{100 * d['difference']:+.1f}</td>"
                f"<td class='num'>{100 * d['ci_low']:+.1f} to {100 * d['ci_high']:+.1f}</td>"
                f"<td class='num'>{d['p_value']:.4f}</td><td>{verdict}</td></tr>"
            )
    heads = ("comparison", "A", "B", "problems", "B - A, points", "95% interval", "p", "difference")
    numbers = ("B - A, points", "95% interval", "p")
    head = "".join(
        f'<th class="num">{name}</th>' if name in numbers else f"<th>{name}</th>" for name in heads
    )
    return (
        '<h3 class="part">Differences, paired by problem</h3>'
        f'<div class="card scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _by_family(rows: Sequence[Mapping[str, Any]]) -> str:
    label = "family" if any("family" in (row.get("by") or {}) for row in rows) else "source"
    tables = [(row, (row.get("by") or {}).get(label) or {}) for row in rows]
    names = sorted({name for _, groups in tables for name in groups})
    if not names:
        return ""
    head = "".join(f'<th class="num">{escape(name)}</th>' for name in names)
    body = "".join(
        f"<tr><td>{escape(str(row['checkpoint']))}</td><td>{escape(str(row['condition']))}</td>"
        + "".join(
            f"<td class='num'>{100 * groups[name]['value']:.1f}</td>"
            if name in groups
            else "<td></td>"
            for name in names
        )
        + "</tr>"
        for row, groups in tables
        if groups
    )
    return (
        f'<h3 class="part">Accuracy by {label}, %</h3><div class="card scroll"><table>'
        f"<thead><tr><th>checkpoint</th><th>condition</th>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _panel(panel: Panel, lines: Metrics) -> str:
    if panel.unless and any(panel.unless in line for line in lines):
        return ""
    series: dict[str, list[tuple[float, float]]] = {}
    for wanted in panel.metrics:
        for name in _names(wanted, lines):
            points = [
                (float(line.get("step", n)), float(line[name]))
                for n, line in enumerate(lines, start=1)
                if isinstance(line.get(name), (int, float))
            ]
            if points:
                series[name.removeprefix(wanted) if wanted.endswith("/") else name] = points
    if panel.kind == "stack":
        return stacked_shares(series, label=panel.title)
    if panel.kind == "rare" and not any(y for points in series.values() for _, y in points):
        return ""
    is_share = panel.kind != "value" and all(
        -1e-9 <= y <= 1 + 1e-9 for points in series.values() for _, y in points
    )
    return line_chart(series, label=panel.title, is_share=is_share, marks=_alarms(lines))


def _alarms(lines: Metrics) -> list[tuple[float, str]]:
    """Steps at which an alarm went off, and why."""
    return [
        (float(line["step"]), line["alarm"])
        for line in lines
        if isinstance(line.get("alarm"), str) and isinstance(line.get("step"), (int, float))
    ]


def _names(wanted: str, lines: Metrics) -> list[str]:
    if not wanted.endswith("/"):
        return [wanted]
    return sorted({n for line in lines for n in line if n.startswith(wanted)})
