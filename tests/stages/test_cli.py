"""The `rivet` command: quick help, near names, exit codes, errors without noise."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from rivet.config import ConfigError
from rivet.interrupt import Interrupted
from rivet.runs import RunDir, RunDirError
from stages import cli

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[list[str]], int]], None]:
    """Make `rivet stage1` call a function of the test."""

    def install(main: Callable[[list[str]], int]) -> None:
        module = types.ModuleType("made_up_stage")
        module.main = main  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "made_up_stage", module)
        monkeypatch.setitem(cli.COMMANDS, "stage1", ("made_up_stage", "made up"))

    return install


def raising(error: BaseException) -> Callable[[list[str]], int]:
    """A command that fails."""

    def main(argv: list[str]) -> int:
        raise error

    return main


def test_help_lists_every_command_and_imports_no_torch() -> None:
    code = (
        "import sys; from stages.cli import main; code = main(['--help'])\n"
        "heavy = {'torch', 'transformers', 'trl', 'yaml', 'numpy', 'tqdm'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in cli.COMMANDS:
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_exists_and_answers_help(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: rivet {name}")


def test_an_unknown_command_is_refused_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["stage_1"]) == 2
    assert "unknown command 'stage_1'; did you mean stage1?" in capsys.readouterr().err


def test_no_command_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: rivet" in capsys.readouterr().out


def test_the_commands_exit_code_is_passed_on(command: Callable) -> None:
    seen = []
    command(lambda argv: seen.append(argv) or 0)
    assert cli.main(["stage1", "a.yaml", "--steps", "3"]) == 0
    assert seen == [["a.yaml", "--steps", "3"]]
    command(raising(SystemExit(2)))
    assert cli.main(["stage1"]) == 2


def test_a_command_may_open_as_many_files_as_the_hard_limit_allows(command: Callable) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = []
    command(lambda argv: seen.append(resource.getrlimit(resource.RLIMIT_NOFILE)) or 0)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        assert cli.main(["stage1"]) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    ((soft, hard),) = seen
    assert hard == before[1]
    assert soft == (65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)) > 512


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RunDirError("runs/a: in use"), 1, "rivet stage1: runs/a: in use\n"),
        (ConfigError(["a.yaml:1: x: unknown"]), 2, "rivet stage1: a.yaml:1: x: unknown\n"),
        (OSError(errno.ENOSPC, "No space left"), 1, "rivet stage1: OSError: [Errno 28] No space"),
    ],
)
def test_errors_meant_for_the_user_are_one_line(
    error: Exception,
    code: int,
    message: str,
    command: Callable,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command(raising(error))
    assert cli.main(["stage1"]) == code
    text = capsys.readouterr().err
    assert text.startswith(message) and "Traceback" not in text
    assert cli.main(["--debug", "stage1"]) == code
    assert "Traceback" in capsys.readouterr().err


def test_a_bug_is_shown_whole_or_left_in_the_log_of_its_run(
    command: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command(raising(ZeroDivisionError("oh")))
    assert cli.main(["stage1"]) == 1
    assert "Traceback" in capsys.readouterr().err

    def main(argv: list[str]) -> int:
        with RunDir.open(tmp_path, {}, stage="stage1"):
            raise ZeroDivisionError("oh")

    command(main)
    assert cli.main(["stage1"]) == 1
    text = capsys.readouterr().err
    assert text == f"rivet stage1: ZeroDivisionError: oh\nlog: {tmp_path / 'log.txt'}\n"
    assert "Traceback" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (Interrupted("stopped after step 12"), "stopped after step 12"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_an_interrupt_says_how_to_resume(
    stop: KeyboardInterrupt, message: str, command: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    command(raising(stop))
    assert cli.main(["stage1", "a b.yaml", "--steps", "3"]) == 130
    expected = f"\n{message}; resume with: rivet stage1 'a b.yaml' --steps 3\n"
    assert capsys.readouterr().err == expected


def test_only_rank_0_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    for rank, level in (("1", logging.WARNING), ("0", logging.INFO)):
        monkeypatch.setenv("RANK", rank)
        cli.set_up_logging()
        assert logging.getLogger("stages.stage1").getEffectiveLevel() == level
