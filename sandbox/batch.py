"""Runs a file of cases: one JSON object a line in, one a line out, in the same order."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sandbox.client import PythonSandbox
from sandbox.result import SandboxLimits

Case = dict[str, Any]


class BatchError(ValueError):
    """A line of the case file that is not a case; names the file, the line and what is wrong."""


def read_cases(path: Path) -> Iterator[Case]:
    """Yield the cases of a JSONL file: `id`, `code` and optionally `prelude`, a list of cells.

    Raises:
        BatchError: for a line that is no case. Empty lines are skipped.
    """
    with path.open(encoding="utf-8", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _parse(line, f"{path}:{number}")


def _parse(line: str, where: str) -> Case:
    form = 'expected {"id": ..., "code": "..."}'
    try:
        case = json.loads(line)
    except json.JSONDecodeError as error:
        raise BatchError(f"{where}: not JSON ({error}); {form} on each line") from None
    if not isinstance(case, dict):
        raise BatchError(f"{where}: a {type(case).__name__}, not an object; {form}")
    if "id" not in case:
        raise BatchError(f"{where}: `id` is missing; {form}")
    if not isinstance(case.get("code"), str):
        got = "is missing" if "code" not in case else f"is a {type(case['code']).__name__}"
        raise BatchError(f"{where}: `code` {got}; expected the source text as a string")
    prelude = case.get("prelude", [])
    if not isinstance(prelude, list) or not all(isinstance(cell, str) for cell in prelude):
        raise BatchError(f"{where}: `prelude` is not a list of source texts")
    return case


async def run_batch(
    cases_path: Path, out_path: Path, *, concurrency: int | None, limits: SandboxLimits
) -> dict[str, int]:
    """Run every case and write the results in the order of the cases.

    Args:
        cases_path: JSONL, see `read_cases`; all of it is checked before anything runs.
        out_path: JSONL with `id` and the fields of the result; written under a temporary name
            and put in place at the end.
        concurrency: calls that run at the same time; by default the cores.
        limits: the limits of each call.

    Returns:
        How many results had each status.
    """
    cases = list(read_cases(cases_path))
    counts: dict[str, int] = {}
    partial = out_path.with_name(f"{out_path.name}.{os.getpid()}.partial")
    try:
        async with PythonSandbox(limits, concurrency) as box:
            with partial.open("w", encoding="utf-8") as out:
                async for case, result in _in_order(box, cases):
                    counts[result["status"]] = counts.get(result["status"], 0) + 1
                    out.write(json.dumps({"id": case["id"], **result}) + "\n")
        partial.replace(out_path)
    finally:
        partial.unlink(missing_ok=True)
    return counts


async def _in_order(box: PythonSandbox, cases: list[Case]):
    """Yield (case, result) in order, with a few calls waiting so that no slot idles."""
    window = 4 * box.slots
    tasks: dict[int, asyncio.Task] = {}
    try:
        for number, case in enumerate(cases):
            for ahead in range(number, min(number + window, len(cases))):
                if ahead not in tasks:
                    tasks[ahead] = asyncio.create_task(_run(box, cases[ahead]))
            yield case, await tasks[number]
            tasks[number] = _DONE
    finally:
        for task in tasks.values():
            if task is not _DONE:
                task.cancel()


_DONE: Any = None


async def _run(box: PythonSandbox, case: Case) -> dict[str, Any]:
    return asdict(await box.run(case["code"], prelude=case.get("prelude", [])))
