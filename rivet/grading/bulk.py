"""Grade a file of answers into a file of verdicts, in order and all or nothing."""

import difflib
import json
import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from rivet.grading.grader import Grader, Request
from rivet.grading.records import read_records, text_field
from rivet.grading.verdict import KINDS, BadRequest, Kind, Mode, Outcome

logger = logging.getLogger(__name__)
_BATCH = 2048


def grade_file(cases: Path, out: Path, *, grader: Grader, mode: Mode) -> Counter[str]:
    """Grade every line of a file and write one verdict a line.

    Args:
        cases: Lines `{"id", "gold", "answer"}` with optional `kind` and `choices`.
        out: Where the verdicts go: lines `{"id", "outcome", "extracted", "reason"}`. It is written
            under a temporary name and renamed when complete.
        grader: Grades.
        mode: "reward" or "eval".

    Returns:
        How often each outcome occurred, and under "line" how many answers were read from an answer
        line instead of a box.

    Raises:
        BadRequest: A line cannot be graded, with its file and line; nothing is written.
    """
    identifiers, requests = _read(cases)
    counts: Counter[str] = Counter()
    partial = out.with_name(out.name + ".part")
    try:
        with partial.open("w", encoding="utf-8") as lines:
            for start in range(0, len(requests), _BATCH):
                batch = requests[start : start + _BATCH]
                grades = grader.grade_many(batch, mode=mode)
                for identifier, grade in zip(identifiers[start:], grades, strict=False):
                    counts[grade.outcome] += 1
                    counts["line"] += grade.source == "line"
                    verdict = {
                        "id": identifier,
                        "outcome": grade.outcome,
                        "extracted": grade.extracted,
                        "reason": f"{grade.reason} (answer line)"
                        if grade.source == "line"
                        else grade.reason,
                    }
                    lines.write(json.dumps(verdict, ensure_ascii=False) + "\n")
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    return counts


def summary(counts: Counter[str], mode: Mode) -> str:
    """Return one line that says how the answers fell out."""
    parts = [f"{outcome} {counts[outcome]}" for outcome in get_args(Outcome) if counts[outcome]]
    line = ", ".join(parts) or "no answers"
    if mode == "eval":
        line += f"; read from an answer line: {counts['line']}"
    return line


def _read(path: Path) -> tuple[list[Any], list[Request]]:
    identifiers: list[Any] = []
    requests: list[Request] = []
    unknown: Counter[str] = Counter()
    for number, record in read_records(path):
        if "id" not in record:
            raise BadRequest(f"{path}:{number}: 'id' is missing")
        identifiers.append(record["id"])
        requests.append(_request(path, number, record, unknown))
    if unknown:
        logger.warning(
            "%s: %d lines name a kind that is no grading kind (%s); graded as math",
            path,
            unknown.total(),
            ", ".join(sorted(unknown)[:5]) + (", ..." if len(unknown) > 5 else ""),
        )
    return identifiers, requests


def _request(path: Path, number: int, record: dict[str, Any], unknown: Counter[str]) -> Request:
    kind = _kind(path, number, record, unknown)
    choices: Sequence[str] | None = record.get("choices")
    if choices is not None and not (
        isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)
    ):
        raise BadRequest(f"{path}:{number}: 'choices' is no list of strings")
    gold = record.get("gold")
    if kind != "reasoning_gym" or not isinstance(gold, dict):
        gold = text_field(path, number, record, "gold")
    answer = text_field(path, number, record, "answer")
    request = Request(answer, gold, kind, choices)
    try:
        request.check()
    except BadRequest as error:
        raise BadRequest(f"{path}:{number}: {error}") from error
    return request


def _kind(path: Path, number: int, record: dict[str, Any], unknown: Counter[str]) -> Kind:
    """Return a record's kind. Files of test cases also use the field for the kind of fault, so a
    name that is not near any of ours means the default."""
    named = record.get("kind", "math")
    for kind in KINDS:
        if named == kind:
            return kind
    near = difflib.get_close_matches(str(named), KINDS, n=1, cutoff=0.7)
    if near or not isinstance(named, str):
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise BadRequest(f"{path}:{number}: kind {named!r}: expected {', '.join(KINDS)}{hint}")
    unknown[named] += 1
    return "math"
