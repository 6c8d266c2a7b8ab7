"""Where a turn ends: the tokenizer's end of sequence and what the model's own settings add."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rivet.tokenization import ProtocolTokenizer


@pytest.mark.parametrize("ends", [None, "missing", "im_end", ["im_end", "endoftext"]])
def test_a_turn_ends_where_the_generation_config_says_too(
    qwen_tokenizer: ProtocolTokenizer, tmp_path: Path, ends: str | list[str] | None
) -> None:
    ids = {"im_end": qwen_tokenizer.eos_id, "endoftext": qwen_tokenizer.encode("<|endoftext|>")[0]}
    qwen_tokenizer.hf.save_pretrained(tmp_path)
    if ends != "missing":
        told = [ids[name] for name in ends] if isinstance(ends, list) else ids.get(ends or "")
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": told}))
    found = ProtocolTokenizer.from_pretrained(tmp_path)
    expected = {ids["im_end"], ids["endoftext"]} if isinstance(ends, list) else {ids["im_end"]}
    assert found.eos_ids == expected
    assert found.eos_id == ids["im_end"]  # what a finished trajectory is ended with
