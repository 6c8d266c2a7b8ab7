"""Licences that an export must carry: of the base model, which binds the weights, and the data."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml


class LicenceError(ValueError):
    """A licence is not known; the message says how to state it."""


@dataclass(frozen=True, slots=True)
class Licences:
    """What the card says.

    Attributes:
        weights: Of the exported weights, as the Hub names it.
        base_model: What was trained on from, None for a model trained from scratch.
        base: Licence of the base model.
        data: Pairs (data set, licence).
    """

    weights: str
    base_model: str | None = None
    base: str = ""
    data: tuple[tuple[str, str], ...] = ()


def find_licences(*, base_model: str, base_license: str, weights: str, data: list[str]) -> Licences:
    """Settle every licence before anything is written.

    Args:
        base_model: Folder or Hub name; empty without one.
        base_license: As its card says; empty reads the card.
        weights: Of the weights; empty takes that of the base, or apache-2.0 without one.
        data: Entries `NAME: LICENCE`.

    Raises:
        LicenceError: One is not known, or it is that of no model.
    """
    pairs = []
    for entry in data:
        name, colon, licence = entry.rpartition(":")
        if not colon or not name.strip() or not licence.strip():
            raise LicenceError(f"data: got {entry!r}, expected NAME: LICENCE")
        pairs.append((name.strip(), licence.strip()))
    if base_license and not base_model:
        raise LicenceError(
            f"base_license is {base_license!r} without a base model; expected its name as "
            "--base_model: weights without one are called trained from scratch"
        )
    if not base_model:
        return Licences(weights or "apache-2.0", data=tuple(pairs))
    base = base_license or _licence_on_card(base_model)
    return Licences(weights or base, base_model, base, tuple(pairs))


def _licence_on_card(base_model: str) -> str:
    """The licence that a model's card names.

    Raises:
        LicenceError: It names none, or cannot be read.
    """
    from huggingface_hub import HfApi, ModelCard
    from huggingface_hub.errors import HFValidationError

    state = "; state it with --base_license (as the model's authors do)"
    try:
        if Path(base_model).is_dir():
            card = Path(base_model) / "README.md"
            if not card.is_file():
                raise LicenceError(f"{base_model}: the base model has no card{state}")
            found = ModelCard.load(card).data
        else:
            found = (
                HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
                .model_info(base_model, timeout=20)
                .card_data
            )  # type: ignore[assignment]
    except LicenceError:
        raise
    except (OSError, ValueError, yaml.YAMLError, httpx.HTTPError, HFValidationError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LicenceError(
            f"{base_model}: its card cannot be read for the licence ({first}){state}"
        ) from error
    licence = getattr(found, "license", None) if found is not None else None
    if licence == "other":
        licence = getattr(found, "license_name", None) or licence
    if not isinstance(licence, str) or not licence:
        raise LicenceError(f"{base_model}: the card of the base model names no licence{state}")
    return licence
