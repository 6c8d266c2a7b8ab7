"""The table of results, as Markdown (also what commands print) and as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any


def percent(value: float | None) -> str:
    """A share in percent with one decimal, `-` where there is none."""
    return "-" if value is None else f"{100 * value:.1f}"


def markdown_cell(text: str) -> str:
    """Text as one cell of a Markdown table: one line, which neither ends the cell nor is markup."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


# Header, whether it is a number, and what stands in it.
_COLUMNS: list[tuple[str, bool, Any]] = [
    ("checkpoint", False, lambda r: "" if r.get("is_part") else str(r["checkpoint"])),
    ("condition", False, lambda r: str(r["condition"])),
    ("accuracy %", True, lambda r: percent(r["accuracy"])),
    ("95% interval", True, lambda r: f"{percent(r['ci_low'])} to {percent(r['ci_high'])}"),
    ("problems", True, lambda r: f"{r['n']}"),
    ("well-formed %", True, lambda r: percent(r.get("well_formed"))),
    ("route %", True, lambda r: percent(r.get("route_accuracy"))),
]


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of results as a Markdown table, a line per benchmark below each; shares in percent."""
    cells = [[name for name, _, _ in _COLUMNS]]
    cells += [[markdown_cell(show(row)) for _, _, show in _COLUMNS] for row in with_parts(rows)]
    widths = [max(len(line[n]) for line in cells) for n in range(len(_COLUMNS))]
    lines = [_markdown_line(line, widths) for line in cells]
    rule = [
        "-" * (width - 1) + ":" if is_number else "-" * width
        for (_, is_number, _), width in zip(_COLUMNS, widths, strict=True)
    ]
    return "\n".join([lines[0], _markdown_line(rule, widths), *lines[1:]])


def results_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of results as an HTML table, with pass@k and maj@k where k is above 1."""
    columns = list(_COLUMNS)
    most = max((row.get("samples_per_problem") or 1 for row in rows), default=1)
    if most > 1:
        columns.append((f"pass@{most} %", True, lambda r: percent(_pass_at(r, most))))
        columns.append((f"maj@{most} %", True, lambda r: percent(_maj_at(r, most))))
    columns += [
        ("fabricated %", True, lambda r: percent(r.get("fabricated_output_rate"))),
        ("tokens / problem", True, _tokens),
        ("expert calls / problem", True, lambda r: _usage(r, "expert_calls", "{:.2f}")),
        ("USD / problem", True, lambda r: _usage(r, "cost_usd", "{:.4f}")),
    ]
    columns = [c for c in columns if c in _COLUMNS or any(c[2](row) != "-" for row in rows)]
    head = "".join(
        f'<th class="num">{escape(n)}</th>' if is_number else f"<th>{escape(n)}</th>"
        for n, is_number, _ in columns
    )
    body, before, number = [], None, ' class="num"'
    for row in with_parts(rows):
        css = ' class="first"' if before not in (None, row["checkpoint"]) else ""
        cells = "".join(
            f"<td{number if is_number else ''}>{escape(show(row))}</td>"
            for _, is_number, show in columns
        )
        body.append(f"<tr{css}>{cells}</tr>")
        before = row["checkpoint"]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def with_parts(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Each row with several benchmarks, followed by one row for each and one for their mean."""
    table: list[Mapping[str, Any]] = []
    for row in rows:
        table.append(row)
        parts = dict((row.get("by") or {}).get("source") or {})
        if len(parts) < 2:
            continue
        mean = row.get("mean_of_sources")
        named = [*parts.items(), *([("mean of benchmarks", mean)] if mean else [])]
        for name, part in named:
            low, high = part["ci"]
            table.append(
                {
                    "checkpoint": row["checkpoint"],
                    "condition": f"- {name}",
                    "accuracy": part["value"],
                    "ci_low": low,
                    "ci_high": high,
                    "n": part["n"],
                    "is_part": True,
                }
            )
    return table


def _markdown_line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.rjust(width) if is_number else cell.ljust(width)
        for cell, width, (_, is_number, _) in zip(cells, widths, _COLUMNS, strict=True)
    ]
    return "| " + " | ".join(padded) + " |"


def _pass_at(row: Mapping[str, Any], k: int) -> float | None:
    return ((row.get("pass_at_k") or {}).get(str(k)) or {}).get("value")


def _maj_at(row: Mapping[str, Any], k: int) -> float | None:
    found = row.get("maj_at_k") or {}
    return found.get("value") if found.get("k") == k else None


def _tokens(row: Mapping[str, Any]) -> str:
    usage = row.get("usage_per_problem") or {}
    counts = [value for name, value in usage.items() if name.endswith("_tokens")]
    return f"{sum(counts):.0f}" if counts else "-"


def _usage(row: Mapping[str, Any], name: str, form: str) -> str:
    value = (row.get("usage_per_problem") or {}).get(name)
    return "-" if not value else form.format(value)
