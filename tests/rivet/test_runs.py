"""Run folders: begun, resumed, refused, locked, and whole whatever happens while writing."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rivet import files
from rivet.files import DiskFullError, atomic_folder, atomic_write_text, recover_folder
from rivet.interrupt import Interrupted, interruptible
from rivet.json_lines import BrokenLineError
from rivet.runs import RunDir, RunDirError, RunFinishedError

ROOT = Path(__file__).parents[2]


@dataclass
class Config:
    """Settings of a made-up stage."""

    run_dir: str = "somewhere"
    learning_rate: float = 1e-3
    seed: int = 7
    sizes: tuple[int, ...] = (1, 2)
    hub_token: str | None = None
    extra: dict[str, float] = field(default_factory=lambda: {"a": 1.0})


def begin(path: Path, config: Config | None = None, **kwargs: object) -> RunDir:
    """Open and close at once, as a process that ended would leave it."""
    with RunDir.open(path, config or Config(), stage="stage1", **kwargs) as run:  # type: ignore[arg-type]
        return run


def test_a_new_run_records_settings_seed_versions_commit_and_command(tmp_path: Path) -> None:
    run = begin(tmp_path / "a" / "run", Config(hub_token="hf_secret"))
    manifest = run.manifest
    assert not run.is_resumed and not run.is_finished
    assert manifest["stage"] == "stage1" and manifest["seed"] == 7
    assert manifest["config"]["sizes"] == [1, 2]
    assert manifest["versions"]["torch"].startswith("2.")
    if (ROOT / ".git").exists():  # a source archive has none
        assert len(manifest["git"]["commit"]) == 40
    assert manifest["command"]
    assert "hf_secret" not in (run.path / "config.json").read_text()


def test_an_unfinished_run_with_the_same_settings_is_resumed_even_after_moving(
    tmp_path: Path,
) -> None:
    begin(tmp_path / "a", Config(run_dir="a"))
    os.rename(tmp_path / "a", tmp_path / "b")
    run = begin(tmp_path / "b", Config(run_dir="b"))
    assert run.is_resumed
    assert run.manifest["config"]["run_dir"] == "a"
    assert len(run.manifest["resumed"]) == 1


def test_other_settings_are_refused_by_name_and_value(tmp_path: Path) -> None:
    begin(tmp_path)
    with pytest.raises(RunDirError, match=r"learning_rate was 0\.001, is 0\.01.*--overwrite true"):
        begin(tmp_path, Config(learning_rate=0.01))
    assert begin(tmp_path, Config(learning_rate=0.01), may_change=["learning_rate"]).is_resumed


def test_a_finished_run_is_refused_and_replaced_only_when_asked(tmp_path: Path) -> None:
    with RunDir.open(tmp_path, Config(), stage="stage1") as run:
        run.append_metrics({"step": 1, "note": "a\u2028b"})
        assert run.metrics() == [{"step": 1, "note": "a\u2028b"}]
        run.checkpoint.mkdir()
        (run.checkpoint / "weights").write_text("old")
        run.finish({"accuracy": 0.5})
    assert RunDir.load(tmp_path).results == {"accuracy": 0.5}
    with pytest.raises(RunFinishedError, match="--overwrite true"):
        begin(tmp_path)
    run = begin(tmp_path, overwrite=True)
    assert not run.is_resumed and not run.is_finished
    assert run.metrics() == [] and not run.checkpoint.exists()


def test_another_stage_is_refused_even_with_overwrite(tmp_path: Path) -> None:
    begin(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(RunDirError, match="holds a run of stage1"):
            RunDir.open(tmp_path, Config(), stage="stage2", overwrite=overwrite)
    with pytest.raises(RunDirError, match="a run of stage1, expected one of stage2"):
        RunDir.load(tmp_path, stage="stage2")


def test_another_format_version_is_refused_by_number(tmp_path: Path) -> None:
    run = begin(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**run.manifest, "run_format": 99}))
    with pytest.raises(RunDirError, match="run format 99, this rivet reads and writes 1"):
        begin(tmp_path)
    with pytest.raises(RunDirError, match="run format 99"):
        RunDir.load(tmp_path)


def test_a_folder_that_is_no_run_is_left_untouched(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    for overwrite in (False, True):
        with pytest.raises(RunDirError, match="not empty and no run of ours.*config.json"):
            begin(tmp_path, overwrite=overwrite)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    with pytest.raises(RunDirError, match="is a file"):
        begin(tmp_path / "config.json")
    with pytest.raises(RunDirError, match="no run here"):
        RunDir.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b'{"run_format": 1, "sta', b"\xff"])
def test_a_broken_config_of_a_run_is_named_and_nothing_is_touched(
    tmp_path: Path, content: bytes
) -> None:
    begin(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    for overwrite in (False, True):
        with pytest.raises(RunDirError, match=r"config\.json: cannot be read .* put a copy of it"):
            begin(tmp_path, overwrite=overwrite)
    with pytest.raises(RunDirError, match=r"config\.json: cannot be read"):
        RunDir.load(tmp_path)
    assert (tmp_path / "config.json").read_bytes() == content


def test_broken_results_are_named_and_the_same_command_makes_them_again(tmp_path: Path) -> None:
    with RunDir.open(tmp_path, Config(), stage="stage1") as run:
        run.finish({"accuracy": 0.5})
    (tmp_path / "finished.json").write_text('{"results": {')
    with pytest.raises(RunDirError, match=r"finished\.json: cannot be read .*remove it and run"):
        _ = RunDir.load(tmp_path).results
    (tmp_path / "finished.json").unlink()
    assert begin(tmp_path).is_resumed


def test_a_folder_that_cannot_be_made_or_filled_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "run" / ".lock").mkdir(parents=True)
    for path in (tmp_path / "file" / "run", Path("/proc/nope/run"), tmp_path / "run"):
        refusal = f"{path}: cannot be written .*choose another"
        with pytest.raises(RunDirError, match=refusal) as told:
            begin(path)
        assert "\n" not in str(told.value)


def test_resume_false_refuses_an_unfinished_run(tmp_path: Path) -> None:
    begin(tmp_path)
    with pytest.raises(RunDirError, match="unfinished run"):
        begin(tmp_path, resume=False)


def test_an_unfinished_run_has_no_results_and_says_how_to_go_on(tmp_path: Path) -> None:
    run = begin(tmp_path)
    with pytest.raises(RunDirError, match="not finished.*resume"):
        _ = run.results


def test_a_kill_while_replacing_leaves_a_folder_that_the_next_run_empties(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunDir.open(tmp_path, Config(), stage="stage1") as run:
        run.write_json("old.json", 1)
        run.finish()

    def killed(self: RunDir) -> None:
        (self.path / "finished.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunDir, "_empty", killed)
        begin(tmp_path, overwrite=True)
    run = begin(tmp_path, Config(learning_rate=5.0))
    assert not run.is_resumed and not (tmp_path / "old.json").exists()


def test_resuming_removes_what_a_killed_writer_left(tmp_path: Path) -> None:
    run = begin(tmp_path)
    (tmp_path / ".checkpoint.tmp-4242").mkdir()
    (tmp_path / ".results.json.tmp-4242").write_text("half")
    (tmp_path / ".checkpoint.old-4242").mkdir()
    (tmp_path / ".checkpoint.old-4242" / "weights").write_text("whole")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / ".dataset[1].old-4242").mkdir()
    (tmp_path / "sub" / ".dataset[1].old-4242" / "rows").write_text("whole")
    begin(tmp_path)
    assert not list(tmp_path.rglob(".*tmp*")) and not list(tmp_path.rglob(".*old*"))
    assert (run.checkpoint / "weights").read_text() == "whole"
    assert (tmp_path / "sub" / "dataset[1]" / "rows").read_text() == "whole"


def test_an_old_folder_of_the_same_process_id_does_not_stop_the_next_writer(tmp_path: Path) -> None:
    for name in ("checkpoint", f".checkpoint.old-{os.getpid()}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)
    with atomic_folder(tmp_path / "checkpoint") as folder:
        (folder / "weights").write_text("new")
    assert (tmp_path / "checkpoint" / "weights").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_a_run_is_not_emptied_of_what_it_was_to_read(tmp_path: Path) -> None:
    (begin(tmp_path).checkpoint).mkdir()
    config = {"model": str(tmp_path / "checkpoint"), "output_dir": str(tmp_path)}
    with pytest.raises(
        RunDirError, match="model: .* would be emptied; expected another output_dir"
    ):
        RunDir.open(tmp_path, config, stage="stage1", overwrite=True)
    assert (tmp_path / "checkpoint").is_dir()


def test_a_second_process_is_refused_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    hold = (
        "import os, sys; from rivet.runs import RunDir\n"
        "run = RunDir.open(sys.argv[1], {'seed': 1}, stage='stage1')\n"
        "child = os.fork()\n"  # an orphan must not keep the lock
        "print(child if child else '', flush=True)\n"
        "sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    child = int("".join(process.stdout.readline().strip() for _ in range(2)))
    try:
        with pytest.raises(RunDirError, match=f"in use by process {process.pid} on"):
            RunDir.open(tmp_path, {"seed": 1}, stage="stage1")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        os.kill(child, 0)  # the orphan is alive
        with RunDir.open(tmp_path, {"seed": 1}, stage="stage1") as run:
            assert run.is_resumed
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdin.close()  # type: ignore[union-attr]
        process.stdout.close()


def test_one_process_cannot_open_a_run_twice(tmp_path: Path) -> None:
    with RunDir.open(tmp_path, Config(), stage="stage1"):
        with pytest.raises(RunDirError, match="open already"):
            begin(tmp_path)
    begin(tmp_path)


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with RunDir.open(tmp_path / "run", Config(), stage="stage1") as run:
        run.append_metrics({"step": 1})
        run.finish()
    assert not (tmp_path / "run").exists()


def test_metrics_are_cut_back_to_the_resumed_step_and_a_torn_line_goes(tmp_path: Path) -> None:
    with RunDir.open(tmp_path, Config(), stage="stage1") as run:
        run.append_metrics({"note": "begin"})
        for step in (1, 2, 3):
            run.append_metrics({"step": step, "loss": step / 2})
        with open(tmp_path / "metrics.jsonl", "a") as file:
            file.write('{"step": 4, "lo')
        assert [m.get("step") for m in run.metrics()] == [None, 1, 2, 3]
        run.append_metrics({"step": 4})
        assert [m.get("step") for m in run.metrics()] == [None, 1, 2, 3, 4]
        run.trim_metrics(2)
        assert [m.get("step") for m in run.metrics()] == [None, 1, 2]


@pytest.mark.parametrize("torn", ['{"step": 2, "lo', "7", ""])
def test_a_torn_line_between_whole_ones_is_named_by_number(tmp_path: Path, torn: str) -> None:
    with RunDir.open(tmp_path, Config(), stage="stage1") as run:
        text = f'{{"step": 1}}\n{torn}\n{{"step": 3}}\n'
        (tmp_path / "metrics.jsonl").write_text(text)
        for read in (run.metrics, lambda: run.trim_metrics(1)):
            with pytest.raises(BrokenLineError, match=r"metrics\.jsonl:2: broken .*remove this"):
                read()
    assert (tmp_path / "metrics.jsonl").read_text() == text


def test_the_log_of_a_run_lies_in_its_folder(tmp_path: Path) -> None:
    with RunDir.open(tmp_path, Config(), stage="stage1"):
        logging.getLogger("rivet.test").warning("step one")
    logging.getLogger("rivet.test").warning("after the end")
    text = (tmp_path / "log.txt").read_text()
    assert "step one" in text and "after the end" not in text


def test_an_error_leaves_its_traceback_in_the_log_and_says_where(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        with RunDir.open(tmp_path, Config(), stage="stage1"):
            1 / 0  # noqa: B018
    assert caught.value.__notes__ == [f"log: {tmp_path / 'log.txt'}"]
    assert "1 / 0" in (tmp_path / "log.txt").read_text()


def no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_named_and_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunDir.open(tmp_path, Config(), stage="stage1") as run:
        run.write_json("results.json", {"old": 1})
        run.append_metrics({"step": 1})
        with monkeypatch.context() as patch:
            patch.setattr(files.os, "fsync", no_space)
            with pytest.raises(DiskFullError, match="no space left.*run the same command again"):
                run.write_json("results.json", {"new": 2})
            with pytest.raises(DiskFullError), atomic_folder(run.checkpoint) as folder:
                (folder / "weights").write_text("half")
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", no_space)
            with pytest.raises(DiskFullError):
                run.append_metrics({"step": 2})
    assert json.loads((tmp_path / "results.json").read_text()) == {"old": 1}
    assert run.metrics() == [{"step": 1}]
    assert not run.checkpoint.exists() and not list(tmp_path.glob(".*tmp*"))
    assert begin(tmp_path).is_resumed


@pytest.fixture
def tiny_disk(tmp_path: Path):
    """A file system of 64 KB, where the machine lets us mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_run_on_a_really_full_disk_can_be_resumed(tiny_disk: Path) -> None:
    path = tiny_disk / "run"
    with RunDir.open(path, Config(), stage="stage1") as run, pytest.raises(DiskFullError):
        for step in range(10_000):
            run.append_metrics({"step": step, "text": "x" * 1000})
    steps = [line["step"] for line in run.metrics()]
    assert steps == list(range(len(steps))) and steps
    with pytest.raises(DiskFullError):
        atomic_write_text(path / "big", "x" * 100_000)
    assert not (path / "big").exists() and not list(path.glob(".*tmp*"))
    (path / "metrics.jsonl").unlink()
    assert begin(path).is_resumed


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    for version in ("1", "2"):
        with atomic_folder(target) as folder:
            (folder / "weights").write_text(version)
        assert (target / "weights").read_text() == version
    with pytest.raises(ValueError), atomic_folder(target) as folder:
        (folder / "weights").write_text("3")
        raise ValueError
    assert (target / "weights").read_text() == "2"
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]
    os.rename(target, tmp_path / ".checkpoint.old-1")
    recover_folder(target)
    assert (target / "weights").read_text() == "2"


def test_what_a_killed_writer_left_is_removed_by_the_next_and_a_living_ones_is_not(
    tmp_path: Path,
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, at_work = (tmp_path / f".checkpoint.tmp-{pid}" for pid in (ended.pid, os.getppid()))
    for folder in (left, at_work):
        folder.mkdir()
    with atomic_folder(tmp_path / "checkpoint"):
        assert not left.exists() and at_work.exists()


def test_the_first_interrupt_lets_the_step_finish_and_a_later_one_stops_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Interrupted, match="stopped after step 1"), interruptible() as stop:
        for step in range(3):
            if step == 1:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGTERM)  # the same request, passed on by a launcher
            done.append(step)
            stop.check(f"step {step}")
    assert done == [0, 1]
    monkeypatch.setattr("rivet.interrupt._SAME_REQUEST_S", 0.0)
    with pytest.raises(KeyboardInterrupt), interruptible():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second signal must stop at once")
    assert signal.getsignal(signal.SIGINT) is before


def test_files_of_a_finished_folder_can_be_read_by_others(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "checkpoint") as folder:
        (folder / "weights").write_text("w")
        (folder / "weights").chmod(0o600)
    mode = (tmp_path / "checkpoint").stat().st_mode
    assert (tmp_path / "checkpoint" / "weights").stat().st_mode & 0o777 == mode & 0o666
