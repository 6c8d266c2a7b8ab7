"""Where an export goes: found out to be writable, free of a killed export's rest, and not taken."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from pathlib import Path

from rivet.files import recover_folder, remove
from rivet.settings import FILE_NAME
from stages.export_verify import ExportError
from stages.model_card import is_ours

logger = logging.getLogger(__name__)


def prepare_target(target: Path, *, overwrite: bool) -> None:
    """Find out before the work whether an export can be written, and clear up after a killed one.

    Raises:
        ExportError: It cannot be written, or is taken.
    """
    _check_writable(target)
    recover_folder(target)
    _remove_leftovers(target)
    _check_free(target, overwrite)


def is_export(folder: Path) -> bool:
    """Whether a folder holds a finished export."""
    return (folder / FILE_NAME).is_file() and is_ours(folder / "README.md")


def _check_writable(target: Path) -> None:
    there = target.absolute().parent
    while not there.exists():
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ExportError(
            f"{target}: cannot be written ({error.strerror}: {there}); choose another --to, or "
            "ask for the right to write there"
        ) from error


def _remove_leftovers(target: Path) -> None:
    """Remove what killed exports to this target left beside it, under hidden names."""
    if not target.parent.is_dir():
        return
    name = re.compile(rf"\.{re.escape(target.name)}\.(?:tmp|old)-(\d+)")
    for path in list(target.parent.iterdir()):
        found = name.fullmatch(path.name)
        if found and not _is_running(int(found[1])):
            logger.info("removing %s, which a killed export left", path)
            remove(path)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _check_free(target: Path, overwrite: bool) -> None:
    """An export replaces an export, and only when told to."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not is_export(target):
        raise ExportError(f"{target}: exists and is no export of ours; choose another output_dir")
    if not overwrite:
        raise ExportError(
            f"{target}: holds an export already; replace it with --overwrite true, or choose "
            "another output_dir"
        )
