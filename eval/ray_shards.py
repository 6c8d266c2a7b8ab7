"""Sampling shared out over Ray actors: the same rows as `eval.generate.sample`, none twice.

A row's id and seed depend on the problem, the sample index and the run seed alone, so it does not
matter who samples it. Problems are cut into shards; each actor (`eval.ray_worker`) samples one at
a time into a store of its own under `STORE/ray/`, and the driver moves finished shards into the
run's store as parquet files. An actor that dies is replaced, and its shard is run once more, from
the rows that it left. A killed driver goes on with the same command, with or without Ray, with any
number of actors.

Without `RAY_ADDRESS` the actors run on this machine. On a cluster the run folder and the
checkpoint must lie where every machine sees them, and the experts must be reachable from there.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.problems import Problem
from eval.generate import (
    FAULTS_SHARD,
    FaultRateError,
    SampleSpec,
    SamplingError,
    plan,
)
from eval.ray_worker import RuntimeSpec, ShardWorker
from eval.store_settings import check_store_settings, digest, sampling_settings
from rivet.experts.config import ExpertConfig
from rivet.experts.types import Experts
from rivet.prompts import PromptBuilder
from rivet.rollout.types import check_prompts
from rivet.store import TrajectoryStore
from rivet.trajectory import Trajectory, fault_of

logger = logging.getLogger(__name__)

WORK_FOLDER = "ray"
_MAX_LOSSES = 1  # of one shard
_MIN_ROWS = 32  # below this many rows a fault rate says little
_START_TRIES = 3
_START_TIMEOUT_S = "300"
_OBJECT_STORE_BYTES = 100 << 20  # only problems and counts go through it


@dataclass(slots=True)
class _Shard:
    """Some problems of a run.

    Attributes:
        problems: In order.
        folder: Where an actor samples them.
        done: Ids of their rows that are in the run's store already.
        losses: Actors that died over it.
    """

    problems: list[Problem]
    folder: Path
    done: set[str]
    losses: int = 0


@dataclass
class RayActors:
    """Actors that sample; open them with `open_actors`.

    Attributes:
        spec: What each of them has open.
        count: How many.
    """

    spec: RuntimeSpec
    count: int
    _remote: Any = None
    _actors: list[Any] = field(default_factory=list)

    def sample(
        self,
        problems: Sequence[Problem],
        how: SampleSpec,
        *,
        store: TrajectoryStore,
        progress: str | None = "sampling",
    ) -> list[Trajectory]:
        """Sample and grade every problem; rows already in the store are not sampled again.

        Args:
            problems: With unique ids.
            how: As for `eval.generate.sample`.
            store: Where rows go.
            progress: Label of the progress bar; None for no bar.

        Returns:
            All rows, ordered by problem and sample index, faulted ones included.

        Raises:
            SamplingError: Two actors died over the same shard, or what `eval.generate.sample`
                raises.
        """
        import ray

        prompts = PromptBuilder(self.spec.checkpoint.tokenizer, self.spec.checkpoint.settings)
        jobs = plan(
            problems,
            prompts,
            how.mode,
            how.sampling,
            how.samples_per_problem,
            how.seed,
            step=0,
        )
        settings, max_context = ray.get(self._actors[0].describe.remote(how.mode))
        lengths = {job.problem.id: len(job.request.prompt_ids) for job in jobs.values()}
        check_prompts(lengths, max_context)
        wanted = sampling_settings(
            problems,
            [job.request.prompt_ids for job in jobs.values()],
            mode=how.mode,
            sampling=how.sampling,
            samples_per_problem=how.samples_per_problem,
            seed=how.seed,
            step=0,
        )
        check_store_settings(
            store.folder, wanted | {"settings": settings}, has_rows=bool(store.shards())
        )
        (store.folder / f"{FAULTS_SHARD}.parquet").unlink(missing_ok=True)
        run = _Run(self, store, how, jobs.keys())
        with tqdm(
            total=len(jobs),
            initial=len(run.done),
            desc=progress,
            unit="row",
            disable=progress is None,
            file=sys.stderr,
            mininterval=0.2 if sys.stderr.isatty() else 10.0,
        ) as bar:
            run.drain(_split(problems, how, store, run.done), bar)
        rows = {t.id: t for t in store}
        shutil.rmtree(store.folder / WORK_FOLDER, ignore_errors=True)
        return [rows[row_id] for row_id in jobs]

    def start(self) -> Any:
        """One more actor."""
        return self._remote.remote(self.spec)


class _Run:
    """One pass over the shards of a store."""

    def __init__(
        self, actors: RayActors, store: TrajectoryStore, how: SampleSpec, wanted: Any
    ) -> None:
        self._actors = actors
        self._store = store
        self._how = how
        self.done = store.ids()
        foreign = self.done - set(wanted)
        if foreign:
            raise SamplingError(
                f"{store.folder}: row {min(foreign)} is none of this run's rows; expected a "
                "folder that this command wrote: use another one, or remove it to sample again"
            )
        taken = [int(s.removeprefix("part-")) for s in store.shards() if s.startswith("part-")]
        self._next = max(taken, default=-1) + 1
        self._faulted: list[Trajectory] = []

    def drain(self, shards: list[_Shard], bar: Any) -> None:
        """Have every shard sampled; whatever happens, finished ones are in the store."""
        import ray

        # One fault is a large share of a small shard: what is borne is counted over all of them.
        how = replace(self._how, max_fault_rate=1.0)
        pending = deque(shards)
        idle = list(self._actors._actors)
        under_way: dict[Any, tuple[Any, _Shard]] = {}
        try:
            while pending or under_way:
                while pending and idle:
                    actor, shard = idle.pop(), pending.popleft()
                    ref = actor.run.remote(shard.problems, shard.folder, how, shard.done)
                    under_way[ref] = (actor, shard)
                (ref, *_), _ = ray.wait(list(under_way), num_returns=1)
                actor, shard = under_way.pop(ref)
                try:
                    ray.get(ref)
                except ray.exceptions.RayActorError as error:
                    idle.append(self._replace(actor))
                    self._lost(shard, error)
                    pending.appendleft(shard)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                else:
                    idle.append(actor)
                    bar.update(self._keep(shard))
                    self._check_faults(at_least=_MIN_ROWS)
        finally:
            if self._faulted:
                self._store.write(FAULTS_SHARD, self._faulted)
        self._check_faults()

    def _replace(self, actor: Any) -> Any:
        import ray

        # It may be out of reach only: it must not go on with its shard, nor keep its GPU.
        ray.kill(actor)
        actors = self._actors._actors
        actors[actors.index(actor)] = new = self._actors.start()
        return new

    def _lost(self, shard: _Shard, error: Exception) -> None:
        shard.losses += 1
        kept = len(TrajectoryStore(shard.folder).ids()) if shard.folder.is_dir() else 0
        what = f"the Ray actor that sampled problems {shard.problems[0].id} to "
        what += f"{shard.problems[-1].id} died ({type(error).__name__})"
        if shard.losses > _MAX_LOSSES:
            raise SamplingError(
                f"{what}, as did the one before it; expected one to last: look for what kills it "
                "(memory? the machine's log), then run the same command to go on. Finished rows "
                f"are kept in {self._store.folder}"
            ) from error
        logger.warning("%s; another one goes on from the %d rows that it left", what, kept)

    def _keep(self, shard: _Shard) -> int:
        """Move a finished shard into the run's store; how many rows are new."""
        rows = [t for t in TrajectoryStore(shard.folder) if t.id not in self.done]
        sound = [t for t in rows if fault_of(t) is None]
        self._faulted += [t for t in rows if fault_of(t) is not None]
        if sound:
            self._store.write(f"part-{self._next:05d}", sound)
            self._next += 1
        self.done |= {t.id for t in sound}
        return len(sound)

    def _check_faults(self, at_least: int = 1) -> None:
        total = len(self.done) + len(self._faulted)
        if total >= at_least and len(self._faulted) > self._how.max_fault_rate * total:
            kinds = Counter(fault_of(t) for t in self._faulted).most_common()
            raise FaultRateError(
                f"{len(self._faulted)} of {total} rows are left with a fault "
                f"({', '.join(f'{name} {count}' for name, count in kinds)}), above max_fault_rate "
                f"{self._how.max_fault_rate:g}; no such row is scored: repair what failed and run "
                "the same command to go on"
            )


def _split(
    problems: Sequence[Problem], how: SampleSpec, store: TrajectoryStore, done: set[str]
) -> list[_Shard]:
    """Shards of at most `shard_size` rows, those that lack a row.

    The problems are cut at the same places however many rows are done, so that a shard that was
    begun is found again.
    """
    size = max(1, how.shard_size // how.samples_per_problem)
    shards = []
    for start in range(0, len(problems), size):
        part = list(problems[start : start + size])
        ids = [f"{p.id}#{n}@0" for p in part for n in range(how.samples_per_problem)]
        if not done.issuperset(ids):
            folder = store.folder / WORK_FOLDER / digest(ids)[:16]
            shards.append(_Shard(part, folder.absolute(), done.intersection(ids)))
    return shards


@contextmanager
def open_actors(spec: RuntimeSpec, count: int) -> Iterator[RayActors]:
    """Start actors, each with the checkpoint open; they end with this.

    Args:
        spec: What each of them opens.
        count: How many, at least 1.

    Raises:
        SamplingError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise SamplingError(
            "ray is not installed, and --ray asks for it; expected it in this environment: "
            "pip install -e '.[ray]' in the clone"
        ) from error
    # Actors may be started elsewhere.
    folder = spec.checkpoint.folder.absolute()
    spec = replace(spec, checkpoint=replace(spec.checkpoint, folder=folder))
    is_ours = not ray.is_initialized()
    if is_ours:
        _connect(ray, count)
    gpus = int(ray.cluster_resources().get("GPU", 0))
    # A GPU each where there are enough; else they share what they find.
    remote = ray.remote(num_cpus=1, num_gpus=1 if gpus >= count else 0, max_restarts=0)
    actors = RayActors(spec, count, remote(ShardWorker))
    try:
        actors._actors = [actors.start() for _ in range(count)]
        yield actors
        ray.wait([a.close.remote() for a in actors._actors], num_returns=count, timeout=30)
    finally:
        for actor in actors._actors:
            ray.kill(actor)
        if is_ours:
            ray.shutdown()


def listed_experts(experts: Experts) -> list[ExpertConfig]:
    """Experts as every actor can open them for itself.

    Raises:
        SamplingError: They are open in this process only.
    """
    from rivet.experts.pool import ExpertPool  # slow to import

    if not isinstance(experts, ExpertPool):
        raise SamplingError(
            f"{type(experts).__name__} answers in this process only; expected experts from an "
            "experts.yaml with --ray"
        )
    return experts.listed


def _connect(ray: Any, count: int) -> None:
    # Nothing is reported to anybody, no dashboard is opened, and a busy machine may be slow.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_register_timeout_seconds", _START_TIMEOUT_S)
    address = os.environ.get("RAY_ADDRESS")
    where = f"at RAY_ADDRESS {address}" if address else "on this machine"
    local = {"num_cpus": count, "object_store_memory": _OBJECT_STORE_BYTES}
    logger.info("starting %d Ray actors %s", count, where)
    settings = {} if address else {"include_dashboard": False} | local
    for left in reversed(range(_START_TRIES)):
        try:
            ray.init(log_to_driver=False, logging_level=logging.WARNING, **settings)
            return
        except Exception as error:  # Ray raises whatever its parts raise, plain `Exception` too
            ray.shutdown()
            if left:  # its own limit of 30 s for a part to start is short on a busy machine
                logger.warning("Ray did not start (%s); trying again", error)
                continue
            raise SamplingError(
                f"Ray does not start {where} ({type(error).__name__}: {error}); expected a "
                "cluster, or a machine with room for it: see /tmp/ray/session_latest/logs, or "
                "leave --ray out"
            ) from error
