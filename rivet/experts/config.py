"""`experts.yaml`: whom the controller may consult, where they are served, and what may be spent.

    experts:
      - name: algebra
        skill: solves equations and simplifies fractions
        model: some-model
        base_urls: [https://api.example.com/v1]
        key_env: EXAMPLE_API_KEY
    budget:                # optional: of one run
      max_usd: 20
    cache:                 # optional: replies on disk
      mode: record

Keys are named by environment variable and never written here; no message quotes what may be a key.
Every fault of a file is reported at once, with its line. docs/experts.md lists every setting.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rivet.config import ConfigError
from rivet.experts.fields import fields_of, nearest, section_faults, setting, value_fault

CACHE_MODES = ("off", "record", "replay")


class ExpertsFileError(ConfigError):
    """An experts file is broken; each message says file, line, expert, key, got and expected."""


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """One expert. Numbers are checked against their ranges on construction."""

    name: str = setting(help='What the controller writes in `<expert name="...">`.')
    model: str = setting(help="The model's name at the endpoint.")
    base_urls: tuple[str, ...] = setting(
        help="Where it is served, each ending before `/chat/completions`; one or several."
    )
    skill: str = setting("", help="What it is good at, as the controller is told.")
    key_env: str | None = setting(None, help="Environment variable that holds the API key.")
    system: str = setting("", help="System message that precedes every request.")
    usd_per_million_prompt_tokens: float = setting(0.0, help="Price in USD, >= 0.", low=0)
    usd_per_million_completion_tokens: float = setting(0.0, help="Price in USD, >= 0.", low=0)
    timeout_s: float = setting(120.0, help="Seconds for one attempt, > 0.", low=0.001)
    max_retries: int = setting(4, help="Attempts after the first, >= 0.", low=0)
    max_concurrency: int = setting(32, help="Requests under way at once, >= 1.", low=1)
    requests_per_minute: int | None = setting(
        None, help="Requests in any minute, retries included, >= 1; null: no limit.", low=1
    )
    tokens_per_minute: int | None = setting(
        None, help="Tokens of prompts and replies in any minute, >= 1; null: no limit.", low=1
    )
    circuit_failures: int = setting(
        5, help="Failures in a row at one base URL that close it off for a while, >= 1.", low=1
    )
    circuit_cooldown_s: float = setting(
        5.0,
        help="Seconds until such a base URL gets a single request on trial, doubled after each "
        "failed trial up to 60, > 0.",
        low=0.001,
    )
    max_tokens: int = setting(1024, help="Longest reply in the endpoint's tokens, >= 1.", low=1)
    max_reply_bytes: int = setting(
        1_000_000, help="A longer response body is a fault, >= 1000.", low=1000
    )
    temperature: float | None = setting(
        None, help="Sampling temperature, >= 0; null leaves it to the endpoint.", low=0
    )
    send_seed: bool = setting(
        False, help="Send a `seed` derived from the sample, for endpoints that honour it."
    )

    def __post_init__(self) -> None:
        problems = _value_faults(self)
        if problems:
            raise ExpertsFileError([f"expert {self.name!r}: {text}" for text in problems])

    def cost_usd(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Price of tokens by the configured rates."""
        cost = prompt_tokens * self.usd_per_million_prompt_tokens
        return (cost + completion_tokens * self.usd_per_million_completion_tokens) / 1e6

    @property
    def has_price(self) -> bool:
        """Whether a token costs anything."""
        return self.cost_usd(1, 1) > 0


@dataclass(frozen=True, slots=True)
class BudgetConfig:
    """What one run may spend on all experts together; null is no limit."""

    max_calls: int | None = setting(
        None, help="Questions that are sent to a provider, >= 0; null: no limit.", low=0
    )
    max_tokens: int | None = setting(
        None, help="Tokens of prompts and replies, >= 0; null: no limit.", low=0
    )
    max_usd: float | None = setting(
        None, help="US dollars by the experts' prices, >= 0; null: no limit.", low=0
    )
    max_calls_per_trajectory: int | None = setting(
        None,
        help="Questions of one trajectory, which ends at the next one with finish `budget`, >= 0; "
        "null: the checkpoint's own limit alone.",
        low=0,
    )

    def __post_init__(self) -> None:
        _check_values("budget", self)

    @property
    def is_limited(self) -> bool:
        """Whether the run as a whole has a limit."""
        return any(v is not None for v in (self.max_calls, self.max_tokens, self.max_usd))


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Whether replies are kept on disk, and asked for only once."""

    mode: str = setting(
        "off",
        help="`record` keeps every reply and never asks twice; `replay` asks nobody; `off`.",
        choices=CACHE_MODES,
    )
    path: str = setting(
        "experts_cache.sqlite", help="The database; relative paths start at this file's folder."
    )

    def __post_init__(self) -> None:
        _check_values("cache", self)


class ExpertList(list[ExpertConfig]):
    """The experts of a file, with the file's budget and cache.

    Attributes:
        budget: What one run may spend.
        cache: Whether replies are kept.
        path: The file, for messages.
    """

    def __init__(
        self,
        experts: Iterable[ExpertConfig],
        *,
        budget: BudgetConfig | None = None,
        cache: CacheConfig | None = None,
        path: Path | None = None,
    ) -> None:
        super().__init__(experts)
        self.budget = budget or BudgetConfig()
        self.cache = cache or CacheConfig()
        self.path = path

    @property
    def cache_path(self) -> Path:
        """Where the cache lies."""
        folder = self.path.parent if self.path is not None else Path()
        return folder / self.cache.path


_SECTIONS: dict[str, type[Any]] = {"budget": BudgetConfig, "cache": CacheConfig}


def load_experts(path: str | Path, *, environ: Mapping[str, str] | None = None) -> ExpertList:
    """Read an experts file.

    Args:
        path: The YAML file.
        environ: Where key variables are looked up; the process's environment by default. With
            `cache: {mode: replay}` nobody is asked, and no key is needed.

    Raises:
        ExpertsFileError: Anything is wrong; all faults at once.
    """
    path = Path(path)
    file = _read_file(path)
    faults: list[str] = []
    settings: dict[str, Any] = {}
    for name, (line, raw) in file.sections.items():
        found = section_faults(_SECTIONS[name], raw)
        faults += [f"{path}:{line}: {name}: {text}" for text in found]
        if not found:
            settings[name] = _SECTIONS[name](**raw)
    experts = ExpertList([], path=path, **settings)
    keys = None if experts.cache.mode == "replay" else (os.environ if environ is None else environ)
    lines: dict[str, int] = {}
    for line, raw in file.experts:
        label = f"expert {raw['name']!r}" if isinstance(raw.get("name"), str) else "an expert"
        where = f"{path}:{line}: {label}"
        found = _entry_faults(raw)
        if not found:
            expert = ExpertConfig(**_normalised(raw))
            found = [] if keys is None else _key_faults(expert, keys)
            if expert.name in lines:
                found.append(f"name is used already in line {lines[expert.name]}; expected another")
            lines.setdefault(expert.name, line)
            experts.append(expert)
        faults += [f"{where}: {text}" for text in found]
    if faults:
        raise ExpertsFileError(faults)
    return experts


@dataclass(frozen=True, slots=True)
class _File:
    """An experts file as plain mappings, each with its first line."""

    experts: list[tuple[int, dict[str, Any]]]
    sections: dict[str, tuple[int, dict[str, Any]]]


def _read_file(path: Path) -> _File:
    text = _read(path)
    loader = None
    try:
        loader = yaml.SafeLoader(text)  # refuses control characters at once
        root = loader.get_single_node()
        top = _mapping_of(loader, root, is_deep=False)
        known = ["experts", *_SECTIONS]
        if not isinstance(root, yaml.MappingNode) or "experts" not in top:
            got = ", ".join(map(str, top)) or "none"
            raise ExpertsFileError([f"{path}:1: expected the key `experts`; got {got}"])
        experts: list[tuple[int, dict[str, Any]]] = []
        sections: dict[str, tuple[int, dict[str, Any]]] = {}
        for name, node in top.items():
            line = node.start_mark.line + 1
            if name not in known:
                raise ExpertsFileError([f"{path}:{line}: {name}: unknown{nearest(name, known)}"])
            if name == "experts":
                experts = _entries(path, loader, node)
            elif isinstance(node, yaml.MappingNode):
                sections[name] = (line, _mapping_of(loader, node))
            else:
                raise ExpertsFileError([f"{path}:{line}: {name}: expected `name: value` lines"])
        return _File(experts, sections)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        reason = getattr(error, "problem", None) or type(error).__name__
        raise ExpertsFileError([f"{path}:{line}: broken YAML: {reason}"]) from error
    except ExpertsFileError:
        raise
    except (ValueError, RecursionError) as error:  # such as 2024-02-30, which looks like a date
        raise ExpertsFileError(
            [f"{path}: no YAML value: {error}; put text between quotes"]
        ) from error
    finally:
        if loader is not None:
            loader.dispose()


def _entries(path: Path, loader: yaml.SafeLoader, listed: Any) -> list[tuple[int, dict[str, Any]]]:
    if not isinstance(listed, yaml.SequenceNode) or not listed.value:
        raise ExpertsFileError([f"{path}:1: experts: expected a non-empty list of experts"])
    entries = []
    for node in listed.value:
        line = node.start_mark.line + 1
        if not isinstance(node, yaml.MappingNode):
            raise ExpertsFileError([f"{path}:{line}: expected `name: value` lines"])
        entries.append((line, _mapping_of(loader, node)))
    return entries


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ExpertsFileError([f"{path}: no such file; expected an experts file"]) from error
    except (OSError, UnicodeDecodeError) as error:
        text = f"{path}: cannot be read ({type(error).__name__}); expected UTF-8 YAML"
        raise ExpertsFileError([text]) from error


def _mapping_of(loader: yaml.SafeLoader, node: Any, *, is_deep: bool = True) -> dict[str, Any]:
    """Names and values of a mapping; with `is_deep` False the values are left as nodes."""
    if not isinstance(node, yaml.MappingNode):
        return {}
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = str(loader.construct_object(key_node, deep=True))
        if key in mapping:
            mark = key_node.start_mark
            raise yaml.MarkedYAMLError(problem=f"{key} is set twice", problem_mark=mark)
        mapping[key] = loader.construct_object(value_node, deep=True) if is_deep else value_node
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
    faults = section_faults(ExpertConfig, _normalised(raw))
    faults = [fault.replace("base_urls: missing", "base_url: missing") for fault in faults]
    if "base_url" in raw and "base_urls" in raw:
        faults.insert(0, "base_url and base_urls are both set; expected one of them")
    return faults


def _value_faults(config: Any) -> list[str]:
    known = fields_of(type(config)).values()
    return [text for item in known if (text := value_fault(item, getattr(config, item.name)))]


def _check_values(section: str, config: Any) -> None:
    if faults := _value_faults(config):
        raise ExpertsFileError([f"{section}: {text}" for text in faults])


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
