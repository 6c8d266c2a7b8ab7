"""Flat groups are replaced within bounds, late rollouts shrink groups, and every fate is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stage1_world import PROBLEMS, ScriptedSource, build_config, build_tokenizer, run, scripted

from rivet.grading.verdict import Grade
from rivet.rewards import CostTerm
from rivet.rollout.local import LocalBackend
from rivet.rollout.types import LATE, PromptTooLongError, RolloutRequest
from rivet.store import StoreError, TrajectoryStore
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Trajectory
from stages.stage1.fates import FATES, describe_funnel, fate_of, funnel, is_flat
from stages.stage1.rollouts import Asked, Refill, StepRollouts
from stages.stage1.sampling import EngineSource

G = 4


class ChoosySource:
    """Rewards by problem: a list of 0s and 1s for its group, else mixed. Sampled rows by id."""

    def __init__(self, rewards: dict[str, list[float | None]]) -> None:
        self.rewards = rewards
        self.sampled: list[str] = []

    def sample(self, asked: Sequence[Asked]) -> list[Trajectory]:
        self.sampled += [one.id for one in asked]
        rewards = [
            self.rewards.get(one.problem.id, [1.0, 0.0, 0.0, 1.0])[one.sample_index % G]
            for one in asked
        ]
        return [
            scripted(one)
            if reward is None
            else replace(scripted(one, reward=reward), seed=one.sample_index)
            for one, reward in zip(asked, rewards, strict=True)
        ]

    def sample_until_mixed(
        self, groups: Sequence[Sequence[Sequence[Asked]]]
    ) -> list[list[list[Trajectory]]]:
        result = []
        for choices in groups:
            tried: list[list[Trajectory]] = []
            for group in choices:
                tried.append(self.sample(group))
                if not is_flat(tried[-1]):
                    break
            result.append(tried)
        return result


def ask(*problems: int, step: int = 3, size: int = G) -> list[Asked]:
    return [Asked(PROBLEMS[n], index, step) for n in problems for index in range(size)]


def build_rollouts(source: ChoosySource, folder: Path, max_refills: int = 2) -> StepRollouts:
    refill = Refill(PROBLEMS, G, max_refills, seed=0)
    return StepRollouts(source, TrajectoryStore(folder), refill=refill)


def test_another_problem_takes_the_place_of_a_flat_group(tmp_path) -> None:
    source = ChoosySource({"p0": [1.0] * G})
    rollouts = build_rollouts(source, tmp_path)
    asked = ask(0, 1)
    batch, is_stored = rollouts.of_step(3, asked)
    assert not is_stored and len(batch) == len(asked) and rollouts.replaced == G
    assert len({t.problem_id for t in batch[:G]} - {"p0", "p1"}) == 1
    assert [t.id for t in batch[G:]] == [a.id for a in asked[G:]]
    assert all(t.sample_index >= G for t in batch[:G])  # ids that no other process can ask for


def test_what_is_sampled_is_bounded_and_a_group_that_stays_flat_is_used(tmp_path) -> None:
    source = ChoosySource({p.id: [0.0] * G for p in PROBLEMS})
    rollouts = build_rollouts(source, tmp_path, max_refills=2)
    batch, _ = rollouts.of_step(3, ask(0, 1))
    assert len(batch) == 2 * G and rollouts.replaced == 4 * G
    assert len(source.sampled) == len(set(source.sampled)) == 3 * 2 * G
    assert len({i.split("#")[0] for i in source.sampled}) == 6  # no problem is tried twice


def test_a_step_that_is_sampled_again_asks_for_the_same(tmp_path) -> None:
    rewards: dict[str, list[float | None]] = {"p0": [1.0] * G, "p1": [0.0] * G}
    batches = []
    for name in ("one", "two"):
        batch, _ = build_rollouts(ChoosySource(rewards), tmp_path / name).of_step(3, ask(0, 1))
        batches.append(batch)
    assert batches[0] == batches[1]


def test_the_step_is_read_back_with_its_replacements(tmp_path) -> None:
    rollouts = build_rollouts(ChoosySource({"p0": [1.0] * G}), tmp_path)
    batch, _ = rollouts.of_step(3, ask(0, 1))
    rollouts.keep(3, batch)
    rows = TrajectoryStore(tmp_path).load()
    assert len(rows) == 3 * G and len({t.id for t in rows}) == 3 * G
    source = ChoosySource({})
    again = build_rollouts(source, tmp_path)
    assert again.of_step(3, ask(0, 1)) == (batch, True)
    assert again.replaced == G and not source.sampled
    with pytest.raises(StoreError, match="other rollouts"):
        build_rollouts(source, tmp_path).of_step(3, ask(2, 3))
    with pytest.raises(StoreError, match="other rollouts"):
        StepRollouts(source, TrajectoryStore(tmp_path)).of_step(3, ask(0, 1))


def test_groups_over_two_processes_have_no_replacement() -> None:
    choices = Refill(PROBLEMS, G, 2, seed=0).choices(1, ask(0, 1)[2:], rank=0)
    assert [len(group) for group in choices] == [1, 3]
    others = Refill(PROBLEMS, G, 2, seed=0).choices(1, ask(0, 1)[2:], rank=1)
    ids = {a.id for group in (*choices, *others) for choice in group[1:] for a in choice}
    assert len(ids) == 4 * G


def test_a_group_that_lost_a_member_is_not_flat() -> None:
    group = [scripted(one, reward=1.0) for one in ask(0)]
    assert is_flat(group)
    for fault in ("expert:timeout", LATE):
        lost = replace(group[0], fault=fault, reward=None, outcome=None)
        assert not is_flat([lost, *group[1:]])
    assert not is_flat([replace(group[0], outcome="died", reward=None), *group[1:]])


def test_every_trajectory_has_one_fate() -> None:
    one = scripted(ask(0)[0], reward=1.0)
    void = replace(one, answer=None, expert_calls=())

    def fate(trajectory: Trajectory, advantage: float, trained: bool, is_void: bool = False) -> str:
        return fate_of(trajectory, advantage=advantage, is_trained=trained, is_void=is_void)

    assert fate(one, 0.5, True) == "used"
    assert fate(one, 0.0, True) == fate(one, 0.0, False) == "zero_advantage"
    assert fate(void, -0.5, False, is_void=True) == "void"
    assert fate(void, -0.5, True, is_void=True) == "used"  # where void ones are trained
    assert fate(replace(one, fault="expert:timeout"), 0.0, False) == "fault"
    assert fate(replace(one, outcome="died"), 0.0, False) == "fault"
    assert fate(replace(one, fault=LATE), 0.0, False) == "late"


def test_a_run_keeps_every_fate_and_they_add_up(tmp_path) -> None:
    def make(asked: Asked) -> Trajectory:
        if asked.problem.id == "p1":  # a group that lost one to its deadline
            if asked.sample_index % G == 0:
                late = scripted(asked, finish="fault", fault=LATE)
                return replace(late, reward=None, outcome=None)
            return scripted(asked, reward=float(asked.sample_index % 2))
        if asked.problem.id in ("p2", "p3", "p4"):
            return scripted(asked, reward=1.0)
        return scripted(asked, reward=float(asked.sample_index % 2))

    class Source(ScriptedSource):
        sample_until_mixed = ChoosySource.sample_until_mixed

    run(tmp_path / "run", Source(make), max_refills=1, max_fault_rate=1.0)
    store = TrajectoryStore(tmp_path / "run" / "trajectories")
    counts = funnel(store)
    rows = store.load()
    assert counts["sampled"] == len(rows) == sum(counts[fate] for fate in FATES)
    assert counts["late"] == sum(t.fault == LATE for t in rows) > 0
    assert counts["replaced"] > 0 and counts["used"] > 0
    assert "unknown" not in counts and f"sampled {len(rows)} -> used" in describe_funnel(counts)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for name in (*FATES, "replaced"):
        logged = sum(line[f"rollout/fate/{name}"] for line in lines)
        expected = counts[name] - (counts["replaced"] if name == "zero_advantage" else 0)
        assert logged == expected, name
    results = json.loads((tmp_path / "run/finished.json").read_text())["results"]
    assert results["fates"] == counts


class FakeGrader:
    """Right if the answer is `4`."""

    async def grade(self, answer_text: str, gold: Any, **_: Any) -> Grade:
        return Grade("right" if answer_text == gold else "wrong", answer_text, "tests")


class FakeBackend(LocalBackend):
    """Counts resets and samples nothing."""

    def __init__(self) -> None:
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1

    async def idle(self) -> None:
        """Nothing is ever under way."""


class FakeEngine:
    """Answers by problem; `slow` problems wait for `done` others first."""

    max_context: int | None = None

    def __init__(self, answers: dict[str, list[str]], waits: dict[str, int]) -> None:
        self.backend = FakeBackend()
        self.answers, self.waits = answers, waits
        self.requests: list[RolloutRequest] = []
        self.done = 0

    async def rollout(self, request: RolloutRequest) -> Trajectory:
        self.requests.append(request)
        while self.done < self.waits.get(request.problem_id, 0):
            await asyncio.sleep(0)
        self.done += 1
        index = request.sample_index
        problem = next(p for p in PROBLEMS if p.id == request.problem_id)
        answers = self.answers.get(request.problem_id, ["4", "5"])
        answer = answers[index % len(answers)]
        made = scripted(Asked(problem, index, request.step), reward=None, answer=answer)
        return replace(made, reward=None, outcome=None)


class FakePrompts:
    """Five tokens, whatever the problem."""

    tokenizer = ProtocolTokenizer(build_tokenizer())

    def build(self, problem: str, mode: str) -> tuple[int, ...]:
        return (2, 3, 4, 5, 6)


class FakeRunner:
    """Runs coroutines at once."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(coroutine)


def build_source(engine: FakeEngine, **changes: Any) -> EngineSource:
    values: dict[str, Any] = {
        "grader": FakeGrader(),
        "prompts": FakePrompts(),
        "temperature": 1.0,
        "seed": 3,
        "cost": CostTerm(),
    }
    return EngineSource(FakeRunner(engine), **(values | changes))  # type: ignore[arg-type]


def test_a_group_goes_on_to_its_next_choice_while_others_are_under_way() -> None:
    # p1 waits until the flat group of p0 and the group that takes its place are done.
    engine = FakeEngine({"p0": ["4"]}, waits={"p1": 2 * G})
    source = build_source(engine, deadline_s=7.0)
    choices = [[ask(0), ask(2), ask(3)], [ask(1), ask(4)]]
    first, second = source.sample_until_mixed(choices)
    assert [[t.problem_id for t in group] for group in first] == [["p0"] * G, ["p2"] * G]
    assert [[t.problem_id for t in group] for group in second] == [["p1"] * G]
    assert [t.reward for t in first[1]] == [1.0, 0.0, 1.0, 0.0]
    assert {request.deadline_s for request in engine.requests} == {7.0}
    assert engine.backend.resets == 1
    assert [t.problem_id for t in source.sample(ask(0, 1))] == ["p0"] * G + ["p1"] * G


def test_the_cost_of_asking_is_taken_off_right_answers(tmp_path: Path) -> None:
    config = build_config(tmp_path, cost_per_call=0.1, cost_per_usd=2.0, max_cost=0.25)
    assert config.cost() == CostTerm(per_call=0.1, per_usd=2.0, max_cost=0.25)
    source = build_source(FakeEngine({}, waits={}), cost=CostTerm(per_call=0.1))
    # Every scripted rollout asks once; every other one is right.
    assert [t.reward for t in source.sample(ask(0))] == [0.9, 0.0, 0.9, 0.0]


def test_a_problem_that_does_not_fit_is_named_before_anything_is_sampled() -> None:
    engine = FakeEngine({}, waits={})
    engine.max_context = 4
    with pytest.raises(PromptTooLongError, match="8 of 8 problems do not fit: p0 "):
        build_source(engine).check_prompts(PROBLEMS)
    assert not engine.requests
