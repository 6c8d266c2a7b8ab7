"""The template of a slot: the process that the children of the calls are copies of.

It does nothing but fork, one child for each order of its slot, as a child of the *slot*, and
it never runs while a child lives. Thus its memory stays as the zygote left it, in whole huge
pages: a process that also did the slot's work would write to some two hundred pages around each
call, each of which would be copied, and would break up the huge pages that they lie in.
"""

from __future__ import annotations

import array
import gc
import os
import resource
import signal
import socket
import struct
import time
from collections.abc import Callable

from sandbox import kernel, memory, runner, seccomp, wire
from sandbox.result import SandboxLimits

PID = struct.Struct("<I")  # what a child says when it is prepared
_STREAMS = struct.Struct("@ii")  # the descriptors that come with the order to run
_STREAMS_SPACE = socket.CMSG_SPACE(_STREAMS.size)


class Template:
    """The slot's side of its template, and what both share with the children.

    Args:
        connection: the slot's socket; the child reads the request from it.
        report: the memory in which a child writes down how its call ended.
        hidden_paths: host path -> what an error text shows in its place.
        must_follow_parent: whether a process has to ask to be killed with its parent.
        huge_ranges: the memory to back by huge pages.
    """

    def __init__(
        self,
        connection: socket.socket,
        report: runner.Report,
        limits: SandboxLimits,
        *,
        hidden_paths: dict[str, str],
        must_follow_parent: bool,
        huge_ranges: list[tuple[int, int]],
    ) -> None:
        self.connection = connection
        self.report = report
        self.limits = limits
        self.hidden_paths = hidden_paths
        self.must_follow_parent = must_follow_parent
        self.huge_ranges = huge_ranges
        self.filter: seccomp.ChildFilter | None = None
        self._pid = -1
        self._ready = -1  # a pid from a child: prepared
        self._go: socket.socket | None = None  # two descriptors from the slot: run

    def start(self) -> None:
        """Fork the template, which forks the first child."""
        self._ready, their_ready = os.pipe()
        self._go, their_go = socket.socketpair()
        self._pid = kernel.fork()
        if self._pid == 0:
            try:
                os.close(self._ready)
                self._go.close()
                self._be_template(their_ready, their_go)
            finally:
                os._exit(0)
        os.close(their_ready)
        their_go.close()

    def close(self) -> None:
        """Let go of a template that is dead."""
        os.close(self._ready)
        assert self._go is not None
        self._go.close()

    def order(self) -> None:
        """Have the next child forked; it prepares itself and waits. The last one is gone."""
        os.kill(self._pid, signal.SIGCONT)

    def next_child(self) -> int:
        """Return the pid of the ordered child, once it is prepared.

        Raises:
            EOFError: when template and child have died.
        """
        said = os.read(self._ready, PID.size)
        if len(said) < PID.size:
            raise EOFError("the template of the slot died")
        return PID.unpack(said)[0]

    def run(self, streams: tuple[int, int]) -> None:
        """Let the waiting child read the request and run it, with these two as its output.

        The template sleeps until the child lets go of its memory, which is a little too early:
        the signal has it sleep on, until the next order.
        """
        os.kill(self._pid, signal.SIGSTOP)
        assert self._go is not None
        rights = array.array("i", streams)
        self._go.sendmsg([b"g"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

    def _be_template(self, ready: int, go: socket.socket) -> None:
        """Fork one child after the other; the slot decides when this process runs."""
        if self.must_follow_parent:
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        memory.collapse(self.huge_ranges)
        gc.freeze()
        fork = kernel.SiblingFork()
        while fork():
            pass
        self._be_child(ready, go)

    def _be_child(self, ready: int, go: socket.socket) -> None:
        """Prepare, wait for the word to run, run the foreign code; never returns."""
        code = 125
        limits, report = self.limits, self.report
        try:
            if self.must_follow_parent:
                kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            _open_stdin()
            pid = os.getpid()
            if self.filter is not None:
                self.filter.install(pid)
            os.write(ready, PID.pack(pid))
            _take_streams(go)
            head = _read_exactly(self.connection, wire.REQUEST.size)
            _, earlier_cells, length = wire.REQUEST.unpack(head)
            request = _read_exactly(self.connection, length)
            if earlier_cells:
                _limit_cpu(limits.cpu_s * (1 + earlier_cells))
            # The mark that the preparation went well. Foreign code cannot forge or undo it, as
            # the socket is closed before any of it runs.
            _read_exactly(self.connection, len(wire.REQUEST_END))
            kernel.close_from(3)
            code = runner.run_cells(
                wire.unpack_cells(request),
                report,
                hidden_paths=self.hidden_paths,
                on_last_cell=_starts(limits, report),
            )
        except BaseException as error:  # before any foreign code: the slot sees its own fault
            report.write(runner.UNPREPARED, error=f"{type(error).__name__}: {error}")
        finally:
            os._exit(code)


def _starts(limits: SandboxLimits, report: runner.Report) -> Callable[[], None]:
    """Return what starts the clocks of the reported cell."""

    def start() -> None:
        used = time.process_time()
        _limit_cpu(used + limits.cpu_s)
        report.mark(time.monotonic(), used)

    return start


def _open_stdin() -> None:
    """Give the child an empty stdin of its own: flags that it sets must not reach the next."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
    except OSError:  # where nothing can confine what is opened, nothing may be
        return
    os.dup2(null, 0)
    os.close(null)


def _take_streams(go: socket.socket) -> None:
    """Wait for the slot's word; make the descriptors that come with it stdout and stderr."""
    _, ancillary, _, _ = go.recvmsg(1, _STREAMS_SPACE)
    if not ancillary:
        raise EOFError("the slot went away")
    for place, stream in enumerate(_STREAMS.unpack(ancillary[0][2]), 1):
        os.dup2(stream, place)


def _read_exactly(connection: socket.socket, count: int) -> bytes:
    data = connection.recv(count, socket.MSG_WAITALL)
    while len(data) < count:
        more = connection.recv(count - len(data), socket.MSG_WAITALL)
        if not more:
            raise EOFError("the client went away")
        data += more
    return data


def _limit_cpu(seconds: float) -> None:
    """Let the kernel kill the process a little after its CPU time is over, whatever happens."""
    whole = int(seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (whole, whole))
