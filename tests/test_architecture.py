"""The shape of the repository: who imports whom, what every file says, that every recipe loads."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import is_dataclass
from importlib import import_module
from itertools import takewhile
from pathlib import Path

import pytest
import yaml

from rivet.config import load_config
from rivet.config_help import own_fields

ROOT = Path(__file__).parents[1]
FOLDERS = ("sandbox", "data", "rivet", "eval", "stages")
# Folder -> which of the others it may import.
MAY_IMPORT = {
    "sandbox": set(),
    "data": set(),
    "rivet": {"sandbox"},
    "eval": {"rivet", "sandbox", "data"},
    "stages": {"eval", "rivet", "sandbox", "data"},
}
# Configuration class of each recipe, by the first word of the recipe's name.
CONFIGS = {
    "warmstart": "stages.warmstart:WarmstartConfig",
    "stage1": "stages.stage1.config:Stage1Config",
    "collect": "stages.collect:CollectConfig",
    "solutions": "stages.solutions:SolutionsConfig",
    "stage2": "stages.stage2.config:Stage2Config",
    "eval": "eval.config:EvalConfig",
    "export": "stages.export:ExportConfig",
    "solve": "stages.solve_config:SolveConfig",
    "serve": "stages.serve:ServeConfig",
    "demo": "stages.demo:DemoConfig",
    "study": "stages.study_config:StudyConfig",
    "latent": "stages.latent.config:LatentConfig",
    "latent-study": "stages.latent.study:LatentStudyConfig",
}
FILES = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))
TEST_FILES = sorted((ROOT / "tests").rglob("*.py"))
RECIPES = sorted((ROOT / "stages" / "recipes").rglob("*.yaml"))


def relative(path: Path) -> str:
    """A path as the tests are named after it."""
    return str(path.relative_to(ROOT))


def imports_of(path: Path) -> set[str]:
    """First words of every module that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: relative import"
            names.add((node.module or "").split(".")[0])
    return names


def load(place: str) -> type:
    """`module:Class` as the class."""
    module, name = place.split(":")
    return getattr(import_module(module), name)


def test_every_folder_has_files() -> None:
    assert {relative(path).split("/")[0] for path in FILES} == set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_this_tree_is_tested_and_not_an_installed_one(folder: str) -> None:
    assert import_module(folder).__file__ == str(ROOT / folder / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_follow_the_table(path: Path) -> None:
    folder = relative(path).split("/")[0]
    ours = imports_of(path) & set(FOLDERS)
    assert ours <= MAY_IMPORT[folder] | {folder}
    if folder == "sandbox":
        # The zygote warms numpy and sympy for the programs, where they are installed.
        warmed = {"numpy", "sympy"} if path.name == "zygote.py" else set()
        assert imports_of(path) - {"sandbox"} - warmed <= sys.stdlib_module_names
    if folder == "data":
        assert "torch" not in imports_of(path)


@pytest.mark.parametrize("path", FILES + TEST_FILES, ids=relative)
def test_every_file_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_tests_have_names_of_their_own() -> None:
    names = [path.name for path in TEST_FILES if path.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))


def test_recipes_are_found() -> None:
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=relative)
def test_every_recipe_resolves_against_its_configuration(path: Path) -> None:
    stage = path.stem.split("_")[0]
    required = {"solve": {"checkpoint": "c", "problem": "p"}, "export": {"checkpoint": "c"}}
    given = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    missing = {k: v for k, v in required.get(stage, {}).items() if k not in given}
    assert is_dataclass(load_config(load(CONFIGS[stage]), path, **missing))


@pytest.mark.parametrize("path", RECIPES, ids=relative)
def test_every_recipe_begins_with_its_purpose_and_command(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    head = "\n".join(takewhile(lambda line: line.startswith("#"), lines))
    assert head.splitlines()[0].strip("# ")
    assert re.search(rf"rivet {path.stem.split('_')[0]}(?![\w-])", head)


@pytest.mark.parametrize("stage", CONFIGS)
def test_every_setting_of_ours_is_documented(stage: str) -> None:
    undocumented = [
        item.name for item in own_fields(load(CONFIGS[stage])) if not item.metadata.get("help")
    ]
    assert not undocumented
