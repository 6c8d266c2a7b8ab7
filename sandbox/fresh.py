"""The reduced mode for systems other than Linux: a fresh process a call, with resource limits.

It keeps time, memory (where the system enforces it), output and state between calls apart, and
hides the environment. It does *not* keep a program from reading the user's files, using the
network or starting processes; the processes of its own group are killed after the call.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict

from sandbox import runner, wire
from sandbox.result import SandboxLimits, Status

MESSAGE = (
    "this system has none of Linux's walls: programs run in fresh processes with resource limits, "
    "and can read your files and use the network; do not run untrusted code here"
)
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from sandbox import fresh
root = sys.path.pop(0)
fresh.be_child(sys.argv[2], int(sys.argv[3]))
"""


def run(
    cells: Sequence[str], limits: SandboxLimits, root: str, environment: dict[str, str]
) -> tuple[wire.ReplyHeader, bytes]:
    """Run the cells in a fresh interpreter; return a reply as a slot would send it."""
    with tempfile.TemporaryFile() as memory, tempfile.TemporaryFile() as out, (
        tempfile.TemporaryFile()
    ) as err, tempfile.TemporaryDirectory() as scratch:  # fmt: skip
        report = runner.Report(limits.stream_bytes, limits.error_bytes, memory.fileno())
        command = [sys.executable, "-s", "-P", "-B", "-X", "utf8", "-c", PROGRAM, root]
        started = time.monotonic()
        process = subprocess.Popen(
            [*command, json.dumps(asdict(limits)), str(memory.fileno())],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            pass_fds=(memory.fileno(),),
            cwd=scratch,
            env=environment | {"HOME": scratch, "TMPDIR": scratch},
            start_new_session=True,
        )
        used_before = resource.getrusage(resource.RUSAGE_CHILDREN)
        is_late = _feed_and_wait(process, json.dumps(list(cells)).encode(), limits, len(cells))
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = used.ru_utime + used.ru_stime - used_before.ru_utime - used_before.ru_stime
        streams = [_kept(stream.fileno(), limits.stream_bytes) for stream in (out, err)]
        is_flood = max(total for total, _ in streams) >= limits.output_kill_bytes
        outcome, detail = _judge(process.returncode, report.read()[0], is_late=is_late)
        if is_flood and outcome != "timeout":
            outcome = "output_limit"
        state, is_cut, value_len, error_len, _, _ = report.read()
        if state not in (runner.OK, runner.ERROR):
            value_len = error_len = 0
        texts = [bytes(text) for text in report.texts(value_len, error_len)]
    header = wire.ReplyHeader(
        outcome, False, is_cut, detail, time.monotonic() - started, cpu_s,
        len(streams[0][1]), streams[0][0], len(streams[1][1]), streams[1][0],
        value_len, error_len,
    )  # fmt: skip
    return header, b"".join([*texts, streams[0][1], streams[1][1]])


def _feed_and_wait(
    process: subprocess.Popen, cells: bytes, limits: SandboxLimits, count: int
) -> bool:
    """Send the cells and wait; return whether the wall limit ended the process."""
    is_late = False
    try:
        process.communicate(cells, timeout=limits.wall_s * count)
    except subprocess.TimeoutExpired:
        is_late = True
    except BrokenPipeError:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # macOS: the group holds zombies only
        pass
    process.wait()
    return is_late


def _judge(code: int, state: int, *, is_late: bool) -> tuple[Status, int]:
    if is_late or -code in (signal.SIGXCPU,):
        return "timeout", 0
    if -code == signal.SIGXFSZ:
        return "output_limit", 0
    if code < 0:
        return "crash", -code
    if state == runner.ERROR:
        return "error", 0
    return ("ok", 0) if code == 0 else ("error", code)


def _kept(stream: int, keep: int) -> tuple[int, bytes]:
    total = os.fstat(stream).st_size
    parts = (os.pread(stream, count, first) for first, count in wire.kept_parts(total, keep))
    return total, b"".join(parts)


def be_child(limits_text: str, memory: int) -> None:
    """Run the cells that arrive on stdin, in the fresh interpreter; never returns."""
    limits = SandboxLimits(**json.loads(limits_text))
    cells = json.loads(sys.stdin.buffer.read())
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    report = runner.Report(limits.stream_bytes, limits.error_bytes, memory)
    os.closerange(3, 256)
    sys.set_int_max_str_digits(limits.int_digits)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    runner.prepare()
    whole = int(limits.cpu_s * len(cells)) + 1
    values = {
        "RLIMIT_CPU": whole,
        "RLIMIT_FSIZE": limits.output_kill_bytes,
        "RLIMIT_CORE": 0,
        "RLIMIT_AS": (limits.memory_mb + 1024) << 20,
    }
    for name, value in values.items():
        try:
            resource.setrlimit(getattr(resource, name), (value, value))
        except (ValueError, OSError):  # macOS does not limit address space
            pass
    hidden = {os.path.dirname(os.__file__): "lib"}
    os._exit(runner.run_cells(cells, report, hidden_paths=hidden, on_last_cell=lambda: None))
