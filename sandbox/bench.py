"""Measures what a call costs, next to the bare fork and to `python -c`.

Run as `python -m sandbox.bench [--rounds N]`. All contestants take turns in one run, so that a
busy machine slows them alike; figures are medians over the rounds. It prints a table and, as the
last line, one JSON object with the figures and the ratios. `ratio_*` compare rates on the clock,
`cpu_ratio_*` CPU seconds, which other load on the machine distorts far less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from sandbox.client import PythonSandbox
from sandbox.launch import SOURCE, clean_environment

PRINT = "print(1+1)"
SYMPY = "from sympy import *\nx = symbols('x')\nprint(solve(x**2-5*x+6))"
# The zygote has solved the equation above once, so sympy remembers parts of it; not of this one.
OTHER = "from sympy import *\ny = symbols('y')\nprint(solve(y**2-11*y+28))"
ANSWERS = {PRINT: "2", SYMPY: "[2, 3]", OTHER: "[4, 7]"}
WALLS = ("user mount pid net ipc uts cgroup root scratch uid capabilities landlock seccomp").split()


class Contest:
    """The contestants, open side by side, and the figures collected so far."""

    def __init__(self, full: PythonSandbox, bare: PythonSandbox) -> None:
        self.full = full
        self.bare = bare
        self.figures: dict[str, list[float]] = {}
        self.latencies: dict[str, list[float]] = {"cores": [], "sixteen": []}
        self.forker = _start_forker()

    def add(self, name: str, value: float) -> None:
        """Record one figure of this round."""
        self.figures.setdefault(name, []).append(value)

    def round(self) -> None:
        """Let every contestant have one turn."""
        rate, cpu_s = _ask_forker(self.forker, 150)
        self.add("fork_exit_per_s", rate)
        self.add("cpu_ms_fork_exit", 1e3 * cpu_s)
        for name, box in (("full", self.full), ("none", self.bare)):
            self.add(f"print_ms_{name}", 1e3 * _sequential(box, PRINT, 150))
        self.add("sympy_ms_full", 1e3 * _sequential(self.full, SYMPY, 30))
        self.add("cpu_ms_print", 1e3 * _cpu_per_call(self.full, PRINT, 150))
        self.add("cpu_ms_sympy", 1e3 * _cpu_per_call(self.full, SYMPY, 30))
        self.add("cpu_ms_sympy_other", 1e3 * _cpu_per_call(self.full, OTHER, 30))
        cores = self.full.slots
        self.latencies["cores"] += asyncio.run(_in_flight(self.full, PRINT, cores, 200))[1]
        for code, name, count, few in ((PRINT, "print", 300, 24), (SYMPY, "sympy", 60, 16)):
            rate, waits = asyncio.run(_in_flight(self.full, code, 16, count))
            self.add(f"{name}_per_s_16", rate)
            if code == PRINT:
                self.latencies["sixteen"] += waits
            before = _cpu_of_children()
            self.add(f"{name}_python_c_per_s_16", asyncio.run(_python_c(code, 16, few)))
            self.add(f"cpu_ms_{name}_python_c", 1e3 * (_cpu_of_children() - before) / few)

    def summary(self) -> dict[str, float]:
        """Return medians and the ratios that the promises are about."""
        result = {name: statistics.median(values) for name, values in self.figures.items()}
        cores, sixteen = (sorted(self.latencies[key]) for key in ("cores", "sixteen"))
        result["p50_ms_cores"] = 1e3 * _quantile(cores, 0.5)
        result["p99_ms_cores"] = 1e3 * _quantile(cores, 0.99)
        result["p50_ms_16"] = 1e3 * _quantile(sixteen, 0.5)
        result["max_ms_16"] = 1e3 * sixteen[-1]
        rate = 1e3 / result["print_ms_full"]
        result["ratio_to_fork_exit"] = rate / result["fork_exit_per_s"]
        result["cpu_ratio_to_fork_exit"] = result["cpu_ms_fork_exit"] / result["cpu_ms_print"]
        for name in ("print", "sympy"):
            rivals = result[f"{name}_python_c_per_s_16"]
            result[f"ratio_{name}_to_python_c"] = result[f"{name}_per_s_16"] / rivals
            rivals = result[f"cpu_ms_{name}_python_c"]
            result[f"cpu_ratio_{name}_to_python_c"] = rivals / result[f"cpu_ms_{name}"]
        pairs = zip(self.figures["print_ms_full"], self.figures["print_ms_none"], strict=True)
        result["layers_cost"] = statistics.median(full / none for full, none in pairs) - 1
        result["ratio_p99_to_p50"] = result["p99_ms_cores"] / result["p50_ms_cores"]
        return {name: round(value, 3) for name, value in result.items()}


def _sequential(box: PythonSandbox, code: str, count: int) -> float:
    """Return the median seconds of one call, with one call in flight."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        text = box.run_sync(code).text()
        times.append(time.perf_counter() - started)
        assert text == ANSWERS[code], text
    return statistics.median(times)


def _cpu_per_call(box: PythonSandbox, code: str, count: int) -> float:
    """Return CPU seconds of a call: client, zygote, slots, templates and children together."""
    before = time.process_time() + _cpu_of_processes(box)
    children = sum(box.run_sync(code).cpu_s for _ in range(count))
    spent = time.process_time() + _cpu_of_processes(box) - before
    return (spent + children) / count


def _cpu_of_processes(box: PythonSandbox) -> float:
    """Return the CPU seconds of all processes of the sandbox that live now."""
    assert box._zygote is not None
    total, todo = 0.0, [box._zygote.pid]
    while todo:
        pid = todo.pop()
        total += time.clock_gettime((~pid << 3) | 2)
        todo += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return total


def _cpu_of_children() -> float:
    """Return the CPU seconds of this process and of all that it has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + used.ru_utime + used.ru_stime


async def _in_flight(
    box: PythonSandbox, code: str, flying: int, count: int
) -> tuple[float, list[float]]:
    """Return calls per second and the seconds that each took, `flying` at a time."""
    times: list[float] = []

    async def work(calls: int) -> None:
        for _ in range(calls):
            started = time.perf_counter()
            text = (await box.run(code)).text()
            times.append(time.perf_counter() - started)
            assert text == ANSWERS[code], text

    started = time.perf_counter()
    await asyncio.gather(*(work(count // flying) for _ in range(flying)))
    return len(times) / (time.perf_counter() - started), times


async def _python_c(code: str, flying: int, count: int) -> float:
    """Return runs per second of `python -c`, `flying` at a time."""
    gate = asyncio.Semaphore(flying)

    async def one() -> None:
        async with gate:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
            )
            output, _ = await process.communicate()
            assert output.decode().strip() == ANSWERS[code], output

    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    return count / (time.perf_counter() - started)


_FORKER = """
import os, resource, sys, time
sys.path.insert(0, sys.argv[1])
from sandbox import memory
with memory.one_heap():
    from sandbox import zygote
    zygote.prepare(sys.argv[1])
zygote.settle(use_huge_pages=True)
def cpu_s():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
for line in sys.stdin:
    times, before = [], cpu_s()
    for _ in range(int(line)):
        started = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        times.append(time.perf_counter() - started)
    print(1 / sorted(times)[len(times) // 2], (cpu_s() - before) / len(times), flush=True)
"""


def _start_forker() -> subprocess.Popen[str]:
    """Start a process with a zygote's memory that only forks and exits."""
    return subprocess.Popen(
        [sys.executable, "-s", "-S", "-P", "-B", "-c", _FORKER, str(SOURCE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )


def _ask_forker(forker: subprocess.Popen[str], count: int) -> tuple[float, float]:
    """Return forks per second, by the median time of one, and the CPU seconds of one."""
    assert forker.stdin is not None and forker.stdout is not None
    forker.stdin.write(f"{count}\n")
    forker.stdin.flush()
    rate, cpu_s = map(float, forker.stdout.readline().split())
    return rate, cpu_s


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main(argv: list[str] | None = None) -> int:
    """Run the contest and print its table and its JSON line."""
    parser = argparse.ArgumentParser(prog="python -m sandbox.bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant")
    parser.add_argument("--slots", type=int, default=None, help="default: the cores")
    arguments = parser.parse_args(argv)
    with (
        PythonSandbox(slots=arguments.slots) as full,
        PythonSandbox(slots=arguments.slots, _disabled=WALLS) as bare,
    ):
        contest = Contest(full, bare)
        for number in range(arguments.rounds):
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
            contest.round()
    assert contest.forker.stdin is not None
    contest.forker.stdin.close()
    contest.forker.wait()
    summary = contest.summary()
    for name, value in summary.items():
        print(f"{name:28} {value:10.3f}")
    summary["load"] = round(os.getloadavg()[0], 2)
    print(json.dumps(summary | {"python": sys.version.split()[0], "slots": full.slots}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
