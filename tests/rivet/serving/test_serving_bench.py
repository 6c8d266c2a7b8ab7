"""The load test counts what clients saw, and fails where a request fails."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

from fake_solver import FakeSolver
from running_server import running

from rivet.serving import bench
from rivet.serving.bench import Load, memory_mb, summary


def test_the_summary_has_the_ranks_worked_by_hand() -> None:
    load = Load([float(n) for n in range(1, 101)], Counter({"x": 2}), 99, 500)
    load.memory_mb = [100, 200, 210, 220, 230, 240, 250, 260]
    result = summary(load, 10.0)
    assert (result["p50_s"], result["p90_s"], result["p99_s"]) == (50, 90, 99)
    assert (result["requests"], result["errors"], result["answered"]) == (100, 2, 99)
    assert (result["requests_per_s"], result["tokens_per_s"]) == (10, 50)
    # Two of eight samples are a quarter: the second is 210 and 220, the last 250 and 260.
    assert (result["memory_second_quarter_mb"], result["memory_last_quarter_mb"]) == (215, 255)
    assert summary(Load(), 1.0)["p99_s"] is None


def test_memory_of_a_process_is_read() -> None:
    found = memory_mb(os.getpid())
    assert found is not None and found > 1
    assert memory_mb(2**22 + 1) is None


def test_it_loads_a_running_server_and_ends_with_json(capsys: Any) -> None:
    with running(FakeSolver(), max_concurrent=4) as url:
        code = bench.main(["--url", url, "--clients", "3", "--seconds", "0.2"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0 and result["errors"] == 0
    assert result["requests"] == result["answered"] >= 3


def test_a_failing_request_is_an_error_of_the_run(capsys: Any) -> None:
    solver = FakeSolver()
    with running(solver, max_concurrent=1, max_queue=0, deadline_s=0.05) as url:
        warm = bench._ask

        async def late(*args: Any) -> None:
            await warm(*args)
            solver.go.clear()  # from the second request on nobody is answered in time

        bench._ask, before = late, bench._ask
        try:
            code = bench.main(["--url", url, "--clients", "1", "--seconds", "0.1"])
        finally:
            bench._ask = before
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 1 and result["errors"] >= 1
    assert "no answer within 0.05 s" in str(result["error_kinds"])
