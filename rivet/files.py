"""Writing files whole or not at all: a temporary name beside the target, fsync, rename.

Temporary names are `.NAME.tmp-PID`, so that leftovers of a killed process are recognised. A full
disk becomes `DiskFullError`; what was there before is still there then. What was cut short all the
same (by a library that writes in place, a copy, a broken disk) is found by `broken_file`.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_TEMPORARY = re.compile(r"\..+\.(?:tmp|old)-\d+")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PICKLE = b"\x80"  # begins what torch writes without an archive; its end says nothing


class DiskFullError(OSError):
    """No space is left to write; nothing half-written was kept."""


def is_disk_full(error: BaseException) -> bool:
    """Whether an error means a full disk, also where a library wrapped it (safetensors does)."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return isinstance(error, DiskFullError) or f"(os error {errno.ENOSPC})" in str(error)


def atomic_write_text(path: str | Path, text: str) -> Path:
    """Write a UTF-8 file; readers see the old content or the new, never a part.

    Raises:
        DiskFullError: No space is left; the old content is untouched.
    """
    path = Path(path)
    temporary = temporary_beside(path)
    with explain_full_disk(path):
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def atomic_write_json(path: str | Path, value: Any) -> Path:
    """Write a value as indented JSON, like `atomic_write_text`."""
    return atomic_write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Fill a temporary folder in the body; it takes the name `path` if the body succeeds.

    An existing folder of that name is replaced. If the body raises, nothing changes.

    Raises:
        DiskFullError: No space is left.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    old = path.with_name(f".{path.name}.old-{os.getpid()}")
    with explain_full_disk(path):
        try:
            _remove_abandoned(path)
            temporary.mkdir()
            yield temporary
            _open_to_readers(temporary)
            _sync_tree(temporary)
            # A folder cannot replace a filled one in a single step: between these two renames
            # a kill leaves the old one under its hidden name, which `recover_folder` puts back.
            if path.exists():
                os.replace(path, old)
            os.replace(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            if path.exists():
                shutil.rmtree(old, ignore_errors=True)


def _remove_abandoned(path: Path) -> None:
    """Remove what killed processes left of `path`, one with our own id included.

    The old folder itself goes only where there is a new one.
    """
    for kind in ("tmp", "old") if path.exists() else ("tmp",):
        for left in path.parent.glob(f".{glob.escape(path.name)}.{kind}-*"):
            pid = left.name.rpartition("-")[2]
            if is_leftover(left) and (int(pid) == os.getpid() or not _is_running(int(pid))):
                shutil.rmtree(left, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's; no id at all
        return True
    return True


def _open_to_readers(folder: Path) -> None:
    """Give files the mode that the umask allows: safetensors leaves 0600, which no server reads."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(mode | (path.stat().st_mode & 0o111))


def recover_folder(path: str | Path) -> None:
    """Undo an `atomic_folder` that was killed between its two renames."""
    path = Path(path)
    if not path.exists():
        for old in path.parent.glob(f".{glob.escape(path.name)}.old-*"):
            os.replace(old, path)
            return


def recover_all(root: Path) -> None:
    """`recover_folder` for every folder below one."""
    for old in [p for p in root.rglob(".*.old-*") if is_leftover(p)]:
        recover_folder(old.with_name(old.name[1:].rpartition(".old-")[0]))


def temporary_beside(path: Path) -> Path:
    """The hidden name under which this process prepares `path`."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}")


def is_leftover(path: Path) -> bool:
    """Whether a name is one that `atomic_*` uses while writing."""
    return _TEMPORARY.fullmatch(path.name) is not None


def broken_file(folder: str | Path) -> Path | None:
    """The first file below a folder that is cut short; None if all are whole."""
    files = (path for path in sorted(Path(folder).rglob("*")) if path.is_file())
    return next((path for path in files if not is_whole(path)), None)


def is_whole(file: Path) -> bool:
    """Whether a file is there and ends where its format says.

    Takes no longer for a large file: of weights, tables and archives only the ends are read. What
    is wrong within, and formats other than those below, are not looked at.
    """
    try:
        match file.suffix:
            case ".json":
                json.loads(file.read_text(encoding="utf-8"))
            case ".pt" | ".pth" | ".bin":  # torch writes a zip archive, its directory last
                return zipfile.is_zipfile(file) or _first_byte(file) == _PICKLE
            case ".safetensors":
                from safetensors import SafetensorError, safe_open

                try:
                    with safe_open(file, framework="numpy"):  # compares its size with its header
                        pass
                except SafetensorError:
                    return False
            case ".parquet":
                from pyarrow import parquet

                parquet.read_metadata(file)  # which comes last
    except (OSError, ValueError):
        return False
    return file.is_file()


def _first_byte(file: Path) -> bytes:
    with open(file, "rb") as handle:
        return handle.read(1)


def remove(path: Path) -> None:
    """Remove a file or a whole folder; a link is removed, not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def explain_full_disk(path: Path) -> Iterator[None]:
    """Turn a full-disk error of the body into `DiskFullError`, which says what to do."""
    try:
        yield
    except Exception as error:
        if isinstance(error, DiskFullError) or not is_disk_full(error):
            raise
        raise DiskFullError(
            errno.ENOSPC,
            f"{path}: no space left on its disk; nothing half-written was kept: free some space "
            "and run the same command again",
        ) from error


def _sync_tree(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
