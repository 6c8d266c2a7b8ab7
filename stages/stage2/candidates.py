"""Graded trajectories as Stage II reads them: arrays of ids and codes, straight from the columns.

A `Trajectory` object holds every token as a Python number, which for a store of a hundred thousand
is gigabytes and a minute. Here a store is read a thousand rows at a time and a row is a few arrays.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rivet.store import StoreError, TrajectoryStore
from rivet.trajectory import AUTHORS, KINDS, Trajectory

COLUMNS = (
    "id", "problem_id", "mode", "prompt_ids", "completion_ids", "segment_lengths",
    "segment_authors", "segment_kinds", "finish", "well_formed", "fault", "expert_calls",
    "code_runs", "outcome",
)  # fmt: skip
_AUTHOR = {name: code for code, name in enumerate(AUTHORS)}
_KIND = {name: code for code, name in enumerate(KINDS)}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One graded trajectory.

    Attributes:
        id, problem_id, mode, finish, well_formed, fault, outcome: As in `Trajectory`.
        prompt_ids: Shape (P,), int32.
        completion_ids: Shape (T,), int32.
        authors: Code of each completion token's author, an index into `AUTHORS`, (T,), uint8.
        kinds: Code of its kind, an index into `KINDS`, shape (T,), uint8.
        routes: Names of the experts that were consulted.
        code_statuses: How each program ended.
    """

    id: str
    problem_id: str
    mode: str
    finish: str
    well_formed: bool
    fault: str | None
    outcome: str | None
    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    authors: np.ndarray
    kinds: np.ndarray
    routes: tuple[str, ...]
    code_statuses: tuple[str, ...]

    @classmethod
    def of(cls, trajectory: Trajectory) -> Candidate:
        """A trajectory that is in memory."""
        lengths = [len(s) for s in trajectory.segments]
        authors = np.array([_AUTHOR[s.author] for s in trajectory.segments], np.uint8)
        kinds = np.array([_KIND[s.kind] for s in trajectory.segments], np.uint8)
        return cls(
            trajectory.id,
            trajectory.problem_id,
            trajectory.mode,
            trajectory.finish,
            trajectory.well_formed,
            trajectory.fault,
            trajectory.outcome,
            np.array(trajectory.prompt_ids, np.int32),
            np.array(trajectory.completion_ids, np.int32),
            np.repeat(authors, lengths),
            np.repeat(kinds, lengths),
            trajectory.routes,
            tuple(run.status for run in trajectory.code_runs),
        )

    def __len__(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_ids) + len(self.completion_ids)


def problem_counts(store: TrajectoryStore) -> Counter[str]:
    """How many trajectories of each problem a store holds."""
    counts: Counter[str] = Counter()
    for batch in store.batches(["problem_id"]):
        counts.update(batch.column("problem_id").to_pylist())
    return counts


def read_candidates(store: TrajectoryStore) -> Iterator[Candidate]:
    """Every trajectory of a store in its order; memory does not grow with the store.

    Raises:
        rivet.store.StoreError: A shard is broken; the message names it or its row.
    """
    for batch in store.batches(list(COLUMNS)):
        yield from _candidates(batch)


def _candidates(batch: pa.RecordBatch) -> Iterator[Candidate]:
    plain = {
        name: batch.column(name).to_pylist()
        for name in ("id", "problem_id", "mode", "finish", "well_formed", "fault", "outcome")
    }
    calls, runs = (batch.column(name).to_pylist() for name in ("expert_calls", "code_runs"))
    prompts, prompt_at = _lists(batch.column("prompt_ids"))
    ids, ids_at = _lists(batch.column("completion_ids"))
    lengths, segments_at = _lists(batch.column("segment_lengths"))
    authors = _codes(batch, "segment_authors", AUTHORS)
    kinds = _codes(batch, "segment_kinds", KINDS)
    # Segments follow one another over row borders, as tokens do.
    token_authors, token_kinds = np.repeat(authors, lengths), np.repeat(kinds, lengths)
    ends = np.concatenate([[0], np.cumsum(lengths)])[segments_at - segments_at[0]]
    if not np.array_equal(ends, ids_at - ids_at[0]):
        row = int(np.argmax(ends != ids_at - ids_at[0])) - 1
        raise StoreError(
            f"trajectory {plain['id'][row]}: segment lengths do not add up to its tokens"
        )
    for n in range(batch.num_rows):
        span = slice(ends[n], ends[n + 1])
        yield Candidate(
            **{name: column[n] for name, column in plain.items()},
            prompt_ids=prompts[prompt_at[n] : prompt_at[n + 1]],
            completion_ids=ids[ids_at[n] : ids_at[n + 1]],
            authors=token_authors[span],
            kinds=token_kinds[span],
            routes=tuple(call["name"] for call in json.loads(calls[n])),
            code_statuses=tuple(run["status"] for run in json.loads(runs[n])),
        )


def _lists(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """Values of a list column, and where each row begins in them, one more than there are rows."""
    return column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()


def _codes(batch: pa.RecordBatch, name: str, words: tuple[str, ...]) -> np.ndarray:
    column = batch.column(name).flatten()
    codes = pc.index_in(column, value_set=pa.array(words))
    if codes.null_count:
        unknown = column.filter(pc.is_null(codes))[0].as_py()
        raise StoreError(f"{name} holds {unknown!r}; expected one of {', '.join(words)}")
    return codes.to_numpy().astype(np.uint8)
