"""The metric tables of docs/training.md name what the code logs."""

from __future__ import annotations

import re
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
    text = "".join(p.read_text(encoding="utf-8") for p in (REPO / "stages").rglob("*.py"))
    for name in documented():
        last = name.rsplit("/", 1)[-1]
        assert last == "NAME" or last in text, name
