"""The report of a study: means, paired differences, raw rows, whatever seeds are missing."""

from __future__ import annotations

import csv
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from eval.gather import ReportError
from eval.report import main as report
from eval.study_report import write_study_report
from eval.study_table import Metric, checkpoints_of, paired, results_csv, table

HOSTILE = "<script>alert('&')</script>\"|\nx"
SVG = "{http://www.w3.org/2000/svg}"


def row(
    seed: int, arm: str, accuracy: float, condition: str = "local", **values: Any
) -> dict[str, Any]:
    """A row of results: Stage I of an arm, or the warm start without one."""
    return {
        "seed": seed,
        "arm": arm,
        "checkpoint": "stage1" if arm else "warm",
        "stage2": "none",
        "condition": condition,
        "n": 600,
        "accuracy": accuracy,
        "ci_low": accuracy / 2,
        "ci_high": 1.0,
        "well_formed": 0.9,
        "route_accuracy": None,
        "fabricated_output_rate": 0.0,
        **values,
    }


def study(folder: Path, rows: list[dict[str, Any]], **results: Any) -> Path:
    """A study's folder with these rows, and settings where `config` has some."""
    folder.mkdir()
    config = results.pop("config", None)
    (folder / "results.json").write_text(json.dumps({"rows": rows, **results}))
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"stage": "study", "config": config}))
    return folder


def page_of(folder: Path) -> str:
    return write_study_report(folder).read_text(encoding="utf-8")


def cells_of(html: str, start: str) -> list[str]:
    """Texts of the cells of the first table row that begins with a text."""
    found = next(
        line for line in re.findall(r"<tr>(.*?)</tr>", html) if f"<td>{start}</td>" in line
    )
    return re.findall(r"<td[^>]*>(.*?)</td>", found)


def number(mean: str, seeds: str) -> str:
    """A cell of the page: a number and, below it, each seed's."""
    return f'{mean}<br><span class="note">{seeds}</span>'


def section(html: str, name: str) -> str:
    return html.split(f"<h2>{name}</h2>")[1].split("</section>")[0]


def test_the_table_gives_mean_deviation_and_seeds_of_every_checkpoint() -> None:
    # 20 and 40: mean 30, deviation sqrt(2 * 10 ** 2 / 1) = 14.14; 80, 90, 100: 90 and 10.
    rows = [row(1, "a", 0.2), row(2, "a", 0.4)]
    rows += [
        row(s, "a", v, checkpoint="stage2", stage2="x") for s, v in ((1, 0.8), (2, 0.9), (3, 1))
    ]
    lines = table(rows).splitlines()
    assert lines[0] == "Percent: mean ± standard deviation over seeds (seeds 1 / 2 / 3)."
    assert lines[2] == "| checkpoint | after removal | well-formed after removal |"
    assert lines[4].startswith("| a, Stage I | 30.0 ± 14.1 (20.0 / 40.0 / -) | 90.0 ± 0.0 (")
    assert lines[5].startswith("| a, Stage II x | 90.0 ± 10.0 (80.0 / 90.0 / 100.0) |")


def test_a_column_is_there_only_for_conditions_that_rows_have() -> None:
    rows = [row(1, "a", 0.5, "experts", route_accuracy=0.25), row(1, "a", 0.1, "plain")]
    lines = table(rows).splitlines()
    assert lines[2:] == [
        "| checkpoint | with experts | route (sampled) | plain |",
        "|---|---|---|---|",
        "| a, Stage I | 50.0 | 25.0 | 10.0 |",
    ]
    assert table([row(1, "a", 0.5, well_formed=None)]).splitlines()[2] == (
        "| checkpoint | after removal |"
    )
    assert table([]) == "No results yet."


def test_one_seed_has_neither_deviation_nor_interval(tmp_path: Path) -> None:
    html = page_of(study(tmp_path / "s", [row(7, "a", 0.5), row(7, "b", 0.75)]))
    assert "Percent: seed 7." in html and "±" not in html
    assert cells_of(section(html, "Results"), "b, Stage I")[1] == "75.0"
    assert cells_of(section(html, "Differences"), "b, Stage I")[:3] == [
        "b, Stage I",
        "a, Stage I",
        "+25.0",
    ]


def test_differences_are_paired_by_seed_and_their_interval_is_students() -> None:
    a = {1: 0.5, 2: 0.7, 3: 0.9, 5: 0.1}
    b = {1: 0.4, 2: 0.4, 3: 0.4, 4: 0.9}
    found, half = paired(a, b)
    assert found == pytest.approx({1: 0.1, 2: 0.3, 3: 0.5})
    assert half == pytest.approx(4.30265 * 0.2 / 3**0.5, rel=1e-5)  # t of 2 degrees of freedom
    assert paired({1: 0.5, 2: 0.7}, {1: 0.4, 2: 0.4})[1] == pytest.approx(12.7062 * 0.1, rel=1e-5)
    assert paired({1: 0.5}, {1: 0.4}) == (pytest.approx({1: 0.1}), None)
    assert paired({1: 0.5}, {2: 0.4}) == ({}, None)


def test_arms_are_compared_with_the_first_one_at_the_same_checkpoint(tmp_path: Path) -> None:
    second = {"checkpoint": "stage2", "stage2": "plain"}
    rows = []
    for seed in (1, 2):
        rows += [
            row(seed, "a", 0.2),
            row(seed, "a", 0.4, **second),
            row(seed, "b", 0.2 + 0.1 * seed),
            row(seed, "b", 0.9, checkpoint="stage2", stage2="other"),
            row(seed, "c", 0.5, **second),
        ]
    html = section(page_of(study(tmp_path / "s", rows)), "Differences")
    against, within = html.split("Within an arm")
    assert cells_of(against, "b, Stage I")[1:3] == [
        "a, Stage I",
        # 0.1 and 0.2: mean 15, half 12.706 * 7.071 / sqrt(2) = 63.5
        number("+15.0 [-48.5, +78.5]", "+10.0 / +20.0"),
    ]
    # The first arm has no variant `other`: what it ends in stands for it, and is named.
    assert cells_of(against, "b, Stage II other")[1] == "a, Stage II plain"
    assert cells_of(against, "c, Stage II plain")[1] == "a, Stage II plain"
    assert re.findall(r"<tr><td>(.*?)</td>", against) == [
        "b, Stage I",
        "b, Stage II other",
        "c, Stage II plain",
    ]
    assert cells_of(within, "a, Stage II plain")[1:3] == [
        "a, Stage I",
        number("+20.0 [+20.0, +20.0]", "+20.0 / +20.0"),
    ]


def test_a_seed_on_which_an_arm_failed_keeps_its_place(tmp_path: Path) -> None:
    rows = [row(1, "b", 0.5), row(1, "a", 0.1), row(2, "a", 0.3), row(3, "b", 0.7)]
    failures = [{"seed": 2, "arm": "b", "error": f"no luck {HOSTILE}"}]
    arms = {"a": {"stage1": {}}, "b": {"stage1": {}}, "evaluated": {}}
    config = {"seeds": [1, 2, 3], "arms": arms}
    html = page_of(study(tmp_path / "s", rows, failures=failures, config=config))
    assert cells_of(section(html, "Results"), "b, Stage I")[1] == number(
        "60.0 ± 14.1", "50.0 / - / 70.0"
    )
    # `a` is the first arm of the settings, although a row of `b` comes first.
    difference = cells_of(section(html, "Differences"), "b, Stage I")
    assert difference[1:3] == ["a, Stage I", number("+40.0", "+40.0 / - / -")]
    assert "seed 2, b: no luck &lt;script&gt;" in section(html, "Failures")
    assert "Nothing yet of seed 3: a." in html and "of seed 1" not in html


def test_a_study_without_any_row_says_so(tmp_path: Path) -> None:
    failures = [{"seed": 1, "arm": "warm", "error": "no space"}]
    folder = study(tmp_path / "s", [], failures=failures, config={"arms": {"a": {}}, "seeds": [1]})
    assert report([str(folder)]) == 0
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert "No results yet." in html and "seed 1, warm: no space" in html
    assert (folder / "table.md").read_text() == "No results yet.\n"
    assert not (folder / "figure.svg").exists()


def test_the_raw_table_has_a_line_per_row_with_four_digits() -> None:
    by = {"family": {"gcd": {"value": 1 / 3}}}
    rows = [
        row(2, "a", 0.123456, by=by),
        row(1, "b", 0.5),
        row(1, "a", 2 / 3, "experts", route_accuracy=0.99996),
        row(1, "", 0.0, by={"family": {"lcm": {"value": 1.0}}}),
    ]
    lines = list(csv.DictReader(results_csv(rows, ["a", "b"]).splitlines()))
    assert list(lines[0]) == (
        "seed arm checkpoint stage2 condition n accuracy ci_low ci_high well_formed "
        "route_accuracy fabricated_output_rate family:gcd family:lcm"
    ).split(" ")
    assert [(line["seed"], line["arm"]) for line in lines] == [
        ("1", ""),
        ("1", "a"),
        ("1", "b"),
        ("2", "a"),
    ]
    assert lines[0]["checkpoint"] == "warm" and lines[0]["family:lcm"] == "1.0"
    assert (lines[1]["accuracy"], lines[1]["route_accuracy"]) == ("0.6667", "1.0")
    assert (lines[3]["accuracy"], lines[3]["ci_low"], lines[3]["n"]) == ("0.1235", "0.0617", "600")
    assert lines[3]["family:gcd"] == "0.3333" and lines[3]["family:lcm"] == ""
    assert lines[3]["route_accuracy"] == ""


def test_values_that_are_no_number_are_no_value() -> None:
    rows = [row(1, "a", float("nan")), row(2, "a", 0.5)]
    (checkpoint,) = checkpoints_of(rows)
    assert checkpoint.values(Metric("", "local")) == {2: 0.5}
    assert results_csv(rows).splitlines()[1].startswith("1,a,stage1,none,local,600,,,1.0,")


def test_families_are_means_over_seeds(tmp_path: Path) -> None:
    rows = [
        row(1, "a", 0.5, by={"family": {"gcd": {"value": 0.25}, "lcm": {"value": 1.0}}}),
        row(2, "a", 0.5, by={"family": {"gcd": {"value": 0.75}}}),
        row(1, "b", 0.5),
    ]
    html = section(page_of(study(tmp_path / "s", rows)), "Families")
    assert cells_of(html, "a, Stage I") == ["a, Stage I", "50.0", "100.0"]
    assert "local" in html and "b, Stage I" not in html and "experts" not in html


def test_times_are_summed_over_seeds_and_arms(tmp_path: Path) -> None:
    phases = [
        {"name": "stage1", "wall_s": 1.5, "cpu_s": 2.0, "seed": seed, "arm": arm}
        for seed in (1, 2)
        for arm in ("a", "b")
    ]
    html = section(page_of(study(tmp_path / "s", [row(1, "a", 0.5)], phases=phases)), "Time")
    assert cells_of(html, "stage1")[1:3] == ["6.0", "8.0"]


def test_the_page_and_the_figure_show_a_point_of_every_seed(tmp_path: Path) -> None:
    rows = [row(seed, arm, 0.1 * seed) for seed in (1, 2, 3) for arm in ("", "a")]
    rows += [row(1, "a", 0.5, "no-python")]
    folder = study(tmp_path / "s", rows)
    html = page_of(folder)
    plots = re.findall(r"<svg.*?</svg>", section(html, "Every seed"))
    titles = re.findall(r"<h3>(.*?)</h3>", section(html, "Every seed"))
    assert titles == ["Accuracy: after removal", "Well-formed after removal", "Accuracy: no-python"]
    assert "<title>a, Stage I, seed 3: 30.0%</title>" in plots[0]
    assert [plot.count('class="seed"') for plot in plots] == [6, 6, 1]
    figure = ElementTree.parse(folder / "figure.svg").getroot()
    points = [e for e in figure.iter(f"{SVG}circle") if e.get("class") == "seed"]
    assert len(points) == 13
    texts = [e.text for e in figure.iter(f"{SVG}text")]
    assert all(title in texts for title in titles) and "warm start" in texts


def test_hostile_names_are_text_everywhere(tmp_path: Path) -> None:
    by = {"family": {HOSTILE: {"value": 0.5}}}
    second = {"checkpoint": "stage2", "stage2": HOSTILE}
    rows = [row(1, HOSTILE, 0.5, by=by), row(1, "b", 0.5), row(1, HOSTILE, 0.5, **second)]
    folder = study(
        tmp_path / "s",
        rows,
        phases=[{"name": HOSTILE, "wall_s": 1.0, "cpu_s": 1.0}],
        failures=[{"seed": 1, "arm": HOSTILE, "error": HOSTILE}],
        config={"arms": {HOSTILE: {"stage1": {}}}, "seeds": [1, 2], "note": HOSTILE},
    )
    html = page_of(folder)
    assert "<script" not in html and "http://" not in html and "https://" not in html
    assert 'default-src &#x27;none&#x27;; style-src &#x27;unsafe-inline&#x27;"' in html
    ElementTree.parse(folder / "figure.svg")
    lines = (folder / "table.md").read_text(encoding="utf-8").splitlines()[2:]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {4}
    assert not any("<" in line or not line.startswith("|") for line in lines)


def test_the_command_writes_every_file_of_an_unfinished_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"seeds": [1], "arms": {"a": {"stage1": {}}, "b": {"stage2": ["x"]}}}
    folder = study(tmp_path / "s", [row(1, "", 0.1), row(1, "a", 0.5)], config=config)
    out = tmp_path / "out"
    assert report([str(folder), "--out", str(out)]) == 0
    assert f"report: {out / 'report.html'}" in capsys.readouterr().out
    assert sorted(p.name for p in out.iterdir()) == [
        "figure.svg",
        "report.html",
        "results.csv",
        "table.md",
    ]
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "results.json"]
    assert "Nothing yet of seed 1: b." in (out / "report.html").read_text(encoding="utf-8")


def test_a_folder_that_is_no_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="no results of `rivet study`"):
        write_study_report(tmp_path)


def changed(row: dict[str, Any], **values: Any) -> str:
    return json.dumps({"rows": [row | values]})


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "no such file"),
        ('{"rows": [{"seed": 1', "cannot be read as JSON"),
        ('"a"', 'it is "a"; expected an object'),
        ('{"rows": 5}', "rows is 5; expected a list"),
        ('{"rows": {"a": 1}}', 'rows is {"a": 1}; expected a list'),
        (changed(row(1, "a", 0.5), accuracy="x"), 'rows[0].accuracy is "x"; expected a number'),
        (changed(row(1, "a", 0.5), seed="one"), 'rows[0].seed is "one"; expected an integer'),
        (changed(row(1, "a", 0.5), by={"family": {"gcd": 3}}), "rows[0].by.family.gcd is 3"),
        ('{"rows": [], "failures": ["x"]}', 'failures[0] is "x"; expected an object'),
        ('{"rows": [], "phases": [{"name": "a"}]}', "phases[0] has no wall_s"),
    ],
)
def test_broken_results_of_a_study_are_named_and_make_no_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, fault: str
) -> None:
    folder = study(tmp_path / "s", [row(1, "a", 0.5)], config={})
    (folder / "results.json").unlink()
    if content is not None:
        (folder / "results.json").write_text(content)
    # What its arms left would make a page of all of them under one name.
    inside = folder / "seed-1" / "a" / "eval" / "stage1"
    inside.mkdir(parents=True)
    own = {k: v for k, v in row(1, "", 0.5).items() if k not in ("seed", "arm")}
    (inside / "results.json").write_text(json.dumps({"rows": [own]}))
    assert report([str(folder)]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"rivet report: {folder}/results.json: {fault}")
    assert "run `rivet study` for" in told and len(told.splitlines()) == 1
    assert sorted(p.name for p in folder.glob("*.*")) == sorted(
        ["config.json"] + ["results.json"] * (content is not None)
    )


@pytest.mark.parametrize(
    ("arms", "fault"),
    [(["x"], 'config.arms is ["x"]; expected'), ({"x": None}, "config.arms.x is null; expected")],
)
def test_broken_settings_of_a_study_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arms: Any, fault: str
) -> None:
    folder = study(tmp_path / "s", [row(1, "a", 0.5)], config={"seeds": [1], "arms": arms})
    assert report([str(folder)]) == 1
    assert f"{folder}/config.json: {fault} an object" in capsys.readouterr().err


def test_a_study_is_reported_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(study(tmp_path / name, [row(1, "a", 0.5)])) for name in ("s", "t")]
    assert report(folders) == 1
    assert "a study of `rivet study` has a page of its own" in capsys.readouterr().err


def test_rows_of_an_evaluation_are_no_study(tmp_path: Path) -> None:
    rows = [
        {"checkpoint": "c", "condition": "local", "accuracy": 0.5, "ci_low": 0.4, "ci_high": 0.6}
    ]
    folder = study(tmp_path / "s", [rows[0] | {"n": 4}])
    assert report([str(folder)]) == 0
    assert (folder / "report.md").exists() and not (folder / "results.csv").exists()


def test_the_published_table_is_what_its_rows_give() -> None:
    docs = Path(__file__).parents[2] / "docs"
    rows = json.loads((docs / "results" / "study_mini.json").read_text(encoding="utf-8"))["rows"]
    line = next(line for line in table(rows).splitlines() if line.startswith("| mask, Stage II"))
    assert line.split(" | ", 1)[1] in (docs / "results.md").read_text(encoding="utf-8")
