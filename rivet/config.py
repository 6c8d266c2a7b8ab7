"""Configuration: a dataclass filled from defaults, then a YAML recipe, then `--name value`.

Works for any dataclass, also subclasses of TRL's `GRPOConfig` and `SFTConfig`. Every fault of a
recipe and of the command line is reported at once, before anything starts, with file and line.

Why not `TrlParser`: it takes YAML values unchecked (`learning_rate: fast` reaches the trainer),
knows no line numbers, stops at the first fault, refuses unions such as `int | str`, and cannot say
`null`. Why not pydantic: its lenient mode takes `true` for the number 1 and its strict mode refuses
`5e-4`, which YAML reads as text. What TRL users type works here too.

Fields are documented with `field(metadata={"help": ...})`. Annotations must resolve at run time
(no names that are imported under `TYPE_CHECKING` only).
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar, get_type_hints

import yaml

from rivet.config_help import help_text, init_fields, shown, to_plain
from rivet.typed_values import Mismatch, describe, first_fit, fits

C = TypeVar("C")

_MISSING = dataclasses.MISSING


def setting(default: Any, text: str) -> Any:
    """A documented field of a configuration; each instance gets its own copy of a list or dict."""
    metadata = {"help": text}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class ConfigError(ValueError):
    """A recipe or a command line is wrong.

    Attributes:
        faults: One message for each fault: where, key, got, expected.
    """

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        # A worker process hands it over; the default would rebuild it from its message.
        return type(self), (self.faults,)


@dataclass(frozen=True, slots=True)
class Parsed(Generic[C]):
    """What a command line asked for.

    Attributes:
        config: The resolved configuration.
        recipe: The YAML file that it came from, if any.
        given: Names of the fields that the recipe or the command line set.
        argv: The arguments as given.
    """

    config: C
    recipe: Path | None
    given: frozenset[str]
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Setting:
    """One value as somebody wrote it. `texts` holds what it can be read as, best reading first."""

    where: str
    name: str
    readings: tuple[Any, ...]


def parse_config(
    cls: type[C],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    description: str = "",
    positional: Sequence[str] = (),
    check: Callable[[C], None] | None = None,
) -> Parsed[C]:
    """Read a command line: `[RECIPE.yaml] [--name value ...]`.

    `--help` and `--dry-run` print and exit with 0; a fault prints every message to stderr and
    exits with 2. Use `load_config` where an exception is wanted.

    Args:
        cls: The configuration dataclass.
        argv: Arguments; None takes those of the process.
        prog: The command, as a user types it.
        description: What the command does, for `--help`.
        positional: Names of fields that plain arguments fill, in order. With any, a recipe is
            given as `--config FILE` only.
        check: Looks at what only the command can judge, such as the settings of other commands
            inside these, and raises `ConfigError`; runs before `--dry-run` prints.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if any(token in ("-h", "--help") for token in argv):
        print(help_text(cls, prog=prog, description=description, positional=positional))
        raise SystemExit(0)
    try:
        recipe, settings, flags = _read_arguments(cls, argv, positional)
        config, values, given = _resolve(cls, recipe, settings)
        if check is not None:
            check(config)
    except ConfigError as error:
        _exit_with_faults(error, prog)
    if "dry_run" in flags:
        sys.stdout.write(yaml.safe_dump(to_plain(values), sort_keys=False, allow_unicode=True))
        raise SystemExit(0)
    return Parsed(config, recipe, given, tuple(argv))


def load_config(cls: type[C], recipe: str | Path | None = None, /, **overrides: Any) -> C:
    """Build a configuration from a recipe and keyword overrides, checked like a command line.

    Raises:
        ConfigError: Anything is wrong; all faults at once.
    """
    settings = [_Setting("override", name, (value,)) for name, value in overrides.items()]
    return _resolve(cls, None if recipe is None else Path(recipe), settings)[0]


# --- reading ------------------------------------------------------------------------------------


def _read_arguments(
    cls: type, argv: list[str], positional: Sequence[str]
) -> tuple[Path | None, list[_Setting], set[str]]:
    """Split a command line into the recipe, the settings and the flags."""
    plain, options = _split_arguments(argv)
    faults, settings, flags = [], [], set()
    recipe: Path | None = None
    for option, tokens in options:
        name = option[2:].replace("-", "_")
        if name == "dry_run" and not tokens:
            flags.add(name)
        elif name == "config":
            if len(tokens) == 1:
                recipe = Path(tokens[0])
            else:
                faults.append(f"--config: got {len(tokens)} values, expected one YAML file")
        else:
            settings.append(_setting_of_tokens(cls, option, name, tokens))
    if positional:
        for name, token in zip(positional, plain, strict=False):
            settings.append(_setting_of_tokens(cls, name.upper(), name, [token]))
        extra = plain[len(positional) :]
    else:
        if plain:
            recipe = Path(plain[0])
        extra = plain[1:]
    if extra:
        hint = "quote a value that has spaces" if positional else "expected one recipe"
        faults.append(f"command line: unexpected argument {extra[0]!r}; {hint}")
    if faults:
        raise ConfigError(faults)
    return recipe, settings, flags


def _split_arguments(argv: list[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Plain arguments before the first option, and each option with the values behind it."""
    plain: list[str] = []
    options: list[tuple[str, list[str]]] = []
    for token in argv:
        if token.startswith("--") and len(token) > 2:
            option, equals, value = token.partition("=")
            options.append((option, [value] if equals else []))
        elif options:
            options[-1][1].append(token)
        else:
            plain.append(token)
    return plain, options


def _setting_of_tokens(cls: type, where: str, name: str, tokens: list[str]) -> _Setting:
    """Text from a command line can mean several things; the field's type decides."""
    if not tokens:
        readings: tuple[Any, ...] = (True, []) if _takes_bare(cls, name) else ()
    elif len(tokens) == 1:
        value = _scalar(tokens[0])
        # A text is kept as typed: YAML would drop what follows a '#'.
        readings = (tokens[0],) if isinstance(value, str) else (value, tokens[0])
        readings += ([value], [tokens[0]])
    else:
        readings = ([_scalar(token) for token in tokens], list(tokens))
    return _Setting(where, name, readings)


def _takes_bare(cls: type, name: str) -> bool:
    hint = get_type_hints(cls).get(name, bool)
    return fits(True, hint) or fits([], hint)


def _scalar(token: str) -> Any:
    try:
        value = yaml.safe_load(token)
    except (yaml.YAMLError, ValueError, RecursionError):  # 2024-02-30 looks like a date
        return token
    return token if isinstance(value, str) else value


def _read_recipe(path: Path) -> list[_Setting]:
    """Settings of a YAML file, each with its line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        near = _nearest(path.name, [p.name for p in path.parent.glob("*.y*ml")])
        raise ConfigError([f"{path}: no such file; expected a YAML recipe{near}"]) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read ({error}); expected YAML text"]) from error
    loader, line = None, 1
    try:
        loader = yaml.SafeLoader(text)  # refuses control characters at once
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            kind = "list" if isinstance(root, yaml.SequenceNode) else "single value"
            raise ConfigError([f"{path}:1: expected `name: value` lines, got a {kind}"])
        if repeated := _repeated_keys(root):
            raise ConfigError([f"{path}:{fault}" for fault in repeated])
        settings = []
        for key_node, value_node in root.value:
            line = key_node.start_mark.line + 1
            key = str(loader.construct_object(key_node))
            readings = [loader.construct_object(value_node, deep=True)]
            if isinstance(readings[0], bool) and value_node.value.lower() not in ("true", "false"):
                readings.append(value_node.value)  # a choice named `on`, `off`, `yes` or `no`
            settings.append(_Setting(f"{path}:{line}", key, tuple(readings)))
        return settings
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise ConfigError([f"{path}:{line}: broken YAML: {error.problem}"]) from error
    except yaml.YAMLError as error:
        raise ConfigError([f"{path}: broken YAML: {error}"]) from error
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            [f"{path}:{line}: no YAML value: {error}; put text between quotes"]
        ) from error
    finally:
        if loader is not None:
            loader.dispose()


def _repeated_keys(root: yaml.Node) -> list[str]:
    """Keys that a mapping has twice, at any depth; YAML would take the last without a word."""
    faults: list[str] = []
    nodes, seen = [root], set[int]()
    while nodes:
        node = nodes.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                line = key.start_mark.line + 1
                name = str(key.value)
                if name in lines:
                    faults.append(f"{line}: {name}: set already in line {lines[name]}")
                lines.setdefault(name, line)
                nodes.append(value)
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
    return faults


def _resolve(
    cls: type[C], recipe: Path | None, overrides: list[_Setting]
) -> tuple[C, dict[str, Any], frozenset[str]]:
    """Check every setting, then build. Returns the config, its arguments and the names set."""
    fields, hints = init_fields(cls), get_type_hints(cls)
    faults: list[str] = []
    given: dict[str, Any] = {}
    for setting in [*(_read_recipe(recipe) if recipe else []), *overrides]:
        if setting.name not in fields:
            near = _nearest(setting.name, fields)
            faults.append(f"{_label(setting)}: unknown setting{near}")
            continue
        try:
            given[setting.name] = first_fit(setting.readings, hints[setting.name])
        except Mismatch:
            faults.append(f"{_label(setting)}: {_complaint(setting, hints[setting.name])}")
            given.setdefault(setting.name, None)  # reported; not also missing
    values = {}
    for name, item in fields.items():
        if name in given:
            values[name] = given[name]
        elif item.default is not _MISSING:
            values[name] = item.default
        elif item.default_factory is not _MISSING:
            values[name] = item.default_factory()
        else:
            faults.append(f"{name}: required, but neither the recipe nor the command line sets it")
    if faults:
        raise ConfigError(faults)
    where = f"{recipe}: " if recipe else ""
    try:
        return cls(**values), values, frozenset(given)
    except ConfigError:
        raise
    except (ValueError, TypeError, ImportError, RuntimeError, LookupError) as error:
        raise ConfigError([f"{where}{cls.__name__}: {error}"]) from error


def _label(setting: _Setting) -> str:
    if setting.where.startswith("--") or setting.where.isupper():
        return setting.where
    return f"{setting.where}: {setting.name}"


def _complaint(setting: _Setting, hint: Any) -> str:
    expected = describe(hint)
    if not setting.readings:
        return f"got no value, expected {expected}"
    got = setting.readings[0]
    near = ""
    if isinstance(got, str):
        near = _nearest(got, expected.split(" | "))
    elif not isinstance(got, list | dict) and fits("text", hint):
        near = "; put it in quotes"
    if isinstance(got, dict) and not all(isinstance(key, str) for key in got):
        near = "; put its keys in quotes, YAML reads one of them as something else than text"
    kind = "" if got is None or isinstance(got, bool) else f" ({describe(type(got))})"
    return f"got {shown(got)}{kind}, expected {expected}{near}"


def _nearest(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _exit_with_faults(error: ConfigError, prog: str) -> NoReturn:
    count = len(error.faults)
    head = f"{prog}: {count} problem{'s' if count > 1 else ''} in the configuration"
    print("\n".join([head, *(f"  {fault}" for fault in error.faults)]), file=sys.stderr)
    print(f"  `{prog} --help` lists every setting.", file=sys.stderr)
    raise SystemExit(2)
