"""Faults of real sockets in a real Stage I step: none is trained on, and too many stop it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import stage1_world
from misbehaving import FAULTS, Misbehaving, completion, http, serving

from rivet.experts.config import BudgetConfig, CacheConfig, ExpertConfig, ExpertList
from rivet.experts.ledger import stop_at_budget
from rivet.experts.pool import ExpertPool
from rivet.interrupt import Interrupted
from rivet.rewards import CostTerm, outcome_reward
from rivet.rollout.backend import Generation, SamplingParams
from rivet.rollout.engine import RolloutEngine
from rivet.rollout.runner import EngineRunner
from rivet.rollout.types import RolloutRequest, rollout_seed
from rivet.settings import ProtocolSettings
from rivet.store import TrajectoryStore
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Trajectory
from stages.stage1.health import FaultRateError
from stages.stage1.rollouts import Asked

KINDS = ["truncated JSON", "no choices", "HTML", "invalid UTF-8", "500", "reset in the body"]


class Controller:
    """Asks the expert for its own request, then answers 1 or 4."""

    def __init__(self, tokenizer: ProtocolTokenizer) -> None:
        self.tokenizer = tokenizer
        self.turns: Counter[str | None] = Counter()

    async def generate(self, prompt_ids: Sequence[int], **arguments: Any) -> Generation:
        session, seed = arguments["session"], arguments["seed"]
        turn = self.turns[session]
        self.turns[session] += 1
        text = f'<expert name="calc">{seed % 10**6}</expert>'
        if turn:
            text = f"<answer>\\boxed{{{1 + 3 * (seed % 2)}}}</answer>"
        ids = self.tokenizer.encode(text) + [self.tokenizer.eos_id] * turn
        return Generation(ids, [-0.5] * len(ids), "eos" if turn else "stop")

    async def release(self, session: str) -> None:
        self.turns.pop(session, None)


class Source:
    """The engine over a real endpoint, as `EngineSource` has it around the trainer's model."""

    def __init__(self, runner: EngineRunner) -> None:
        self.runner = runner

    def sample(self, asked: Sequence[Asked]) -> list[Trajectory]:
        requests = [
            RolloutRequest(
                one.problem.id,
                (2 + int(one.problem.id[1:]), 3),
                sampling=SamplingParams(),
                seed=rollout_seed(0, one.step, one.problem.id, one.sample_index),
                step=one.step,
                sample_index=one.sample_index,
            )
            for one in asked
        ]
        return [self.graded(trajectory) for trajectory in self.runner.run(requests)]

    def graded(self, trajectory: Trajectory) -> Trajectory:
        if trajectory.fault is None:
            is_right = "4" in (trajectory.answer or "")
            trajectory = replace(trajectory, outcome="right" if is_right else "wrong")
        return replace(trajectory, reward=outcome_reward(trajectory, CostTerm()))


def open_source(behaviours: list[Any], servers: list[Misbehaving], **fields: Any) -> EngineRunner:
    """A runner over a server that begins with these behaviours, and an expert that asks once."""
    run_dir = fields.pop("run_dir", None)
    extras = {name: fields.pop(name) for name in ("budget", "cache") if name in fields}
    tokenizer = ProtocolTokenizer(stage1_world.build_tokenizer())

    @asynccontextmanager
    async def open_engine() -> AsyncIterator[RolloutEngine]:
        async with serving() as server:
            server.behaviours = list(behaviours)
            servers.append(server)
            expert = ExpertConfig("calc", "m", (server.url,), max_retries=0, **fields)
            async with ExpertPool(ExpertList([expert], **extras)) as pool:
                if run_dir is not None:
                    pool.keep_ledger(run_dir)
                yield RolloutEngine(
                    Controller(tokenizer),
                    tokenizer,
                    ProtocolSettings(prompt="bare", after_tag=""),
                    experts=pool,
                    sandbox=Unused(),
                )

    return EngineRunner(open_engine)


class Unused:
    async def run(self, code: str) -> Any:
        raise AssertionError("no program is written here")


STEP = {"max_steps": 1, "max_completion_length": 120, "fault_window": 1}


def test_no_token_of_a_fault_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    behaviours = [FAULTS[kind][0] for kind in KINDS[:3]] + [http(completion("It is 4."))]
    batches: list[dict[str, Any]] = []
    original = stage1_world.Stage1Trainer._compute_loss

    def spy(self: Any, model: Any, inputs: dict[str, Any]) -> Any:
        batches.append(inputs)
        return original(self, model, inputs)

    monkeypatch.setattr(stage1_world.Stage1Trainer, "_compute_loss", spy)
    servers: list[Misbehaving] = []
    with open_source(behaviours, servers) as runner:
        stage1_world.run(tmp_path, Source(runner), max_fault_rate=1.0, **STEP)
    rows = TrajectoryStore(tmp_path / "trajectories").load()
    faulted = [t for t in rows if t.fault is not None]
    assert len(rows) == 8 and [t.fault for t in faulted] == ["expert:bad_response"] * 3
    assert all(t.reward is None and t.outcome is None for t in faulted)
    assert all(set(t.authors) == {"controller"} for t in faulted), "no reply came in"
    sound = [t for t in rows if t.fault is None]
    assert {t.reward for t in sound} == {0.0, 1.0}
    is_trained = Counter[bool]()
    requests = {tuple(t.completion_ids): t.fault is not None for t in rows}
    for batch in batches:
        for ids, mask, weights in zip(
            batch["completion_ids"], batch["tool_mask"], batch["advantages"], strict=True
        ):
            weighs = bool((mask * weights).abs().sum() > 0)
            matches = [f for c, f in requests.items() if ids[: len(c)].tolist() == list(c)]
            assert len(matches) == 1
            is_trained[weighs] += 1
            assert not (matches[0] and weighs), "a token of a fault was trained"
    assert is_trained[True], "sound ones are trained"
    assert len(servers[0].requests) == 8


def test_too_many_faults_stop_the_step_before_anything_is_trained(tmp_path: Path) -> None:
    behaviours = [FAULTS[kind][0] for kind in KINDS] + [http(completion("It is 4."))]
    servers: list[Misbehaving] = []
    with open_source(behaviours, servers) as runner:
        with pytest.raises(FaultRateError, match=r"6 of 8 rollouts.*expert:bad_response x4"):
            stage1_world.run(tmp_path, Source(runner), max_fault_rate=0.5, **STEP)
    assert not TrajectoryStore(tmp_path / "trajectories").shards()
    assert not (tmp_path / "checkpoint").exists()


def test_a_spent_budget_stops_between_steps_and_the_run_goes_on(tmp_path: Path) -> None:
    """Three steps of eight calls; the money ends in the second and comes back."""
    good = [http(completion("It is 4."))]
    cache = CacheConfig("record", str(tmp_path / "cache.sqlite"))
    undisturbed = tmp_path / "undisturbed"
    with open_source(good, []) as runner:
        stage1_world.run(undisturbed, Source(runner), **STEP | {"max_steps": 3})
    folder, asked = tmp_path / "run", []
    for calls in (12, 1000):
        servers: list[Misbehaving] = []
        budget = BudgetConfig(max_calls=calls)
        source = open_source(good, servers, budget=budget, cache=cache, run_dir=tmp_path / "books")
        with source as runner:
            if calls == 12:
                with pytest.raises(Interrupted, match="max_calls is 12"), stop_at_budget():
                    stage1_world.run(folder, Source(runner), **STEP | {"max_steps": 3})
                assert TrajectoryStore(folder / "trajectories").shards() == ["step-00001"]
            else:
                stage1_world.run(folder, Source(runner), **STEP | {"max_steps": 3})
        asked.append(len(servers[0].requests))
    assert asked == [12, 12], "what the first process paid for was not paid for again"
    mine, other = (
        [(t.id, t.completion_ids, t.reward) for t in TrajectoryStore(f / "trajectories").load()]
        for f in (folder, undisturbed)
    )
    assert mine == other
