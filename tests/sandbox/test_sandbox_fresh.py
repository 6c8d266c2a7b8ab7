"""The reduced mode of other systems, tried here: a fresh process a call, with limits."""

from __future__ import annotations

import asyncio

import pytest
from attack_suite import SHORT

from sandbox import PythonSandbox


@pytest.fixture(scope="module")
def fresh_box():
    with PythonSandbox(SHORT, slots=2, _is_fresh=True) as opened:
        yield opened


def test_opening_warns_of_what_is_not_stopped(caplog):
    with PythonSandbox(slots=1, _is_fresh=True) as box:
        assert "can read your files" in caplog.text
        assert box.layers is not None and "seccomp" in box.layers["missing"]


def test_results_look_the_same(fresh_box):
    assert fresh_box.run_sync("print(3)\n4").text() == "3\n4"
    error = fresh_box.run_sync("1/0")
    assert error.status == "error" and "ZeroDivisionError" in error.error
    assert fresh_box.run_sync("import os\nos.abort()").status == "crash"
    assert fresh_box.run_sync("x", prelude=["x = 5\nprint(1)"]).text() == "5"


def test_limits_hold(fresh_box):
    late = fresh_box.run_sync("print('half', flush=True)\nimport time\ntime.sleep(60)")
    assert (late.status, late.stdout) == ("timeout", "half\n")
    assert fresh_box.run_sync("while True: print('x' * 9999)").status == "output_limit"


def test_environment_is_clean(fresh_box, monkeypatch):
    monkeypatch.setenv("FAKE_API_KEY", "SECRETENV123")
    assert "SECRETENV123" not in fresh_box.run_sync("import os\nprint(os.environ)").stdout


async def test_async_calls_work(fresh_box):
    results = await asyncio.gather(*(fresh_box.run(f"{i}") for i in range(4)))
    assert [r.text() for r in results] == ["0", "1", "2", "3"]
