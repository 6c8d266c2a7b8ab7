"""What a checkpoint must remember to speak the protocol: `rivet.json` beside its weights."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from rivet.protocol import Style
from rivet.rollout.types import RolloutLimits

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
            SettingsError: It is missing, not readable, or of another protocol version.
        """
        path = Path(folder) / FILE_NAME
        if not path.is_file():
            raise SettingsError(
                f"{path}: no such file; expected a rivet checkpoint (weights, tokenizer and "
                f"{FILE_NAME}): train one with `rivet warmstart`, or copy {FILE_NAME} beside it"
            )
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            version = raw.pop("protocol_version")
            if version != PROTOCOL_VERSION:
                raise SettingsError(
                    f"{path}: protocol_version is {version}, this rivet speaks "
                    f"{PROTOCOL_VERSION}; use the rivet release that wrote the checkpoint"
                )
            experts = tuple(ExpertCard(**card) for card in raw.pop("experts"))
            limits = RolloutLimits(**raw.pop("limits"))
            return cls(experts=experts, limits=limits, **raw)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise SettingsError(
                f"{path}: cannot be read ({error!r}); expected the file that rivet wrote"
            ) from error
