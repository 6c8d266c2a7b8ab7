"""The commands: `python -m sandbox run FILE.py`, `batch CASES.jsonl --out FILE`, `doctor`."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import sys
from pathlib import Path

from sandbox import doctor
from sandbox.batch import BatchError, run_batch
from sandbox.client import PythonSandbox
from sandbox.result import SandboxError, SandboxLimits

_FAILED, _BAD_USAGE = 1, 2


def main(argv: list[str] | None = None) -> int:
    """Run one command; return 0 done, 1 failed, 2 bad usage."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        return int(arguments.command(arguments))
    except (BatchError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _BAD_USAGE
    except SandboxError as error:
        print(f"error: {error}", file=sys.stderr)
        return _FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m sandbox", description=__doc__
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run one file and show what a model would see")
    run.add_argument("file", type=Path, help="Python source; - reads standard input")
    run.add_argument("--json", action="store_true", help="print every field of the result")
    run.set_defaults(command=_run)
    batch = commands.add_parser("batch", help="run a file of cases, results in the same order")
    batch.add_argument("cases", type=Path, help='JSONL, each line {"id": ..., "code": "..."}')
    batch.add_argument("--out", type=Path, required=True, help="JSONL of results")
    batch.add_argument("--concurrency", type=_positive, help="calls at a time; default: the cores")
    batch.set_defaults(command=_batch)
    for command in (run, batch):
        _add_limits(command)
    check = commands.add_parser("doctor", help="say which isolation layers hold on this machine")
    check.set_defaults(command=lambda _: doctor.report())
    return parser


def _add_limits(parser: argparse.ArgumentParser) -> None:
    defaults = SandboxLimits()
    group = parser.add_argument_group("limits of each call")
    for name, unit in (("cpu_s", "seconds"), ("wall_s", "seconds"), ("memory_mb", "MiB")):
        default = getattr(defaults, name)
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(default),
            default=default,
            metavar=unit.upper(),
            help=f"in {unit}, default {default}",
        )


def _limits(arguments: argparse.Namespace) -> SandboxLimits:
    names = ("cpu_s", "wall_s", "memory_mb")
    return SandboxLimits(**{name: getattr(arguments, name) for name in names})


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _run(arguments: argparse.Namespace) -> int:
    if str(arguments.file) == "-":
        code = sys.stdin.read()
    else:
        code = arguments.file.read_text(encoding="utf-8")
    with PythonSandbox(_limits(arguments), slots=1) as box:
        result = box.run_sync(code)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(result)))
    else:
        print(result.text(max_chars=1 << 20))
        if not result.ok:
            print(f"[{result.status}]", file=sys.stderr)
    return 0 if result.ok else _FAILED


def _batch(arguments: argparse.Namespace) -> int:
    work = run_batch(
        arguments.cases,
        arguments.out,
        concurrency=arguments.concurrency,
        limits=_limits(arguments),
    )
    counts = asyncio.run(work)
    total = sum(counts.values())
    print(f"{total} results in {arguments.out}: "
          + ", ".join(f"{count} {status}" for status, count in sorted(counts.items())))  # fmt: skip
    return _FAILED if counts.get("sandbox_failure") else 0


if __name__ == "__main__":
    sys.exit(main())
