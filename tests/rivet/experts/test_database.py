"""SQLite files: WAL where all processes share the memory it needs, a rollback journal elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from rivet.experts.database import Database

Mount = Callable[..., None]


@pytest.fixture
def mount(monkeypatch: pytest.MonkeyPatch) -> Mount:
    """Pretend that these file systems are mounted, folder and kind, in this order."""

    def pretend(*mounts: tuple[Path, str]) -> None:
        listed = [SimpleNamespace(mountpoint=str(at), fstype=kind) for at, kind in mounts]
        monkeypatch.setattr("psutil.disk_partitions", lambda all: listed)

    return pretend


def journal(path: Path) -> object:
    """Journal mode of a file that is opened and written."""
    database = Database(path, "CREATE TABLE IF NOT EXISTS t (a)", 1)
    with database.writing() as connection:
        connection.execute("INSERT INTO t VALUES (1)")
    ((mode,),) = database.rows("PRAGMA journal_mode")
    database.close()
    return mode


def test_a_local_disk_has_a_wal_and_a_shared_or_unknown_one_a_rollback_journal(
    tmp_path: Path, mount: Mount
) -> None:
    shared = tmp_path / "home" / "runs"
    mount((Path("/"), "ext4"))
    assert journal(shared / "a.sqlite") == "wal"
    mount((tmp_path / "home", "nfs4"), (Path("/"), "ext4"))
    assert journal(shared / "b.sqlite") == "truncate"
    assert journal(tmp_path / "c.sqlite") == "wal"
    mount((Path("/"), "ext4"), (tmp_path, "autofs"), (tmp_path, "xfs"), (shared, "never_heard_of"))
    assert journal(shared / "d.sqlite") == "truncate"
    assert journal(tmp_path / "e.sqlite") == "wal"


def test_a_file_that_has_a_wal_gives_it_up_on_a_shared_disk(tmp_path: Path, mount: Mount) -> None:
    path = tmp_path / "a.sqlite"
    mount((Path("/"), "ext4"))
    assert journal(path) == "wal"
    mount((Path("/"), "lustre"))
    assert journal(path) == "truncate"
    rows = Database(path, "", 1, is_read_only=True).rows("SELECT a FROM t")
    assert rows == [(1,), (1,)]
