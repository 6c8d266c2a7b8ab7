"""What was paid for is not asked again, a replay says what is missing, and a kill loses nothing."""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from misbehaving import completion, http

from rivet.experts.cache import CachedReply, ReplyCache, cache_key
from rivet.experts.config import BudgetConfig, CacheConfig, ExpertList, ExpertsFileError
from rivet.experts.database import Database, DatabaseError
from rivet.experts.ledger import BudgetExceededError, Spent
from rivet.experts.pool import ExpertPool, ExpertsUnavailableError

PRICES = {"usd_per_million_prompt_tokens": 1.0, "usd_per_million_completion_tokens": 10.0}


@pytest.fixture
def experts(config, tmp_path):
    """Makes the list of one expert with a cache in the test's folder."""

    def make(mode="record", budget=None, **fields):
        cache = CacheConfig(mode, str(tmp_path / "cache.sqlite"))
        return ExpertList([config(**fields)], cache=cache, budget=budget)

    return make


async def test_a_repeated_run_pays_nothing_and_gets_the_same(server, experts, tmp_path):
    asked = [(f"question {n % 3}", f"7/p{n}#{n % 2}@0/0") for n in range(12)]
    server.behaviours = [http(completion(f"answer {n}")) for n in range(13)]
    runs, totals = [], []
    for folder in ("a", "b"):
        async with ExpertPool(experts(**PRICES)) as pool:
            pool.keep_ledger(tmp_path / folder)
            await pool.preflight()
            runs.append([await pool.ask("algebra", q, sample_key=key) for q, key in asked])
            totals.append(pool.total())
            spent = pool.spent()
    assert len(server.requests) == 12 + 1, "the preflight, and each question once"
    key = [(r.status, r.text, r.prompt_tokens, r.completion_tokens, r.cost_usd) for r in runs[0]]
    assert key == [
        (r.status, r.text, r.prompt_tokens, r.completion_tokens, r.cost_usd) for r in runs[1]
    ]
    assert [reply.is_cached for reply in runs[1]] == [True] * 12
    assert (totals[0].calls, totals[0].cached) == (12, 0) and totals[0].cost_usd > 0
    assert (totals[1].calls, totals[1].cached, totals[1].attempts) == (12, 12, 0)
    assert totals[1].cost_usd == 0 and spent == {}


async def test_replies_differ_by_sample_and_by_everything_that_is_sent(server, experts):
    server.behaviours = [http(completion(f"answer {n}")) for n in range(40)]
    seen = set()
    variants = [{}, {"temperature": 0.5}, {"system": "Be brief."}, {"model": "m2"}]
    variants += [{"max_tokens": 9}, {"name": "calc"}]
    for fields in variants:
        async with ExpertPool(experts(**fields)) as pool:
            for key in ("7/p#0@0/0", "8/p#0@0/0", "7/p#1@0/0", "7/p#0@0/1"):
                seen.add((await pool.ask(pool.names[0], "?", sample_key=key)).text)
    assert len(seen) == 4 * len(variants) == len(server.requests)
    # Another address, price or patience is the same expert.
    async with ExpertPool(experts(timeout_s=3.0, base_urls=("http://127.0.0.1:9/v1",))) as pool:
        assert (await pool.ask("algebra", "?", sample_key="7/p#0@0/0")).is_cached


def test_a_key_is_the_same_in_every_process():
    body = {"model": "m", "messages": [{"role": "user", "content": "ü?"}], "max_tokens": 5}
    assert cache_key("calc", body, "7/p#0@0/0").hex() == "bc17f72c22b14e8cd35388af06bfa485"
    assert (
        cache_key("calc", dict(reversed(body.items())), "7/p#0@0/0").hex()
        == "bc17f72c22b14e8cd35388af06bfa485"
    )


async def test_faults_are_not_recorded(server, experts):
    server.behaviours = [http({}, 500), http(completion("fine"))]
    async with ExpertPool(experts()) as pool:
        assert (await pool.ask("algebra", "?", sample_key="k")).status == "server_error"
        reply = await pool.ask("algebra", "?", sample_key="k")
    assert (reply.status, reply.text, reply.is_cached) == ("ok", "fine", False)


async def test_a_replay_needs_neither_network_nor_key(server, experts, tmp_path, monkeypatch):
    async with ExpertPool(experts(key_env="ALGEBRA_KEY"), environ={"ALGEBRA_KEY": "k" * 9}) as pool:
        first = await pool.ask("algebra", "a question", sample_key="7/p#0@0/0")
    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", None)
    replayed = experts("replay", base_urls=("http://127.0.0.1:9/v1",), key_env="ALGEBRA_KEY")
    async with ExpertPool(replayed, environ={}) as pool:
        await pool.preflight()
        reply = await pool.ask("algebra", "a question", sample_key="7/p#0@0/0")
        assert (reply.status, reply.text, reply.attempts) == ("ok", first.text, 0)
        missing = await pool.ask("algebra", "another\nquestion", sample_key="7/p#1@0/0")
    assert (missing.status, missing.text, missing.is_fault) == ("not_recorded", "", True)
    for part in ("cache.sqlite", "algebra", "'another question'", "'7/p#1@0/0'", "model m"):
        assert part in missing.detail
    assert len(server.requests) == 1


def test_a_replay_without_a_record_is_refused_at_once(experts):
    with pytest.raises(ExpertsFileError, match=r"cache.sqlite does not exist.*run it once with"):
        ExpertPool(experts("replay"))


async def test_a_record_can_be_replayed_from_a_folder_that_nobody_may_write(experts, tmp_path):
    async with ExpertPool(experts()) as pool:
        await pool.ask("algebra", "?", sample_key="k")
    path = tmp_path / "cache.sqlite"
    path.chmod(0o400)
    tmp_path.chmod(0o500)
    try:
        cache = ReplyCache(CacheConfig("replay"), path)
        with pytest.raises(DatabaseError, match="readonly"):
            cache.put("algebra", {}, "k", CachedReply("x", 1, 1, True))
        cache.close()
    finally:
        tmp_path.chmod(0o700)


async def test_endpoints_are_asked_before_the_first_reply_that_is_not_recorded(server, experts):
    async with ExpertPool(experts()) as pool:
        await pool.ask("algebra", "?", sample_key="k")
    dead = experts(base_urls=("http://127.0.0.1:9/v1",))
    async with ExpertPool(dead) as pool:
        await pool.preflight()  # all may be recorded
        assert (await pool.ask("algebra", "?", sample_key="k")).is_cached
        asks = (pool.ask("algebra", str(n), sample_key="k") for n in range(3))
        for error in await asyncio.gather(*asks, return_exceptions=True):
            assert isinstance(error, ExpertsUnavailableError) and "127.0.0.1:9" in str(error)


async def test_what_is_recorded_counts_against_no_budget(server, experts, tmp_path):
    budget = BudgetConfig(max_calls=1)
    for is_repeated in (False, True):
        async with ExpertPool(experts(budget=budget)) as pool:
            pool.keep_ledger(tmp_path)
            if is_repeated:
                await pool.preflight()
            for _ in range(3):
                assert (await pool.ask("algebra", "?", sample_key="k")).status == "ok"
            assert pool.spent() == {"algebra": Spent(1, 1, 11, 7, 0.0, 0)}
    async with ExpertPool(experts(budget=budget)) as pool:
        pool.keep_ledger(tmp_path)
        await pool.preflight()
        with pytest.raises(BudgetExceededError):
            await pool.ask("algebra", "?", sample_key="another")
    assert len(server.requests) == 1


def test_the_first_reply_stays_and_the_second_asker_gets_it(tmp_path):
    caches = [ReplyCache(CacheConfig("record"), tmp_path / "c.sqlite") for _ in range(2)]
    first, second = CachedReply("one", 1, 2, True), CachedReply("two", 3, 4, False)
    assert caches[0].put("calc", {"model": "m"}, "k", first) == first
    assert caches[1].put("calc", {"model": "m"}, "k", second) == first
    assert caches[1].get("calc", {"model": "m"}, "k") == first


CHILD = """
import random, sys
from pathlib import Path
from rivet.experts.cache import CachedReply, ReplyCache
from rivet.experts.config import CacheConfig

cache = ReplyCache(CacheConfig("record"), Path(sys.argv[1]))
rng = random.Random(int(sys.argv[2]))
for n in range(int(sys.argv[3])):
    k = rng.randrange(200)
    kept = cache.put("calc", {"n": k}, "s", CachedReply(f"{k} by {sys.argv[2]}" * 50, k, 1, True))
    print(k, kept.text.split(" by ")[1][:1], flush=True)
"""


def test_processes_write_one_file_and_a_kill_at_any_moment_loses_nothing(tmp_path):
    """Each child says what is kept, once it is; whatever it said is still true at the end."""
    path = tmp_path / "cache.sqlite"
    rng = random.Random(0)
    said: list[str] = []
    running: list[subprocess.Popen] = []

    def spawn(number: int, count: int) -> subprocess.Popen:
        command = [sys.executable, "-c", CHILD, str(path), str(number), str(count)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        running.append(process)
        return process

    try:
        whole = [spawn(n, 300) for n in (1, 2)]
        for number in (3, 4, 5):
            victim = spawn(number, 100_000)
            for _ in range(rng.randrange(1, 40)):
                said.append(victim.stdout.readline())
            victim.send_signal(signal.SIGKILL)
            said += victim.stdout.read().splitlines(keepends=True)
        for process in whole:
            said += process.stdout.read().splitlines(keepends=True)
            assert process.wait() == 0
    finally:
        for process in running:
            process.kill()
            process.wait()
            process.stdout.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    cache = ReplyCache(CacheConfig("replay"), path)
    lines = [line.split() for line in said if line.endswith("\n")]
    assert len(lines) > 600
    for k, who in lines:
        kept = cache.get("calc", {"n": int(k)}, "s")
        assert kept is not None and kept.text == f"{k} by {who}" * 50


def test_a_file_of_another_version_is_refused(tmp_path):
    path = tmp_path / "c.sqlite"
    ReplyCache(CacheConfig("record"), path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    for mode in ("record", "replay"):
        with pytest.raises(DatabaseError, match="schema 99, this rivet reads and writes 1"):
            ReplyCache(CacheConfig(mode), path)


def test_a_full_disk_is_named_and_nobody_is_told_to_remove_what_was_paid_for(tmp_path):
    cache = ReplyCache(CacheConfig("record"), tmp_path / "c.sqlite")
    kept = cache.put("calc", {}, "k", CachedReply("one", 1, 2, True))
    cache._database._connection.execute("PRAGMA max_page_count = 4")
    with pytest.raises(DatabaseError, match=r"c\.sqlite: database or disk is full") as caught:
        cache.put("calc", {}, "l", CachedReply("x" * 100_000, 1, 2, True))
    assert "remove" not in str(caught.value)
    assert cache.get("calc", {}, "k") == kept
    cache._database._connection.execute("PRAGMA max_page_count = 4000")
    cache.put("calc", {}, "l", CachedReply("x" * 100_000, 1, 2, True))


def test_a_commit_that_fails_leaves_no_transaction_open(tmp_path):
    schema = (
        "CREATE TABLE p (id INTEGER PRIMARY KEY);"
        "CREATE TABLE c (id INTEGER REFERENCES p DEFERRABLE INITIALLY DEFERRED)"
    )
    database = Database(tmp_path / "d.sqlite", schema, 1)
    database._connection.execute("PRAGMA foreign_keys = ON")
    with pytest.raises(DatabaseError, match="FOREIGN KEY"), database.writing() as connection:
        connection.execute("INSERT INTO c VALUES (7)")  # refused by the commit
    with database.writing() as connection:
        connection.execute("INSERT INTO p VALUES (7)")
    assert database.rows("SELECT count(*) FROM p, c") == [(0,)]


def test_a_path_that_is_a_folder_is_named(tmp_path):
    (tmp_path / "c.sqlite").mkdir()
    with pytest.raises(DatabaseError, match=r"c\.sqlite: unable to open"):
        ReplyCache(CacheConfig("record"), tmp_path / "c.sqlite")


def test_only_the_three_modes_exist():
    with pytest.raises(ExpertsFileError, match="mode: got 'on', expected one of off, record, rep"):
        CacheConfig("on")
    assert Path(CacheConfig().path).suffix == ".sqlite"
