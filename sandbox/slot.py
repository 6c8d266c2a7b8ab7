"""One slot: waits for a request, forks a child that runs it, watches, kills, answers, cleans up.

The slot never reads a request's code nor a program's output into its own memory: the child
reads the one, and the kernel moves the other to the client. A later child, which starts as a
copy of the slot, therefore finds nothing of earlier calls.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from dataclasses import dataclass

from sandbox import jail, runner, seccomp, template, wire
from sandbox.result import SandboxLimits, Status

_CORES = os.cpu_count() or 1
_TICK_S = 0.002
_MAX_CALLS = 5000  # then the slot is replaced, which bounds whatever a kernel object may keep


@dataclass(frozen=True, slots=True)
class Ending:
    """How the child ended: the outcome, and a signal or exit code."""

    outcome: Status
    detail: int = 0


@dataclass(frozen=True, slots=True)
class Child:
    """A forked child: its pid, and a descriptor that tells of its end (or -1)."""

    pid: int
    pid_fd: int


class Slot:
    """The state of one slot process."""

    def __init__(
        self,
        connection: socket.socket,
        limits: SandboxLimits,
        layers: jail.Layers,
        *,
        hidden_paths: dict[str, str],
        huge_ranges: list[tuple[int, int]],
    ) -> None:
        self.connection = connection
        self.limits = limits
        self.layers = layers
        self.report = runner.Report(limits.stream_bytes, limits.error_bytes)
        self.reserved = set() if layers.lacks("scratch") else set(os.listdir(jail.SCRATCH))
        self.scratch_mode = os.stat(jail.SCRATCH).st_mode if not layers.lacks("scratch") else 0
        self.template = template.Template(
            connection,
            self.report,
            limits,
            hidden_paths=hidden_paths,
            must_follow_parent=layers.lacks("pid"),
            huge_ranges=huge_ranges,
        )
        self.calls = 0
        self.first_look_s = min(limits.cpu_s / _CORES, limits.wall_s, 0.1)
        self.poller = select.poll()
        self.poller.register(connection, select.POLLHUP | select.POLLRDHUP)

    def install_filter(self, program: seccomp.Program) -> None:
        """Apply the allow-list, and have every child stack its own filter on it."""
        child_filter = seccomp.ChildFilter()
        program.install()
        self.template.filter = child_filter

    def greet(self) -> None:
        """Tell the client that the slot is ready and which layers hold."""
        text = json.dumps(self.layers.as_dict()).encode()
        self.connection.sendall(wire.HELLO.pack(wire.HELLO_MAGIC, len(text)) + text)

    def serve(self) -> None:
        """Answer requests until the client goes away or the slot has to be replaced."""
        self.template.start()
        while True:
            head = self.connection.recv(wire.REQUEST.size, socket.MSG_PEEK | socket.MSG_WAITALL)
            if not head:
                return
            _, earlier_cells, _ = wire.REQUEST.unpack(head)
            if not self._call(1 + min(earlier_cells, 1000)):
                return
            self.template.order()  # ahead of time; the child waits for its request

    def _call(self, cells: int) -> bool:
        """Run one request; return whether the slot can be used again."""
        self.calls += 1
        pid = self.template.next_child()
        child = Child(pid, _open_pid(pid))
        streams = (_open_stdin(), os.memfd_create("stdout"), os.memfd_create("stderr"))
        started = time.monotonic()
        self.template.run(streams)
        ending, cpu_s = self._watch(child, started, cells)
        duration_s = time.monotonic() - started
        is_clean = self._clean_up() and self.calls < _MAX_CALLS
        if self._was_never_started():
            ending, is_clean = Ending("sandbox_failure", ending.detail), False
        try:
            self._reply(streams[1:], ending, duration_s, cpu_s, is_retiring=not is_clean)
        finally:
            for stream in streams:
                os.close(stream)
        self.report.wipe()
        return is_clean

    def _watch(self, child: Child, started: float, cells: int) -> tuple[Ending, float]:
        """Wait for the child's end, or bring it about at a limit.

        Not woken up until then, where the kernel can tell of the end: a look at the clocks is
        due when the child may have reached a limit.
        """
        pid, is_known = child.pid, child.pid_fd >= 0
        if is_known:
            self.poller.register(child.pid_fd, select.POLLIN)
        wait_s = self.first_look_s if is_known else _TICK_S
        reason: Status | None = None
        while True:
            for where, _ in self.poller.poll(None if reason and is_known else wait_s * 1000):
                if where != child.pid_fd:
                    os._exit(0)  # the client is gone, or no longer wants this call
            done, status, usage = os.wait4(pid, os.WNOHANG)
            if done == pid:
                break
            wait_s = self._time_left(pid, started, cells)
            if wait_s <= 0 and not reason:
                reason = "timeout"
                os.kill(pid, signal.SIGKILL)
            wait_s = max(wait_s, _TICK_S) if is_known else _TICK_S
        if is_known:
            self.poller.unregister(child.pid_fd)
            os.close(child.pid_fd)
        cpu_s = usage.ru_utime + usage.ru_stime
        if reason:
            return Ending(reason), cpu_s
        return self._judge(status, is_over_cpu=cpu_s >= self.limits.cpu_s), cpu_s

    def _time_left(self, pid: int, started: float, cells: int) -> float:
        """Return the seconds until the next look at the clocks; 0 when a limit is reached."""
        limits = self.limits
        wall_mark, cpu_mark = self.report.read()[4:]
        # The marks come from the child: they may only bring an end nearer, never move it out.
        wall_end, cpu_end = started + limits.wall_s * cells, limits.cpu_s * cells
        if wall_mark > 0:
            wall_end = min(wall_end, wall_mark + limits.wall_s)
            cpu_end = min(cpu_end, cpu_mark + limits.cpu_s)
        wall_left = wall_end - time.monotonic()
        cpu_left = cpu_end - _clock((~pid << 3) | 2)  # the CPU clock of another process
        if wall_left <= 0 or cpu_left <= 0:
            return 0.0
        # several threads may use up the CPU seconds that many times faster
        wait_s = min(wall_left, max(cpu_left / _CORES, 0.01))
        return wait_s if wall_mark > 0 else min(wait_s, 0.1)

    def _judge(self, status: int, *, is_over_cpu: bool) -> Ending:
        """Name the end of a child that was not killed by the slot."""
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            if number == signal.SIGXFSZ:
                return Ending("output_limit")
            if number == signal.SIGXCPU or (number == signal.SIGKILL and is_over_cpu):
                return Ending("timeout")
            return Ending("crash", number)
        code = os.WEXITSTATUS(status)
        state = self.report.read()[0]
        if state == runner.OK and code == 0:
            return Ending("ok")
        if state == runner.ERROR:
            return Ending("error")
        # os._exit: the program ended the process itself
        return Ending("ok") if code == 0 else Ending("error", code)

    def _was_never_started(self) -> bool:
        """Whether the child ended before it had prepared itself: its request is not read up."""
        try:
            return bool(self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return False

    def _reply(
        self, streams: tuple[int, int], ending: Ending, duration_s: float, cpu_s: float, *,
        is_retiring: bool,
    ) -> None:  # fmt: skip
        totals = [os.fstat(stream).st_size for stream in streams]
        outcome = ending.outcome
        if outcome != "timeout" and max(totals) >= self.limits.output_kill_bytes:
            outcome = "output_limit"
        keep = self.limits.stream_bytes
        kept = [min(total, keep) for total in totals]
        state, is_cut, value_len, error_len, _, _ = self.report.read()
        if outcome == "sandbox_failure":
            value_len = 0
        elif state not in (runner.OK, runner.ERROR):
            value_len = error_len = 0
        header = wire.ReplyHeader(
            outcome, is_retiring, is_cut, ending.detail, duration_s, cpu_s,
            kept[0], totals[0], kept[1], totals[1], value_len, error_len,
        )  # fmt: skip
        _send_all(self.connection, [header.pack(), *self.report.texts(value_len, error_len)])
        for stream, total in zip(streams, totals, strict=True):
            for first, count in wire.kept_parts(total, keep):
                _send_file(self.connection, stream, first, count)

    def _clean_up(self) -> bool:
        """Kill what is left, empty the scratch; return whether nothing of the call remains.

        Plain files are removed. Anything else is not worth walking, since names, depth and
        modes are the program's choice: the slot is replaced and its file system goes with it.
        """
        if self.template.filter is None:  # else no program can have started a process
            self._kill_all()
        if self.layers.lacks("scratch"):
            return True
        try:
            if os.stat(jail.SCRATCH).st_mode != self.scratch_mode:
                return False
            for name in os.listdir(jail.SCRATCH):
                if name not in self.reserved:
                    os.unlink(f"{jail.SCRATCH}/{name}")
        except OSError:
            return False
        return True

    def _kill_all(self) -> None:
        """Kill every process of the slot, the template too, and start a new one."""
        if self.layers.lacks("pid") and os.getuid() < jail.FIRST_OWN_UID:
            return  # it would reach the processes of the user
        try:  # reaches this pid namespace, or this slot's own uid, and nothing else
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
        _reap_all()
        self.template.close()
        self.template.start()


def _clock(clock: int) -> float:
    try:
        return time.clock_gettime(clock)
    except OSError:
        return 0.0


def _open_stdin() -> int:
    """Return an empty stdin for one child alone: flags that it sets must not reach the next."""
    try:
        return os.open(os.devnull, os.O_RDWR)
    except OSError:  # where nothing can confine what is opened, nothing may be
        return os.dup(0)


def _open_pid(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):  # before Linux 5.3: `_watch` looks every few milliseconds
        return -1


def _reap_all() -> None:
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass


def _send_all(connection: socket.socket, parts: list) -> None:
    sent = connection.sendmsg(parts)
    total = sum(len(part) for part in parts)
    while sent < total:
        rest, skip = [], sent
        for part in parts:
            if skip >= len(part):
                skip -= len(part)
                continue
            rest.append(memoryview(part)[skip:])
            skip = 0
        sent += connection.sendmsg(rest)


def _send_file(connection: socket.socket, stream: int, first: int, count: int) -> None:
    while count > 0:
        sent = os.sendfile(connection.fileno(), stream, first, count)
        if sent == 0:
            raise OSError("a stream became shorter while it was sent")
        first, count = first + sent, count - sent
