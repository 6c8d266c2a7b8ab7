"""Read files of problems or answers line by line, with errors that name the file and the line."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rivet.grading.verdict import BadRequest

Record = tuple[int, dict[str, Any]]


def read_records(path: Path) -> Iterator[Record]:
    """Yield (line number, object) from a .jsonl, .jsonl.gz or .parquet file.

    Raises:
        BadRequest: The file or a line cannot be read.
    """
    if not path.is_file():
        raise BadRequest(f"{path}: no such file; expected .jsonl, .jsonl.gz or .parquet")
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
    else:
        yield from _read_lines(path)


def _read_lines(path: Path) -> Iterator[Record]:
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _parse(path, number, line)
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise BadRequest(f"{path}:{number + 1}: {error}; expected UTF-8 text") from error


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{path}:{number}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise BadRequest(f"{path}:{number}: expected one JSON object, got {line.strip()[:60]!r}")
    return record


def _read_parquet(path: Path) -> Iterator[Record]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise BadRequest(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from error
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise BadRequest(f"{path}: {error}; expected a parquet file") from error
    yield from enumerate(rows, start=1)


def text_field(path: Path, number: int, record: dict[str, Any], name: str) -> str:
    """Return a string field of a record.

    Raises:
        BadRequest: It is missing or no string.
    """
    value = record.get(name)
    if not isinstance(value, str):
        raise BadRequest(
            f"{path}:{number}: {name!r} is {'missing' if value is None else repr(value)[:60]}; "
            "expected a string"
        )
    return value
