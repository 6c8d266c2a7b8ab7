"""What a checkpoint must remember to speak the protocol: `rivet.json` beside its weights."""

from __future__ import annotations

import json
import os
from dataclasses import MISSING, Field, asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from rivet.config_help import init_fields, shown
from rivet.protocol import Style
from rivet.rollout.types import RolloutLimits
from rivet.typed_values import Mismatch, convert, describe

PROTOCOL_VERSION = 1
FILE_NAME = "rivet.json"


class SettingsError(ValueError):
    """`rivet.json` is missing, broken, or of another protocol version."""


Prompt = Literal["bare", "instruct"]


@dataclass(frozen=True, slots=True)
class ExpertCard:
    """How an expert is presented to the controller: its name and what it is good at."""

    name: str
    skill: str = ""


@dataclass(frozen=True, slots=True)
class ProtocolSettings:
    """The protocol as one checkpoint speaks it.

    Attributes:
        prompt: `instruct` explains the protocol in a system message; `bare` gives the problem
            alone, which a controller that was trained to speak the protocol needs no more than.
        after_tag: See `rivet.protocol.Style`.
        experts: Whom the controller may name, in the order of the system message.
        limits: Bounds of one trajectory.
        protocol_version: Raised when the grammar changes.
    """

    prompt: Prompt = "instruct"
    after_tag: str = "\n"
    experts: tuple[ExpertCard, ...] = ()
    limits: RolloutLimits = field(default_factory=RolloutLimits)
    protocol_version: int = PROTOCOL_VERSION

    @property
    def style(self) -> Style:
        """Layout of spliced spans."""
        return Style(self.after_tag)

    def save(self, folder: str | Path) -> None:
        """Write `rivet.json` into a checkpoint folder, atomically."""
        path = Path(folder) / FILE_NAME
        temporary = path.with_suffix(".json.tmp")
        temporary.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)

    @classmethod
    def load(cls, folder: str | Path) -> ProtocolSettings:
        """Read `rivet.json` from a checkpoint folder.

        Raises:
            SettingsError: It is missing, not readable, of another protocol version, or has a value
                of another type.
        """
        path = Path(folder) / FILE_NAME
        if not path.is_file():
            raise SettingsError(
                f"{path}: no such file; expected a rivet checkpoint (weights, tokenizer and "
                f"{FILE_NAME}): train one with `rivet warmstart`, or copy {FILE_NAME} beside it"
            )
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"{path}: cannot be read ({error}); expected the file that rivet wrote: copy the "
                "checkpoint again"
            ) from error
        raw = _typed(raw, dict, f"{path}")
        version = _typed(raw.get("protocol_version"), int, f"{path}: protocol_version")
        if version != PROTOCOL_VERSION:
            raise SettingsError(
                f"{path}: protocol_version is {version}, this rivet speaks "
                f"{PROTOCOL_VERSION}; use the rivet release that wrote the checkpoint"
            )
        cards = _typed(raw.get("experts"), list, f"{path}: experts")
        limits = _record(RolloutLimits, raw.get("limits"), f"{path}: limits")
        experts = [_record(ExpertCard, c, f"{path}: experts[{n}]") for n, c in enumerate(cards)]
        return _record(cls, {**raw, "experts": tuple(experts), "limits": limits}, f"{path}")


R = TypeVar("R")


def _record(cls: type[R], raw: Any, where: str) -> R:
    """A dataclass of what a file has for it, each value checked against its field."""
    fields, hints = init_fields(cls), get_type_hints(cls)
    raw = _typed(raw, dict, where)
    if unknown := sorted(set(raw) - set(fields)):
        raise SettingsError(
            f"{where}: {unknown[0]}: unknown; expected some of {', '.join(fields)}: remove it, or "
            "use the rivet release that wrote the checkpoint"
        )
    missing = {name for name, item in fields.items() if _is_needed(item)} - set(raw)
    if missing:
        raise SettingsError(f"{where}: {min(missing)} is missing; copy the checkpoint again")
    return cls(**{n: _typed(value, hints[n], f"{where}: {n}") for n, value in raw.items()})


def _is_needed(item: Field[Any]) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def _typed(value: Any, hint: Any, where: str) -> Any:
    try:
        return convert(value, hint)
    except Mismatch as error:
        raise SettingsError(
            f"{where}: got {shown(value)}, expected {describe(hint)}; correct it, or copy the "
            "checkpoint again"
        ) from error
