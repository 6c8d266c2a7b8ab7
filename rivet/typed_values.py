"""Values as the types that a configuration's fields declare, without guessing.

Exact where YAML already has a type: `true` is no number and 12 is no text. `5e-4`, which YAML reads
as text, is a number. Unions, choices, enums, lists, tuples, mappings and paths are covered.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin


class Mismatch(Exception):
    """A value does not fit a type."""


def first_fit(readings: Sequence[Any], hint: Any) -> Any:
    """The first reading that fits, as the type; raises `Mismatch` if none does."""
    for reading in readings:
        try:
            return convert(reading, hint)
        except Mismatch:
            continue
    raise Mismatch


def fits(value: Any, hint: Any) -> bool:
    """Whether a value fits a type."""
    try:
        convert(value, hint)
    except Mismatch:
        return False
    return True


def convert(value: Any, hint: Any) -> Any:
    """A value as the type that a field declares.

    Raises:
        Mismatch: It does not fit without guessing.
    """
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if _is_union(hint):
        exact = [a for a in args if isinstance(a, type) and type(value) is a]
        return _first_of(value, [*exact, *args])
    if origin is Literal:
        matches = [arg for arg in args if arg == value and type(arg) is type(value)]
        return matches[0] if matches else _refuse()
    if hint is None or hint is type(None):
        return None if value is None else _refuse()
    kind = origin or hint
    if kind in (list, tuple, set, frozenset):
        return _convert_items(value, kind, args)
    if kind in (dict, Mapping):
        if not isinstance(value, Mapping):
            _refuse()
        key_hint, value_hint = args or (Any, Any)
        return {convert(k, key_hint): convert(v, value_hint) for k, v in value.items()}
    return _convert_scalar(value, kind)


def _convert_scalar(value: Any, kind: Any) -> Any:
    if kind is float and not isinstance(value, bool):
        try:  # YAML reads 5e-4 as text
            number = float(value) if isinstance(value, int | float | str) else _refuse()
        except (ValueError, OverflowError):
            _refuse()
        # NaN would pass every range check; a number too large for a float becomes infinite.
        is_too_large = isinstance(value, str) and math.isinf(number) and "inf" not in value.lower()
        return _refuse() if math.isnan(number) or is_too_large else number
    if kind is int:
        return value if isinstance(value, int) and not isinstance(value, bool) else _refuse()
    if isinstance(kind, type) and isinstance(value, kind):
        return value
    if isinstance(kind, type) and issubclass(kind, Enum):
        matches = [member for member in kind if member.value == value]
        return matches[0] if matches else _refuse()
    if kind is Path and isinstance(value, str):
        return Path(value)
    return _refuse()


def _convert_items(value: Any, kind: Any, args: tuple[Any, ...]) -> Any:
    if isinstance(value, str | Mapping) or not isinstance(value, list | tuple | set | frozenset):
        _refuse()
    items = list(value)
    if kind is tuple and args and Ellipsis not in args:
        if len(items) != len(args):
            _refuse()
        return tuple(convert(item, arg) for item, arg in zip(items, args, strict=True))
    return kind(convert(item, args[0] if args else Any) for item in items)


def _first_of(value: Any, hints: Sequence[Any]) -> Any:
    for hint in hints:
        if fits(value, hint):
            return convert(value, hint)
    return _refuse()


def _refuse() -> NoReturn:
    raise Mismatch


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def describe(hint: Any) -> str:
    """A type as a reader of an error message would say it.

    >>> describe(float | None)
    'number or null'
    """
    origin, args = get_origin(hint), get_args(hint)
    if _is_union(hint):
        names = [describe(arg) for arg in args if arg is not type(None)]
        names += ["null"] if type(None) in args else []
        return " or ".join(dict.fromkeys(names))
    if origin is Literal:
        return " | ".join(str(arg) for arg in args)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " | ".join(str(member.value) for member in hint)
    if origin in (list, tuple, set, frozenset) or hint in (list, tuple, set, frozenset):
        inner = [describe(arg) for arg in args if arg is not Ellipsis]
        return f"list of {' or '.join(dict.fromkeys(inner))}" if inner else "list"
    if origin is dict or hint is dict:
        return "mapping"
    names_of = {bool: "true | false", int: "integer", float: "number", str: "text", Path: "path"}
    return names_of.get(hint) or str(getattr(hint, "__name__", hint))
