"""Where a turn ends, by the tokenizer and by the model's settings; encoding adds nothing itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rivet.protocol import Style
from rivet.rollout.splice import Splicer
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


def sentencepiece(part: object) -> ProtocolTokenizer:
    """A vocabulary of signs and bytes as Llama 2 has it, with a part that adds a space before."""
    signs = ["\u2581", *map(chr, range(0x21, 0x7F)), *[f"<0x{byte:02X}>" for byte in range(256)]]
    names = ["<unk>", "</s>", *signs]
    vocabulary = {token: i for i, token in enumerate(names)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    if isinstance(part, normalizers.Normalizer):
        backend.normalizer = part
    else:
        backend.pre_tokenizer = part
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return ProtocolTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


def byte_level() -> ProtocolTokenizer:
    """A vocabulary of bytes, with a space before each text as RoBERTa has it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({sign: i for i, sign in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return ProtocolTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


SPACES = normalizers.Replace(" ", "\u2581")
PREFIXED = {
    "a normalizer": normalizers.Sequence([normalizers.Prepend("\u2581"), SPACES]),
    "metaspace": pre_tokenizers.Metaspace(prepend_scheme="always", split=False),
    "the first metaspace": pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first")]
    ),
}


@pytest.mark.parametrize("kind", [*PREFIXED, "byte level"])
def test_a_space_before_a_text_never_gets_into_what_is_spliced(kind: str) -> None:
    tokenizer = byte_level() if kind == "byte level" else sentencepiece(PREFIXED[kind])
    program = Splicer(tokenizer, Style()).program("hi = 3\nprint(hi)")
    assert tokenizer.decode(program) == "<python>\nhi = 3\nprint(hi)\n</python>\n"
    for text in ("hi  there", " hi", "hi</s>there", "\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.unescape(tokenizer.decode(tokenizer.encode_untrusted(text))) == text


def test_the_tokenizer_that_is_shared_keeps_its_space() -> None:
    tokenizer = sentencepiece(PREFIXED["a normalizer"])
    assert tokenizer.hf.tokenize("hi") == ["\u2581", "h", "i"]
