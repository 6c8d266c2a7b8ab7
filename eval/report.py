"""The report of a run: one HTML page that works offline, and the same tables in Markdown.

    write_report(run_dir, rows=..., phases=..., curves=..., stores=..., tokenizer=...)

writes `run_dir/report.html` and `run_dir/report.md`. Everything but `rows` may be left out:

- rows: as in `results.json`: `checkpoint`, `condition`, `accuracy`, ... and, where there, the rest
  of `eval.summary` (`outcomes`, `by`, `usage_per_problem`, ...);
- phases: `{"name", "wall_s", "cpu_s"}`;
- curves: stage name -> its `metrics.jsonl`;
- stores: label -> a folder of trajectories, for the viewer;
- tokenizer: that of the stores, or one per label;
- weights: label -> name of a training -> what it weighed tokens with, by `author/kind`.

The page holds no address of another site, its style and script are inline, and a content policy
forbids any script but ours. Text from models, problems and files is escaped or is data. The command
gives a folder of `rivet latent` the page of `eval.latent_report`, and one of `rivet study` that of
`eval.study_report`.

Run line: `rivet report runs/demo`
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.charts import comparison_table, curve_panels, outcome_chart, phase_table, result_charts
from eval.gather import ReportError, gather, read_metrics
from eval.latent_report import is_latent_run, write_latent_report
from eval.page import asset, page, settings
from eval.results_file import ResultsError
from eval.study_report import is_study, write_study_report
from eval.table import markdown_cell, markdown_table, results_table
from eval.viewer import Shelf, pack_blocks, thin_out
from rivet.checkpoints import CheckpointError, load_tokenizer
from rivet.files import DiskFullError, atomic_write_text, is_leftover
from rivet.store import StoreError, TrajectoryStore
from rivet.tokenization import ProtocolTokenizer, TokenizerError

MAX_TRAJECTORIES = 5000
# Folders with a page of another form: whether one is such, what writes it, and its name.
OWN_PAGES = (
    (is_latent_run, write_latent_report, "run of `rivet latent`"),
    (is_study, write_study_report, "study of `rivet study`"),
)


def write_report(
    run_dir: str | Path,
    *,
    rows: Sequence[Mapping[str, Any]],
    phases: Sequence[Mapping[str, Any]] = (),
    curves: Mapping[str, str | Path] | None = None,
    stores: Mapping[str, str | Path] | None = None,
    tokenizer: ProtocolTokenizer | Mapping[str, ProtocolTokenizer] | None = None,
    weights: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None,
    comparisons: Sequence[Mapping[str, Any]] = (),
    config: Any = None,
    title: str = "rivet report",
    max_trajectories: int = MAX_TRAJECTORIES,
) -> Path:
    """Write `report.html` and `report.md` into a folder, each atomically.

    Args:
        run_dir: Where they go.
        rows: One per checkpoint and condition.
        phases: Wall and CPU time of each phase.
        curves: Stage name to its `metrics.jsonl`; files that are not there are left out.
        stores: Label to trajectory folder; without any (or without a tokenizer) no viewer.
        tokenizer: Of all stores, or per label.
        weights: Of the tokens of a store, by label, by training, by `author/kind`.
        comparisons: From `eval.compare.compare`.
        config: Shown as it is, JSON-able.
        title: Heading of the page.
        max_trajectories: In the viewer; more are thinned out evenly, and the page says so.

    Returns:
        Path of the page.
    """
    run_dir = Path(run_dir)
    shelves = _shelves(stores or {}, tokenizer, weights or {}, max_trajectories)
    metrics = {name: read_metrics(Path(path)) for name, path in (curves or {}).items()}
    sections = {
        "Results": _results_section(rows, comparisons),
        "Outcomes": outcome_chart(rows),
        "Learning curves": curve_panels(metrics),
        "Time": phase_table(phases),
        "Trajectories": _viewer_section(shelves) if shelves else "",
        "Configuration": settings(config),
    }
    run_dir.mkdir(parents=True, exist_ok=True)
    text = _markdown(title, rows, phases, comparisons)
    atomic_write_text(run_dir / "report.md", text)
    viewer = {"script": asset("viewer.js"), "data": pack_blocks(shelves)} if shelves else {}
    return atomic_write_text(run_dir / "report.html", page(title, sections, **viewer))


def main(argv: list[str] | None = None) -> int:
    """Write the report of a run folder."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="rivet report",
        description="Write report.html and report.md of a run folder.",
    )
    parser.add_argument("run", type=Path, nargs="+", help="run folders, such as runs/demo")
    parser.add_argument("--out", type=Path, help="where to write; default: the first run folder")
    parser.add_argument("--tokenizer", type=Path, help="checkpoint whose tokenizer reads the texts")
    parser.add_argument(
        "--max-trajectories", type=_at_least_one, default=MAX_TRAJECTORIES, help="in the viewer"
    )
    args = parser.parse_args(argv)
    out = args.out or args.run[0]
    try:
        tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
        for is_such, write, what in OWN_PAGES:
            if any(map(is_such, args.run)):
                if len(args.run) > 1:
                    raise ReportError(f"a {what} has a page of its own; give it alone")
                print(f"report: {write(args.run[0], args.out)}")
                return 0
        written = write_report(
            out,
            **gather(args.run, tokenizer),
            title=f"rivet report: {', '.join(run.resolve().name for run in args.run)}",
            max_trajectories=args.max_trajectories,
        )
    except (ResultsError, CheckpointError, TokenizerError, StoreError) as error:
        print(f"rivet report: {error}", file=sys.stderr)
        return 1
    except DiskFullError:
        raise
    except OSError as error:
        where = Path(error.filename or out)
        print(
            f"rivet report: {where.parent if is_leftover(where) else where}: "
            f"{error.strerror or error}; expected files to read and a folder to write into (--out)",
            file=sys.stderr,
        )
        return 1
    print(f"report: {written}")
    return 0


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _shelves(
    stores: Mapping[str, str | Path],
    tokenizer: ProtocolTokenizer | Mapping[str, ProtocolTokenizer] | None,
    weights: Mapping[str, Mapping[str, Mapping[str, float]]],
    limit: int,
) -> list[Shelf]:
    """Trajectories of every store that is there, thinned out evenly to the limit."""
    if not tokenizer:
        return []
    loaded = {
        label: sorted(TrajectoryStore(folder), key=lambda t: (t.step, t.problem_id, t.sample_index))
        for label, folder in stores.items()
    }
    loaded = {label: rows for label, rows in loaded.items() if rows}
    total = sum(map(len, loaded.values()))
    shelves = []
    for label, rows in loaded.items():
        keep = len(rows) if total <= limit else max(1, len(rows) * limit // total)
        chosen = [rows[n] for n in thin_out(len(rows), keep)]
        reader = tokenizer if isinstance(tokenizer, ProtocolTokenizer) else tokenizer[label]
        shelves.append(Shelf(label, chosen, reader, len(rows), weights.get(label, {})))
    return shelves


def _results_section(
    rows: Sequence[Mapping[str, Any]], comparisons: Sequence[Mapping[str, Any]]
) -> str:
    if not rows:
        return ""
    return (
        f'<div class="card scroll">{results_table(rows)}</div>'
        '<p class="note">Accuracy is avg@k; intervals are 95%, clustered by problem. Route: the '
        "first expert consulted is the one that knows the problem's family. Rows that "
        "infrastructure voided are not scored.</p>"
        f"{result_charts(rows)}{comparison_table(comparisons)}"
    )


def _viewer_section(shelves: Sequence[Shelf]) -> str:
    shown = sum(len(s.trajectories) for s in shelves)
    total = sum(s.total for s in shelves)
    thinned = f" {shown:,} of {total:,} are shown, spread evenly." if shown < total else ""
    key = "".join(
        f'<span class="{author}"><b class="{author}">{author}</b> {what}</span>'
        for author, what in (
            ("controller", "what the model itself wrote"),
            ("expert", "what a consulted expert wrote"),
            ("environment", "what the sandbox printed"),
        )
    )
    return f"""
<p class="note" id="viewer-note">Every sample, token for token: point at one to see its
log-probability and what it weighed in training.{thinned} Keys: j and k for the next and previous
trajectory, h and l to step through its spans.</p>
<div class="key">{key}<span><span class="k-route">route</span></span>
<span class="k-request">request</span><span class="k-code">code</span>
<span class="k-answer">answer</span><span class="k-format">tags</span></div>
<div id="filters"></div>
<div id="viewer">
<div id="list" class="card" role="listbox" aria-label="trajectories" tabindex="0">
<div id="rows"></div></div>
<div id="detail" class="card">
<div id="controls"><button id="previous">previous</button><button id="next">next</button>
<span class="grow"></span><button id="back">step back</button><span id="step" class="note"></span>
<button id="forth">step on</button><button id="whole">whole</button>
<label class="note">shade by <select id="shade"><option value="">author</option>
<option value="logprob">log-probability</option><option value="weight">training weight</option>
</select></label></div>
<div id="open"></div></div></div>
<div id="tip" role="tooltip" hidden></div>"""


def _markdown(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    phases: Sequence[Mapping[str, Any]],
    comparisons: Sequence[Mapping[str, Any]],
) -> str:
    from eval.compare import describe

    parts = [f"# {markdown_cell(title)}"]
    if rows:
        parts.append(markdown_table(rows))
    if comparisons:
        described = [describe(dict(c)).split("\n") for c in comparisons]
        lines = [
            f"{'  ' if n else '- '}{markdown_cell(line)}"
            for lines in described
            for n, line in enumerate(lines)
        ]
        parts.append("\n".join(lines))
    if phases:
        lines = ["| phase | wall s | CPU s |", "|---|---:|---:|"]
        lines += [
            f"| {markdown_cell(p['name'])} | {p['wall_s']:.1f} | {p['cpu_s']:.1f} |" for p in phases
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
