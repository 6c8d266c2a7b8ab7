"""Charts as inline SVG: no library, no script, readable in light and dark, safe by escaping.

Colours are CSS classes of `chart.css` (`c0`, `c1`, ... in the palette of Okabe and Ito, which
colour-blind readers can tell apart), so a chart follows the page's theme; `figure` gives a file of
its own, which carries that style. Points carry their value
as a `<title>`, which browsers show on hover. Shares are drawn on a fixed 0 to 100% axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from eval.page import asset
from eval.ticks import tick_labels, ticks

MAX_POINTS = 400  # per line: more cannot be told apart at this size
PALETTE = 8  # classes c0 to c7 in chart.css
_WIDTH, _HEIGHT = 400, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 32
_LABEL = 40  # characters of a row's label that are shown

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Bar:
    """One share with its interval, for `interval_chart`.

    Attributes:
        label: Left of the row.
        value: In [0, 1].
        interval: Bounds in [0, 1] around it, at 95%; None where they are not known.
        color: Index in the palette.
    """

    label: str
    value: float
    interval: Sequence[float] | None
    color: int = 0


@dataclass(frozen=True, slots=True)
class Dots:
    """One row of `dot_chart`.

    Attributes:
        label: Left of the row.
        values: Name of each point, such as a seed, to its share in [0, 1]; not empty.
        color: Index in the palette.
    """

    label: str
    values: Mapping[str, float]
    color: int = 0


@dataclass(frozen=True, slots=True)
class _Frame:
    """A plot area with linear axes."""

    x0: float
    x1: float
    y0: float
    y1: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x0) / (self.x1 - self.x0) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _TOP + (self.y1 - value) / (self.y1 - self.y0) * (_HEIGHT - _TOP - _BOTTOM)


def line_chart(
    series: Mapping[str, Points],
    *,
    label: str,
    is_share: bool = False,
    x_label: str = "step",
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Lines over steps: each value faint, their moving average bold, with a legend.

    Args:
        series: Name to points (x, y); points that are not finite are left out, and neighbours
            of a very long line are averaged.
        label: What the chart shows, for screen readers.
        is_share: Draw on a 0 to 100% axis.
        x_label: Name of the x axis.
        marks: Vertical lines: x, and what happened there.
    """
    clean = {
        name: binned([(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)])
        for name, points in series.items()
    }
    clean = {name: points for name, points in clean.items() if points}
    if not clean:
        return ""
    frame = _frame(clean, is_share)
    body = [_axes(frame, is_share, x_label)]
    body += [_mark(frame, x, what) for x, what in marks if frame.x0 <= x <= frame.x1]
    for n, (name, points) in enumerate(clean.items()):
        color = n % PALETTE
        smooth = moving_average(points)
        if len(smooth) > 4:
            body.append(f'<path class="line faint c{color}" d="{_path(frame, points)}"/>')
        body.append(f'<path class="line c{color}" d="{_path(frame, smooth)}"/>')
        body += [_point(frame, name, x, y, color, is_share) for x, y in points]
    return _svg(_WIDTH, _HEIGHT, label, body) + _legend(list(clean))


def stacked_shares(series: Mapping[str, Points], *, label: str, x_label: str = "step") -> str:
    """Shares that add up to at most 1, stacked over steps; a step without a value counts as 0."""
    steps = sorted({x for points in series.values() for x, _ in points})
    if not steps:
        return ""
    values = {name: dict(points) for name, points in series.items()}
    frame = _Frame(steps[0], max(steps[-1], steps[0] + 1), 0.0, 1.0)
    base = [0.0] * len(steps)
    body = []
    for n, (name, at) in enumerate(values.items()):
        top = [min(1.0, low + at.get(x, 0.0)) for low, x in zip(base, steps, strict=True)]
        upper = [(x, y) for x, y in zip(steps, top, strict=True)]
        lower = [(x, y) for x, y in zip(steps, base, strict=True)]
        area = _path(frame, upper + lower[::-1])
        body.append(
            f'<path class="area c{n % PALETTE}" d="{area}Z"><title>{escape(name)}</title></path>'
        )
        base = top
    body.append(_axes(frame, True, x_label))
    return _svg(_WIDTH, _HEIGHT, label, body) + _legend(list(series))


def interval_chart(bars: Sequence[Bar], *, label: str, legend: Sequence[str] = ()) -> str:
    """A dot with its interval, if it has one, per row, on a 0 to 100% axis."""
    if not bars:
        return ""
    left, step = max(118, _label_width([bar.label for bar in bars])), 26
    height = _TOP + step * len(bars) + _BOTTOM
    scale = _WIDTH - 118 - _RIGHT - 54  # room for the value's text
    width = left + scale + _RIGHT + 54

    def at(value: float) -> float:
        return left + value * scale

    body = [_percent_grid(at, _TOP, height - _BOTTOM)]
    for n, bar in enumerate(bars):
        y = _TOP + step * (n + 0.5)
        text, whisker = f"{bar.label}: {bar.value:.1%}", ""
        if bar.interval is not None:
            low, high = bar.interval
            text += f", 95% interval {low:.1%} to {high:.1%}"
            whisker = (
                f'<line class="whisker" x1="{at(low):.1f}" x2="{at(high):.1f}" '
                f'y1="{y:.1f}" y2="{y:.1f}"/>'
            )
        body.append(
            f'<g class="c{bar.color % PALETTE}"><title>{escape(text)}</title>'
            f'<text class="tick" x="{left - 10}" y="{y + 4:.1f}" text-anchor="end">'
            f"{escape(_short(bar.label))}</text>{whisker}"
            f'<circle class="dot" cx="{at(bar.value):.1f}" cy="{y:.1f}" r="5"/>'
            f'<text class="value" x="{width - 4}" y="{y + 4:.1f}" text-anchor="end">'
            f"{bar.value:.1%}</text>"
            "</g>"
        )
    return _svg(width, height, label, body) + _legend(list(legend))


def dot_chart(rows: Sequence[Dots], *, label: str) -> str:
    """A point per value and a bar at their mean per row, on a 0 to 100% axis."""
    return _svg(*_dot_rows(rows, _label_width([row.label for row in rows]), label)) if rows else ""


def figure(panels: Mapping[str, Sequence[Dots]], *, label: str, columns: int = 2) -> str:
    """Dot charts as one SVG file, with its own colours on its own background.

    Args:
        panels: Title to rows, none of them empty.
        label: What the figure shows.
        columns: Panels side by side.
    """
    left = _label_width([row.label for rows in panels.values() for row in rows])
    drawn = [(title, *_dot_rows(rows, left, title)) for title, rows in panels.items()]
    body, height, width = [], 10.0, 0.0
    for start in range(0, len(drawn), columns):
        line = drawn[start : start + columns]
        for n, (title, panel_width, _, _, parts) in enumerate(line):
            body.append(
                f'<g transform="translate({n * panel_width:.0f} {height:.0f})">'
                f'<text class="value" x="{left}" y="14">{escape(title)}</text>'
                f'<g transform="translate(0 18)">{"".join(parts)}</g></g>'
            )
            width = max(width, (n + 1) * panel_width)
        height += 30 + max(panel[2] for panel in line)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img" '
        f'aria-label="{escape(label, quote=True)}"><title>{escape(label)}</title>\n'
        f"<style>\n{asset('chart.css')}</style>\n"
        '<rect class="paper" width="100%" height="100%"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def stacked_bars(
    rows: Mapping[str, Mapping[str, int]], *, label: str, classes: Sequence[str] = ()
) -> str:
    """Counts of each row as shares of a full bar.

    Args:
        rows: Row label to counts by category, the same categories in each row.
        label: What the chart shows.
        classes: CSS class per category; the palette in order by default.
    """
    if not rows:
        return ""
    categories = list(next(iter(rows.values())))
    classes = list(classes) or [f"c{n % PALETTE}" for n in range(len(categories))]
    left, step, width = max(130, _label_width(list(rows))), 26, 2.4 * _WIDTH
    height = _TOP + step * len(rows) + _BOTTOM
    scale = width - left - _RIGHT - 10  # room for the last tick's label

    def at(value: float) -> float:
        return left + value * scale

    body = []
    for n, (name, counts) in enumerate(rows.items()):
        y, done, total = _TOP + step * n + 3, 0, sum(counts.values()) or 1
        body.append(
            f'<text class="tick" x="{left - 10}" y="{y + 14}" text-anchor="end">'
            f"{escape(_short(name))}</text>"
        )
        for category, css in zip(categories, classes, strict=True):
            count = counts.get(category, 0)
            if count:
                text = (
                    f"{name}: {category.replace('_', ' ')} {count} of {total} ({count / total:.1%})"
                )
                body.append(
                    f'<rect class="bar {css}" x="{at(done / total):.1f}" y="{y}" '
                    f'width="{count / total * scale:.1f}" height="{step - 6}">'
                    f"<title>{escape(text)}</title></rect>"
                )
            done += count
    body.append(_percent_grid(at, height - _BOTTOM, height - _BOTTOM))
    names = [category.replace("_", " ") for category in categories]
    return _svg(width, height, label, body) + _legend(names, classes)


def binned(points: Points, most: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Neighbours averaged so that at most `most` points are left; few points stay as they are."""
    size = -(-len(points) // most)
    if size <= 1:
        return list(points)
    groups = [points[n : n + size] for n in range(0, len(points), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def moving_average(points: Points) -> list[tuple[float, float]]:
    """Centred moving average over a tenth of the points, at most 15; the ends use what is there."""
    half = min(7, len(points) // 20)
    values = [y for _, y in points]
    smooth = []
    for n, (x, _) in enumerate(points):
        reach = min(half, n, len(points) - 1 - n)  # symmetric, so that a slope is not bent
        window = values[n - reach : n + reach + 1]
        smooth.append((x, sum(window) / len(window)))
    return smooth


def _frame(series: Mapping[str, Points], is_share: bool) -> _Frame:
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    x0, x1 = min(xs), max(xs)
    if is_share:
        return _Frame(x0, max(x1, x0 + 1), 0.0, 1.0)
    low, high = min(ys), max(ys)
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return _Frame(x0, max(x1, x0 + 1), low - margin, high + margin)


def _axes(frame: _Frame, is_share: bool, x_label: str) -> str:
    bottom = _HEIGHT - _BOTTOM
    parts = []
    values = ticks(frame.y0, frame.y1)
    names = [f"{value:.0%}" for value in values] if is_share else tick_labels(values)
    for value, name in zip(values, names, strict=True):
        y = frame.y(value)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
            f"{name}</text>"
        )
    values = ticks(frame.x0, frame.x1, whole=True)
    for value, name in zip(values, tick_labels(values), strict=True):
        parts.append(
            f'<text class="tick" x="{frame.x(value):.1f}" y="{bottom + 15}" '
            f'text-anchor="middle">{name}</text>'
        )
    parts.append(
        f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>'
        f'<text class="tick name" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 3}" text-anchor="end">'
        f"{escape(x_label)}</text>"
    )
    return "".join(parts)


def _percent_grid(at: object, top: float, bottom: float) -> str:
    assert callable(at)
    return "".join(
        f'<line class="grid" x1="{at(v):.1f}" x2="{at(v):.1f}" y1="{top}" y2="{bottom}"/>'
        f'<text class="tick" x="{at(v):.1f}" y="{bottom + 15}" text-anchor="middle">{v:.0%}</text>'
        for v in (0, 0.25, 0.5, 0.75, 1)
    )


def _label_width(labels: Sequence[str]) -> int:
    longest = max(map(len, labels), default=0)
    return 18 + round(6.3 * min(longest, _LABEL))


def _short(label: str) -> str:
    """A label without the middle of a long one: what tells rows apart is at either end."""
    half = _LABEL // 2
    return label if len(label) <= _LABEL else f"{label[: half - 1]}\u2026{label[-half:]}"


def _dot_rows(rows: Sequence[Dots], left: int, label: str) -> tuple[float, float, str, list[str]]:
    """What `_svg` draws: width, height, label and body."""
    step, scale = 26, 210

    def at(value: float) -> float:
        return left + value * scale

    height = _TOP + step * len(rows) + _BOTTOM
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    body = [_percent_grid(at, _TOP, height - _BOTTOM)]
    for n, row in enumerate(rows):
        y = _TOP + step * (n + 0.5)
        mean = sum(row.values.values()) / len(row.values)
        body.append(
            f'<g class="c{row.color % PALETTE}">'
            f"<title>{escape(row.label)}: mean {mean:.1%}</title>"
            f'<text class="tick" x="{left - 10}" y="{y + 4:.1f}" text-anchor="end">'
            f"{escape(_short(row.label))}</text>"
            f'<line class="mean" x1="{at(mean):.1f}" x2="{at(mean):.1f}" '
            f'y1="{y - 10:.1f}" y2="{y + 10:.1f}"/>'
        )
        for name, value in row.values.items():
            # Each name at its own height, so that equal values do not hide one another.
            shift = 14 * ((names.index(name) + 0.5) / len(names) - 0.5)
            body.append(
                f'<circle class="seed" cx="{at(value):.1f}" cy="{y + shift:.1f}" r="3.5">'
                f"<title>{escape(f'{row.label}, {name}: {value:.1%}')}</title></circle>"
            )
        body.append(
            f'<text class="value" x="{at(1) + 56}" y="{y + 4:.1f}" text-anchor="end">'
            f"{mean:.1%}</text></g>"
        )
    return at(1) + 60, height, label, body


def _path(frame: _Frame, points: Points) -> str:
    return "M" + "L".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)


def _mark(frame: _Frame, x: float, what: str) -> str:
    at = frame.x(x)
    return (
        f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}">'
        f"<title>step {x:g}: {escape(what)}</title></line>"
    )


def _point(frame: _Frame, name: str, x: float, y: float, color: int, is_share: bool) -> str:
    text = f"{name}, {x:g}: {_value(y, is_share)}"
    return (
        f'<circle class="hover c{color}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="4">'
        f"<title>{escape(text)}</title></circle>"
    )


def _value(value: float, is_share: bool) -> str:
    if is_share:
        return f"{value:.1%}"
    return f"{value:z,.0f}" if value == round(value) or abs(value) >= 10_000 else f"{value:.4g}"


def _legend(names: Sequence[str], classes: Sequence[str] = ()) -> str:
    if len(names) < 2:
        return ""
    classes = list(classes) or [f"c{n % PALETTE}" for n in range(len(names))]
    items = "".join(
        f'<li class="{css}"><span class="swatch"></span>{escape(name)}</li>'
        for name, css in zip(names, classes, strict=True)
    )
    return f'<ul class="legend">{items}</ul>'


def _svg(width: float, height: float, label: str, body: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" style="max-width:{1.2 * width:.0f}px" '
        f'role="img" aria-label="{escape(label, quote=True)}">' + "".join(body) + "</svg>"
    )
