"""A server as a child process that ends when its parent does: experts, or vLLM.

The child is a command of its own, not a fork and not a spawned copy of this program, so that it
imports no more than it needs.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from rivet.experts.server import HOST, READY_PREFIX, ServerError


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server in a child process."""

    port: int
    pid: int

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as `base_url`."""
        return f"http://{HOST}:{self.port}/v1"


@contextmanager
def start_server(
    command: Sequence[str], *, timeout_s: float = 60.0, name: str = "the expert server"
) -> Iterator[RunningServer]:
    """Run a server command as a child process, wait until it answers, and stop it at the end.

    Args:
        command: Prints `READY_PREFIX` and its port, and ends when the process `{parent}` does,
            which becomes this process's id: `run_server(..., parent_pid=...)` and
            `rivet.rollout.vllm_guard` do.
        timeout_s: Seconds that it may take to answer.
        name: What errors call it.

    Raises:
        ServerError: It ended, or did not answer in time.
    """
    command = [part.replace("{parent}", str(os.getpid())) for part in command]
    with tempfile.TemporaryFile() as log:
        # A session of its own: Ctrl-C is the parent's to handle, and the parent may still finish
        # a step that needs the experts.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield RunningServer(_wait_until_ready(process, log, timeout_s, name), process.pid)
        finally:
            _stop(process)


def _wait_until_ready(
    process: subprocess.Popen[bytes], log: IO[bytes], timeout_s: float, name: str
) -> int:
    deadline = time.monotonic() + timeout_s
    pause_s = 0.01
    while time.monotonic() < deadline:
        printed = _printed(log)
        found = re.search(rf"^{READY_PREFIX}(\d+)$", printed, re.MULTILINE)
        if found and _is_healthy(int(found[1])):
            return int(found[1])
        if process.poll() is not None:
            raise ServerError(
                f"{name} ended with code {process.returncode} before it answered:\n"
                f"{printed[-2000:]}"
            )
        time.sleep(pause_s)
        pause_s = min(0.1, pause_s * 1.5)
    raise ServerError(f"{name} did not answer within {timeout_s:g} s:\n{_printed(log)[-2000:]}")


def _printed(log: IO[bytes]) -> str:
    # pread: the child shares this file's offset and must go on writing at the end.
    return os.pread(log.fileno(), 1 << 20, 0).decode("utf-8", "replace")


def _is_healthy(port: int) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{HOST}:{port}/health", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
