"""Runs the cells of one call inside the forked child and writes down how they ended.

Everything here happens in the same process as the foreign code, so nothing it reports is
trusted: the slot reads it as plain text of bounded length, and decides timeouts, crashes and
output limits from what the kernel says.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import io
import linecache
import mmap
import os
import random
import struct
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence

# state, truncated, bytes of value, bytes of error, start of the reported cell: wall and CPU clock
REPORT = struct.Struct("<BBxxIIxxxxdd")
UNPREPARED, STARTED, OK, ERROR = 0, 1, 2, 3
CELL_NAME = "<cell>"
_VALUE = " value of the last expression"  # no program can have this name


class Report:
    """The memory that child and slot share: a header, the echoed value and the error text."""

    def __init__(self, value_bytes: int, error_bytes: int, file: int = -1) -> None:
        self.value_bytes = value_bytes
        self.error_bytes = error_bytes
        self._size = REPORT.size + value_bytes + error_bytes
        if file >= 0:  # shared through a file, not through a fork
            os.ftruncate(file, self._size)
        self._memory = mmap.mmap(file, self._size)
        self._blank = bytes(self._size)

    def wipe(self) -> None:
        """Erase what the last call left."""
        self._memory[:] = self._blank

    def read(self) -> tuple[int, bool, int, int, float, float]:
        """Return the header; the lengths are cut to what there is room for."""
        state, truncated, value, error, wall, cpu = REPORT.unpack_from(self._memory)
        return (
            state,
            bool(truncated),
            min(value, self.value_bytes),
            min(error, self.error_bytes),
            wall,
            cpu,
        )

    def texts(self, value_len: int, error_len: int) -> list[memoryview]:
        """Return value and error without copying them into this process's own memory."""
        view = memoryview(self._memory)
        at = REPORT.size + self.value_bytes
        return [view[REPORT.size : REPORT.size + value_len], view[at : at + error_len]]

    def mark(self, wall: float, cpu: float) -> None:
        """Write down when the reported cell starts."""
        REPORT.pack_into(self._memory, 0, STARTED, False, 0, 0, wall, cpu)

    def write(self, state: int, value: str = "", error: str = "") -> None:
        """Write down how the call ended."""
        value_raw = value.encode("utf-8", "backslashreplace")
        error_raw = error.encode("utf-8", "backslashreplace")
        is_cut = len(value_raw) > self.value_bytes or len(error_raw) > self.error_bytes
        value_raw, error_raw = value_raw[: self.value_bytes], error_raw[: self.error_bytes]
        at = REPORT.size
        self._memory[at : at + len(value_raw)] = value_raw
        at += self.value_bytes
        self._memory[at : at + len(error_raw)] = error_raw
        REPORT.pack_into(self._memory, 0, state, is_cut, len(value_raw), len(error_raw), 0.0, 0.0)


def prepare() -> None:
    """Set up, before any fork, what every call starts with: an empty `__main__`, its streams.

    The streams are unbuffered, so that what was printed before a kill is kept.
    """
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = io.TextIOWrapper(
            io.FileIO(number, "w", closefd=False),
            encoding="utf-8",
            errors="backslashreplace",
            write_through=True,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    random.seed(0)


def run_cells(
    cells: Sequence[str],
    report: Report,
    *,
    hidden_paths: dict[str, str],
    on_last_cell: Callable[[], None],
) -> int:
    """Run the cells in one namespace, the last one visibly; return the exit code.

    Args:
        cells: earlier cells, replayed without output, and the one to report.
        report: where the end is written down.
        hidden_paths: host folder -> what an error text shows instead.
        on_last_cell: called right before the reported cell starts.
    """
    module = sys.modules["__main__"]
    try:
        if len(cells) > 1:
            _replay(cells[:-1], module.__dict__)
        on_last_cell()
        value = _run_cell(cells[-1], CELL_NAME, module.__dict__)
        text = "" if value is None else repr(value)
        _finish_like_the_interpreter()
        _flush()
        report.write(OK, text)
        return 0
    except SystemExit as error:
        _flush()
        return _on_system_exit(error, report)
    except BaseException as error:
        _flush()
        try:
            text = _describe(error, report.error_bytes, hidden_paths)
        except BaseException:  # out of memory, or an exception that fights its own description
            text = "MemoryError" if isinstance(error, MemoryError) else "the code raised an error"
        report.write(ERROR, error=text)
        return 1


def _finish_like_the_interpreter() -> None:
    """Wait for threads that are no daemons and call what was registered for the exit."""
    if len(threading._active) > 1:  # type: ignore[attr-defined]
        threading._shutdown()  # type: ignore[attr-defined]
    if atexit._ncallbacks():
        atexit._run_exitfuncs()


def _flush() -> None:
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except BaseException:  # replaced or closed by the program: its output is its own affair
            pass


def _replay(cells: Sequence[str], namespace: dict) -> None:
    """Run earlier cells with their output thrown away."""
    kept = os.dup(1), os.dup(2)
    for stream in (1, 2):
        os.dup2(0, stream)  # stdin is /dev/null, open for writing too
    for number, cell in enumerate(cells, 1):
        _run_cell(cell, f"<earlier cell {number}>", namespace)
    _flush()
    for stream, saved in zip((1, 2), kept, strict=True):
        os.dup2(saved, stream)
        os.close(saved)


def _run_cell(source: str, name: str, namespace: dict) -> object:
    """Execute `source`; return the value of its last expression, None without one."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    tree = ast.parse(source, name)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        place = {key: getattr(last, key) for key in last._attributes}
        target = ast.Name(_VALUE, ast.Store(), **place)
        tree.body[-1] = ast.Assign([target], last.value, **place)
    # not with the __future__ imports of this module
    exec(compile(tree, name, "exec", dont_inherit=True), namespace)
    return namespace.pop(_VALUE, None)


def _on_system_exit(error: SystemExit, report: Report) -> int:
    if error.code is None or (isinstance(error.code, int) and error.code == 0):
        report.write(OK)
        return 0
    report.write(ERROR, error=f"SystemExit: {str(error.code)[:200]}")
    return 1


def _describe(error: BaseException, max_bytes: int, hidden_paths: dict[str, str]) -> str:
    """Return the last frames of the user's own code and the message, without host paths."""
    shown = traceback.TracebackException(type(error), error, error.__traceback__, limit=-200)
    frames = [f for f in shown.stack if f.filename == CELL_NAME or f.filename[:9] == "<earlier "]
    lines = ["Traceback (most recent call last):\n"] if frames else []
    if len(frames) > 4:
        lines.append(f"  [{len(frames) - 4} frames left out]\n")
    lines += traceback.StackSummary.from_list(frames[-4:]).format()
    head = _without_paths("".join(lines), hidden_paths)
    message = "".join(shown.format_exception_only())
    message = _without_paths(message[: 8 * max_bytes], hidden_paths).rstrip("\n")
    return _fit(head, message, max_bytes)


def _without_paths(text: str, hidden_paths: dict[str, str]) -> str:
    for path, replacement in hidden_paths.items():
        text = text.replace(path, replacement)
    return text


def _fit(head: str, message: str, max_bytes: int) -> str:
    """Join both; a long message loses its middle, then long frames their beginning."""
    raw_head, raw_message = (x.encode("utf-8", "backslashreplace") for x in (head, message))
    room = max_bytes - min(len(raw_head), max_bytes // 2)
    if len(raw_message) > room:
        note = b" ... "
        half = (room - len(note)) // 2
        raw_message = raw_message[:half] + note + raw_message[len(raw_message) - half :]
    left = max_bytes - len(raw_message)
    raw_head = raw_head[-left:] if left < len(raw_head) else raw_head
    return (raw_head + raw_message).decode("utf-8", "replace")
