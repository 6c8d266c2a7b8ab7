"""The run folder: what a stage was told, what it measured, and whether it is done.

    config.json     resolved settings, stage, git commit, package versions, seed; before step 0
    metrics.jsonl   one line a step
    checkpoint/     the stage's result as a Hugging Face checkpoint, where it makes one
    log.txt         everything that was logged
    finished.json   results; written last, so its presence means that the run is complete

A folder is continued only by the same stage with the same settings, and a finished one is replaced
only when asked. One process at a time owns a folder: the lock is the kernel's and goes with the
process, so a killed one leaves nothing to clean up. In a distributed run only rank 0 writes; the
other ranks get a `RunDir` whose writing methods do nothing. `output_dir` of a trainer must be a
folder inside, never the run folder itself: `save_model` would overwrite config.json.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rivet.config_help import to_plain
from rivet.files import (
    atomic_write_json,
    atomic_write_text,
    explain_full_disk,
    is_disk_full,
    is_leftover,
    recover_all,
    remove,
)
from rivet.json_lines import append_line, read_lines
from rivet.lock import FolderLock, LockedError
from rivet.provenance import now, process_facts

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
CONFIG_FILE = "config.json"
FINISHED_FILE = "finished.json"
LOG_FILE = "log.txt"
_LOCK_FILE = ".lock"
# Settings that say where, how loudly or how fast, but never what is computed.
_MAY_CHANGE = frozenset(
    "run_dir output_dir overwrite resume report_to run_name logging_dir disable_tqdm log_level "
    "log_level_replica local_rank dataloader_num_workers resume_from_checkpoint push_to_hub "
    "hub_token hub_model_id".split()
)


class RunDirError(Exception):
    """A run folder cannot be used as asked; the message says why and what to do."""


class RunFinishedError(RunDirError):
    """The folder holds a finished run of the same stage with the same settings."""


class RunDir:
    """A run folder. Make one with `RunDir.open` (to write) or `RunDir.load` (to read).

    Attributes:
        path: The folder.
        is_resumed: Whether an earlier process began this run.
        is_writer: Whether this process writes (rank 0 of an opened run).
    """

    def __init__(self, path: Path, *, is_resumed: bool, is_writer: bool) -> None:
        self.path = path
        self.is_resumed = is_resumed
        self.is_writer = is_writer
        self._lock: FolderLock | None = None
        self._log: logging.Handler | None = None

    @classmethod
    def open(
        cls,
        path: str | Path,
        config: Any,
        *,
        stage: str,
        overwrite: bool = False,
        resume: bool = True,
        may_change: Collection[str] = (),
        reopen: bool = False,
    ) -> RunDir:
        """Begin a run, or continue an unfinished one of the same stage and settings.

        Writes `config.json`, takes the folder's lock and adds `log.txt` to the root logger.

        Args:
            path: The folder; it is created.
            config: The resolved configuration, a dataclass or a mapping.
            stage: The stage's name, such as `stage1`.
            overwrite: Replace a run of this stage that is there, finished or not.
            resume: Continue an unfinished run; False refuses.
            may_change: Settings that may differ when a run is continued, besides paths and logging.
            reopen: Continue a finished run as well: what `may_change` allows may ask for more.

        Raises:
            RunFinishedError: The run is complete and `overwrite` is False.
            RunDirError: The folder is another stage's, of another format version, has other
                settings, is in use, cannot be written, has a broken `config.json`, or is no run
                folder.
        """
        path = Path(path)
        settings = to_plain(config)
        run = cls(path, is_resumed=False, is_writer=_rank() == 0)
        if not run.is_writer:
            return run
        with explain_full_disk(path):
            try:
                _check_is_ours(path)
                path.mkdir(parents=True, exist_ok=True)
                run._lock = FolderLock(path / _LOCK_FILE)
                run._start(
                    settings, stage, overwrite, resume, _MAY_CHANGE | set(may_change), reopen
                )
                run._log = _attach_log(path / LOG_FILE)
            except BaseException as error:
                run.close()
                if isinstance(error, LockedError):
                    raise RunDirError(str(error)) from error
                if isinstance(error, OSError) and not is_disk_full(error):
                    raise RunDirError(
                        f"{path}: cannot be written ({error}); expected a folder that this user "
                        "may make and fill: choose another, or change its permissions"
                    ) from error
                raise
        return run

    @classmethod
    def load(cls, path: str | Path, *, stage: str | None = None) -> RunDir:
        """Look at a run without writing to it.

        Raises:
            RunDirError: It is no run folder, not of this stage or format version, or cannot be
                read.
        """
        path = Path(path)
        manifest = _read_manifest(path)
        if manifest is None:
            raise RunDirError(
                f"{path}: no run here; expected a folder with a {CONFIG_FILE} of ours"
            )
        _check_version(path, manifest)
        if stage is not None and manifest["stage"] != stage:
            raise RunDirError(f"{path}: a run of {manifest['stage']}, expected one of {stage}")
        return cls(path, is_resumed=False, is_writer=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and self._log is not None:
            # The command shows one line; the whole of it is kept here.
            record = logger.makeRecord(
                logger.name, logging.ERROR, __file__, 0, "failed", (), (type(error), error, trace)
            )
            self._log.handle(record)
            error.add_note(f"log: {self.path / LOG_FILE}")
        self.close()

    def close(self) -> None:
        """Give the lock back and stop logging into the folder."""
        if self._log is not None:
            logging.getLogger().removeHandler(self._log)
            self._log.close()
            self._log = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @property
    def checkpoint(self) -> Path:
        """Where the stage leaves its resulting checkpoint."""
        return self.path / "checkpoint"

    @property
    def manifest(self) -> dict[str, Any]:
        """Content of `config.json`."""
        return json.loads((self.path / CONFIG_FILE).read_text(encoding="utf-8"))

    @property
    def is_finished(self) -> bool:
        """Whether the run is complete."""
        return (self.path / FINISHED_FILE).is_file()

    @property
    def results(self) -> dict[str, Any]:
        """What `finish` was given.

        Raises:
            RunDirError: The run is not finished, or `finished.json` is broken.
        """
        if not self.is_finished:
            raise RunDirError(
                f"{self.path}: this run is not finished; run its command again to resume it: "
                f"{self.manifest['command']}"
            )
        advice = f"remove it and run this run's command again: {self.manifest['command']}"
        return _read_json(self.path / FINISHED_FILE, advice)["results"]

    def finish(self, results: Mapping[str, Any] | None = None) -> None:
        """Mark the run complete. Call it after everything else is on disk."""
        if self.is_writer:
            content = {"finished_at": now(), "results": to_plain(results or {})}
            atomic_write_json(self.path / FINISHED_FILE, content)

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file into the folder, atomically."""
        if self.is_writer:
            atomic_write_json(self.path / name, value)

    def append_metrics(self, metrics: Mapping[str, Any], name: str = "metrics.jsonl") -> None:
        """Append one line. Give it a `step`, so that resuming can drop what is done again."""
        if self.is_writer:
            append_line(self.path / name, json.dumps(to_plain(metrics), ensure_ascii=False))

    def metrics(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """All lines so far; a torn last line, left by a kill, is not one.

        Raises:
            rivet.json_lines.BrokenLineError: Another line is broken.
        """
        return read_lines(self.path / name)

    def trim_metrics(self, last_step: int, name: str = "metrics.jsonl") -> None:
        """Keep lines up to a step, and those without one: call it when resuming from a step."""
        path = self.path / name
        if self.is_writer and path.exists():
            kept = [line for line in read_lines(path) if line.get("step", last_step) <= last_step]
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)
            atomic_write_text(path, text)

    def _start(
        self,
        settings: dict[str, Any],
        stage: str,
        overwrite: bool,
        resume: bool,
        may_change: Collection[str],
        reopen: bool,
    ) -> None:
        """Decide under the lock what to do with what is there."""
        old = _read_manifest(self.path)
        if old is not None and overwrite and not old.get("discarded"):
            if old["stage"] != stage:
                raise RunDirError(
                    f"{self.path}: holds a run of {old['stage']}, which {stage} does not "
                    "overwrite; choose another folder, or remove it yourself"
                )
            self._check_keeps_inputs(settings)
            # From here on a kill leaves a folder that the next run empties.
            atomic_write_json(self.path / CONFIG_FILE, {**old, "discarded": True})
            old = {**old, "discarded": True}
        if old is None or old.get("discarded"):
            self._empty()
            manifest = _new_manifest(settings, stage)
        else:
            self._check_can_resume(old, settings, stage, resume, may_change, reopen)
            (self.path / FINISHED_FILE).unlink(missing_ok=True)
            self.is_resumed = True
            manifest = {**old, "resumed": [*old.get("resumed", []), process_facts()]}
            if reopen:  # what is done from now on is what these settings ask for
                manifest["config"] = settings
            if manifest["resumed"][-1]["git"] != old["git"]:
                logger.warning("%s: resumed by another commit than it was begun by", self.path)
            recover_all(self.path)
            self._remove_leftovers()
        atomic_write_json(self.path / CONFIG_FILE, manifest)

    def _check_can_resume(
        self,
        old: dict[str, Any],
        settings: dict[str, Any],
        stage: str,
        resume: bool,
        may_change: Collection[str],
        reopen: bool,
    ) -> None:
        _check_version(self.path, old)
        if old["stage"] != stage:
            raise RunDirError(
                f"{self.path}: holds a run of {old['stage']}, this is {stage}; choose another "
                "folder"
            )
        different = _differences(old["config"], settings, may_change)
        if different:
            raise RunDirError(
                f"{self.path}: holds a run with other settings ({'; '.join(different)}); give it "
                "the same settings to resume, choose another folder, or replace it with "
                "--overwrite true"
            )
        if self.is_finished and not reopen:
            raise RunFinishedError(
                f"{self.path}: this run is finished; replace it with --overwrite true, or choose "
                "another folder"
            )
        if not resume:
            raise RunDirError(
                f"{self.path}: holds an unfinished run; resume it (--resume true) or replace it "
                "(--overwrite true)"
            )

    def _check_keeps_inputs(self, settings: dict[str, Any]) -> None:
        """Refuse to empty a folder that a setting other than its own place lies in."""
        for name, value in settings.items():
            for item in value if isinstance(value, list) else [value]:
                if name in _MAY_CHANGE or not isinstance(item, str) or not item:
                    continue
                inside = Path(item).resolve()
                if inside.is_relative_to(self.path.resolve()) and inside.exists():
                    raise RunDirError(
                        f"{name}: {item} lies in {self.path}, which would be emptied; expected "
                        "another output_dir"
                    )

    def _empty(self) -> None:
        """Remove everything but the lock and config.json, which is replaced next."""
        for item in self.path.iterdir():
            if item.name not in (_LOCK_FILE, CONFIG_FILE):
                remove(item)

    def _remove_leftovers(self) -> None:
        for item in [p for p in self.path.rglob(".*") if is_leftover(p)]:
            remove(item)


def _check_is_ours(path: Path) -> None:
    """Refuse a path that holds anything but a run, before a lock file is put there."""
    if path.exists() and not path.is_dir():
        raise RunDirError(f"{path}: is a file; expected a folder for the run")
    if not path.is_dir() or _read_manifest(path) is not None:
        return
    foreign = [p.name for p in path.iterdir() if p.name != _LOCK_FILE and not is_leftover(p)]
    if foreign:
        raise RunDirError(
            f"{path}: not empty and no run of ours (it holds {', '.join(sorted(foreign)[:3])}); "
            "choose another folder"
        )


def _read_manifest(path: Path) -> dict[str, Any] | None:
    """Content of config.json, None if there is none of ours (checkpoints have one as well).

    Raises:
        RunDirError: It is broken or cannot be read.
    """
    advice = (
        "it says what the folder holds: put a copy of it back, choose another folder, or remove "
        "this one if you need nothing in it"
    )
    try:
        manifest = _read_json(path / CONFIG_FILE, advice)
    except (FileNotFoundError, NotADirectoryError):
        return None
    is_ours = isinstance(manifest, dict) and {"run_format", "stage", "config"} <= set(manifest)
    return manifest if is_ours else None


def _read_json(file: Path, advice: str) -> Any:
    """Content of a file.

    Raises:
        RunDirError: It cannot be read; says what to do.
        FileNotFoundError, NotADirectoryError: It is not there.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError) as error:
        raise RunDirError(f"{file}: cannot be read ({error}); {advice}") from error


def _check_version(path: Path, manifest: dict[str, Any]) -> None:
    if manifest["run_format"] != FORMAT_VERSION:
        raise RunDirError(
            f"{path}: run format {manifest['run_format']}, this rivet reads and writes "
            f"{FORMAT_VERSION}; use the rivet that wrote it ({manifest.get('versions', {})}), "
            "another folder, or --overwrite true"
        )


def _differences(
    old: dict[str, Any], new: dict[str, Any], may_change: Collection[str]
) -> list[str]:
    """What differs between two sets of settings, as a reader would want it."""
    names = [n for n in {**old, **new} if n not in may_change]
    absent = "(absent)"
    pairs = [(n, old.get(n, absent), new.get(n, absent)) for n in names]
    return [f"{n} was {a!r}, is {b!r}" for n, a, b in pairs if a != b]


def _new_manifest(settings: dict[str, Any], stage: str) -> dict[str, Any]:
    facts = {"run_format": FORMAT_VERSION, "stage": stage, "seed": settings.get("seed")}
    return {**facts, **process_facts(), "config": settings}


def _attach_log(path: Path) -> logging.Handler:
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    # A log line that finds the disk full must not end the run; the run's own writes say it.
    handler.handleError = lambda record: None  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    return handler


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
