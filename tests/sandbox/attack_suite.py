"""Runs attack cases (a JSON line each: code, and what must hold afterwards) against a sandbox.

`surroundings` plants what no program may reach or harm; `faults` runs one case and returns what
did not hold, in words. The same checks serve the cases of this folder and those of a case file.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from sandbox import ExecutionResult, PythonSandbox, SandboxLimits

SHORT = SandboxLimits(cpu_s=0.5, wall_s=3.0)  # attacks end soon
# The reduced modes: what is missing on machines that refuse it, taken away on purpose.
NAMESPACES = ("user", "mount", "pid", "net", "ipc", "uts", "cgroup")
MODES = {"no-user-namespace": ("user",), "no-namespaces": NAMESPACES}
CANARY = Path("/tmp/rivet_canary")
HOME = Path("/tmp/rivet_home")
SECRETS = ("SECRETENV123", "SECRETGOLD777", "SECRETFILE456")
Case = dict[str, Any]


def load(path: Path) -> list[Case]:
    """Return the cases of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def parameters(table: dict[str, list[tuple[str, str, Case]]]) -> list[Any]:
    """Return the cases of a table, by kind: (name, code, checks).

    A program that tells what it must not get has to end well unless the table says otherwise: one
    that breaks off before it has tried tells nothing.
    """
    return [
        pytest.param({"id": name, "code": code, "checks": ended(checks)}, id=f"{kind}-{name}")
        for kind, attacks in table.items()
        for name, code, checks in attacks
    ]


def ended(checks: Case) -> Case:
    """Return checks with the status that an attack ends with."""
    return {"status": ["ok"], **checks} if "no" in checks else checks


@contextlib.contextmanager
def surroundings() -> Iterator[subprocess.Popen]:
    """Plant the secrets, the canary folder and an unrelated process of the same user."""
    lock = _lock()
    saved = {name: os.environ.get(name) for name in ("FAKE_API_KEY", "HOME")}
    os.environ.update(FAKE_API_KEY=SECRETS[0], HOME=str(HOME))
    gold = "".join(["SECRET", "GOLD", "777"])  # a live string in the owner's memory
    token = HOME / ".cache/huggingface/token"
    token.parent.mkdir(parents=True, exist_ok=True)
    token.write_text(SECRETS[2])
    CANARY.mkdir(exist_ok=True)
    (CANARY / "file.txt").write_text("intact")
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        yield victim
    finally:
        victim.kill()
        victim.wait()
        assert gold
        shutil.rmtree(CANARY, ignore_errors=True)
        shutil.rmtree(HOME, ignore_errors=True)
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        lock.close()


def _lock() -> BinaryIO:
    """Wait until no other run of these tests uses the planted folders, whose names are fixed."""
    path = f"{CANARY}.{os.getuid()}.lock"
    lock = open(path, "ab")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def faults(box: PythonSandbox, case: Case, victim: subprocess.Popen) -> list[str]:
    """Run one case and return everything that did not hold."""
    checks = case.get("checks", {})
    for name in ("rmfile", "nofile"):
        if name in checks:
            Path(checks[name]).unlink(missing_ok=True)
    affinity = os.sched_getaffinity(0)
    started = time.monotonic()
    result = box.run_sync(case["code"])
    took_s = time.monotonic() - started
    found = _text_faults(result, checks)
    if took_s > checks.get("maxs", 60):
        found.append(f"took {took_s:.1f} s")
    found += _host_faults(checks, victim, affinity)
    follow_up = checks.get("next")
    if follow_up:
        after = box.run_sync(follow_up["code"])
        found += [f"next call: {fault}" for fault in _text_faults(after, follow_up)]
    honest = box.run_sync("print(1+1)")
    if honest.text() != "2":
        found.append(f"the next honest call gave {honest!r}")
    return found


def _text_faults(result: ExecutionResult, checks: Case) -> list[str]:
    shown = result.stdout + result.stderr + result.value_repr
    found = []
    if result.status == "sandbox_failure":
        found.append(f"sandbox failure: {result.error}")
    if "status" in checks and result.status not in checks["status"]:
        found.append(f"status {result.status}, expected one of {checks['status']}: {shown[:300]}")
    found += [f"{text!r} is missing in {shown[:300]!r}" for text in checks.get("has", ())
              if text not in shown]  # fmt: skip
    # The message of a refused call repeats the path that the program itself named.
    learnt = "\n".join(line for line in shown.splitlines() if not line.startswith("[Errno "))
    found += [f"{text!r} is in {shown[:300]!r}" for text in (*checks.get("no", ()), *SECRETS)
              if text in learnt]  # fmt: skip
    if len(result.stdout) + len(result.stderr) > checks.get("maxout", 10**9):
        found.append(f"{len(result.stdout) + len(result.stderr)} bytes kept")
    return found


def _host_faults(checks: Case, victim: subprocess.Popen, affinity: set[int]) -> list[str]:
    found = []
    if victim.poll() is not None:
        found.append(f"an unrelated process was killed ({victim.returncode})")
    if os.sched_getaffinity(0) != affinity:
        found.append("the CPU affinity of the owner changed")
    for name in ("nofile", "rmfile"):
        if name in checks and os.path.lexists(checks[name]):
            found.append(f"{checks[name]} exists on the host")
            Path(checks[name]).unlink()
    if sorted(p.name for p in CANARY.iterdir()) != ["file.txt"]:
        found.append("the canary folder has other files")
    if (CANARY / "file.txt").read_text() != "intact":
        found.append("the canary file changed")
    if "noleak" in checks and _processes("LEAKME"):
        found.append("a process named LEAKME is left")
    if "noleak_cmd" in checks and _processes(checks["noleak_cmd"]):
        found.append(f"a process {checks['noleak_cmd']!r} is left")
    if "ipcrm" in checks:
        libc = ctypes.CDLL(None)
        identity = libc.shmget(checks["ipcrm"], 0, 0)
        if identity >= 0:
            found.append("a System V segment is left on the host")
            libc.shmctl(identity, 0, None)
    return found


def _processes(text: str) -> list[int]:
    """Return the pids whose name or command line holds `text`, this process apart."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            name = (entry / "comm").read_text()
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:  # it ended meanwhile
            continue
        if text in name or text in line:
            found.append(int(entry.name))
    return found


def descendants(pid: int) -> list[int]:
    """Return the pids of all processes below `pid`, as the host sees them."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text()
                parents[int(entry.name)] = int(stat[stat.rindex(")") + 2 :].split()[1])
    found, todo = [], [pid]
    while todo:
        children = [child for child, parent in parents.items() if parent == todo[0]]
        found += children
        todo = todo[1:] + children
    return found


def session(leader: int) -> list[int]:
    """Return the pids that are left of the session that `leader` started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text()
                if int(stat[stat.rindex(")") + 2 :].split()[3]) == leader:
                    found.append(int(entry.name))
    return found
