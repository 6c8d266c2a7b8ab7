"""The Stage II dataset: trajectories as rows of token ids with an author and a kind per token.

A `datasets` dataset in one parquet file, with a card. Authors and kinds are small integers, indices
into `AUTHOR_CODES` and `KIND_CODES` of `stages.stage2.objective`; the card repeats them. Weights
are not stored: one dataset serves every setting of the objective.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset

from rivet.files import atomic_folder
from rivet.trajectory import Trajectory
from stages.stage2.objective import AUTHOR_CODES, KIND_CODES, PROMPT_AUTHOR, PROMPT_KIND

DATA_FILE = "train.parquet"
FUNNEL_FILE = "funnel.json"
_AUTHOR = {name: code for code, name in enumerate(AUTHOR_CODES)}
_KIND = {name: code for code, name in enumerate(KIND_CODES)}


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
    return Dataset(_table(trajectories, expert_scales))


def write_dataset(
    folder: str | Path,
    trajectories: Sequence[Trajectory],
    *,
    funnel: Mapping[str, Any],
    source: str,
) -> None:
    """Write a dataset folder (data, card, funnel), whole or not at all; replaces an earlier one.

    Args:
        folder: Where.
        trajectories: The kept ones, in order.
        funnel: What the filter counted, for the card and `funnel.json`.
        source: Where the trajectories came from, for the card.
    """
    table = _table(trajectories, None)
    with atomic_folder(folder) as temporary:
        pq.write_table(table, temporary / DATA_FILE, compression="zstd")
        (temporary / FUNNEL_FILE).write_text(
            json.dumps(funnel, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        (temporary / "README.md").write_text(_card(trajectories, funnel, source), encoding="utf-8")


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


def codes_of(trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids (int32), author and kind codes (uint8) of prompt and completion, shape (T,)."""
    lengths = [len(trajectory.prompt_ids), *(len(s) for s in trajectory.segments)]
    authors = [PROMPT_AUTHOR, *(_AUTHOR[s.author] for s in trajectory.segments)]
    kinds = [PROMPT_KIND, *(_KIND[s.kind] for s in trajectory.segments)]
    ids = np.array([*trajectory.prompt_ids, *trajectory.completion_ids], np.int32)
    return (
        ids,
        np.repeat(np.array(authors, np.uint8), lengths),
        np.repeat(np.array(kinds, np.uint8), lengths),
    )


def _table(trajectories: Sequence[Trajectory], expert_scales: Sequence[float] | None) -> pa.Table:
    coded = [codes_of(t) for t in trajectories]
    lengths = np.array([len(ids) for ids, _, _ in coded], np.int32)
    columns: dict[str, pa.Array] = {
        "id": pa.array([t.id for t in trajectories], pa.string()),
        "problem_id": pa.array([t.problem_id for t in trajectories], pa.string()),
        "routes": pa.array([list(t.routes) for t in trajectories], pa.list_(pa.string())),
        "length": pa.array(lengths),
        "input_ids": _lists([ids for ids, _, _ in coded], lengths, np.int32),
        "authors": _lists([authors for _, authors, _ in coded], lengths, np.uint8),
        "kinds": _lists([kinds for _, _, kinds in coded], lengths, np.uint8),
    }
    if expert_scales is not None:
        columns["expert_scale"] = pa.array(np.array(expert_scales, np.float32))
    return pa.table(columns)


def _lists(arrays: Iterable[np.ndarray], lengths: np.ndarray, dtype: type) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    flat = np.concatenate([np.zeros(0, dtype), *arrays])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))


def _card(trajectories: Sequence[Trajectory], funnel: Mapping[str, Any], source: str) -> str:
    tokens = sum(len(t.prompt_ids) + sum(map(len, t.segments)) for t in trajectories)
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

{len(trajectories)} trajectories of {len({t.problem_id for t in trajectories})} problems,
{tokens} tokens, from `{source}` ({funnel["read"]} read), written by rivet for Stage II.

| rule | dropped | kept |
|---|---|---|
{steps}

Columns: `id`, `problem_id`, `routes` (experts consulted), `length`, and per token `input_ids`,
`authors` ({authors}) and `kinds` ({kinds}). The prompt is included. Token ids belong to the
controller that sampled them; they are never to be tokenised again.
"""
