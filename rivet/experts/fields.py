"""Fields of `experts.yaml` with their documentation, types and ranges, and what is wrong with one.

No message quotes what may be a key.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from typing import Any
from urllib.parse import urlsplit

from rivet.protocol import EXPERT_NAME

_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
_SECRET_WORDS = ("key", "token", "secret", "password", "header", "auth")
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "text"),
    "str | None": ((str, type(None)), "text or null"),
    "float": ((int, float), "a number"),
    "float | None": ((int, float, type(None)), "a number or null"),
    "int": ((int,), "an integer"),
    "int | None": ((int, type(None)), "an integer or null"),
    "bool": ((bool,), "true or false"),
    "tuple[str, ...]": ((tuple,), "a list of URLs"),
}


def setting(
    default: Any = MISSING, *, help: str, low: float = -math.inf, choices: Sequence[str] = ()
) -> Any:
    """A field with its documentation, its smallest value and, for words, those allowed."""
    metadata = {"help": help, "low": low, "choices": tuple(choices)}
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def fields_of(cls: type[Any]) -> dict[str, Field[Any]]:
    """The fields of a settings class by name."""
    return {item.name: item for item in fields(cls)}


def section_faults(cls: type[Any], values: Mapping[str, Any]) -> list[str]:
    """What is wrong with a section that should fill a settings class."""
    known = fields_of(cls)
    faults = []
    for key in values:
        if key not in known:
            faults.append(f"{key}: unknown key{nearest(key, list(known))}")
    for key, item in known.items():
        if key in values:
            fault = value_fault(item, values[key])
            faults += [fault] if fault else []
        elif item.default is MISSING:
            faults.append(f"{key}: missing; expected {item.metadata['help']}")
    return faults


def value_fault(item: Field[Any], value: Any) -> str:
    """What is wrong with one value, or nothing. Never quotes a value that may be a key."""
    key = item.name
    types, expected = _TYPES[str(item.type)]
    if not any(isinstance(value, t) for t in types) or (type(value) is bool and bool not in types):
        return f"{key}: got {_shown(key, value)}, expected {expected}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not (math.isfinite(value) and value >= item.metadata["low"]):
            return f"{key}: got {value}, expected {item.metadata['help']}"
    if (choices := item.metadata["choices"]) and value not in choices:
        return f"{key}: got {value!r}, expected one of {', '.join(choices)}"
    if key == "name" and not re.fullmatch(EXPERT_NAME, value):
        return f"name: got {value!r}, expected letters, digits, `_`, `-` or `.`, at most 64"
    if key == "model" and not value.strip():
        return "model: is empty; expected the model's name at the endpoint"
    if key == "key_env" and value is not None and not _VARIABLE.fullmatch(value):
        return (
            f"key_env: got {len(value)} characters that are no variable name (withheld); expected "
            "the name of an environment variable such as PROVIDER_API_KEY, not the key itself"
        )
    if key == "base_urls":
        return "; ".join(filter(None, map(_url_fault, value or [""])))
    return ""


def _url_fault(url: Any) -> str:
    expected = "expected http(s)://host[:port]/path without user, query or fragment"
    if not isinstance(url, str):
        return f"base_url: got {type(url).__name__}, {expected}"
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises where it is no number
    except ValueError:
        return f"base_url: is no URL; {expected}"
    if parts.username or parts.password or parts.query or parts.fragment:
        return f"base_url: has a user, a query or a fragment (withheld); {expected}"
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"\s", url):
        return f"base_url: got {url!r}, {expected}" if "://" in url else f"base_url: {expected}"
    return ""


def nearest(key: str, known: list[str]) -> str:
    """The end of a message about an unknown key: what it may have meant."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not near and "key_env" in known and any(word in key.lower() for word in _SECRET_WORDS):
        near = ["key_env"]
    if near:
        return f"; did you mean {near[0]}?"
    return f"; expected one of {', '.join(known)}"


def _shown(key: str, value: Any) -> str:
    kind = type(value).__name__
    return kind if key == "key_env" else f"{kind} {value!r}"
