"""The report page: complete in itself, and model text is data wherever it comes from."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import completion, trajectory_of

from eval.gather import ReportError, gather, read_metrics
from eval.report import main, write_report
from eval.summary import summarise
from eval.viewer import CHUNK, Shelf, pack_blocks, thin_out, token_lengths, unpack_block
from rivet.rollout.types import RolloutRequest
from rivet.store import TrajectoryStore
from rivet.trajectory import Trajectory

HOSTILE = (
    "</script><script>document.title='broken'</script><img src=x onerror=\"document.title='in'\">"
    "<svg onload=alert(1)>--><style>*{display:none}</style>&lt;b&gt;\x00\u2028\U0001f600]]>"
)


class Page(HTMLParser):
    """Collects tags and attributes of a page, and the text of its script elements."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.text: list[str] = []
        self._script: dict[str, str | None] | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._script = dict(attrs) if tag == "script" else None

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.scripts.append((self._script, data))
            self._script = None
        else:
            self.text.append(data)


@pytest.fixture
def rows_of(tag_tokenizer):
    """Makes graded rows whose every text is hostile, or plain."""

    def make(count: int, text: str = HOSTILE, mode: Any = "experts") -> list[Trajectory]:
        rows = []
        for n in range(count):
            request = RolloutRequest(
                f"p{n}{text}",
                tuple(tag_tokenizer.encode_untrusted(f"problem {n} {text}")),
                mode=mode,
                info={"family": f"gcd{text}", "gold": text, "extracted": text, "reason": text},
            )
            pieces = completion("numth", "6", mode=mode)
            pieces[1:1] = []
            foreign = tag_tokenizer.decode(tag_tokenizer.encode_untrusted(text))
            pieces[1] = (pieces[1][0].replace("Use code.", foreign), pieces[1][1])
            outcome = ("right", "wrong")[n % 2]
            rows.append(
                trajectory_of(
                    tag_tokenizer, request, pieces, outcome=outcome, reward=float(n % 2 == 0)
                )
            )
        return rows

    return make


def write_hostile(folder: Path, rows: list[Trajectory], tokenizer: Any) -> Path:
    """A report in which everything that is not ours is hostile."""
    TrajectoryStore(folder / "trajectories").write("part-00000", rows)
    curves = folder / "metrics.jsonl"
    lines = [
        {"step": n, "loss": 1 / (n + 1), "reward/mean": n / 9, f"route/share/{HOSTILE}": 0.5}
        for n in range(10)
    ]
    curves.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 10, "lo')
    summary = summarise(rows, competent={f"gcd{HOSTILE}": "numth"})
    difference = {
        "difference": 0.1,
        "ci_low": 0.0,
        "ci_high": 0.2,
        "p_value": 0.03,
        "n": 4,
        "is_real": True,
    }
    return write_report(
        folder,
        rows=[{"checkpoint": HOSTILE, "condition": "experts", **summary}],
        phases=[{"name": HOSTILE, "wall_s": 1.0, "cpu_s": 2.0}],
        curves={HOSTILE: curves},
        stores={HOSTILE: folder / "trajectories"},
        tokenizer=tokenizer,
        comparisons=[
            {
                "name": HOSTILE,
                "a": HOSTILE,
                "b": HOSTILE,
                "accuracy_a": 0.1,
                "accuracy_b": 0.2,
                "overall": difference,
                "by_source": {HOSTILE: difference},
                "unpaired": 0,
            }
        ],
        config={"note": HOSTILE},
        title=f"report {HOSTILE}",
    )


def test_hostile_text_makes_no_markup_and_no_script(rows_of, tag_tokenizer, tmp_path) -> None:
    page = Page(write_hostile(tmp_path, rows_of(4), tag_tokenizer).read_text("utf-8"))
    own = [text for attrs, text in page.scripts if "type" not in attrs]
    data = [attrs for attrs, _ in page.scripts if attrs.get("type") == "application/octet-stream"]
    assert len(own) == 1 and "unpack" in own[0]  # viewer.js and nothing else
    assert len(own) + len(data) == len(page.scripts) == 4
    assert {tag for tag, _ in page.tags} & {"img", "iframe", "object", "link", "base"} == set()
    assert sum(tag == "style" for tag, _ in page.tags) == 1
    for _, attrs in page.tags:
        assert not any(name.startswith("on") for name in attrs)
        assert (attrs.get("href") or "#").startswith("#") and "src" not in attrs
    shown = "".join(page.text)
    assert "</script><script>document.title='broken'</script>" in shown  # as text


def test_the_page_loads_nothing_and_allows_no_script_but_its_own(
    rows_of, tag_tokenizer, tmp_path
) -> None:
    import base64
    import hashlib

    text = write_hostile(tmp_path, rows_of(4), tag_tokenizer).read_text("utf-8")
    page = Page(text)
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    script = next(text for attrs, text in page.scripts if "type" not in attrs)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert "http://" not in text and "https://" not in text and "@import" not in text


def test_the_viewer_never_builds_markup_from_data() -> None:
    script = (Path("eval") / "viewer.js").read_text("utf-8")
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "srcdoc",
    ):
        assert word not in script


def test_what_the_viewer_unpacks_is_what_was_sampled(rows_of, tag_tokenizer, tmp_path) -> None:
    rows = rows_of(CHUNK + 5)
    page = Page(pack_blocks([Shelf("run", rows, tag_tokenizer, len(rows))]))
    blocks = {attrs["id"]: unpack_block(text) for attrs, text in page.scripts}
    assert list(blocks) == ["viewer-index"] + [
        f"viewer-{name}-{n}" for n in (0, 1) for name in ("chunk", "tokens")
    ]
    assert [row[1] for row in blocks["viewer-index"]["rows"]] == [t.id for t in rows]
    texts = [*blocks["viewer-chunk-0"], *blocks["viewer-chunk-1"]]
    for row, text in zip(rows, texts, strict=True):
        assert "".join(span[2] for span in text["spans"]) == tag_tokenizer.decode(
            row.completion_ids
        )
        assert [tuple(s[:2]) for s in text["spans"]] == [(s.author, s.kind) for s in row.segments]
        assert text["prompt"] == tag_tokenizer.decode(row.prompt_ids)
        assert dict(text["facts"])["gold"] == HOSTILE


def test_every_token_has_its_text_its_logprob_and_its_weights(rows_of, tag_tokenizer) -> None:
    (row,) = rows_of(1, "caf\u00e9 \U0001f600")
    own = [round(0.1 * n - 0.2, 4) for n in range(len(row.segments))]
    row = replace(row, info=row.info | {"segment_weights": own})
    table = {"controller/format": 2.0, "expert/reply": 0.5}
    shelf = Shelf("run", [row], tag_tokenizer, 1, {"Stage II (stage2)": table})
    page = Page(pack_blocks([shelf]))
    blocks = {attrs["id"]: unpack_block(text) for attrs, text in page.scripts}
    spans, (tokens,) = blocks["viewer-chunk-0"][0]["spans"], blocks["viewer-tokens-0"]
    assert "segment_weights" not in dict(blocks["viewer-chunk-0"][0]["facts"])
    for n, (segment, span) in enumerate(zip(row.segments, spans, strict=True)):
        lengths, logprobs, weights = tokens[n]
        assert len(lengths) == len(segment)
        assert sum(lengths) == len(span[2].encode("utf-16-le")) // 2
        assert logprobs == (
            [round(100 * v) for v in segment.logprobs] if segment.logprobs else None
        )
        name = f"{segment.author}/{segment.kind}"
        assert weights == {"Stage I": own[n], "Stage II (stage2)": table.get(name, 0.0)}


@pytest.mark.parametrize("logprob", [float("-inf"), float("inf"), float("nan")])
def test_a_logprob_that_is_no_number_leaves_json_that_a_browser_reads(
    rows_of, tag_tokenizer, logprob: float
) -> None:
    (row,) = rows_of(1, "x")
    first = replace(row.segments[0], logprobs=(logprob, *row.segments[0].logprobs[1:]))
    row = replace(row, segments=(first, *row.segments[1:]))
    page = Page(pack_blocks([Shelf("run", [row], tag_tokenizer, 1)]))
    blocks = {attrs["id"]: unpack_block(text) for attrs, text in page.scripts}
    json.dumps(blocks, allow_nan=False)  # Python reads the Infinity and NaN that browsers refuse
    ((_, logprobs, _), *_) = blocks["viewer-tokens-0"][0]
    assert logprobs == [-100_000, *(round(100 * v) for v in first.logprobs[1:])]


@settings(deadline=None)  # other processes may have the machine
@given(st.lists(st.integers(0, 255), min_size=1, max_size=12))
def test_lengths_of_tokens_add_up_whatever_bytes_they_are(values: list[int]) -> None:
    tokenizer: Any = SimpleNamespace(bytes_of=bytes)  # each byte is a token
    text = bytes(values).decode("utf-8", "replace")
    lengths = token_lengths(values, tokenizer)
    assert len(lengths) == len(values) and sum(lengths) == len(text.encode("utf-16-le")) // 2


def test_a_report_finds_what_stage_two_weighed_the_tokens_with(
    rows_of, tag_tokenizer, tmp_path
) -> None:
    store = tmp_path / "run" / "collect" / "trajectories"
    TrajectoryStore(store).write("part-00000", rows_of(2, "x"))
    stage2 = tmp_path / "run" / "stage2"
    stage2.mkdir()
    config = {"config": {"trajectories": str(store)}}
    (stage2 / "config.json").write_text(json.dumps(config))
    table = {"controller/format": 2.0}
    (stage2 / "finished.json").write_text(json.dumps({"results": {"token_weights": table}}))
    found = gather([tmp_path / "run"], tag_tokenizer)
    assert found["weights"] == {"collect": {"Stage II (stage2)": table}}
    assert write_report(tmp_path, **found).is_file()


def test_facts_survive_json_whatever_they_are(rows_of, tag_tokenizer) -> None:
    (row,) = rows_of(1, "x")
    row = replace(row, seed=2**63 - 1, info=row.info | {"score": float("nan"), "gold": "\ud800"})
    page = Page(pack_blocks([Shelf("run", [row], tag_tokenizer, 1)]))
    facts = dict(unpack_block(page.scripts[1][1])[0]["facts"])
    assert facts["seed"] == str(2**63 - 1) and facts["score"] == "nan" and facts["gold"] == "?"


def test_a_label_never_stands_for_a_fact_of_the_trajectory(rows_of, tag_tokenizer) -> None:
    (row,) = rows_of(1, "x")
    labels = {"seed": 1, "step": 9, "answer": "7", "verdict": "wrong", "level": 3}
    row = replace(row, seed=5, step=2, info=row.info | labels)
    page = Page(pack_blocks([Shelf("run", [row], tag_tokenizer, 1)]))
    facts = dict(unpack_block(page.scripts[1][1])[0]["facts"])
    assert [facts[name] for name in labels] == ["5", "2", "x", "right", "3"]


def test_more_trajectories_than_the_limit_are_thinned_out_evenly_and_the_page_says_so(
    rows_of, tag_tokenizer, tmp_path
) -> None:
    assert thin_out(3, 10) == [0, 1, 2]
    assert thin_out(10, 5) == [0, 2, 4, 6, 8]
    stores = {}
    for name, count in (("a", 30), ("b", 10)):
        TrajectoryStore(tmp_path / name).write("part-00000", rows_of(count, name))
        stores[name] = tmp_path / name
    path = write_report(
        tmp_path, rows=[], stores=stores, tokenizer=tag_tokenizer, max_trajectories=20
    )
    page = Page(path.read_text("utf-8"))
    index = next(unpack_block(t) for a, t in page.scripts if a.get("id") == "viewer-index")
    assert [(r["shown"], r["total"]) for r in index["runs"]] == [(15, 30), (5, 10)]
    assert "20 of 40 are shown" in "".join(page.text)


def test_a_report_of_rows_alone_has_no_viewer_and_no_script(tmp_path) -> None:
    row = {
        "checkpoint": "warm",
        "condition": "local",
        "accuracy": 0.063,
        "ci_low": 0.046,
        "ci_high": 0.085,
        "n": 600,
        "well_formed": 0.996,
        "route_accuracy": None,
    }
    path = write_report(tmp_path, rows=[row])
    page = Page(path.read_text("utf-8"))
    assert page.scripts == [] and "6.3" in "".join(page.text)
    assert (tmp_path / "report.md").read_text().count("| warm") == 1


def test_markdown_holds_the_table_the_differences_and_the_times(
    rows_of, tag_tokenizer, tmp_path
) -> None:
    write_hostile(tmp_path, rows_of(4), tag_tokenizer)
    text = (tmp_path / "report.md").read_text("utf-8")
    assert "| checkpoint" in text and "50.0" in text
    assert "+10.0 points" in text and "| 1.0 | 2.0 |" in text


def test_missing_curves_and_torn_lines_are_left_out(tmp_path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n[1]\n{"step": 2, "lo')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.0}]
    assert write_report(tmp_path, rows=[], curves={"x": tmp_path / "none.jsonl"}).is_file()


def test_the_command_gathers_a_run_folder(rows_of, tag_tokenizer, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    rows = rows_of(4, "x")
    TrajectoryStore(run / "eval" / "local" / "trajectories").write("part-00000", rows)
    (run / "eval" / "results.json").write_text(
        json.dumps({"rows": [{"checkpoint": "c", "condition": "local", **summarise(rows)}]})
    )
    (run / "stage1").mkdir()
    (run / "stage1" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    tag_tokenizer.hf.save_pretrained(run / "stage1" / "checkpoint")
    found = gather([run])
    assert list(found["curves"]) == ["stage1"] and list(found["stores"]) == ["eval/local"]
    assert main([str(run)]) == 0
    page = Page((run / "report.html").read_text("utf-8"))
    assert "report.html" in capsys.readouterr().out
    assert {a.get("id") for a, _ in page.scripts} >= {"viewer-index", "viewer-chunk-0"}
    with pytest.raises(ReportError, match="found no results.json"):
        gather([tmp_path / "nothing"])
    assert main([str(tmp_path / "nothing")]) == 1

    for name, start in (("a", "2026-01-02"), ("b", "2026-01-01")):
        (tmp_path / "order" / name).mkdir(parents=True)
        (tmp_path / "order" / name / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
        (tmp_path / "order" / name / "config.json").write_text(json.dumps({"started_at": start}))
    assert list(gather([tmp_path / "order"])["curves"]) == ["b", "a"]

    both = gather([run, run / "eval"], tag_tokenizer)
    assert list(both["stores"]) == ["run: eval/local", "eval: local"]
    assert len(both["rows"]) == 2
    out = tmp_path / "out"
    assert main([str(run), str(run / "eval"), "--out", str(out)]) == 0
    assert (out / "report.html").is_file()


def write_evaluation(folder: Path, rows: list[dict[str, Any]], **results: Any) -> Path:
    """A finished evaluation as far as a report reads it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"stage": "eval"}))
    (folder / "finished.json").write_text("{}")
    (folder / "results.json").write_text(json.dumps({"rows": rows, **results}))
    return folder


def eval_row(accuracy: float, condition: str = "experts") -> dict[str, Any]:
    bounds = {"ci_low": 0.0, "ci_high": 1.0, "n": 4}
    return {"checkpoint": "stage1", "condition": condition, "accuracy": accuracy, **bounds}


DIFFERENCE = {"difference": -0.1, "ci_low": -0.2, "ci_high": 0.0, "p_value": 0.5, "n": 4}
GAP = {
    "name": "expert-removal gap",
    "a": "stage1/experts",
    "b": "stage1/local",
    "accuracy_a": 0.5,
    "accuracy_b": 0.4,
    "overall": {**DIFFERENCE, "is_real": False},
    "by_source": {},
    "unpaired": 0,
}


def test_evaluations_that_call_their_checkpoint_alike_are_told_apart(tmp_path: Path) -> None:
    for arm in ("a", "b"):
        greedy = [eval_row(0.5), eval_row(0.4, "local")]
        write_evaluation(tmp_path / arm / "eval" / "stage1", greedy, comparisons=[GAP])
    write_evaluation(tmp_path / "a" / "eval" / "stage1-sampled", [eval_row(0.3)])

    def names(*runs: Path) -> tuple[list[str], list[str]]:
        found = gather(runs)
        return [row["checkpoint"] for row in found["rows"]], [
            c[side] for c in found["comparisons"] for side in ("a", "b")
        ]

    # One evaluation keeps the name that it gave itself.
    assert names(tmp_path / "b") == (["stage1"] * 2, ["stage1/experts", "stage1/local"])
    assert names(tmp_path / "a") == (
        ["stage1", "stage1", "stage1-sampled"],
        ["stage1/experts", "stage1/local"],
    )
    rows, sides = names(tmp_path)
    sampled = "a/eval/stage1-sampled"
    assert rows == ["a/eval/stage1"] * 2 + [sampled] + ["b/eval/stage1"] * 2
    assert sides[2:] == ["b/eval/stage1/experts", "b/eval/stage1/local"]
    rows, _ = names(tmp_path / "a", tmp_path / "b" / "eval")
    assert rows[2:] == ["a: eval/stage1-sampled", "eval: stage1", "eval: stage1"]
    # In the table, and whole in the charts.
    assert main([str(tmp_path)]) == 0
    page = Page((tmp_path / "report.html").read_text("utf-8"))
    assert page.text.count(sampled) == 1 and f"{sampled} / experts" in page.text


def test_runs_of_one_name_are_told_apart_by_the_folders_they_lie_in(tmp_path: Path) -> None:
    for seed in ("seed-1", "seed-2"):
        folder = write_evaluation(tmp_path / seed / "arm", [eval_row(0.5)])
        (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    found = gather([tmp_path / "seed-1" / "arm", tmp_path / "seed-2" / "arm"])
    names = ["seed-1/arm", "seed-2/arm"]
    assert [row["checkpoint"] for row in found["rows"]] == [f"stage1 ({name})" for name in names]
    assert list(found["curves"]) == [f"{name}: {name}" for name in names]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ('{"rows": [{"checkp', "cannot be read as JSON"),
        ("7", "it is 7; expected an object"),
        (None, "no such file"),
        ('{"rows": {"a": 1}}', 'rows is {"a": 1}; expected a list'),
        ('{"rows": [{"checkpoint": "c"}]}', "rows[0] has no condition"),
        (json.dumps({"rows": [eval_row(0.5) | {"accuracy": "x"}]}), 'rows[0].accuracy is "x"'),
        (json.dumps({"rows": [eval_row(0.5) | {"by": [1]}]}), "rows[0].by is [1]"),
        (json.dumps({"rows": [], "phases": [{"name": "x"}]}), "phases[0] has no wall_s"),
        (json.dumps({"comparisons": [GAP | {"overall": {}}]}), "comparisons[0].overall has no"),
    ],
)
def test_a_broken_results_file_inside_a_run_is_named_and_no_row_drops_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, fault: str
) -> None:
    write_evaluation(tmp_path / "eval" / "whole", [eval_row(0.5)])
    broken = write_evaluation(tmp_path / "eval" / "broken", []) / "results.json"
    if content is None:
        broken.unlink()
    else:
        broken.write_text(content)
    assert main([str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"rivet report: {broken}: {fault}") and len(told.splitlines()) == 1
    assert not (tmp_path / "report.html").exists()


def test_what_a_report_cannot_read_or_write_is_one_line(
    tag_tokenizer, tmp_path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    run = write_evaluation(tmp_path / "run", [eval_row(0.5)])
    (run / "checkpoint").mkdir()
    tag_tokenizer.hf.save_pretrained(run / "checkpoint")
    tokenizer = run / "checkpoint" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text()[:500])
    TrajectoryStore(run / "trajectories").write("part-00000", [])

    def told(*arguments: str) -> str:
        assert main([str(run), *arguments]) == 1
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        return lines[0].removeprefix("rivet report: ")

    cannot = f"{run}/checkpoint: its tokenizer cannot be loaded: "
    assert told().startswith(cannot)
    assert told("--tokenizer", str(run / "checkpoint")).startswith(cannot)
    assert told("--tokenizer", f"{tmp_path}/none").startswith(f"{tmp_path}/none: no such folder")
    shutil.rmtree(run / "trajectories")
    file = run / "results.json"
    assert told("--out", f"{file}/x").startswith(f"{file}/x: Not a directory; expected")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(denied(run)))
    assert told().startswith(f"{run}: Permission denied; expected files to read and a folder to")
    for number in ("0", "-1", "x"):
        with pytest.raises(SystemExit) as stop:
            main([str(run), f"--max-trajectories={number}"])
        assert stop.value.code == 2 and "at least 1" in capsys.readouterr().err


def denied(folder: Path) -> OSError:
    return PermissionError(13, "Permission denied", str(folder / ".report.md.tmp-1"))


def test_hostile_names_end_no_cell_of_markdown_and_are_no_markup(tmp_path: Path) -> None:
    name = "<script>\n| a\n\n# b\u2028c"
    rows = [eval_row(0.5) | {"checkpoint": name}]
    phases = [{"name": name, "wall_s": 1.0, "cpu_s": 1.0}]
    gap = GAP | {"a": name, "by_source": {name: GAP["overall"]}}
    write_report(tmp_path, rows=rows, phases=phases, comparisons=[gap], title=name)
    text = (tmp_path / "report.md").read_text("utf-8")
    assert "<" not in text and "\u2028" not in text
    assert "".join(line[0] for line in text.split("\n") if line) == "#|||-  |||"
    assert text.count("&lt;script> \\| a # b c |") == 2


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_shows_hostile_text_as_text(rows_of, tag_tokenizer, tmp_path) -> None:
    path = write_hostile(tmp_path, rows_of(4), tag_tokenizer)
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
        "--disable-background-networking --disable-component-update --virtual-time-budget=10000"
    ).split()
    done = subprocess.run(
        [CHROMIUM, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    page = Page(done.stdout)
    html = next(attrs for tag, attrs in page.tags if tag == "html")
    assert html.get("data-viewer") == "ready"
    tokens = sum(tag == "span" and attrs.get("class") == "t" for tag, attrs in page.tags)
    assert tokens == sum(map(len, rows_of(1)[0].segments))  # of the one that is open
    assert not any(tag in ("img", "iframe") for tag, _ in page.tags)
    shown = "".join(page.text)
    assert shown.count("report </script><script>document.title='broken'") == 2  # title, heading
    assert "4 of 4 trajectories" in shown and shown.count("problem 0 </script>") == 1
