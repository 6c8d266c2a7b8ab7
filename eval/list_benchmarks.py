"""`rivet benchmarks`: which benchmarks there are, where each is found, and files of them.

    rivet benchmarks [NAME...] [--data_dir DIR] [--to FOLDER]

Named ones are loaded, so that the Hub's cache has them; `--to` writes each as JSONL besides, with
the ids, the order and the lettered options that an evaluation uses.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from data.benchmarks import BENCHMARKS, SUITES, expand, find_file, load_benchmark
from rivet.files import atomic_write_text


def main(argv: list[str] | None = None) -> int:
    """Run `rivet benchmarks`."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="rivet benchmarks",
        description="List benchmarks, load them, write them as JSONL.",
    )
    parser.add_argument("names", nargs="*", help="benchmarks and suites to load; none: list all")
    parser.add_argument("--data_dir", "--data-dir", help="folder with copies of the benchmarks")
    parser.add_argument("--to", type=Path, help="folder to write the named ones to, as JSONL")
    args = parser.parse_args(argv)
    if not args.names:
        if args.to is not None:
            parser.error("--to: name the benchmarks to write")
        print(listing(args.data_dir))
        return 0
    for name in expand(args.names):
        problems = load_benchmark(name, args.data_dir)
        where = ""
        if args.to is not None:
            lines = "".join(json.dumps(asdict(p), ensure_ascii=False) + "\n" for p in problems)
            args.to.mkdir(parents=True, exist_ok=True)
            where = f": {atomic_write_text(args.to / f'{name}.jsonl', lines)}"
        print(f"{name}, {len(problems)} problems{where}")
    return 0


def listing(data_dir: str | None = None) -> str:
    """Every benchmark in a line: problems, suite, id on the Hub, file in the folder."""
    suite_of = {name: suite for suite, names in SUITES.items() for name in names}
    rows = [("benchmark", "problems", "suite", "on the Hub", "file" if data_dir else "")]
    for name, benchmark in BENCHMARKS.items():
        path = find_file(name, data_dir) if data_dir else None
        hub = benchmark.hub + (f" ({benchmark.config})" if benchmark.config else "")
        hub += ", gated" if benchmark.is_gated else ""
        file = (path.name if path else "not there") if data_dir else ""
        rows.append((name, str(benchmark.size), suite_of.get(name, "-"), hub, file))
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


if __name__ == "__main__":
    sys.exit(main())
