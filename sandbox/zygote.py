"""The zygote: a clean interpreter with the libraries imported, from which slots are forked.

It is started as a fresh program (never forked from the caller, which may have threads and GPU
state), gets the ends of socket pairs from the client and turns each into a slot. It ends when
the client's control socket closes or the client's process dies, and takes its slots with it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import json
import os
import select
import signal
import site
import socket
import sys
import sysconfig

from sandbox import jail, kernel, memory, seccomp, template, wire
from sandbox.result import SandboxLimits
from sandbox.slot import Slot

CONTROL_FD = 3  # where the client puts the control socket
# What programs often import; sympy and numpy, where they are installed, bring more with them.
# Each shared library that a module loads makes every call dearer, so none is here that serves
# networks and processes only.
_WARM_MODULES = (
    "bisect calendar cmath collections copy ctypes dataclasses datetime decimal enum fractions "
    "functools glob heapq inspect io itertools json math numbers operator os pickle pprint "
    "queue random re statistics string tempfile textwrap threading time traceback types typing "
    "unicodedata warnings numpy sympy"
).split()
_SOLVE = "from sympy import *\nx = symbols('x')\nprint(solve(x**2-5*x+6))"
# Run before any fork. What comes last is at its fastest in the children: the steps that every
# call takes, often enough for the interpreter to specialise their bytecode (eight times).
_REHEARSED = (
    "import numpy\nnumpy.random.seed(0)\nnumpy.linalg.solve(numpy.eye(2), numpy.ones(2))",
    "from sympy import *\nx = symbols('x')\nrepr(simplify(sin(x)**2 + cos(x)**2)), factorint(360)",
    *[_SOLVE] * 2,
    *["print(1+1)"] * 10,
)


class Zygote:
    """The process that forks slots and outlives none of its client's."""

    def __init__(self, config: dict) -> None:
        self.control = socket.socket(fileno=CONTROL_FD)
        self.limits = SandboxLimits(**config["limits"])
        self.client_pid = config["client_pid"]
        self.slots: dict[int, int] = {}  # number -> pid as seen from here
        self.code_paths = _code_paths()
        self.hidden_paths = {
            path: os.path.basename(path) or path for path in sorted(self.code_paths, key=len)[::-1]
        }
        self.use_huge_pages = config["use_huge_pages"]
        self.disabled = frozenset(config["disabled"])
        with open("/proc/self/statm") as statm:
            self.base_bytes = int(statm.read().split()[0]) * os.sysconf("SC_PAGESIZE")

    def serve(self) -> None:
        """Fork slots on request until the client is gone."""
        if kernel.IS_LINUX:
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the group
        poller = select.poll()
        client = self._watch_client(poller)
        poller.register(self.control, select.POLLIN)
        poller.register(wake_read, select.POLLIN)
        try:
            while True:
                ready = {where for where, _ in poller.poll(None if client >= 0 else 500)}
                if client in ready or (client < 0 and os.getppid() != self.client_pid):
                    return
                if wake_read in ready:
                    os.read(wake_read, 4096)
                    self._reap()
                if self.control.fileno() in ready and not self._take_message():
                    return
        finally:
            for pid in self.slots.values():
                _kill(pid)
            _wait_for_all()  # a subreaper also inherits what a slot leaves

    def _watch_client(self, poller: select.poll) -> int:
        try:
            client = os.pidfd_open(self.client_pid)
        except (OSError, AttributeError):
            return -1
        poller.register(client, select.POLLIN)
        return client

    def _take_message(self) -> bool:
        """Serve one message: `slot N` with a socket, or `kill N`."""
        data, fds, _, _ = socket.recv_fds(self.control, wire.MESSAGE_BYTES, 1)
        if not data:
            return False
        word, number = data.decode().split()
        if word == "kill":
            pid = self.slots.get(int(number))
            if pid is not None:
                _kill(pid)
        else:
            self._start_slot(int(number), fds[0])
            os.close(fds[0])
        return True

    def _start_slot(self, number: int, connection: int) -> None:
        """Fork a slot by way of a process that enters the new namespaces and ends at once."""
        pid_read, pid_write = os.pipe()
        go_read, go_write = os.pipe()
        plan = jail.JailPlan(
            self.code_paths, self.disabled, os.getpid() * 512 + number % 512, self.base_bytes
        )
        between = kernel.fork()
        if between == 0:
            try:
                os.close(pid_read)
                os.close(go_write)
                signal.set_wakeup_fd(-1)
                layers = jail.Layers()
                jail.enter_namespaces(plan, layers)
                pid = kernel.fork()
                if pid == 0:
                    self._be_slot(plan, layers, connection, go_read)
                os.write(pid_write, str(pid).encode())
            finally:
                os._exit(0)
        os.close(pid_write)
        os.close(go_read)
        text = os.read(pid_read, 32)
        os.close(pid_read)
        os.waitpid(between, 0)
        if text:
            self.slots[number] = int(text)
            try:
                os.write(go_write, b"g")
            except BrokenPipeError:  # the slot is dead already; the client sees its socket close
                pass
        os.close(go_write)

    def _be_slot(
        self, plan: jail.JailPlan, layers: jail.Layers, connection: int, go_read: int
    ) -> None:
        """Set up the walls and serve; never returns."""
        try:
            copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (connection, go_read)]
            for fd, place in zip(copies, (4, 5), strict=True):
                os.dup2(fd, place, inheritable=False)
            os.close(CONTROL_FD)
            kernel.close_from(6)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # ends a child with too long an output
            huge_ranges = memory.huge_page_ranges() if self.use_huge_pages else []
            jail.lock_down(plan, layers, self.limits)
            if not os.read(5, 1):
                return
            os.close(5)
            # Only now is the zygote this process's parent, and a change of uid clears the mark.
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
            slot = Slot(
                socket.socket(fileno=4),
                self.limits,
                layers,
                hidden_paths=self.hidden_paths,
                huge_ranges=huge_ranges,
            )
            _install_filter(plan, layers, slot)
            slot.greet()
            slot.serve()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client is gone
        except BaseException as error:
            os.write(2, f"sandbox slot: {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(0)

    def _reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.slots = {n: p for n, p in self.slots.items() if p != pid}


def _install_filter(plan: jail.JailPlan, layers: jail.Layers, slot: Slot) -> None:
    if "seccomp" in plan.disabled:
        layers.missing["seccomp"] = "switched off"
        return
    if not seccomp.is_supported():
        layers.missing["seccomp"] = "not in this kernel, or an unknown architecture"
        return
    own_root = not layers.lacks("root")
    may_open = own_root or not layers.lacks("landlock")
    program = seccomp.slot_filter(may_open=may_open, may_change_metadata=own_root)
    try:
        slot.install_filter(seccomp.Program(program))
    except OSError as error:
        layers.missing["seccomp"] = str(error)
        slot.template.filter = None


def _wait_for_all() -> None:
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _code_paths() -> tuple[str, ...]:
    """Return the folders that hold the standard library and the installed packages."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), os.path.join(sys.base_prefix, "lib")]
    real = [os.path.realpath(path) for path in paths if path]
    # A package may point elsewhere (an editable install): that place stays outside.
    return tuple(dict.fromkeys(path for path in [*paths, *real] if path and os.path.isdir(path)))


def prepare(hidden_folder: str) -> None:
    """Set up the interpreter as programs find it, import what they use and rehearse a few.

    Args:
        hidden_folder: the folder from which this package was imported, which no program needs.
    """
    site.main()
    sys.path[:] = [path for path in sys.path if path not in ("", hidden_folder)]
    for name in _WARM_MODULES:
        with contextlib.suppress(ImportError):
            __import__(name)
    atexit._clear()  # what a library wants done at the end must not be done at a rehearsal's
    template.rehearse(_REHEARSED)


def settle(*, use_huge_pages: bool) -> None:
    """Bring the memory of this process into the state in which it is cheap to fork."""
    gc.collect()
    memory.fill_gaps()
    memory.immortalise()
    memory.join_code()
    gc.freeze()  # else a collection in a child writes to, and so copies, every page
    if use_huge_pages:
        memory.round_up_heap()
        memory.collapse(memory.huge_page_ranges())


def main(config_text: str) -> None:
    """Become the zygote, in an interpreter that `prepare` has set up.

    Args:
        config_text: JSON with `limits`, `disabled` layers and `client_pid`.
    """
    config = json.loads(config_text)
    settle(use_huge_pages=config["use_huge_pages"])
    sys.set_int_max_str_digits(config["limits"]["int_digits"])
    zygote = Zygote(config)
    for name in [name for name in sys.modules if name.split(".")[0] == "sandbox"]:
        del sys.modules[name]
    sys.argv = [""]
    sys.orig_argv[:] = [""]
    gc.freeze()
    zygote.serve()
    os._exit(0)
