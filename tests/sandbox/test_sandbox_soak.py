"""Many calls, a quarter of them attacks, many in flight: no wrong result, nothing grows.

RIVET_SOAK_CALLS sets the number of calls; `docs/sandbox.md` records the long run.
"""

from __future__ import annotations

import asyncio
import os
import random

import pytest
from test_sandbox_attacks import ALL

from sandbox import PythonSandbox, SandboxLimits

CALLS = int(os.environ.get("RIVET_SOAK_CALLS", "1500"))
QUICK = SandboxLimits(cpu_s=0.3, wall_s=1.0)
SLOW_ONES = {"time"}


def memory_kb() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024


@pytest.mark.slow
@pytest.mark.timeout(0)  # as long as RIVET_SOAK_CALLS asks for
async def test_soak_gives_no_wrong_result():
    attacks = [code for kind, few in ALL.items() if kind not in SLOW_ONES for _, code, _ in few]
    attacks += [code for _, code, _ in ALL["time"][:2]]
    chance = random.Random(5)
    wrong: list[str] = []
    async with PythonSandbox(QUICK, slots=2) as box:

        async def honest(i: int) -> None:
            a, b = chance.randrange(10**6), chance.randrange(10**6)
            result = await box.run(f"print({a} * {b})")
            # On a starved machine honest code may meet the short wall limit.
            if result.text() != str(a * b) and result.status != "timeout":
                wrong.append(f"call {i}: {result!r}")

        async def work(first: int, last: int) -> None:
            for i in range(first, last):
                if chance.random() < 0.25:
                    result = await box.run(chance.choice(attacks))
                    if result.status == "sandbox_failure":
                        wrong.append(f"call {i}: {result.error}")
                else:
                    await honest(i)

        async def part(first: int, last: int) -> None:
            step = (last - first) // 8
            await asyncio.gather(
                *(work(first + k * step, first + (k + 1) * step) for k in range(8))
            )

        await part(0, CALLS // 5)
        descriptors, memory = len(os.listdir("/proc/self/fd")), memory_kb()
        await part(CALLS // 5, CALLS)
        assert wrong == []
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 2
        assert memory_kb() < memory + 20_000
