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
from collections.abc import Callable, Sequence

from sandbox import kernel, memory, runner, seccomp, wire
from sandbox.result import SandboxLimits

PID = struct.Struct("<I")  # what a child says when it is prepared
_STREAMS = struct.Struct("@iii")  # the descriptors that come with the order to run
_STREAMS_SPACE = socket.CMSG_SPACE(_STREAMS.size)

Streams = tuple[int, int, int]  # descriptors of stdin, stdout and stderr


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
        self._on_last_cell = _starts(limits, report)
        self._pid = -1
        self._ready = -1  # a pid from a child: prepared
        self._go: socket.socket | None = None  # three descriptors from the slot: run

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

    def run(self, streams: Streams) -> None:
        """Let the waiting child read the request and run it, with these as its streams.

        The template sleeps until the child lets go of its memory, which is a little too early:
        the signal has it sleep on, until the next order.
        """
        os.kill(self._pid, signal.SIGSTOP)
        assert self._go is not None
        _send_streams(self._go, streams)

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
        try:
            if self.must_follow_parent:
                kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            pid = os.getpid()
            if self.filter is not None:
                self.filter.install(pid)
            os.write(ready, PID.pack(pid))
            _take_streams(go)
            cells = _read_cells(self.connection, self.limits)
            kernel.close_from(3)
            code = runner.run_cells(
                cells,
                self.report,
                hidden_paths=self.hidden_paths,
                on_last_cell=self._on_last_cell,
            )
        except BaseException as error:  # before any foreign code: the slot sees its own fault
            self.report.write(runner.UNPREPARED, error=f"{type(error).__name__}: {error}")
        finally:
            os._exit(code)


def _starts(limits: SandboxLimits, report: runner.Report) -> Callable[[], None]:
    """Return what starts the clocks of the reported cell."""

    def start() -> None:
        used = time.process_time()
        _limit_cpu(used + limits.cpu_s)
        report.mark(time.monotonic(), used)

    return start


def rehearse(cells: Sequence[str]) -> None:
    """Go through the steps of a call in this process, once for each of `cells`.

    A first time leaves its marks all over the memory: specialised bytecode, looked-up
    attributes of types, interned names. They are shared once they are made before the fork;
    each child would otherwise make them on pages that are copied for it alone. What can be
    done only once in a process (filter, limits, closing everything) is left out. A cell that
    fails, for want of a library, is passed over; `__main__` and the streams are left as
    programs find them.
    """
    kept = [os.dup(place) for place in range(3)]
    null = os.open(os.devnull, os.O_RDWR)
    limits = SandboxLimits()
    report = runner.Report(limits.stream_bytes, limits.error_bytes)
    ours, connection = socket.socketpair()
    word, go = socket.socketpair()
    with ours, connection, word, go:
        for cell in cells:
            runner.prepare()
            ours.sendall(wire.pack_request(cell, ()))
            _send_streams(word, (null, null, null))
            for copy in _take_streams(go):
                os.close(copy)
            runner.run_cells(
                _read_cells(connection, limits),
                report,
                hidden_paths={},
                on_last_cell=lambda: report.mark(time.monotonic(), time.process_time()),
            )
    runner.prepare()
    for place, copy in enumerate(kept):
        os.dup2(copy, place)
        os.close(copy)
    os.close(null)


def _send_streams(go: socket.socket, streams: Streams) -> None:
    rights = array.array("i", streams)
    go.sendmsg([b"g"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


def _take_streams(go: socket.socket) -> Streams:
    """Wait for the slot's word; make the descriptors that come with it this process's streams.

    Returns:
        The descriptors as they came; the streams are copies.
    """
    _, ancillary, _, _ = go.recvmsg(1, _STREAMS_SPACE)
    if not ancillary:
        raise EOFError("the slot went away")
    streams = _STREAMS.unpack(ancillary[0][2])
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
    return streams


def _read_cells(connection: socket.socket, limits: SandboxLimits) -> list[str]:
    """Read a request, all of it, and return its cells."""
    head = _read_exactly(connection, wire.REQUEST.size)
    _, earlier_cells, length = wire.REQUEST.unpack(head)
    request = _read_exactly(connection, length)
    if earlier_cells:
        _limit_cpu(limits.cpu_s * (1 + earlier_cells))
    # The mark that the preparation went well. Foreign code cannot forge or undo it, as the
    # socket is closed before any of it runs.
    _read_exactly(connection, len(wire.REQUEST_END))
    return wire.unpack_cells(request)


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
