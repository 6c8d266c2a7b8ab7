"""`rivet vllm`: serves until it is stopped, and says early what is wrong."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fake_vllm_process import gone, install, wait_until_gone
from stage1_world import build_model, build_tokenizer

from rivet.checkpoints import CheckpointError
from rivet.rollout.backend import BackendError
from rivet.settings import ProtocolSettings
from stages.vllm import check_port, main


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    build_model().save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    ProtocolSettings("bare", "").save(folder)
    return folder


def test_it_serves_until_it_is_asked_to_stop(checkpoint: Path, tmp_path: Path) -> None:
    python, pids = install(tmp_path)
    command = [sys.executable, "-m", "stages.vllm", str(checkpoint), "--port", "0", "--seed", "3"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"RIVET_VLLM_PYTHON": str(python)},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ready: "):
                break
        assert line.startswith("ready: vllm_urls: ['http://127.0.0.1:")
        assert not gone(pids)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    wait_until_gone(pids)


def test_a_server_that_fails_is_a_failure_of_the_command(checkpoint: Path, tmp_path: Path) -> None:
    python, _ = install(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "stages.vllm", str(checkpoint), "--port", "0", "--fail"],
        capture_output=True,
        text=True,
        env=os.environ | {"RIVET_VLLM_PYTHON": str(python)},
    )
    assert done.returncode == 1
    assert "no room for the key-value cache" in done.stdout
    assert "vLLM ended with code 3" in done.stderr


def test_a_port_that_is_taken_is_refused() -> None:
    """vLLM would share it, and half of the requests would go elsewhere."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(BackendError, match=f"127.0.0.1:{port}: somebody listens there"):
            check_port("127.0.0.1", port)


def test_a_model_on_the_hub_is_served_as_its_card_says(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", {"me/mine": str(checkpoint)}.get)
    monkeypatch.setattr("stages.vllm.find_python", lambda: Path(sys.executable))
    monkeypatch.setattr("stages.vllm.set_environment", lambda: None)
    monkeypatch.setattr("stages.vllm._announce", lambda *_: None)
    monkeypatch.setattr(
        "stages.vllm.vllm_guard.run", lambda command, **_: commands.append(command) or 0
    )
    assert main(["me/mine", "--port", "0"]) == 0
    assert str(checkpoint) in commands[0]


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        main([str(tmp_path / "nothing")])
