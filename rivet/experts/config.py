"""`experts.yaml`: whom the controller may consult, where they are served, and what they cost.

    experts:
      - name: algebra
        skill: solves equations and simplifies fractions
        model: some-model
        base_urls: [https://api.example.com/v1]
        key_env: EXAMPLE_API_KEY

Keys are named by environment variable and never written here; no message quotes what may be a key.
Every fault of a file is reported at once, with its line.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from rivet.config import ConfigError
from rivet.protocol import EXPERT_NAME

_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
_SECRET_WORDS = ("key", "token", "secret", "password", "header", "auth")


class ExpertsFileError(ConfigError):
    """An experts file is broken; each message says file, line, expert, key, got and expected."""


def _setting(default: Any = MISSING, *, help: str, low: float = -math.inf) -> Any:
    """A field with its documentation and its smallest allowed value."""
    metadata = {"help": help, "low": low}
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """One expert. Numbers are checked against their ranges on construction."""

    name: str = _setting(help='What the controller writes in `<expert name="...">`.')
    model: str = _setting(help="The model's name at the endpoint.")
    base_urls: tuple[str, ...] = _setting(
        help="Where it is served, each ending before `/chat/completions`; one or several."
    )
    skill: str = _setting("", help="What it is good at, as the controller is told.")
    key_env: str | None = _setting(None, help="Environment variable that holds the API key.")
    system: str = _setting("", help="System message that precedes every request.")
    usd_per_million_prompt_tokens: float = _setting(0.0, help="Price in USD, >= 0.", low=0)
    usd_per_million_completion_tokens: float = _setting(0.0, help="Price in USD, >= 0.", low=0)
    timeout_s: float = _setting(120.0, help="Seconds for one attempt, > 0.", low=0.001)
    max_retries: int = _setting(4, help="Attempts after the first, >= 0.", low=0)
    max_concurrency: int = _setting(32, help="Requests under way at once, >= 1.", low=1)
    max_tokens: int = _setting(1024, help="Longest reply in the endpoint's tokens, >= 1.", low=1)
    max_reply_bytes: int = _setting(
        1_000_000, help="A longer response body is a fault, >= 1000.", low=1000
    )
    temperature: float | None = _setting(
        None, help="Sampling temperature, >= 0; null leaves it to the endpoint.", low=0
    )
    send_seed: bool = _setting(
        False, help="Send a `seed` derived from the sample, for endpoints that honour it."
    )

    def __post_init__(self) -> None:
        problems = [text for key in _FIELDS if (text := _value_fault(key, getattr(self, key)))]
        if problems:
            raise ExpertsFileError([f"expert {self.name!r}: {text}" for text in problems])


_FIELDS = {item.name: item for item in fields(ExpertConfig)}
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "text"),
    "str | None": ((str, type(None)), "text or null"),
    "float": ((int, float), "a number"),
    "float | None": ((int, float, type(None)), "a number or null"),
    "int": ((int,), "an integer"),
    "bool": ((bool,), "true or false"),
    "tuple[str, ...]": ((tuple,), "a list of URLs"),
}


def load_experts(
    path: str | Path, *, environ: Mapping[str, str] | None = None
) -> list[ExpertConfig]:
    """Read an experts file.

    Args:
        path: The YAML file.
        environ: Where key variables are looked up; the process's environment by default.

    Raises:
        ExpertsFileError: Anything is wrong; all faults at once.
    """
    path = Path(path)
    faults: list[str] = []
    experts: list[ExpertConfig] = []
    lines: dict[str, int] = {}
    for line, raw in _entries(path):
        label = f"expert {raw['name']!r}" if isinstance(raw.get("name"), str) else "an expert"
        where = f"{path}:{line}: {label}"
        found = _entry_faults(raw)
        if not found:
            expert = ExpertConfig(**_normalised(raw))
            found = _key_faults(expert, os.environ if environ is None else environ)
            if expert.name in lines:
                found.append(f"name is used already in line {lines[expert.name]}; expected another")
            lines.setdefault(expert.name, line)
            experts.append(expert)
        faults += [f"{where}: {text}" for text in found]
    if faults:
        raise ExpertsFileError(faults)
    return experts


def _entries(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The experts of a file as plain mappings, each with its first line."""
    text = _read(path)
    loader = None
    try:
        loader = yaml.SafeLoader(text)  # refuses control characters at once
        root = loader.get_single_node()
        top = _mapping_of(loader, root)
        if not isinstance(root, yaml.MappingNode) or set(top) != {"experts"}:
            got = ", ".join(map(str, top)) or "none"
            raise ExpertsFileError([f"{path}:1: expected one key, `experts`; got {got}"])
        listed = root.value[0][1]
        if not isinstance(listed, yaml.SequenceNode) or not listed.value:
            raise ExpertsFileError([f"{path}:1: experts: expected a non-empty list of experts"])
        entries = []
        for node in listed.value:
            line = node.start_mark.line + 1
            if not isinstance(node, yaml.MappingNode):
                raise ExpertsFileError([f"{path}:{line}: expected `name: value` lines"])
            entries.append((line, _mapping_of(loader, node)))
        return entries
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        reason = getattr(error, "problem", None) or type(error).__name__
        raise ExpertsFileError([f"{path}:{line}: broken YAML: {reason}"]) from error
    finally:
        if loader is not None:
            loader.dispose()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ExpertsFileError([f"{path}: no such file; expected an experts file"]) from error
    except (OSError, UnicodeDecodeError) as error:
        text = f"{path}: cannot be read ({type(error).__name__}); expected UTF-8 YAML"
        raise ExpertsFileError([text]) from error


def _mapping_of(loader: yaml.SafeLoader, node: Any) -> dict[str, Any]:
    if not isinstance(node, yaml.MappingNode):
        return {}
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = str(loader.construct_object(key_node, deep=True))
        if key in mapping:
            mark = key_node.start_mark
            raise yaml.MarkedYAMLError(problem=f"{key} is set twice", problem_mark=mark)
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


def _normalised(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `ExpertConfig`: `base_url` is one URL of `base_urls`."""
    values = {key: value for key, value in raw.items() if key != "base_url"}
    if "base_url" in raw:
        values["base_urls"] = (raw["base_url"],)
    elif isinstance(raw.get("base_urls"), list):
        values["base_urls"] = tuple(raw["base_urls"])
    return values


def _entry_faults(raw: Mapping[str, Any]) -> list[str]:
    values = _normalised(raw)
    known = [*_FIELDS, "base_url"]
    faults = []
    if "base_url" in raw and "base_urls" in raw:
        faults.append("base_url and base_urls are both set; expected one of them")
    for key in values:
        if key not in _FIELDS:
            faults.append(f"{key}: unknown key{_nearest(key, known)}")
    for key, item in _FIELDS.items():
        if key in values:
            fault = _value_fault(key, values[key])
            faults += [fault] if fault else []
        elif item.default is MISSING:
            name = "base_url" if key == "base_urls" else key
            faults.append(f"{name}: missing; expected {item.metadata['help']}")
    return faults


def _value_fault(key: str, value: Any) -> str:
    """What is wrong with one value, or nothing. Never quotes a value that may be a key."""
    item = _FIELDS[key]
    types, expected = _TYPES[str(item.type)]
    if not any(isinstance(value, t) for t in types) or (type(value) is bool and bool not in types):
        return f"{key}: got {_shown(key, value)}, expected {expected}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not (math.isfinite(value) and value >= item.metadata["low"]):
            return f"{key}: got {value}, expected {item.metadata['help']}"
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


def check_keys(experts: Sequence[ExpertConfig], environ: Mapping[str, str]) -> None:
    """Refuse to go on without a usable key for every expert that names one.

    Raises:
        ExpertsFileError: A variable is not set, or does not hold a key; its name is given, never
            its value.
    """
    faults = [(e.name, text) for e in experts for text in _key_faults(e, environ)]
    if faults:
        raise ExpertsFileError([f"expert {name!r}: {text}" for name, text in faults])


def api_key(expert: ExpertConfig, environ: Mapping[str, str]) -> str:
    """The expert's key, or nothing if it names none."""
    return environ.get(expert.key_env, "").strip() if expert.key_env else ""


def _key_faults(expert: ExpertConfig, environ: Mapping[str, str]) -> list[str]:
    key = api_key(expert, environ)
    # Anything else cannot stand in a header, and the HTTP library would quote it in its error.
    if expert.key_env is None or re.fullmatch(r"[!-~]+", key):
        return []
    state = "not set"
    if expert.key_env in environ:
        state = "set to something that is no key (withheld)" if key else "set but empty"
    return [
        f"key_env: the environment variable {expert.key_env} is {state}; expected the API key: "
        f"`export {expert.key_env}=...`, or name another variable"
    ]


def _shown(key: str, value: Any) -> str:
    kind = type(value).__name__
    return kind if key == "key_env" else f"{kind} {value!r}"


def _nearest(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not near and any(word in key.lower() for word in _SECRET_WORDS):
        near = ["key_env"]
    if near:
        return f"; did you mean {near[0]}?"
    return f"; expected one of {', '.join(known)}"
