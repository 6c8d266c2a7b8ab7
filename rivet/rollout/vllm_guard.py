"""Runs a vLLM server as a child and ends it, with all its processes, when the parent is gone.

    python -m rivet.rollout.vllm_guard --port 8000 --parent PID -- python -m vllm....

vLLM does not watch its parent, and its engine is a process of its own. The guard does: it polls for
the death of the process that asked for the server, which also sees a SIGKILL, and then stops the
server's whole session. Standard library only.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from rivet.experts.server import READY_PREFIX

_POLL_S = 0.2
_GRACE_S = 3.0  # what `rivet.experts.server_process` leaves the guard itself is more
_PR_SET_PDEATHSIG = 1


def run(command: Sequence[str], *, port: int, parent_pid: int | None = None) -> int:
    """Run the server until it ends, a signal asks to stop, or the parent is gone.

    Args:
        command: The server's.
        port: Where it will listen; printed for whoever waits for it.
        parent_pid: End as soon as this is no longer the parent process.

    Returns:
        The server's exit code, 0 if it was asked to stop.
    """
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda signum, frame: asked.append(signum))
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_guard
    )
    print(f"{READY_PREFIX}{port}", flush=True)
    try:
        while process.poll() is None and not asked:
            if parent_pid is not None and os.getppid() != parent_pid:
                break
            time.sleep(_POLL_S)
        return process.returncode or 0
    finally:
        _end(process)


def _die_with_guard() -> None:
    """In the child: end, in good order, also when the guard is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop the server and every process of its session's group."""
    _signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    # The engine may outlive a front end that crashed.
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def main(argv: Sequence[str] | None = None) -> int:
    """Run the guard; what follows `--` is the server's command."""
    parser = argparse.ArgumentParser(prog="python -m rivet.rollout.vllm_guard")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parent", type=int)
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args(argv)
    return run(arguments.command, port=arguments.port, parent_pid=arguments.parent)


if __name__ == "__main__":
    sys.exit(main())
