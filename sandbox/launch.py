"""The zygote as its client sees it: started with a clean environment, told things, ended."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sandbox import wire

SOURCE = Path(__file__).resolve().parent.parent
_END_S = 5.0  # for the processes to end on request
# `site` is left to `main` (-S), so that what it imports lies in the same heap as all the rest.
_PROGRAM = """
import os, sys
sys.path.insert(0, sys.argv[1])
os.dup2(int(sys.argv[3]), 3, inheritable=False)
from sandbox import memory
with memory.one_heap():
    from sandbox.zygote import prepare
    prepare(sys.argv[1])
from sandbox.zygote import main
main(sys.argv[2])
"""


class ZygoteProcess:
    """A running zygote.

    It is spawned, never forked: the caller may have threads, locks and GPU state.

    Args:
        config: what `zygote.main` takes: limits, disabled layers, use of huge pages.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._control, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()
        text = json.dumps(config | {"client_pid": os.getpid()})
        command = [sys.executable, "-s", "-S", "-P", "-B", "-X", "utf8", "-c", _PROGRAM]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(SOURCE), text, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=(theirs.fileno(),),
                cwd="/",
                env=clean_environment(),
            )
        self._owner = os.getpid()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def tell(self, message: str, *fds: int) -> None:
        """Send a message; when the zygote is dead, the call that needs its slot finds out."""
        try:
            socket.send_fds(self._control, [message.encode().ljust(wire.MESSAGE_BYTES)], fds)
        except OSError:
            pass

    def is_dead(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def obituary(self) -> str:
        """Return how it ended and the end of what it said."""
        self._errors.seek(0)
        said = self._errors.read()[-500:].decode("utf-8", "replace").strip()
        return f"the zygote ended with code {self._process.returncode}: {said}"

    def kill(self) -> None:
        """Kill it at once; the kernel kills its slots in turn."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End it and its slots, and wait until they are gone."""
        self._control.close()
        if self._owner == os.getpid():
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self.kill()
        self._errors.close()


def clean_environment() -> dict[str, str]:
    """Return all that the inside sees of the environment: no secret, no path of a home."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "LD_BIND_NOW": "1",  # else each child looks up the functions that it is the first to call
        "MPLBACKEND": "Agg",
    }
    for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB_MAXIMUM"):
        environment[f"{library}_NUM_THREADS"] = "1"
    if "LD_LIBRARY_PATH" in os.environ:  # some interpreters do not start without it
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    return environment
