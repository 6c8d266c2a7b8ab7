"""Files of one JSON object on each line, to which a run adds while it goes on."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from rivet.files import explain_full_disk


class BrokenLineError(ValueError):
    """A line is no JSON object; the message names it by file and number."""


def append_line(path: Path, line: str) -> None:
    """Append a line whole or not at all; a torn last line from a kill is cut off first.

    Raises:
        DiskFullError: No space is left; the file is as before.
    """
    with explain_full_disk(path), open(path, "ab+") as file:
        end = file.seek(0, os.SEEK_END)
        if end and _last_byte(file) != b"\n":
            file.seek(0)
            end = file.read().rfind(b"\n") + 1
            file.truncate(end)
        data = f"{line}\n".encode()
        try:
            # Unbuffered: a line of one write is not torn by a kill, and a short write shows.
            if os.write(file.fileno(), data) != len(data):
                raise OSError(errno.ENOSPC, "short write")
        except OSError:
            file.truncate(end)
            raise


def _last_byte(file: Any) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, none if it is not there; a torn last line, left by a kill, is not one.

    Raises:
        BrokenLineError: Another line is broken.
    """
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    *whole, _ = text.split("\n")
    return [_read_line(line, f"{path}:{n}") for n, line in enumerate(whole, 1)]


def _read_line(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise BrokenLineError(
            f"{where}: broken ({line[:40]!r}); expected a JSON object on each line: remove this "
            "line (all that is lost is what it says of its step) and run the same command again"
        )
    return value
