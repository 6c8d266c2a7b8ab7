"""The metric tables of docs/training.md name what the code logs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parents[2]
DOCS = (REPO / "docs" / "training.md").read_text(encoding="utf-8")
SPACES = "reward|rollout|route|controller|expert|sampling|sync|time|loss|speed"
NAME = re.compile(rf"\"((?:{SPACES})/[\w/]+)\"")
SUMS = {"sampling/count", "sampling/gap"}  # become sampling/logp_difference before they are logged


def documented() -> set[str]:
    table = [line.split("|")[1] for line in DOCS.splitlines() if line.startswith("| `")]
    return {name for cell in table for name in re.findall(r"`([\w/]+)`", cell)}


def test_every_metric_that_the_code_names_is_documented() -> None:
    named = {
        name
        for path in (REPO / "stages").rglob("*.py")
        for name in NAME.findall(path.read_text(encoding="utf-8"))
    }
    assert len(named) > 15
    assert named - SUMS <= documented()


def test_every_documented_metric_is_one_that_the_code_can_log() -> None:
    written = {
        name
        for path in (REPO / "stages").rglob("*.py")
        for name in names_in(ast.parse(path.read_text(encoding="utf-8")))
    }
    logged = re.compile("|".join(written))
    assert {name for name in documented() if not logged.fullmatch(name)} == set()


def names_in(tree: ast.AST) -> Iterator[str]:
    """Patterns of the names that a program writes: whole ones, and those around a value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and re.fullmatch(r"[\w/]+", str(node.value)):
            yield str(node.value)
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "" for p in node.values]
            if re.fullmatch(r"\w+/[\w/]*|/\w+", "".join(map(str, parts))):
                is_of_an_author = parts[0] == ""
                pattern = "".join(str(part) or r"\w+" for part in parts)
                yield pattern.replace(r"\w+", "(controller|expert|route)", int(is_of_an_author))
