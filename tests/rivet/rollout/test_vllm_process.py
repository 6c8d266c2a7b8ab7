"""A managed server's life: it starts, says why it does not, and leaves nobody behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_vllm_process import gone, install, wait_until_gone

from rivet.experts.server import ServerError
from rivet.rollout.vllm_process import (
    VLLMNotFoundError,
    VLLMSettings,
    find_python,
    managed_server,
    server_command,
)


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts the fake in the place of vLLM's interpreter; gives the file with its process ids."""
    python, path = install(tmp_path)
    monkeypatch.setenv("RIVET_VLLM_PYTHON", str(python))
    return path


def test_it_answers_while_it_is_open_and_nobody_is_left_behind(pids: Path) -> None:
    with managed_server(VLLMSettings("model")) as server:
        assert server.base_url.startswith("http://127.0.0.1:")
        assert not gone(pids)
    wait_until_gone(pids)


def test_it_ends_with_a_parent_that_is_killed(pids: Path) -> None:
    program = (
        "import time\n"
        "from rivet.rollout import vllm_process\n"
        "vllm_process._has_gpu = lambda: False\n"  # spares the import of torch
        "with vllm_process.managed_server(vllm_process.VLLMSettings('model')):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
        os.kill(parent.pid, signal.SIGKILL)
    wait_until_gone(pids)


def test_one_that_does_not_come_up_says_its_last_words(pids: Path) -> None:
    settings = VLLMSettings("model", arguments=("--fail",))
    with pytest.raises(ServerError, match="vLLM ended with code 3.*(?s:.*)no room for the key"):
        with managed_server(settings):
            pass


def test_without_vllm_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RIVET_VLLM_PYTHON", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    with pytest.raises(VLLMNotFoundError, match="make setup-vllm"):
        find_python()
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert find_python() == str(python)


def test_the_users_arguments_come_last_and_adapters_get_a_rank_that_vllm_knows() -> None:
    settings = VLLMSettings("m", max_lora_rank=12, arguments=("--seed", "3"))
    command = server_command(settings, "python", 8000)
    assert command[-2:] == ["--seed", "3"]
    assert command[command.index("--max-lora-rank") + 1] == "16"
    assert command[command.index("--logprobs-mode") + 1] == "processed_logprobs"
