"""`settings.json` beside a store's shards: what its rows depend on, checked before a resume.

Prompts and problems enter as digests: the prompts' token ids cover the template, the system
message, the tokenizer and the statements at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.problems import Problem
from rivet.files import atomic_write_json
from rivet.rollout.backend import SamplingParams

FILE_NAME = "settings.json"


class StoreSettingsError(ValueError):
    """A store was started with other settings; the message says in what they differ."""


def sampling_settings(
    problems: Sequence[Problem],
    prompts: Iterable[Sequence[int]],
    *,
    mode: str,
    sampling: SamplingParams,
    samples_per_problem: int,
    seed: int,
    step: int,
) -> dict[str, Any]:
    """What the rows of a sampling run depend on, JSON-able."""
    return {
        "mode": mode,
        "sampling": asdict(sampling),
        "samples_per_problem": samples_per_problem,
        "seed": seed,
        "step": step,
        "problems": len(problems),
        "problems_digest": problems_digest(problems),
        "prompts_digest": digest(list(ids) for ids in prompts),
    }


def problems_digest(problems: Iterable[Problem]) -> str:
    """Digest of what was asked and against what it is graded, in order."""
    return digest([p.id, p.problem, p.answer, p.kind] for p in problems)


def digest(items: Iterable[Any]) -> str:
    """Short digest of a sequence of JSON-able items, the same on every machine."""
    state = hashlib.blake2b(digest_size=16)
    for item in items:
        state.update(json.dumps(item, ensure_ascii=True, sort_keys=True).encode() + b"\n")
    return state.hexdigest()


def read_store_settings(folder: Path) -> dict[str, Any] | None:
    """Settings of a store, None if it has none.

    Raises:
        StoreSettingsError: The file is broken.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise StoreSettingsError(
            f"{path}: cannot be read ({error}); expected the JSON object that rivet wrote: use "
            "another folder, or remove this one to sample again"
        ) from error
    if not isinstance(settings, dict):
        raise StoreSettingsError(f"{path}: got {type(settings).__name__}; expected a JSON object")
    return settings


def check_store_settings(folder: Path, wanted: Mapping[str, Any], *, has_rows: bool) -> None:
    """Write the settings of a new store, or hold those of an old one against `wanted`.

    Args:
        folder: The store's folder.
        wanted: Settings of this run.
        has_rows: Whether shards are there.

    Raises:
        StoreSettingsError: They differ, or there are rows without settings.
    """
    wanted = json.loads(json.dumps(wanted))  # tuples become lists, as in the file
    found = read_store_settings(folder)
    if found is None:
        if has_rows:
            raise StoreSettingsError(
                f"{folder}: holds rows but no {FILE_NAME}, so what they were sampled with is "
                "unknown; use another folder, or remove this one to sample again"
            )
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write_json(folder / FILE_NAME, wanted)
        return
    differences = list(_differences(found, wanted, ""))
    if differences:
        raise StoreSettingsError(
            f"{folder}: was started with other settings:\n  "
            + "\n  ".join(differences)
            + "\nuse another folder, or the settings of the first run to resume it"
        )


def _differences(found: Any, wanted: Any, key: str) -> Iterable[str]:
    if isinstance(found, dict) and isinstance(wanted, dict):
        for name in sorted(found.keys() | wanted.keys()):
            path = f"{key}.{name}" if key else name
            yield from _differences(found.get(name), wanted.get(name), path)
    elif found != wanted:
        yield f"{key}: in the store {json.dumps(found)}, now {json.dumps(wanted)}"
