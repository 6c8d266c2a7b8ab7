"""The JSON files that runs leave, as reports and comparisons read them: whole, or named.

A *form* says what a file must hold for what is read of it; whatever else is there is left alone:

    str, int, dict, NUMBER    a value of that type; a truth value is no number
    [form]                    a list, each item of the form
    [form, form]              a list of exactly these
    {str: form}               an object, each value of the form
    {"a": form, "b?": form}   an object that has `a`; `b` may be absent or null
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rivet.runs import CONFIG_FILE, FINISHED_FILE

RESULTS_FILE = "results.json"
NUMBER = (int, float)
Form = Any

_NAMES = {str: "text", int: "an integer", bool: "true or false", NUMBER: "a number"}


class ResultsError(ValueError):
    """A file of results is missing, broken or of another form; the message names it."""


def read_json(path: Path, form: Form = dict) -> Any:
    """Content of a JSON file; an empty object if it is not there.

    Raises:
        ResultsError: It cannot be read, is no JSON (cut short, say), or is not of the form.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise _broken(path, f"cannot be read as JSON ({error})") from error
    return check_form(path, value, form)


def check_form(path: Path, value: Any, form: Form) -> Any:
    """What was read from a file, if it is of a form.

    Raises:
        ResultsError: It is not; says where in the file.
    """
    if fault := next(_faults(value, form, ""), None):
        raise _broken(path, fault)
    return value


def require(path: Path) -> None:
    """Refuse a folder without a file that its run leaves.

    Raises:
        ResultsError: It is not there.
    """
    if not path.is_file():
        raise _broken(path, "no such file")


def stage_of(folder: Path) -> str:
    """The stage whose run a folder holds, such as `study`; empty if it holds none."""
    return str(read_json(folder / CONFIG_FILE).get("stage", ""))


def _faults(value: Any, form: Form, where: str) -> Iterator[str]:
    """What in a value is not of a form: `rows[3].seed is "1"; expected an integer`."""
    if isinstance(form, dict) and isinstance(value, dict):
        for name, inner in form.items():
            if name is str:
                for key, item in value.items():
                    yield from _faults(item, inner, f"{where}.{key}".lstrip("."))
                continue
            key = name.removesuffix("?")
            if key == name and key not in value:
                yield f"{where or 'it'} has no {key}"
            elif key == name or value.get(key) is not None:
                yield from _faults(value[key], inner, f"{where}.{key}".lstrip("."))
    elif isinstance(form, list) and isinstance(value, list) and len(form) in (1, len(value)):
        forms = form if len(form) > 1 else form * len(value)
        for number, (item, inner) in enumerate(zip(value, forms, strict=True)):
            yield from _faults(item, inner, f"{where}[{number}]")
    elif isinstance(form, (dict, list)) or not _is_a(value, form):
        yield f"{where or 'it'} is {_shown(value)}; expected {_name(form)}"


def _is_a(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _name(form: Form) -> str:
    if isinstance(form, list):
        return "a list" if len(form) == 1 else f"a list of {len(form)}"
    return "an object" if form is dict or isinstance(form, dict) else _NAMES[form]


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:59]}\u2026"


def _broken(path: Path, what: str) -> ResultsError:
    return ResultsError(f"{path}: {what}: {_remedy(path)}")


def _remedy(path: Path) -> str:
    """How to get a file back, from what is known of the run that it belongs to."""
    if path.name == CONFIG_FILE:
        return "restore it, or move it away to go on without what it says"
    for folder in (path.parent, path.parent.parent):
        stage = _stage_if_readable(folder)
        if stage == "study":
            return f"run `rivet study` for {folder} again, which reads what is finished"
        if stage:
            finished = folder / FINISHED_FILE
            again = f"run its command (in {folder / CONFIG_FILE}) again, which goes on from there"
            return f"restore it, or {f'remove {finished} and ' * finished.is_file()}{again}"
    return "restore it, or run again what wrote it"


def _stage_if_readable(folder: Path) -> str:
    try:
        return str(json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")).get("stage", ""))
    except (OSError, ValueError, AttributeError):
        return ""
