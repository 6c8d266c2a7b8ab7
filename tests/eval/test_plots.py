"""Charts: coordinates that mean what they say, labels escaped, edge cases without a crash."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from eval.charts import curve_panels, phase_table, result_charts
from eval.plots import (
    Bar,
    Dots,
    binned,
    dot_chart,
    figure,
    interval_chart,
    line_chart,
    moving_average,
    stacked_bars,
    stacked_shares,
)
from eval.ticks import tick_labels, ticks


def svg_of(chart: str) -> ElementTree.Element:
    """The chart's SVG, parsed: so it is well-formed XML."""
    return ElementTree.fromstring(chart[: chart.index("</svg>") + 6])


def test_higher_values_are_drawn_higher_and_later_steps_further_right() -> None:
    svg = svg_of(line_chart({"a": [(0, 0.1), (10, 0.9)]}, label="x", is_share=True))
    low, high = svg.findall("circle")
    assert float(low.attrib["cx"]) < float(high.attrib["cx"])
    assert float(low.attrib["cy"]) > float(high.attrib["cy"])
    assert [c.find("title").text for c in (low, high)] == ["a, 0: 10.0%", "a, 10: 90.0%"]


def test_bars_are_as_long_as_their_shares() -> None:
    svg = svg_of(stacked_bars({"r": {"right": 3, "wrong": 1, "fault": 0}}, label="x"))
    widths = [float(r.attrib["width"]) for r in svg.findall("rect")]
    assert widths[0] == pytest.approx(3 * widths[1], rel=0.01) and len(widths) == 2
    assert svg.find("rect/title").text == "r: right 3 of 4 (75.0%)"


def test_an_interval_spans_its_bounds() -> None:
    svg = svg_of(interval_chart([Bar("a", 0.5, (0.25, 1.0))], label="x"))
    whisker = svg.find("g/line")
    dot = float(svg.find("g/circle").attrib["cx"])
    left, right = float(whisker.attrib["x1"]), float(whisker.attrib["x2"])
    assert right - dot == pytest.approx(2 * (dot - left), abs=0.2)


def test_a_share_without_an_interval_has_neither_a_whisker_nor_a_word_of_one() -> None:
    svg = svg_of(interval_chart([Bar("a", 0.5, None)], label="x"))
    assert svg.find("g/line") is None and svg.find("g/title").text == "a: 50.0%"


def test_a_dot_stands_at_each_value_and_a_bar_at_their_mean() -> None:
    rows = [Dots("a", {"seed 1": 0.0, "seed 2": 1.0, "seed 3": 0.2}, 1), Dots("b", {"seed 2": 0.5})]
    svg = svg_of(dot_chart(rows, label="x"))
    first, second = svg.findall("g")
    left, right, third = (float(c.attrib["cx"]) for c in first.findall("circle"))
    mean = first.find("line")
    assert third == pytest.approx(left + 0.2 * (right - left), abs=0.1)
    assert float(mean.attrib["x1"]) == pytest.approx(left + 0.4 * (right - left), abs=0.1)
    assert first.find("circle/title").text == "a, seed 1: 0.0%" and first.get("class") == "c1"
    grid = [float(line.attrib["x1"]) for line in svg.findall("line")]
    assert (min(grid), max(grid)) == (left, right)  # the axis goes from 0 to 100%
    # A seed has the same height in every row, so equal values do not hide one another.
    tops = [float(g.find("line").attrib["y1"]) for g in (first, second)]
    heights = [float(c.attrib["cy"]) for c in first.findall("circle")]
    assert len(set(heights)) == 3
    assert float(second.find("circle").attrib["cy"]) - tops[1] == heights[1] - tops[0]


def test_a_figure_carries_its_colours_in_light_and_dark() -> None:
    text = figure(
        {"one": [Dots("a", {"s": 0.5})], "two": [Dots("b" * 30 + "c" * 30, {"s": 0.5}, 9)]},
        label="x",
    )
    svg = ElementTree.fromstring(text)
    name = "{http://www.w3.org/2000/svg}"
    style = svg.find(f"{name}style").text
    assert "prefers-color-scheme: dark" in style and "url(" not in style
    used = {css for e in svg.iter() for css in e.get("class", "").split()}
    assert used == {"paper", "value", "tick", "grid", "mean", "seed", "c0", "c1"}
    assert all(f".{css} {{" in style for css in used)
    width, height = float(svg.attrib["width"]), float(svg.attrib["height"])
    assert svg.attrib["viewBox"] == f"0 0 {width:.0f} {height:.0f}"
    second = svg.findall(f"{name}g")[1].attrib["transform"]
    assert second.startswith(f"translate({width / 2:.0f} ")  # side by side
    shown = [e.text for e in svg.iter(f"{name}text") if e.text.startswith("b")]
    assert shown == ["b" * 19 + "\u2026" + "c" * 20]


def test_stacked_shares_end_where_they_add_up() -> None:
    chart = stacked_shares({"a": [(1, 0.25), (2, 0.25)], "b": [(1, 0.5), (2, 0.75)]}, label="x")
    areas = [p.attrib["d"] for p in svg_of(chart).findall("path")]
    tops = [[float(y) for y in re.findall(r",([\d.]+)", d)] for d in areas]
    zero, one = max(tops[0]), min(tops[1])
    assert tops[1][0] == pytest.approx(zero - 0.75 * (zero - one), abs=0.2)


@pytest.mark.parametrize("chart", [line_chart, stacked_shares])
def test_no_data_gives_no_chart_and_one_point_gives_one(chart) -> None:
    assert chart({}, label="x") == ""
    assert chart({"a": []}, label="x") == ""
    svg_of(chart({"a": [(1, 0.5)]}, label="x"))


def test_values_that_are_no_number_are_left_out() -> None:
    chart = line_chart(
        {"a": [(1, math.nan), (2, math.inf), (3, 1.0)], "b": [(1, math.nan)]}, label="x"
    )
    assert len(svg_of(chart).findall("circle")) == 1
    assert "nan" not in chart and "inf" not in chart


def test_labels_are_escaped() -> None:
    bad = '<script>"&'
    for chart in (
        line_chart({bad: [(1, 1)], "b": [(1, 2)]}, label=bad),
        stacked_shares({bad: [(1, 1)], "b": [(1, 0)]}, label=bad),
        interval_chart([Bar(bad, 0.5, (0.4, 0.6))], label=bad, legend=[bad, "b"]),
        stacked_bars({bad: {bad: 1, "b": 2}}, label=bad),
        dot_chart([Dots(bad, {bad: 0.5})], label=bad),
        figure({bad: [Dots(bad, {bad: 0.5})]}, label=bad),
    ):
        assert "<script>" not in chart
        svg_of(chart)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (-3.7, 2.2), (0, 80), (1e-5, 3e-5), (0, 1e7), (5, 5)]
)
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    values = ticks(low, high)
    assert 1 <= len(values) <= 7
    assert all(low - 1e-9 <= v <= high + 1e-9 for v in values)


def test_steps_are_marked_in_whole_numbers() -> None:
    assert ticks(1, 2, whole=True) == [1, 2]
    assert ticks(0, 80, whole=True) == [0, 20, 40, 60, 80]


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (10.01, 10.03, "10.010 10.015 10.020 10.025 10.030"),
        (0.9990, 0.9996, "0.9990 0.9992 0.9994 0.9996"),
        (0, 1, "0 0.2 0.4 0.6 0.8 1.0"),
        (-0.5, 0.6, "-0.50 -0.25 0 0.25 0.50"),
        (0, 3000, "0 1,000 2,000 3,000"),
        (0, 250_000, "0 50,000 100,000 150,000 200,000 250,000"),
        (0, 2e6, "0 5.0e+05 1.0e+06 1.5e+06 2.0e+06"),
        (1e-6, 3e-6, "1.0e-06 1.5e-06 2.0e-06 2.5e-06 3.0e-06"),
        (5, 5, "5"),
        (0, 0, "0"),
    ],
)
def test_labels_of_ticks_tell_neighbours_apart(low: float, high: float, labels: str) -> None:
    assert tick_labels(ticks(low, high)) == labels.split()
    assert len(tick_labels([1e15, 1e15])) == 2  # closer than a float can tell


def test_an_axis_and_its_points_show_large_and_close_values_in_full() -> None:
    chart = line_chart(
        {"loss": [(500, 10.01), (1000, 10.02), (1500, 12345.0), (2000, -0.0)]}, label="x"
    )
    svg = svg_of(chart)
    shown = [text.text for text in svg.findall("text")]
    assert {"500", "1,000", "1,500", "5,000", "10,000"} <= set(shown) and "e+" not in chart
    titles = [c.find("title").text.partition(": ")[2] for c in svg.findall("circle")]
    assert titles == ["10.01", "10.02", "12,345", "0"]


def test_the_moving_average_keeps_constants_and_slopes() -> None:
    assert [y for _, y in moving_average([(n, 3.0) for n in range(100)])] == [3.0] * 100
    line = moving_average([(n, 2.0 * n) for n in range(100)])
    assert [y for _, y in line] == pytest.approx([2.0 * n for n in range(100)])
    assert moving_average([(0, 1.0), (1, 5.0)]) == [(0, 1.0), (1, 5.0)]


def test_long_runs_are_binned_without_moving_their_mean() -> None:
    points = [(float(n), float(n % 7)) for n in range(14_000)]
    few = binned(points)
    assert len(few) == 400
    assert sum(y for _, y in few) / 400 == pytest.approx(sum(y for _, y in points) / 14_000)
    assert few[0][0] < 35 and few[-1][0] > 13_900
    assert len(svg_of(line_chart({"a": points}, label="x")).findall("circle")) == 400


def test_panels_show_what_was_measured_and_nothing_else() -> None:
    lines = [
        {"step": n, "loss": 1.0, "route/share/calc": 0.5, "rollout/fault_rate": 0.0}
        for n in range(5)
    ]
    html = curve_panels({"stage1": lines, "empty": []})
    titles = re.findall(r"<h3>(.*?)</h3>", html)
    assert titles == ["Whom the controller consults first", "Loss"]
    assert "empty" not in html
    detailed = [line | {"entropy": 1.0, "controller/entropy": 0.5} for line in lines]
    assert "<h3>Entropy, nats</h3>" not in curve_panels({"stage1": detailed})
    assert "<h3>Entropy, nats</h3>" in curve_panels({"stage2": [{"entropy": 1.0}]})
    faulted = [line | {"rollout/fault_rate": 0.1} for line in lines]
    assert "Infrastructure faults" in curve_panels({"stage1": faulted})


def test_the_step_of_an_alarm_is_marked_in_every_panel_of_its_stage() -> None:
    lines = [{"step": n, "expert/logp": -float(n), "expert/rare_gradient": 0.1} for n in range(9)]
    alarm = {"step": 6, "alarm": "expert text costs <more>"}
    html = curve_panels({"stage1": [*lines, alarm], "stage2": [{"step": 1, "loss": 1.0}]})
    assert "Alarm at step 6 (dashed): expert text costs &lt;more&gt;." in html
    charts = re.findall(r"<svg.*?</svg>", html)
    assert [svg.count('class="mark"') for svg in charts] == [1, 1, 0]
    # Where step 6 is, between the frame's left side at step 0 and its right side at step 8.
    (mark,) = (e for e in svg_of(charts[0]).findall("line") if e.get("class") == "mark")
    assert mark.get("x1") == mark.get("x2") == "304.0"


def test_phases_add_up_and_results_without_intervals_are_drawn() -> None:
    table = phase_table(
        [{"name": "a", "wall_s": 1.5, "cpu_s": 3.0}, {"name": "b", "wall_s": 2, "cpu_s": 0}]
    )
    assert "3.5" in table and "total" in table
    assert phase_table([]) == ""
    row = {"checkpoint": "c", "condition": "local", "accuracy": 0.5, "ci_low": 0.4, "ci_high": 0.6}
    chart = result_charts([row | {"well_formed": 0.9}])
    assert "50.0%, 95% interval 40.0% to 60.0%<" in chart and "c / local: 90.0%<" in chart
