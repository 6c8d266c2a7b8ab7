"""SQLite files that several processes write at the same time and that survive a kill.

A commit is whole or absent, whatever kills the process. On a disk of this machine SQLite is in WAL
mode: a commit is not forced to the disk one by one, so a power failure may lose the last ones,
never the file. WAL needs memory that all processes share, which a network file system does not give
them. There SQLite keeps a rollback journal, relies on the file system's locks alone, and forces
each commit to the disk, which takes hundreds of times as long.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_BUSY_S = 30.0
# Of one machine, for certain. What is not known gets the journal that works everywhere.
_LOCAL_FILE_SYSTEMS = frozenset(
    "apfs bcachefs btrfs ext2 ext3 ext4 f2fs hfs ntfs overlay tmpfs ufs xfs zfs".split()
)


class DatabaseError(RuntimeError):
    """A database cannot be opened, read or written; the message names it and says what to do."""


class Database:
    """One SQLite file with one schema.

    Args:
        path: The file; it is created with its folder.
        schema: `CREATE TABLE IF NOT EXISTS ...` statements.
        version: Of the schema; another one in the file is refused.
        is_read_only: Create and write nothing.

    Raises:
        DatabaseError: It cannot be opened, or is none of ours.
    """

    def __init__(self, path: Path, schema: str, version: int, *, is_read_only: bool = False):
        self.path = path
        with self._explained():
            if is_read_only:
                self._connection = _connect_read_only(path)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._connection = _connect(str(path))
                _set_journal(self._connection, is_local=is_on_local_disk(path.parent))
                with self.writing():
                    found = self._version()
                    if not found:
                        for statement in schema.split(";"):
                            self._connection.execute(statement)
                        self._connection.execute(f"PRAGMA user_version = {version}")
            found = self._version()
        if found != version:
            self.close()
            raise DatabaseError(
                f"{path}: schema {found}, this rivet reads and writes {version}; use another file, "
                "or the rivet that wrote it"
            )

    def close(self) -> None:
        """Close it. Closing twice is fine."""
        self._connection.close()

    def rows(self, statement: str, values: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
        """Run a query.

        Raises:
            DatabaseError: It failed.
        """
        with self._explained():
            return self._connection.execute(statement, values).fetchall()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction that no other process can come between.

        Raises:
            DatabaseError: It failed; nothing of it is kept.
        """
        with self._explained():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # a full disk has ended it already
                    self._connection.execute("ROLLBACK")
                raise

    def _version(self) -> int:
        return int(self._connection.execute("PRAGMA user_version").fetchone()[0])

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            remedy = "repair that"
            if type(error) is sqlite3.DatabaseError:  # and no subclass: damaged, or no database
                remedy += ", or remove the file to start a new one"
            raise DatabaseError(
                f"{self.path}: {error}; expected a database that this rivet wrote, on a disk with "
                f"room and locks: {remedy}"
            ) from error


def _connect(name: str, *, is_uri: bool = False) -> sqlite3.Connection:
    # One event loop uses it at a time, not always in the thread that opened it.
    return sqlite3.connect(
        name, timeout=_BUSY_S, isolation_level=None, uri=is_uri, check_same_thread=False
    )


def _connect_read_only(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise FileNotFoundError("no such file")
    uri = path.resolve().as_uri()
    connection = _connect(f"{uri}?mode=ro", is_uri=True)
    try:
        connection.execute("PRAGMA user_version").fetchone()
    except sqlite3.OperationalError:
        # WAL needs a writable folder even to read; nobody writes where we cannot.
        connection.close()
        connection = _connect(f"{uri}?immutable=1", is_uri=True)
    return connection


def is_on_local_disk(folder: Path) -> bool:
    """Whether a folder lies on a file system of this machine alone, as far as is known."""
    folder = folder.resolve()
    mounts = [m for m in psutil.disk_partitions(all=True) if folder.is_relative_to(m.mountpoint)]
    # The longest path is the one in effect; of two at the same place the later one.
    mounts.sort(key=lambda mount: len(mount.mountpoint))
    return bool(mounts) and mounts[-1].fstype.lower() in _LOCAL_FILE_SYSTEMS


def _set_journal(connection: sqlite3.Connection, *, is_local: bool) -> None:
    """Choose the mode; while another process does the same, SQLite refuses instead of waiting."""
    mode = "WAL" if is_local else "TRUNCATE"
    deadline = time.monotonic() + _BUSY_S
    while True:
        try:
            connection.execute(f"PRAGMA journal_mode = {mode}")
            break
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    connection.execute("PRAGMA synchronous = NORMAL")
