"""What a run has spent is booked before it is used, and outlives the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from misbehaving import completion, http

from rivet.experts.config import BudgetConfig, ExpertList, ExpertsFileError
from rivet.experts.database import DatabaseError
from rivet.experts.ledger import FILE_NAME, BudgetExceededError, Ledger, Spent, stop_at_budget
from rivet.experts.pool import ExpertPool
from rivet.interrupt import Interrupted

ONE = Spent(0, 1, 100, 20, 0.25, 0)
PRICES = {"usd_per_million_prompt_tokens": 1e4, "usd_per_million_completion_tokens": 1e5}
# 11 tokens in and 7 out at these prices.
USD = (11 * 1e4 + 7 * 1e5) / 1e6


def test_what_is_booked_adds_up_by_expert_and_over_all(tmp_path):
    ledger = Ledger(tmp_path, BudgetConfig())
    for name in ("calc", "calc", "sage"):
        ledger.begin_call(name)
        ledger.add(name, ONE)
    ledger.add("sage", Spent(0, 1, 0, 0, 0.0, 1))
    assert ledger.by_expert() == {
        "calc": Spent(2, 2, 200, 40, 0.5, 0),
        "sage": Spent(1, 2, 100, 20, 0.25, 1),
    }
    assert ledger.total() == Spent(3, 4, 300, 60, 0.75, 1)
    assert ledger.total().tokens == 360


@pytest.mark.parametrize(
    ("limit", "calls"), [({"max_calls": 3}, 3), ({"max_tokens": 300}, 3), ({"max_usd": 0.5}, 2)]
)
def test_a_limit_ends_the_calls_and_says_which(tmp_path, limit, calls):
    ledger = Ledger(tmp_path, BudgetConfig(**limit), source="runs/experts.yaml")
    for _ in range(calls):
        ledger.check(is_retry=False)
        ledger.begin_call("calc")
        ledger.check(is_retry=True)  # of the last call that fits
        ledger.add("calc", ONE)
    (name,) = limit
    with pytest.raises(BudgetExceededError, match=rf"{name} is .*so far {calls} calls.*") as caught:
        ledger.begin_call("calc")
    assert "raise the limit under `budget:` in runs/experts.yaml" in str(caught.value)
    assert ledger.total().calls == calls, "what is refused is not booked"


def test_a_resumed_run_goes_on_counting(tmp_path):
    first = Ledger(tmp_path, BudgetConfig(max_calls=2))
    first.begin_call("calc")
    first.close()
    second = Ledger(tmp_path, BudgetConfig(max_calls=2))
    second.begin_call("calc")
    with pytest.raises(BudgetExceededError):
        second.begin_call("calc")
    raised = Ledger(tmp_path, BudgetConfig(max_calls=3))
    raised.begin_call("calc")
    assert raised.total().calls == 3


CHILD = """
import sys
from pathlib import Path
from rivet.experts.config import BudgetConfig
from rivet.experts.ledger import BudgetExceededError, Ledger, Spent

ledger = Ledger(Path(sys.argv[1]), BudgetConfig(max_calls=int(sys.argv[2])))
print("ready", flush=True)
sys.stdin.readline()
done = 0
try:
    while True:
        ledger.begin_call("calc")
        ledger.add("calc", Spent(0, 1, 3, 2, 0.5, 0))
        done += 1
        print(done, flush=True)
except BudgetExceededError:
    print("end", flush=True)
"""


ON_A_NETWORK = """
import rivet.experts.database
rivet.experts.database.is_on_local_disk = lambda folder: False
"""


def start(folder: Path, limit: int, before: str) -> subprocess.Popen:
    command = [sys.executable, "-c", before + CHILD, str(folder), str(limit)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)


@pytest.mark.parametrize(
    ("limit", "before"), [(3000, ""), (60, ON_A_NETWORK)], ids=["local", "network"]
)
def test_processes_share_one_budget_exactly_and_a_kill_loses_nothing(tmp_path, limit, before):
    processes = [start(tmp_path, limit, before) for _ in range(3)]
    victim = processes[0]
    lines: list[list[str]] = []
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.close()
            # Asked at once: without a WAL, who writes without pause leaves others no turn for long.
            lines += [[victim.stdout.readline()] if process is victim else []]
        victim.send_signal(signal.SIGKILL)
        for process, seen in zip(processes, lines, strict=True):
            seen += process.stdout.read().splitlines(keepends=True)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()
    assert [seen[-1] for seen in lines[1:]] == ["end\n"] * 2 and lines[0][-1] != "end\n"
    booked = sum(line.strip().isdigit() for seen in lines for line in seen)
    # The kill may come between a booking and its line, or between the two bookings.
    total = Ledger(tmp_path, BudgetConfig()).total()
    assert total.calls == limit, "exact over all processes"
    assert booked <= total.calls <= booked + 1
    assert total.attempts in (total.calls, total.calls - 1)
    assert (total.prompt_tokens, total.completion_tokens) == (
        3 * total.attempts,
        2 * total.attempts,
    )


async def test_the_pool_books_every_attempt_and_stops_at_the_budget(server, config, tmp_path):
    expert = config(max_retries=1, **PRICES)
    experts = ExpertList([expert], budget=BudgetConfig(max_usd=3.5 * USD))
    server.behaviours = [http(completion(None)), http(completion())]
    async with ExpertPool(experts, backoff_s=0.001) as pool:
        pool.keep_ledger(tmp_path)
        assert (await pool.ask("algebra", "1")).status == "ok"  # two attempts, both paid for
        assert pool.spent() == {"algebra": Spent(1, 2, 22, 14, pytest.approx(2 * USD), 0)}
    async with ExpertPool(experts, backoff_s=0.001) as pool:
        pool.keep_ledger(tmp_path)
        assert (await pool.ask("algebra", "2")).status == "ok"
        assert (await pool.ask("algebra", "3")).status == "ok"
        with pytest.raises(BudgetExceededError, match="max_usd"):
            await pool.ask("algebra", "4")
        with pytest.raises(BudgetExceededError):
            await pool.preflight()
    assert len(server.requests) == 4, "nobody is asked beyond it"


async def test_no_run_starts_where_every_call_is_spent(server, config, tmp_path):
    experts = ExpertList([config()], budget=BudgetConfig(max_calls=1))
    for _ in range(2):
        async with ExpertPool(experts) as pool:
            pool.keep_ledger(tmp_path)
            if pool.spent():
                with pytest.raises(BudgetExceededError, match="max_calls is 1"):
                    await pool.preflight()
            else:
                await pool.ask("algebra", "?")
    assert len(server.requests) == 1


async def test_a_retry_of_the_last_call_is_made(server, config):
    experts = ExpertList([config(max_retries=1)], budget=BudgetConfig(max_calls=1))
    server.behaviours = [http(completion(None)), http(completion())]
    async with ExpertPool(experts, backoff_s=0.001) as pool:
        assert (await pool.ask("algebra", "?")).status == "ok"


async def test_a_retry_does_not_go_beyond_the_budget(server, config):
    expert = config(max_retries=5, **PRICES)
    experts = ExpertList([expert], budget=BudgetConfig(max_tokens=36))
    server.behaviours = [http(completion(None))]
    async with ExpertPool(experts, backoff_s=0.001) as pool:
        with pytest.raises(BudgetExceededError):
            await pool.ask("algebra", "1")
    assert len(server.requests) == 2


async def test_calls_of_one_trajectory_are_limited_and_others_go_on(server, config):
    experts = ExpertList([config()], budget=BudgetConfig(max_calls_per_trajectory=2))
    async with ExpertPool(experts) as pool:
        statuses = [
            (await pool.ask("algebra", "?", sample_key=f"7/{problem}#0@0/{n}")).status
            for problem in ("p1", "p2")
            for n in range(3)
        ]
    assert statuses == ["ok", "ok", "budget"] * 2
    assert len(server.requests) == 4


def test_no_ledger_is_kept_where_nothing_costs_anything(config, tmp_path, server):
    ExpertPool([config()]).keep_ledger(tmp_path)
    assert not list(tmp_path.iterdir())
    ExpertPool([config(**PRICES)]).keep_ledger(tmp_path)
    assert (tmp_path / FILE_NAME).exists()


def test_a_spent_budget_is_an_orderly_stop(tmp_path):
    with pytest.raises(Interrupted, match="spent"), stop_at_budget():
        raise BudgetExceededError("spent")
    with pytest.raises(Interrupted, match="spent"), stop_at_budget():
        raise ExceptionGroup("", [ExceptionGroup("", [BudgetExceededError("spent")])])
    with pytest.raises(ExceptionGroup), stop_at_budget():
        raise ExceptionGroup("", [ValueError("else")])


@pytest.mark.parametrize("limit", [{"max_usd": -1}, {"max_calls": 1.5}, {"max_tokens": True}])
def test_an_impossible_limit_is_refused(limit):
    with pytest.raises(ExpertsFileError, match="budget: max_"):
        BudgetConfig(**limit)


def test_a_file_that_is_no_ledger_is_refused_by_name(tmp_path):
    (tmp_path / FILE_NAME).write_text("this is no database at all, whatever its name says" * 20)
    with pytest.raises(DatabaseError, match=f"{FILE_NAME}: file is not a .*or remove the file"):
        Ledger(tmp_path, BudgetConfig())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(DatabaseError, match=FILE_NAME):
        Ledger(tmp_path, BudgetConfig())
