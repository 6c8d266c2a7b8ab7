"""A pool of persistent worker processes with a hard time limit.

Workers are fresh interpreters, not forks of a trainer that holds torch, started on first use. The
parent waits with a deadline and kills a worker that misses it (no signals in the parent, so any
thread may call); the next request gets a new worker.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from rivet.grading.verdict import GraderFault, GradingError

STARTUP_S = 120.0
_ROOT = Path(__file__).resolve().parents[2]
_KEPT_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SYSTEMROOT", "TMPDIR")


class WorkerTimeout(GradingError):
    """A worker missed its deadline and was killed."""


class WorkerDied(GradingError):
    """A worker ended, or ran out of memory, in the middle of a request."""


class WorkerOverran(WorkerDied):
    """A request used up the CPU time of one request, and its worker was ended for it."""


class Worker:
    """One worker process; used by one thread at a time."""

    def __init__(self, *, memory_mb: int, cpu_s: int) -> None:
        python_path = os.pathsep.join([str(_ROOT), *(path for path in sys.path if path)])
        environment = {key: os.environ[key] for key in _KEPT_ENVIRONMENT if key in os.environ}
        environment |= {
            "PYTHONPATH": python_path,
            "PYTHONHASHSEED": "0",
            "PYTHONIOENCODING": "utf-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rivet.grading.worker", str(memory_mb), str(cpu_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )
        self._left = b""
        self.owner_pid = os.getpid()
        self.warm: set[str] = set()
        try:
            self._receive(STARTUP_S)
        except (WorkerTimeout, WorkerDied) as error:
            raise GraderFault(
                f"a grading worker could not start ({error}); run "
                f"`python -m rivet.grading.worker {memory_mb} {cpu_s}` to see why"
            ) from error

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one request and wait for its reply.

        Raises:
            WorkerTimeout: No reply in time; the worker is dead now.
            WorkerDied: The worker ended; it may have been dead before.
            WorkerOverran: It was ended because the request costs too much.
        """
        assert self.process.stdin is not None
        try:
            data = memoryview(json.dumps(request).encode() + b"\n")
            while data:
                data = data[self.process.stdin.write(data) or 0 :]
        except (BrokenPipeError, OSError) as error:
            self.kill()
            raise WorkerDied("the worker was gone before the request") from error
        return self._receive(timeout_s)

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self.process.stdout, select.POLLIN | select.POLLHUP)
        while b"\n" not in self._left:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                self.kill()
                raise WorkerTimeout(f"no reply within {timeout_s:g} s")
            chunk = os.read(self.process.stdout.fileno(), 65536)
            if not chunk:
                self.kill()
                if self.process.returncode == -signal.SIGXCPU:
                    raise WorkerOverran("the request costs too much CPU time")
                raise WorkerDied(f"the worker ended (exit {self.process.returncode})")
            self._left += chunk
        line, _, self._left = self._left.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    @property
    def is_alive(self) -> bool:
        """Tell whether the process still runs."""
        return self.process.poll() is None

    def kill(self) -> None:
        """End the process at once and reap it."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class WorkerPool:
    """Hands each request to an idle worker, starting up to `size` of them.

    Args:
        size: The most workers at a time; further callers wait for one.
        timeout_s: Wall time of one request, counted from when it is sent; waiting is not counted.
        memory_mb: Address space of one worker.
    """

    def __init__(self, *, size: int, timeout_s: float, memory_mb: int) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.memory_mb = memory_mb
        self._idle: list[Worker] = []
        self._reset()
        weakref.finalize(self, _kill_all, self._idle)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._slots = threading.BoundedSemaphore(self.size)
        self._lock = threading.Lock()

    def ask(self, request: dict[str, Any], *, warm: str = "") -> dict[str, Any]:
        """Have one request answered.

        Args:
            request: What `worker.answer_request` understands.
            warm: What the worker must have imported first, outside the time limit.

        Raises:
            WorkerTimeout: The request took too long.
            WorkerDied: The worker died of it.
            WorkerOverran: It died of the request's cost.
        """
        if os.getpid() != self._pid:
            # A fork of our caller must not share its pipes.
            self._idle.clear()
            self._reset()
        with self._slots:
            worker = self._take()
            try:
                if warm and warm not in worker.warm:
                    worker.ask({"kind": "warm", "what": warm}, STARTUP_S)
                    worker.warm.add(warm)
                reply = worker.ask(request, self.timeout_s)
            except BaseException:
                # A reply that is still to come, or unread, must not answer the next request.
                worker.kill()
                raise
            with self._lock:
                self._idle.append(worker)
            return reply

    def _take(self) -> Worker:
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                # Far below the wall time: a busy machine must not hide what a request costs.
                return Worker(memory_mb=self.memory_mb, cpu_s=max(1, int(self.timeout_s) // 4))
            if worker.is_alive:
                return worker
            worker.kill()

    def close(self) -> None:
        """End all idle workers; a busy one ends with its request."""
        with self._lock:
            workers, self._idle[:] = list(self._idle), []
        _kill_all(workers)


def _kill_all(workers: list[Worker]) -> None:
    for worker in workers:
        # A fork that exits must not end the workers of the process it came from.
        if worker.owner_pid == os.getpid():
            worker.kill()
    workers.clear()
