"""What the README says exists: its commands, recipes, make targets, files and folders."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from stages.cli import COMMANDS

REPO = Path(__file__).parents[1]
README = (REPO / "README.md").read_text(encoding="utf-8")
MAKEFILE = (REPO / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, flags=re.MULTILINE))


def code_lines() -> list[str]:
    """Lines of shell blocks and inline code."""
    blocks = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    return [line for line in lines if line] + re.findall(r"`([^`\n]+)`", prose)


@pytest.mark.parametrize("line", sorted({c for c in code_lines() if c.startswith("make ")}))
def test_make_targets_exist(line: str) -> None:
    assert shlex.split(line)[1] in TARGETS


@pytest.mark.parametrize("line", sorted({c for c in code_lines() if c.startswith("rivet ")}))
def test_commands_and_their_recipes_exist(line: str) -> None:
    words = shlex.split(line.replace("...", ""))
    if len(words) > 1:
        assert words[1] in COMMANDS or words[1].startswith("-")
    for word in words[2:]:
        if word.startswith("stages/recipes/"):
            assert (REPO / word).is_file()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(((?!http)[^)#]+)", README))))
def test_links_lead_somewhere(target: str) -> None:
    assert (REPO / target).exists()


def test_the_layout_names_every_top_level_folder() -> None:
    layout = README.split("## Layout", 1)[1].split("```text\n", 1)[1].split("```", 1)[0]
    named = set(re.findall(r"^(\w+)/", layout, flags=re.MULTILINE))
    ignored = {"runs", "build", "dist", "exports", "models", "problems"}
    there = {p.name for p in REPO.iterdir() if p.is_dir() and not p.name.startswith((".", "_"))}
    assert named == {n for n in there - ignored if not n.endswith(".egg-info")}


def test_every_command_is_in_the_readme() -> None:
    named = set(re.findall(r"\brivet ([a-z0-9-]+)", README))
    assert set(COMMANDS) - named - {"demo"} == set()


def test_every_make_target_is_in_its_help() -> None:
    helped = set(re.findall(r"^([a-z0-9-]+):.*## ", MAKEFILE, flags=re.MULTILINE))
    phony = set(re.findall(r"[a-z0-9-]+", MAKEFILE.split(".PHONY:")[1].split("\n\n")[0]))
    assert helped == phony
