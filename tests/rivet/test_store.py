"""The trajectory store keeps what it is given, whole or not at all."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rivet.files import DiskFullError
from rivet.store import SCHEMA, StoreError, TrajectoryStore
from rivet.trajectory import (
    AUTHORS,
    FINISHES,
    KINDS,
    MODES,
    CodeRun,
    ExpertCall,
    Segment,
    Trajectory,
    merge_runs,
)

logprob = st.floats(-50, 0, allow_nan=False)
token = st.integers(0, 2**31 - 1)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    author = draw(st.sampled_from(AUTHORS))
    ids = tuple(draw(st.lists(token, min_size=1, max_size=5)))
    sampled = author == "controller" and draw(st.booleans())
    logprobs = tuple(draw(logprob) for _ in ids) if sampled else None
    return Segment(author, draw(st.sampled_from(KINDS)), ids, logprobs)


trajectories = st.builds(
    Trajectory,
    id=st.text(min_size=1),
    problem_id=st.text(),
    mode=st.sampled_from(MODES),
    prompt_ids=st.lists(token, max_size=5).map(tuple),
    segments=st.lists(segments(), max_size=5).map(tuple),
    finish=st.sampled_from(FINISHES),
    well_formed=st.booleans(),
    malformed_reason=st.text(),
    answer=st.none() | st.text(),
    fault=st.none() | st.text(),
    expert_calls=st.lists(
        st.builds(ExpertCall, name=st.text(), status=st.text(), latency_s=st.floats(0, 9))
    ).map(tuple),
    code_runs=st.lists(st.builds(CodeRun, author=st.sampled_from(AUTHORS), status=st.text())).map(
        tuple
    ),
    outcome=st.none() | st.sampled_from(["right", "wrong"]),
    reward=st.none() | st.floats(-9, 9, allow_nan=False),
    seed=st.integers(0, 2**63 - 1),
    step=st.integers(0, 10**6),
    sample_index=st.integers(0, 100),
    info=st.dictionaries(st.text(), st.integers() | st.text()),
)


def make(n: int, tokens: int = 69) -> Trajectory:
    segment = Segment("controller", "reasoning", tuple(range(tokens)), (-0.1,) * tokens)
    return Trajectory(f"p{n}#0@0", f"p{n}", "local", (1, 2), (segment,), "answer", True, seed=n)


@settings(max_examples=60, deadline=None)
@given(batch=st.lists(trajectories, max_size=4))
def test_trajectories_round_trip_exactly(
    tmp_path_factory: pytest.TempPathFactory, batch: list[Trajectory]
) -> None:
    store = TrajectoryStore(tmp_path_factory.mktemp("store"))
    store.write("a", batch)
    assert store.load() == batch


def test_ten_thousand_trajectories_are_kept(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    batch = [make(n) for n in range(10_000)]
    store.write("all", batch)
    assert store.load() == batch
    assert len(store.dataset()) == store.count() == 10_000


def test_shards_read_in_order_of_name_and_replace_each_other(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    store.write("step-00002", [make(2)])
    store.write("step-00001", [make(1)])
    store.write("step-00001", [make(3)])
    assert [t.problem_id for t in store] == ["p3", "p2"]
    assert store.ids() == {"p3#0@0", "p2#0@0"}


def test_a_write_that_fails_leaves_no_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TrajectoryStore(tmp_path)
    store.write("a", [make(1)])

    def full(table: object, path: Path, **_: object) -> None:
        Path(path).write_bytes(b"PAR1 half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(DiskFullError, match="a.parquet"):
        store.write("a", [make(2)])
    assert [t.problem_id for t in store] == ["p1"]
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]


def test_a_broken_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"not parquet")
    with pytest.raises(StoreError, match="a.parquet: cannot be read.*restore it; without a copy"):
        TrajectoryStore(tmp_path).load()
    with pytest.raises(StoreError, match="a finished one needs --overwrite true"):
        TrajectoryStore(tmp_path).count()


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    path = store.write("a", [make(1)])
    table = pq.read_table(path).replace_schema_metadata({b"rivet_trajectory_schema": b"99"})
    pq.write_table(table, path)
    with pytest.raises(StoreError, match="schema version is 99, this rivet reads 1"):
        store.load()


def test_an_empty_store_has_no_dataset(tmp_path: Path) -> None:
    assert TrajectoryStore(tmp_path / "none").load() == []
    with pytest.raises(StoreError, match="no trajectory"):
        TrajectoryStore(tmp_path / "none").dataset()


def test_every_field_of_a_trajectory_is_a_column() -> None:
    fields = set(Trajectory.__dataclass_fields__) - {"segments"}
    columns = {c for c in SCHEMA.names if not c.startswith("segment_")}
    assert columns - {"completion_ids", "logprobs"} == fields


def test_tokens_authors_kinds_and_logprobs_agree() -> None:
    parts = merge_runs(
        [1, 2, 3, 4],
        ["controller", "controller", "expert", "controller"],
        ["code", "code", "reply", "code"],
        [-0.5, -0.25, None, -1.0],
    )
    trajectory = Trajectory("a", "a", "experts", (), parts, "eos", False)
    assert [len(s) for s in parts] == [2, 1, 1]
    assert trajectory.completion_ids == [1, 2, 3, 4]
    assert trajectory.logprobs == [-0.5, -0.25, None, -1.0]
    assert trajectory.authors == ["controller", "controller", "expert", "controller"]
    assert trajectory.kinds == ["code", "code", "reply", "code"]


def test_a_segment_refuses_logprobs_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="2 ids but 1"):
        Segment("controller", "code", (1, 2), (-0.1,))
    with pytest.raises(ValueError, match="only sampled"):
        Segment("expert", "reply", (1,), (-0.1,))
    with pytest.raises(ValueError, match="at least one token"):
        Segment("expert", "reply", ())


def test_logprobs_are_float32() -> None:
    value = Segment("controller", "code", (1,), (-0.1,)).logprobs
    assert value is not None and value[0] != -0.1 and math.isclose(value[0], -0.1, rel_tol=1e-7)
