"""The sampling loop: resumable, none twice, none lost, faults never scored."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from scripted import ScriptedEngine, ScriptedGrader

from data.problems import Problem
from eval.generate import FaultRateError, SamplingError, sample
from eval.store_settings import StoreSettingsError
from rivet.prompts import PromptBuilder
from rivet.rollout.backend import SamplingParams
from rivet.rollout.types import PromptTooLongError, RolloutRequest, rollout_seed
from rivet.store import TrajectoryStore
from rivet.trajectory import Trajectory


async def run(
    engine: ScriptedEngine,
    problems: list[Problem],
    prompts: PromptBuilder,
    folder: Path,
    *,
    grader: ScriptedGrader | None = None,
    **changes: Any,
) -> list[Trajectory]:
    """`sample` with small defaults."""
    arguments: dict[str, Any] = {
        "prompts": prompts,
        "mode": "experts",
        "sampling": SamplingParams(),
        "samples_per_problem": 3,
        "seed": 5,
        "store": TrajectoryStore(folder),
        "shard_size": 5,
        "concurrency": 4,
        "settings": {"checkpoint": "abc"},
        "progress": None,
    }
    return await sample(engine, grader or ScriptedGrader(), problems, **(arguments | changes))


def expected_ids(problems: list[Problem]) -> list[str]:
    return [f"{p.id}#{i}@0" for p in problems for i in range(3)]


async def test_every_row_is_sampled_graded_and_stored_once(problems, prompts, tmp_path) -> None:
    engine = ScriptedEngine(prompts.tokenizer)
    rows = await run(engine, problems, prompts, tmp_path)
    assert [t.id for t in rows] == expected_ids(problems)
    assert set(engine.asked.values()) == {1}
    for row in rows:
        seed = rollout_seed(5, 0, row.problem_id, row.sample_index)
        assert row.seed == seed
        assert (row.outcome, row.reward) == (("right", 1.0) if seed % 2 == 0 else ("wrong", 0.0))
        assert row.info["gold"] == "6" and row.info["family"] in ("gcd", "sum")
        assert row.info["routes"] == [row.expert_calls[0].name]
        assert row.info["extracted"] == ("6" if seed % 2 == 0 else "7")
    stored = TrajectoryStore(tmp_path)
    assert sorted(stored.load(), key=lambda t: t.id) == sorted(rows, key=lambda t: t.id)
    assert all(len(stored.read_shard(s)) <= 5 for s in stored.shards())


async def test_a_label_of_the_problem_never_stands_for_its_gold_source_or_kind(
    prompts, tmp_path
) -> None:
    meta = {"gold": "7", "source": "a book", "kind": "hard", "level": 3}
    problem = Problem("p", "gcd of 18 and 12", "6", "toy", "exact", meta)
    rows = await run(ScriptedEngine(prompts.tokenizer), [problem], prompts, tmp_path)
    told = [{name: row.info[name] for name in meta} for row in rows]
    assert told == 3 * [{"gold": "6", "source": "toy", "kind": "exact", "level": 3}]


async def test_a_finished_store_is_not_sampled_again(problems, prompts, tmp_path) -> None:
    first = await run(ScriptedEngine(prompts.tokenizer), problems, prompts, tmp_path)
    again = ScriptedEngine(prompts.tokenizer)
    assert await run(again, problems, prompts, tmp_path) == first
    assert not again.asked


async def test_prompts_beyond_the_context_are_named_before_anything_is_sampled(
    problems, prompts, tmp_path
) -> None:
    engine = ScriptedEngine(prompts.tokenizer)
    longest = max(problems, key=lambda p: len(prompts.build(p.problem, "experts")))
    engine.max_context = len(prompts.build(longest.problem, "experts"))
    with pytest.raises(PromptTooLongError, match=longest.id):
        await run(engine, problems, prompts, tmp_path)
    assert not engine.asked and not list(tmp_path.iterdir())


@pytest.mark.parametrize("stop_after", [0, 1, 7, 20, 33])
async def test_an_interrupted_run_resumes_to_the_same_rows(
    problems, prompts, tmp_path, stop_after: int
) -> None:
    whole = await run(ScriptedEngine(prompts.tokenizer), problems, prompts, tmp_path / "whole")

    def interrupt(total: int) -> None:
        if total == stop_after:
            task.cancel()

    broken = ScriptedEngine(prompts.tokenizer, before=interrupt)
    folder = tmp_path / "broken"
    task = asyncio.ensure_future(run(broken, problems, prompts, folder, concurrency=1))
    with pytest.raises(asyncio.CancelledError):
        await task
    kept = TrajectoryStore(folder).ids()
    assert stop_after <= len(kept) < 36  # all that was finished, also in a shard that is not full
    second = ScriptedEngine(prompts.tokenizer)
    assert await run(second, problems, prompts, folder, shard_size=8) == whole
    assert second.asked.keys() == set(expected_ids(problems)) - kept


def _sample_until_killed(tokenizer, problems, prompts, folder: Path, kill_at: int) -> None:
    """In a process of its own: sample, and die without warning at the n-th rollout."""

    def die(total: int) -> None:
        if total == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(run(ScriptedEngine(tokenizer, before=die), problems, prompts, folder))


@pytest.mark.parametrize("kill_at", [3, 17, 30])
async def test_kill_9_leaves_whole_shards_and_a_resume_completes_them(
    problems, prompts, tmp_path, kill_at: int
) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=_sample_until_killed,
        args=(prompts.tokenizer, problems, prompts, tmp_path / "killed", kill_at),
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    store = TrajectoryStore(tmp_path / "killed")
    kept = store.load()
    assert len(kept) % 5 == 0 and len(kept) <= kill_at
    whole = await run(ScriptedEngine(prompts.tokenizer), problems, prompts, tmp_path / "whole")
    resumed = await run(ScriptedEngine(prompts.tokenizer), problems, prompts, store.folder)
    assert resumed == whole
    assert sorted(t.id for t in store) == sorted(expected_ids(problems))


async def test_a_fault_is_run_again_and_then_scored(problems, prompts, tmp_path) -> None:
    engine = ScriptedEngine(
        prompts.tokenizer,
        fault=lambda request, asked: "timeout" if request.id == "p3#1@0" and asked < 2 else None,
    )
    rows = {t.id: t for t in await run(engine, problems, prompts, tmp_path)}
    assert engine.asked["p3#1@0"] == 3
    assert rows["p3#1@0"].outcome in ("right", "wrong")
    assert rows["p3#1@0"].info["faults"] == ["timeout", "timeout"]
    assert "faults" not in rows["p3#0@0"].info


async def test_a_row_that_stays_faulted_is_kept_unscored_and_sampled_by_the_next_run(
    problems, prompts, tmp_path
) -> None:
    def fault(request: RolloutRequest, asked: int) -> str | None:
        return "connection" if request.id == "p3#1@0" else None

    engine = ScriptedEngine(prompts.tokenizer, fault=fault)
    rows = {t.id: t for t in await run(engine, problems, prompts, tmp_path)}
    assert engine.asked["p3#1@0"] == 3
    row = rows["p3#1@0"]
    assert (row.fault, row.outcome, row.reward) == ("connection", None, None)
    assert TrajectoryStore(tmp_path).read_shard("faults") == [row]

    healed = ScriptedEngine(prompts.tokenizer)
    rows = {t.id: t for t in await run(healed, problems, prompts, tmp_path)}
    assert dict(healed.asked) == {"p3#1@0": 1}
    assert rows["p3#1@0"].fault is None and rows["p3#1@0"].outcome in ("right", "wrong")
    ids = [t.id for t in TrajectoryStore(tmp_path)]
    assert sorted(ids) == sorted(expected_ids(problems))


async def test_a_grader_fault_is_graded_again_without_a_new_rollout(
    problems, prompts, tmp_path
) -> None:
    engine = ScriptedEngine(prompts.tokenizer)
    rows = await run(engine, problems, prompts, tmp_path, grader=ScriptedGrader(failures=2))
    assert set(engine.asked.values()) == {1}
    assert sum("grader_timeout" in t.info.get("faults", []) for t in rows) == 2
    assert {t.outcome for t in rows} == {"right", "wrong"}


async def test_a_row_that_cannot_be_graded_has_no_reward(problems, prompts, tmp_path) -> None:
    grader = ScriptedGrader(failures=10**9)
    rows = await run(
        ScriptedEngine(prompts.tokenizer),
        problems,
        prompts,
        tmp_path,
        grader=grader,
        max_fault_rate=1.0,
    )
    assert {(t.outcome, t.reward) for t in rows} == {("timeout", None)}


async def test_a_fault_rate_above_the_limit_stops_and_says_why(problems, prompts, tmp_path) -> None:
    engine = ScriptedEngine(
        prompts.tokenizer,
        fault=lambda request, asked: "rate_limited" if request.seed % 2 else None,
    )
    with pytest.raises(FaultRateError, match=r"rate_limited \d+.*max_fault_rate 0.1.*kept in"):
        await run(engine, problems, prompts, tmp_path)
    kept = TrajectoryStore(tmp_path).ids()
    assert kept and all(t.fault is None for t in TrajectoryStore(tmp_path))
    healed = ScriptedEngine(prompts.tokenizer)
    assert len(await run(healed, problems, prompts, tmp_path)) == 36
    assert healed.asked.keys() == set(expected_ids(problems)) - kept


async def test_a_few_rows_left_faulted_among_few_rows_stop_the_run_too(
    problems, prompts, tmp_path
) -> None:
    engine = ScriptedEngine(
        prompts.tokenizer,
        fault=lambda request, asked: "timeout" if request.problem_id == "p0" else None,
    )
    with pytest.raises(FaultRateError, match="timeout 9"):
        await run(engine, problems[:2], prompts, tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sampling": SamplingParams(temperature=0.5)}, r"sampling\.temperature: .*1\.0.*0\.5"),
        ({"seed": 6}, r"seed: in the store 5, now 6"),
        ({"samples_per_problem": 4}, r"samples_per_problem: in the store 3, now 4"),
        ({"mode": "local"}, r'mode: in the store "experts", now "local"'),
        ({"settings": {"checkpoint": "xyz"}}, r'settings\.checkpoint: .*"abc".*"xyz"'),
    ],
)
async def test_a_store_started_with_other_settings_is_refused(
    problems, prompts, tmp_path, change: dict[str, Any], named: str
) -> None:
    first = await run(ScriptedEngine(prompts.tokenizer), problems, prompts, tmp_path)
    engine = ScriptedEngine(prompts.tokenizer)
    with pytest.raises(StoreSettingsError, match=named):
        await run(engine, problems, prompts, tmp_path, **change)
    assert not engine.asked
    assert len(TrajectoryStore(tmp_path).load()) == len(first)


async def test_other_problems_and_other_prompts_are_told_apart(problems, prompts, tmp_path) -> None:
    await run(ScriptedEngine(prompts.tokenizer), problems, prompts, tmp_path)
    other = [*problems[:-1], Problem("p11", "gcd of 11 and 12", "1", "toy", "exact", {})]
    with pytest.raises(StoreSettingsError) as wrong_gold:
        await run(ScriptedEngine(prompts.tokenizer), other, prompts, tmp_path)
    assert "problems_digest" in str(wrong_gold.value)
    assert "prompts_digest" not in str(wrong_gold.value)


async def test_rows_without_settings_and_broken_settings_are_refused(
    problems, prompts, tmp_path
) -> None:
    engine = ScriptedEngine(prompts.tokenizer)
    await run(engine, problems, prompts, tmp_path)
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(StoreSettingsError, match=r"settings\.json: cannot be read"):
        await run(engine, problems, prompts, tmp_path)
    (tmp_path / "settings.json").unlink()
    with pytest.raises(StoreSettingsError, match="holds rows but no settings.json"):
        await run(engine, problems, prompts, tmp_path)


async def test_rows_of_another_run_and_doubled_rows_are_refused(
    problems, prompts, tmp_path
) -> None:
    engine = ScriptedEngine(prompts.tokenizer)
    rows = await run(engine, problems, prompts, tmp_path)
    store = TrajectoryStore(tmp_path)
    store.write("part-99999", rows[:1])
    with pytest.raises(SamplingError, match="p0#0@0 is there twice"):
        await run(engine, problems, prompts, tmp_path)


async def test_doubled_problem_ids_and_impossible_counts_are_refused(
    problems, prompts, tmp_path
) -> None:
    engine = ScriptedEngine(prompts.tokenizer)
    with pytest.raises(SamplingError, match="'p0' occurs twice"):
        await run(engine, [*problems, problems[0]], prompts, tmp_path)
    with pytest.raises(SamplingError, match="at least 1"):
        await run(engine, problems, prompts, tmp_path, samples_per_problem=0)


async def test_a_rollout_that_is_cancelled_from_within_is_an_error_not_a_lost_row(
    problems, prompts, tmp_path
) -> None:
    def cancel(total: int) -> None:
        if total == 12:
            raise asyncio.CancelledError

    engine = ScriptedEngine(prompts.tokenizer, before=cancel)
    with pytest.raises(SamplingError, match=r"\d+ of 36 rows were cancelled"):
        await run(engine, problems, prompts, tmp_path)


async def test_a_failure_of_the_engine_itself_is_raised_and_finished_rows_are_kept(
    problems, prompts, tmp_path
) -> None:
    def fail(total: int) -> None:
        if total == 12:
            raise ZeroDivisionError("a bug")

    engine = ScriptedEngine(prompts.tokenizer, before=fail)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        await run(engine, problems, prompts, tmp_path)
    assert len(TrajectoryStore(tmp_path).ids()) >= 5
