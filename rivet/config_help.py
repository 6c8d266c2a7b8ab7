"""What a configuration class offers: its fields, its values in plain types, and its --help page."""

from __future__ import annotations

import dataclasses
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, get_type_hints

import yaml

from rivet.typed_values import describe

_FOREIGN = ("trl", "transformers")
# By their whole names: `eos_token` and `pad_token` are settings of TRL, and no secrets.
_SECRET = re.compile(
    r"token|(?:.*_)?(?:(?:hub|hf|access|auth|bearer)_token|api_key|password|secret)", re.IGNORECASE
)
_WITHHELD = "<withheld>"
_MISSING = dataclasses.MISSING


def own_fields(cls: type) -> list[dataclasses.Field[Any]]:
    """Fields that this project declares, without those inherited from TRL and transformers.

    Those of the class itself come first, then its bases' in the order of its `__mro__`.
    """
    fields = init_fields(cls)
    names = [n for base in cls.__mro__ for n in base.__dict__.get("__annotations__", {})]
    ordered = [n for n in dict.fromkeys(names) if n in fields]
    return [fields[n] for n in ordered if not _is_foreign(_owner(cls, n))]


def init_fields(cls: type) -> dict[str, dataclasses.Field[Any]]:
    """Fields that the constructor takes, by name."""
    return {f.name: f for f in dataclasses.fields(cls) if f.init}


def _owner(cls: type, name: str) -> type:
    """The class that declares a field, the most derived one if several do."""
    return next(c for c in cls.__mro__ if name in c.__dict__.get("__annotations__", {}))


def _is_foreign(owner: type) -> bool:
    return owner.__module__.split(".")[0] in _FOREIGN


def is_secret(name: str) -> bool:
    """Whether a setting's value is not to be shown or stored."""
    return _SECRET.fullmatch(name) is not None


def shown_command(words: Sequence[str]) -> str:
    """A command line for people and for files, without the values of secret settings."""
    shown: list[str] = []
    follows_secret = False
    for word in words:
        name, equals, _ = word.partition("=")
        names_secret = word.startswith("--") and is_secret(name[2:].replace("-", "_"))
        if names_secret and equals:
            word = f"{name}={_WITHHELD}"
        elif follows_secret and not word.startswith("--"):
            word = _WITHHELD
        follows_secret = names_secret and not equals
        shown.append(word)
    return shlex.join(shown)


def _help_of(item: dataclasses.Field[Any]) -> str:
    text = " ".join(str(item.metadata.get("help", "")).replace("%%", "%").split())
    if item.default is not _MISSING:
        default = item.default
    elif item.default_factory is not _MISSING:
        default = item.default_factory()
    else:
        return f"{text} (required)".strip()
    return f"{text} (default: {shown(default)})".strip()


def _entry(head: str, text: str) -> list[str]:
    body = textwrap.wrap(text, 92) or [""]
    return [f"  {head}", *(f"      {line}" for line in body)]


def to_plain(value: Any) -> Any:
    """Turn a configuration into JSON types; values of secret fields are withheld.

    Only what a constructor takes is kept, so that the result can be read back as a recipe.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        return to_plain(items)
    if isinstance(value, Mapping):
        return {str(k): _plain_entry(str(k), v) for k, v in value.items()}
    if isinstance(value, Enum):
        return to_plain(value.value)
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(to_plain, value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def _plain_entry(name: str, value: Any) -> Any:
    return _WITHHELD if isinstance(value, str) and is_secret(name) else to_plain(value)


def shown(value: Any) -> str:
    """A value as a recipe would have it."""
    text = yaml.safe_dump(to_plain(value), default_flow_style=True, width=1000, allow_unicode=True)
    return text.strip().removesuffix("...").strip()


def help_text(
    cls: type, *, prog: str, description: str = "", positional: Sequence[str] = ()
) -> str:
    """The `--help` page: our own settings first, then the inherited ones by class."""
    plain = " ".join(name.upper() for name in positional) or "[RECIPE.yaml]"
    lines = [f"usage: {prog} {plain} [--name value ...] [--dry-run] [--help]", ""]
    if description:
        lines += [textwrap.fill(description, 98), ""]
    if positional:
        lines += _entry("--config FILE", "A YAML recipe with any of the settings below.")
    else:
        lines += _entry("RECIPE.yaml", "Settings; also --config FILE. --name value overrides them.")
    lines += _entry("--dry-run", "Print the resolved settings as YAML and stop.")
    hints = get_type_hints(cls)
    fields = init_fields(cls)
    groups = {"settings": [f.name for f in own_fields(cls)]}
    for name in fields:
        if name not in groups["settings"]:
            groups.setdefault(f"from {_owner(cls, name).__name__}", []).append(name)
    for title in ["settings", *(f"from {base.__name__}" for base in cls.__mro__)]:
        if names := groups.get(title):
            lines += ["", f"{title}:"]
            for name in names:
                lines += _entry(f"--{name} {describe(hints[name])}", _help_of(fields[name]))
    return "\n".join(lines)
