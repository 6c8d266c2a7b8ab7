"""The trajectory store: a folder of parquet shards, written atomically, read through `datasets`.

One store serves Stage I logging, collection, Stage II, evaluation and reports. A shard is written
under a temporary name and renamed, so a killed run leaves whole shards only, and a shard written
again under the same name replaces the first. Columns are the fields of `Trajectory`; segments are
three parallel lists (lengths, authors, kinds) over flat token ids and log-probabilities (null where
no token was sampled). The schema's version is in each file's metadata.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rivet.files import explain_full_disk
from rivet.trajectory import AUTHORS, KINDS, CodeRun, ExpertCall, Segment, Trajectory

SCHEMA_VERSION = 1
_VERSION_KEY = b"rivet_trajectory_schema"

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("problem_id", pa.string()),
        ("mode", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("segment_lengths", pa.list_(pa.int32())),
        ("segment_authors", pa.list_(pa.string())),
        ("segment_kinds", pa.list_(pa.string())),
        ("finish", pa.string()),
        ("well_formed", pa.bool_()),
        ("malformed_reason", pa.string()),
        ("answer", pa.string()),
        ("fault", pa.string()),
        ("expert_calls", pa.string()),
        ("code_runs", pa.string()),
        ("outcome", pa.string()),
        ("reward", pa.float64()),
        ("seed", pa.int64()),
        ("step", pa.int64()),
        ("sample_index", pa.int64()),
        ("info", pa.string()),
    ],
    metadata={_VERSION_KEY: str(SCHEMA_VERSION).encode()},
)


class StoreError(ValueError):
    """A store is broken or of another version; the message names the file."""


class TrajectoryStore:
    """Trajectories in a folder.

    Args:
        folder: Created at the first write.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def write(self, shard: str, trajectories: Iterable[Trajectory]) -> Path:
        """Write one shard, whole or not at all; an existing one of this name is replaced.

        Args:
            shard: Name without ending, such as `step-00012`. Shards are read in order of name.
            trajectories: In order.

        Raises:
            rivet.files.DiskFullError: No space is left; an existing shard is untouched.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{shard}.parquet"
        temporary = self.folder / f".{shard}.parquet.tmp-{os.getpid()}"
        table = pa.Table.from_pylist([_to_row(t) for t in trajectories], schema=SCHEMA)
        with explain_full_disk(path):
            try:
                pq.write_table(table, temporary, compression="zstd")
                with open(temporary, "rb") as file:
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
        return path

    def shards(self) -> list[str]:
        """Names of the shards that are there, sorted."""
        return sorted(path.stem for path in self.folder.glob("[!.]*.parquet"))

    def read_shard(self, shard: str) -> list[Trajectory]:
        """Trajectories of one shard, in order."""
        return [_from_row(row) for row in self._table(shard).to_pylist()]

    def __iter__(self) -> Iterator[Trajectory]:
        for shard in self.shards():
            yield from self.read_shard(shard)

    def batches(self, columns: list[str], size: int = 1024) -> Iterator[pa.RecordBatch]:
        """Columns of every trajectory in order of shard, at most `size` rows at a time."""
        for shard in self.shards():
            self._check_version(shard)
            with pq.ParquetFile(self.folder / f"{shard}.parquet") as file:
                yield from file.iter_batches(size, columns=columns)

    def load(self) -> list[Trajectory]:
        """Every trajectory, in order of shard."""
        return list(self)

    def ids(self) -> set[str]:
        """Ids of every trajectory, without reading the rest."""
        return {i for shard in self.shards() for i in self._table(shard, ["id"])["id"].to_pylist()}

    def count(self) -> int:
        """How many trajectories there are, without reading them."""
        total = 0
        for shard in self.shards():
            self._check_version(shard)
            total += pq.read_metadata(self.folder / f"{shard}.parquet").num_rows
        return total

    def dataset(self) -> Any:
        """The whole store as a memory-mapped `datasets.Dataset`.

        Raises:
            StoreError: The store is empty.
        """
        from datasets import Dataset

        if not self.shards():
            raise StoreError(f"{self.folder}: no trajectory here; expected parquet shards")
        for shard in self.shards():
            self._check_version(shard)
        return Dataset.from_parquet([str(self.folder / f"{s}.parquet") for s in self.shards()])

    def _table(self, shard: str, columns: list[str] | None = None) -> pa.Table:
        self._check_version(shard)
        return pq.read_table(self.folder / f"{shard}.parquet", columns=columns)

    def _check_version(self, shard: str) -> None:
        path = self.folder / f"{shard}.parquet"
        try:
            metadata = pq.read_schema(path).metadata or {}
        except (pa.ArrowInvalid, OSError) as error:
            raise StoreError(
                f"{path}: cannot be read ({error}); expected a parquet file that rivet wrote: "
                "restore it; without a copy, remove it and run the command that sampled it again: "
                "an unfinished run samples what is missing, a finished one needs --overwrite true "
                "and samples everything"
            ) from error
        version = metadata.get(_VERSION_KEY, b"none").decode()
        if version != str(SCHEMA_VERSION):
            raise StoreError(
                f"{path}: trajectory schema version is {version}, this rivet reads "
                f"{SCHEMA_VERSION}; use the rivet release that wrote it, or another folder"
            )


def _to_row(trajectory: Trajectory) -> dict[str, Any]:
    row = {name: getattr(trajectory, name) for name in SCHEMA.names if not name.startswith("seg")}
    row["segment_lengths"] = [len(s) for s in trajectory.segments]
    row["segment_authors"] = [s.author for s in trajectory.segments]
    row["segment_kinds"] = [s.kind for s in trajectory.segments]
    row["expert_calls"] = json.dumps([asdict(call) for call in trajectory.expert_calls])
    row["code_runs"] = json.dumps([asdict(run) for run in trajectory.code_runs])
    row["info"] = json.dumps(trajectory.info)
    return row


def _from_row(row: dict[str, Any]) -> Trajectory:
    lengths, authors, kinds = (
        row.pop(f"segment_{name}") for name in ("lengths", "authors", "kinds")
    )
    ids, logprobs = row.pop("completion_ids"), row.pop("logprobs")
    if not sum(lengths) == len(ids) == len(logprobs):
        raise StoreError(f"trajectory {row['id']}: segment lengths do not add up to its tokens")
    segments, start = [], 0
    for length, author, kind in zip(lengths, authors, kinds, strict=True):
        if author not in AUTHORS or kind not in KINDS:
            raise StoreError(f"trajectory {row['id']}: unknown segment {author}/{kind}")
        end = start + length
        sampled = logprobs[start] is not None
        segments.append(
            Segment(
                author, kind, tuple(ids[start:end]), tuple(logprobs[start:end]) if sampled else None
            )
        )
        start = end
    row["prompt_ids"] = tuple(row["prompt_ids"])
    row["expert_calls"] = tuple(ExpertCall(**c) for c in json.loads(row["expert_calls"]))
    row["code_runs"] = tuple(CodeRun(**r) for r in json.loads(row["code_runs"]))
    row["info"] = json.loads(row["info"])
    return Trajectory(segments=tuple(segments), **row)
