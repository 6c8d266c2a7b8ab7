"""One owner at a time for a run folder, without anything to clean up after a kill."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path


class LockedError(Exception):
    """The lock cannot be had; the message says who holds it."""


class FolderLock:
    """An exclusive lock on a file, held while the process lives.

    A POSIX record lock: children made by fork do not inherit it, so an orphan of a killed run
    cannot hold it. It does not exclude the same process, hence the set.
    """

    _held: set[Path] = set()

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        if self.path in self._held:
            raise LockedError(f"{path.parent}: this process has the run open already")
        self._file = open(self.path, "a+", encoding="utf-8")  # noqa: SIM115 - held on purpose
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise LockedError(
                    f"{path.parent}: its file system has no locks ({error}); use a local disk"
                ) from error
            raise LockedError(
                f"{path.parent}: in use by {holder}; wait for it, stop it, or choose another folder"
            ) from error
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()
        self._held.add(self.path)

    def release(self) -> None:
        """Unlock; the empty file stays, since removing it would race with the next owner."""
        self._file.truncate(0)
        self._file.close()
        self._held.discard(self.path)
