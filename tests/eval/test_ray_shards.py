"""Shards over actors: the same rows as the sampling loop alone, whoever dies; Ray is a stand-in.

The real Ray is in tests/stages/test_ray.py.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from scripted import ScriptedEngine, ScriptedGrader

from data.problems import Problem
from eval.generate import FAULTS_SHARD, FaultRateError, SampleSpec, SamplingError, sample
from eval.ray_shards import WORK_FOLDER, RayActors, listed_experts, open_actors
from eval.store_settings import StoreSettingsError
from rivet.prompts import PromptBuilder
from rivet.rollout.backend import SamplingParams
from rivet.rollout.types import PromptTooLongError
from rivet.settings import ProtocolSettings
from rivet.store import TrajectoryStore
from rivet.trajectory import Trajectory

HOW = SampleSpec("experts", SamplingParams(), samples_per_problem=3, seed=5, shard_size=6)
SETTINGS = {"checkpoint": "abc"}


class ActorLost(Exception):
    """What Ray raises for an actor that died."""


class TaskFailed(Exception):
    """What Ray raises for a call that raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Worker:
    """A worker over a scripted engine that may die before or after a shard is sampled."""

    def __init__(self, prompts: PromptBuilder, engine: ScriptedEngine, dies: list[str]) -> None:
        self.prompts, self.engine, self.dies = prompts, engine, dies
        self.max_context: int | None = None
        self.describe = SimpleNamespace(remote=lambda mode: lambda: (SETTINGS, self.max_context))
        self.run = SimpleNamespace(remote=lambda *a: lambda: self._run(*a))

    def _run(
        self, problems: Sequence[Problem], folder: Path, how: SampleSpec, skip: Collection[str]
    ) -> int:
        when = self.dies.pop(0) if self.dies else "never"
        if when == "before":
            raise ActorLost
        try:
            rows = asyncio.run(
                sample(
                    self.engine,
                    ScriptedGrader(),
                    problems,
                    prompts=self.prompts,
                    store=TrajectoryStore(folder),
                    settings=SETTINGS,
                    skip=skip,
                    progress=None,
                    **how.arguments(),
                )
            )
        except Exception as error:
            raise TaskFailed(error) from error
        if when == "after":
            raise ActorLost
        return len(rows)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Refs are functions; they run when somebody asks for their result, the last one first."""
    module = ModuleType("ray")
    module.get = lambda ref: ref()  # type: ignore[attr-defined]
    module.wait = lambda refs, **_: ([refs[-1]], refs[:-1])  # type: ignore[attr-defined]
    module.exceptions = SimpleNamespace(  # type: ignore[attr-defined]
        RayActorError=ActorLost, RayTaskError=TaskFailed
    )
    module.killed = []  # type: ignore[attr-defined]
    module.kill = module.killed.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", module)
    return module


def build_actors(
    prompts: PromptBuilder, engine: ScriptedEngine, *, dies: Sequence[str] = (), count: int = 2
) -> RayActors:
    deaths = list(dies)
    checkpoint = SimpleNamespace(
        tokenizer=prompts.tokenizer, settings=ProtocolSettings(prompt="bare")
    )

    def start(spec: Any) -> Worker:
        return Worker(prompts, engine, deaths)

    actors = RayActors(
        SimpleNamespace(checkpoint=checkpoint),  # type: ignore[arg-type]
        count,
        SimpleNamespace(remote=start),
    )
    actors._actors = [actors.start() for _ in range(count)]
    return actors


def alone(
    prompts: PromptBuilder, problems: list[Problem], folder: Path, engine: ScriptedEngine
) -> list[Trajectory]:
    """The rows of the sampling loop in one process."""
    return asyncio.run(
        sample(
            engine,
            ScriptedGrader(),
            problems,
            prompts=prompts,
            store=TrajectoryStore(folder),
            settings=SETTINGS,
            progress=None,
            **HOW.arguments(),
        )
    )


@pytest.mark.parametrize("dies", [(), ("before",), ("after",), ("after", "never", "before")])
def test_the_rows_are_those_of_one_process_whoever_dies(
    ray: ModuleType, problems, prompts, tmp_path, dies: tuple[str, ...]
) -> None:
    expected = alone(prompts, problems, tmp_path / "alone", ScriptedEngine(prompts.tokenizer))
    engine = ScriptedEngine(prompts.tokenizer)
    actors = build_actors(prompts, engine, dies=dies)
    store = TrajectoryStore(tmp_path / "shared")
    assert actors.sample(problems, HOW, store=store, progress=None) == expected
    rows = store.load()
    assert len(rows) == len({t.id for t in rows}) == len(expected)
    assert set(engine.asked.values()) == {1}  # a shard that was sampled is not sampled again
    assert len(store.shards()) > 2 and not (store.folder / WORK_FOLDER).exists()


def test_an_actor_that_is_out_of_reach_is_ended_before_another_one_takes_its_shard(
    ray: ModuleType, problems, prompts, tmp_path
) -> None:
    engine = ScriptedEngine(prompts.tokenizer)
    actors = build_actors(prompts, engine, dies=["before"])
    first = list(actors._actors)
    actors.sample(problems, HOW, store=TrajectoryStore(tmp_path), progress=None)
    assert len(ray.killed) == 1 and ray.killed[0] in first
    assert ray.killed[0] not in actors._actors and len(actors._actors) == len(first)


def test_a_shard_that_two_actors_die_over_stops_the_run_and_what_is_done_stays(
    ray: ModuleType, problems, prompts, tmp_path
) -> None:
    store = TrajectoryStore(tmp_path)
    actors = build_actors(
        prompts, ScriptedEngine(prompts.tokenizer), dies=["never", "before", "before"], count=1
    )
    with pytest.raises(SamplingError, match="died .*, as did the one before it"):
        actors.sample(problems, HOW, store=store, progress=None)
    done = store.ids()
    assert len(done) == HOW.shard_size
    engine = ScriptedEngine(prompts.tokenizer)
    rows = build_actors(prompts, engine).sample(problems, HOW, store=store, progress=None)
    assert not done & engine.asked.keys() and len(rows) == len(problems) * 3


def test_a_run_goes_on_with_or_without_ray(ray: ModuleType, problems, prompts, tmp_path) -> None:
    def stop_at(total: int) -> Callable[[int], None]:
        def check(asked: int) -> None:
            if asked >= total:
                raise RuntimeError("stopped")

        return check

    engine = ScriptedEngine(prompts.tokenizer, before=stop_at(9))
    store = TrajectoryStore(tmp_path)
    with pytest.raises(RuntimeError, match="stopped"):
        alone(prompts, problems, tmp_path, engine)
    with pytest.raises(RuntimeError, match="stopped"):
        stopping = ScriptedEngine(prompts.tokenizer, before=stop_at(11))
        build_actors(prompts, stopping).sample(problems, HOW, store=store, progress=None)
    rows = alone(prompts, problems, tmp_path, ScriptedEngine(prompts.tokenizer))
    assert Counter(t.id for t in store) == Counter(t.id for t in rows)
    again = ScriptedEngine(prompts.tokenizer)
    assert build_actors(prompts, again).sample(problems, HOW, store=store, progress=None) == rows
    assert not again.asked


@pytest.mark.parametrize("size", [6, 15])
def test_only_rows_that_are_not_there_are_sampled(
    ray: ModuleType, problems, prompts, tmp_path, size: int
) -> None:
    store = TrajectoryStore(tmp_path)
    expected = alone(prompts, problems, tmp_path, ScriptedEngine(prompts.tokenizer))
    lacking = {t.id for t in expected[4:26:7]}  # scattered over problems and shards
    for shard in store.shards():
        store.write(shard, [t for t in store.read_shard(shard) if t.id not in lacking])
    engine = ScriptedEngine(prompts.tokenizer)
    rows = build_actors(prompts, engine, dies=["after"]).sample(
        problems, replace(HOW, shard_size=size), store=store, progress=None
    )
    assert rows == expected and len(store.load()) == len(expected)
    assert dict(engine.asked) == dict.fromkeys(lacking, 1)


def test_a_shard_that_was_begun_is_found_again_though_other_rows_are_done_since(
    ray: ModuleType, problems, prompts, tmp_path
) -> None:
    store = TrajectoryStore(tmp_path)
    stopping = build_actors(
        prompts, ScriptedEngine(prompts.tokenizer), dies=["after", "before"], count=1
    )
    with pytest.raises(SamplingError, match="as did the one before it"):
        stopping.sample(problems, HOW, store=store, progress=None)
    begun = TrajectoryStore(next((tmp_path / WORK_FOLDER).iterdir()))
    first, *others = begun.load()
    store.write("part-00000", [first])
    engine = ScriptedEngine(prompts.tokenizer)
    rows = build_actors(prompts, engine).sample(problems, HOW, store=store, progress=None)
    assert Counter(t.id for t in store) == Counter(t.id for t in rows)
    assert others and not engine.asked.keys() & {t.id for t in [first, *others]}


def test_faults_are_kept_apart_and_run_again(ray: ModuleType, problems, prompts, tmp_path) -> None:
    first = f"{problems[0].id}#0@0"
    engine = ScriptedEngine(
        prompts.tokenizer, fault=lambda r, _: "expert:timeout" if r.id == first else None
    )
    store = TrajectoryStore(tmp_path)
    rows = build_actors(prompts, engine).sample(problems, HOW, store=store, progress=None)
    assert [t.fault for t in rows] == ["expert:timeout", *[None] * (len(rows) - 1)]
    assert [t.id for t in store.read_shard(FAULTS_SHARD)] == [first]
    sound = ScriptedEngine(prompts.tokenizer)
    rows = build_actors(prompts, sound).sample(problems, HOW, store=store, progress=None)
    assert not any(t.fault for t in rows) and len(store.load()) == len(rows)
    broken = ScriptedEngine(prompts.tokenizer, fault=lambda *_: "expert:timeout")
    with pytest.raises(FaultRateError, match="expert:timeout"):
        build_actors(prompts, broken).sample(
            problems, HOW, store=TrajectoryStore(tmp_path / "broken"), progress=None
        )


def test_bad_input_is_refused_before_anything_is_sampled(
    ray: ModuleType, problems, prompts, tmp_path
) -> None:
    engine = ScriptedEngine(prompts.tokenizer)
    actors = build_actors(prompts, engine)
    actors._actors[0].max_context = 3
    store = TrajectoryStore(tmp_path / "a")
    with pytest.raises(PromptTooLongError, match="do not fit"):
        actors.sample(problems, HOW, store=store, progress=None)
    alone(prompts, problems[:2], tmp_path / "b", ScriptedEngine(prompts.tokenizer))
    with pytest.raises(StoreSettingsError, match="other settings"):
        build_actors(prompts, engine).sample(
            problems, HOW, store=TrajectoryStore(tmp_path / "b"), progress=None
        )
    with pytest.raises(SamplingError, match="answers in this process only"):
        listed_experts(SimpleNamespace())  # type: ignore[arg-type]
    assert not engine.asked


def test_without_ray_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # makes the import fail
    with pytest.raises(SamplingError, match=r"pip install -e '\.\[ray\]'"):
        with open_actors(SimpleNamespace(), 2):  # type: ignore[arg-type]
            pass
