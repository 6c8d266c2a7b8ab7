"""Where a turn ends: the tokenizer's end of sequence and what the model's own settings add."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rivet.tokenization import ProtocolTokenizer, TokenizerError, _generation_ends


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


def test_a_model_that_cannot_be_looked_up_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert _generation_ends("nobody/has-this-model") == []
    assert "nobody/has-this-model: whether it has a generation_config.json cannot" in caplog.text


def test_a_broken_generation_config_is_named(
    qwen_tokenizer: ProtocolTokenizer, tmp_path: Path
) -> None:
    qwen_tokenizer.hf.save_pretrained(tmp_path)
    for text in ('{"eos_token_id": [1', "[]", '{"eos_token_id": "end"}'):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(TokenizerError, match=r"generation_config.json: cannot be read"):
            ProtocolTokenizer.from_pretrained(tmp_path)
