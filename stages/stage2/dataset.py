"""The Stage II dataset: trajectories as rows of token ids with an author and a kind per token.

A `datasets` dataset in one parquet file, with a card. Authors and kinds are small integers, indices
into `AUTHOR_CODES` and `KIND_CODES` of `stages.stage2.objective`; the card repeats them. Weights
are not stored: one dataset serves every setting of the objective.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset

from rivet.files import atomic_folder, is_whole
from rivet.trajectory import Trajectory
from stages.stage2.candidates import Candidate
from stages.stage2.objective import AUTHOR_CODES, KIND_CODES, PROMPT_AUTHOR, PROMPT_KIND

logger = logging.getLogger(__name__)

DATA_FILE = "train.parquet"
FUNNEL_FILE = "funnel.json"
_ROWS = 1000  # of a row group
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("problem_id", pa.string()),
        ("routes", pa.list_(pa.string())),
        ("length", pa.int32()),
        ("input_ids", pa.list_(pa.int32())),
        ("authors", pa.list_(pa.uint8())),
        ("kinds", pa.list_(pa.uint8())),
    ]
)


class DatasetError(ValueError):
    """A Stage II dataset is missing, empty or of other columns; the message names the folder."""


def to_dataset(
    trajectories: Sequence[Trajectory], *, expert_scales: Sequence[float] | None = None
) -> Dataset:
    """Rows for the Stage II trainer.

    Args:
        trajectories: In order.
        expert_scales: Factor on the expert's weights for each trajectory; None means 1.
    """
    return Dataset(_table([Candidate.of(t) for t in trajectories], expert_scales))


def write_dataset(
    folder: str | Path,
    kept: Iterable[Candidate],
    *,
    funnel: Callable[[], Mapping[str, Any]],
    source: str,
) -> None:
    """Write a dataset folder (data, card, funnel), whole or not at all; replaces an earlier one.

    Rows are written as they come, so memory does not grow with their number.

    Args:
        folder: Where.
        kept: The trajectories, in order.
        funnel: Gives what the filter counted, once all have come; for the card and `funnel.json`.
        source: Where the trajectories came from, for the card.
    """
    rows = iter(kept)
    tokens = 0
    with atomic_folder(folder) as temporary:
        with pq.ParquetWriter(temporary / DATA_FILE, SCHEMA, compression="zstd") as writer:
            while chunk := list(itertools.islice(rows, _ROWS)):
                writer.write_table(_table(chunk, None))
                tokens += sum(map(len, chunk))
        counted = funnel()
        (temporary / FUNNEL_FILE).write_text(
            json.dumps(counted, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        (temporary / "README.md").write_text(_card(counted, tokens, source), encoding="utf-8")


def is_dataset(folder: Path) -> bool:
    """Whether a folder holds a dataset, and a whole one; says which file is cut short."""
    files = [folder / name for name in (DATA_FILE, FUNNEL_FILE)]
    broken = [file for file in files if not is_whole(file)]
    if broken and folder.exists():
        logger.warning("%s: missing or cut short; the dataset is made again", broken[0])
    return not broken


def read_dataset(folder: str | Path) -> Dataset:
    """Memory-map a dataset that `write_dataset` wrote.

    Raises:
        DatasetError: It is not there, has no row, or lacks a column.
    """
    path = Path(folder) / DATA_FILE
    if not path.is_file():
        raise DatasetError(f"{path}: no such file; expected a Stage II dataset (`rivet stage2`)")
    dataset = Dataset.from_parquet(str(path))
    missing = {"input_ids", "authors", "kinds", "length"} - set(dataset.column_names)
    if missing:
        raise DatasetError(
            f"{path}: column {sorted(missing)[0]!r} is missing (there are "
            f"{', '.join(dataset.column_names)}); expected a dataset that `rivet stage2` wrote"
        )
    if not len(dataset):
        raise DatasetError(f"{path}: no row; loosen the filter or collect more trajectories")
    return dataset


def _table(kept: Sequence[Candidate], expert_scales: Sequence[float] | None) -> pa.Table:
    lengths = np.array([len(row) for row in kept], np.int32)
    prompts = [len(row.prompt_ids) for row in kept]
    columns: dict[str, pa.Array] = {
        "id": pa.array([row.id for row in kept], pa.string()),
        "problem_id": pa.array([row.problem_id for row in kept], pa.string()),
        "routes": pa.array([list(row.routes) for row in kept], pa.list_(pa.string())),
        "length": pa.array(lengths),
        "input_ids": _lists(
            [part for row in kept for part in (row.prompt_ids, row.completion_ids)],
            lengths,
            np.int32,
        ),
        "authors": _lists(_coded(prompts, PROMPT_AUTHOR, [r.authors for r in kept]), lengths),
        "kinds": _lists(_coded(prompts, PROMPT_KIND, [r.kinds for r in kept]), lengths),
    }
    if expert_scales is not None:
        columns["expert_scale"] = pa.array(np.array(expert_scales, np.float32))
    return pa.table(columns)


def _coded(
    prompts: Sequence[int], code: int, completions: Sequence[np.ndarray]
) -> Iterator[np.ndarray]:
    """The code of the prompt for each of its tokens, then those of the completion, row by row."""
    for length, completion in zip(prompts, completions, strict=True):
        yield np.full(length, code, np.uint8)
        yield completion


def _lists(arrays: Iterable[np.ndarray], lengths: np.ndarray, dtype: type = np.uint8) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    flat = np.concatenate([np.zeros(0, dtype), *arrays])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))


def _card(funnel: Mapping[str, Any], tokens: int, source: str) -> str:
    steps = "\n".join(
        f"| {step['rule']} | {step['dropped']} | {step['kept']} |" for step in funnel["rules"]
    )
    authors = ", ".join(f"{code} {name}" for code, name in enumerate(AUTHOR_CODES))
    kinds = ", ".join(f"{code} {name}" for code, name in enumerate(KIND_CODES))
    return f"""---
configs:
- config_name: default
  data_files: {DATA_FILE}
tags:
- rivet
- trajectories
---
# Verified trajectories

{funnel["kept"]} trajectories of {funnel["problems"]} problems,
{tokens} tokens, from `{source}` ({funnel["read"]} read), written by rivet for Stage II.

| rule | dropped | kept |
|---|---|---|
{steps}

Columns: `id`, `problem_id`, `routes` (experts consulted), `length`, and per token `input_ids`,
`authors` ({authors}) and `kinds` ({kinds}). The prompt is included. Token ids belong to the
controller that sampled them; they are never to be tokenised again.
"""
