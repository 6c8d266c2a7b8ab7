"""The tokenizer of a GGUF file: SentencePiece vocabularies, chat templates, and a check of all.

A file whose `tokenizer.ggml.model` is `llama` has a SentencePiece BPE vocabulary: pieces, and
scores that say in which order they were learnt. `transformers` makes a Unigram model of Gemma's,
which reads single characters, so all of them are built here, with `tokenizers` alone. The fields
are those of the GGUF specification; where it is silent, llama.cpp is followed.

Not covered: other vocabularies (`gpt2`, `t5`, ...), which are left to `transformers`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

# Kinds of token in `tokenizer.ggml.token_type`; what is unused or a byte is never merged.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"  # what SentencePiece writes for a space
_SAMPLE = 1000
_MOST_SPLIT = 0.1

# Gemma's turns as its documentation has them: no system role, and the model is called `model`.
GEMMA_CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- set now = namespace(system='') -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- set now.system = now.system + message.content | trim + '\n\n' -%}
{%- else -%}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' -}}
{%- if message.role == 'user' -%}
{{- now.system -}}
{%- set now.system = '' -%}
{%- endif -%}
{{- message.content | trim + '<end_of_turn>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<start_of_turn>model\n' -}}
{%- endif -%}
"""


def read_metadata(file: Path) -> dict[str, Any]:
    """The fields of a GGUF file, of arrays of strings the vocabulary alone.

    Raises:
        ValueError: It is no GGUF file.
    """
    from transformers.integrations.gguf import read_gguf_metadata

    return dict(read_gguf_metadata(str(file), string_arrays=("tokenizer.ggml.tokens",))[0])


def check_whole(file: Path) -> None:
    """Find a GGUF file that is cut short, without de-quantising anything.

    Raises:
        ValueError: It is no GGUF file, or not all of what its head lists is there.
    """
    from gguf import GGUFReader

    with open(file, "rb") as head:
        if head.read(4) != b"GGUF":
            raise ValueError("it does not begin as a GGUF file does; expected a GGUF file")
    try:
        GGUFReader(file)
    except (ValueError, IndexError, OverflowError, KeyError) as error:
        raise ValueError(
            f"its {file.stat().st_size} bytes do not hold what they should ({error}): the file is "
            "cut short or damaged, download it again"
        ) from error


def is_sentencepiece_bpe(metadata: Mapping[str, Any]) -> bool:
    """Whether `sentencepiece_bpe` is the builder for a file with these fields."""
    return bool(metadata.get("tokenizer.ggml.model") == "llama")


def sentencepiece_bpe(metadata: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer of a SentencePiece BPE vocabulary.

    Control tokens become special tokens. User-defined ones (tags, runs of white space) are cut out
    of the text before anything is merged, the longest first. With `add_space_prefix` a space goes
    before the text and, as in llama.cpp, before what follows a control or user-defined token.

    Raises:
        ValueError: Fields are missing or do not fit together.
    """
    from transformers import PreTrainedTokenizerFast

    columns = _columns(metadata)
    names = _names(metadata)
    return PreTrainedTokenizerFast(
        tokenizer_object=_backend(metadata, columns, names),
        **names,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def _columns(metadata: Mapping[str, Any]) -> tuple[list[str], list[float], list[int]]:
    """Text, score and kind of each token."""
    columns = [_field(metadata, name) or [] for name in ("tokens", "scores", "token_type")]
    tokens, scores, types = columns
    if not tokens or len({len(column) for column in columns}) != 1:
        raise ValueError("its vocabulary is incomplete; expected a score and a type of each token")
    return tokens, scores, types


def _names(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The tokens with a role, by the name that `transformers` has for it."""
    tokens, names = _field(metadata, "tokens"), {}
    for name in ("bos", "eos", "unknown", "padding"):
        i = _field(metadata, f"{name}_token_id")
        if i is not None:
            if i >= len(tokens):
                raise ValueError(f"its {name} token is {i}; expected an id below {len(tokens)}")
            names[f"{name[:3]}_token"] = str(tokens[i])
    return names


def _backend(
    metadata: Mapping[str, Any],
    columns: tuple[list[str], list[float], list[int]],
    names: Mapping[str, str],
) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    tokens, scores, types = columns
    # The text of a user-defined token is matched before spaces are marked.
    pieces = [
        token.replace(SPACE, " ") if kind == USER_DEFINED else token
        for token, kind in zip(tokens, types, strict=True)
    ]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    if len(vocabulary) != len(pieces):
        twice = next(piece for i, piece in enumerate(pieces) if vocabulary[piece] != i)
        raise ValueError(f"its vocabulary has {twice!r} twice; expected every token once")
    normal = {
        piece: score
        for piece, score, kind in zip(pieces, scores, types, strict=True)
        if kind == NORMAL
    }
    backend = Tokenizer(
        models.BPE(
            vocabulary,
            derive_merges(normal, vocabulary),
            unk_token=names.get("unk_token"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = bool(_field(metadata, "add_space_prefix", True))
    marks: list[Any] = [normalizers.Prepend(SPACE)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*marks, normalizers.Replace(" ", SPACE)])
    strips: list[Any] = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strips]
    )
    for kinds, is_special in (({CONTROL, UNKNOWN}, True), ({USER_DEFINED}, False)):
        added = [
            AddedToken(piece, normalized=False, special=is_special)
            for piece, kind in zip(pieces, types, strict=True)
            if kind in kinds
        ]
        (backend.add_special_tokens if is_special else backend.add_tokens)(added)
    _add_ends(backend, metadata, names)
    return backend


def derive_merges(scores: Mapping[str, float], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece BPE vocabulary, the first to be made first.

    SentencePiece joins the two neighbours that give the piece with the highest score. A list of
    merges says the same if it has every way to cut a piece into two others, ordered by the score of
    the whole; ways to make the same piece are ordered by the ids of the parts.

    >>> derive_merges({"a": -3.0, "b": -4.0, "ab": -1.0, "aab": -2.0}, {"a": 0, "b": 1, "ab": 2})
    [('a', 'b'), ('a', 'ab')]
    """
    merges = []
    for whole, score in scores.items():
        for cut in range(1, len(whole)):
            left, right = whole[:cut], whole[cut:]
            if left in scores and right in scores:
                merges.append((-score, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _add_ends(backend: Tokenizer, metadata: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Put BOS before a text and EOS after it, where the file says so."""
    from tokenizers import processors

    ends = (("bos", True), ("eos", False))  # what llama.cpp takes where the file does not say
    bos, eos = (
        [names[f"{end}_token"]]
        if _field(metadata, f"add_{end}_token", default) and f"{end}_token" in names
        else []
        for end, default in ends
    )
    if not bos and not eos:
        return
    backend.post_processor = processors.TemplateProcessing(
        single=[*bos, "$A", *eos],
        pair=[*bos, "$A", *eos, *[f"{t}:1" for t in bos], "$B:1", *[f"{t}:1" for t in eos]],
        special_tokens=[(token, backend.token_to_id(token)) for token in {*bos, *eos}],
    )


def chat_template(metadata: Mapping[str, Any], vocabulary: Mapping[str, int]) -> str | None:
    """The file's own chat template; for a Gemma with turns in its vocabulary, Gemma's; or None."""
    if own := metadata.get("tokenizer.chat_template"):
        return str(own)
    is_gemma = str(metadata.get("general.architecture", "")).startswith("gemma")
    return GEMMA_CHAT_TEMPLATE if is_gemma and "<start_of_turn>" in vocabulary else None


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The control token that the chat template puts after what the assistant says, if any.

    Raises:
        ValueError: The template is no Jinja.
    """
    from jinja2 import TemplateError, TemplateSyntaxError

    said = "Well said."
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Speak."}, {"role": "assistant", "content": said}],
            tokenize=False,
        )
    except TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template is broken in line {error.lineno} ({error.message}); expected a "
            "Jinja template: correct it, or give another with --chat-template"
        ) from error
    except (ValueError, TypeError, TemplateError):  # no template, or one that wants other messages
        return None
    ids = _read(tokenizer, str(text).partition(said)[2].lstrip())
    return int(ids[0]) if ids and ids[0] in tokenizer.added_tokens_decoder else None


def split_words(tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], int]:
    """Words of the vocabulary that are read as several tokens, and how many were tried.

    At most a thousand, evenly over the vocabulary; a word is a piece of Latin letters with a mark
    of a space before it, SentencePiece's or that of byte-level BPE.
    """
    word = re.compile(rf"[{SPACE}\u0120][A-Za-z]{{2,}}")
    ids = sorted(i for piece, i in tokenizer.get_vocab().items() if word.fullmatch(piece))
    ids = ids[:: max(1, len(ids) // _SAMPLE)][:_SAMPLE]
    words = [str(tokenizer.decode([i], clean_up_tokenization_spaces=False)) for i in ids]
    return [w for w in words if len(_read(tokenizer, w)) != 1], len(words)


def refuse_splitting(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that does not know the words of its own vocabulary.

    Raises:
        ValueError: It splits more than a tenth of them.
    """
    split, tried = split_words(tokenizer)
    if len(split) > _MOST_SPLIT * tried:
        example = tokenizer.convert_ids_to_tokens(_read(tokenizer, split[0]))
        raise ValueError(
            f"the tokenizer made of it splits {len(split)} of {tried} words of its own vocabulary, "
            f"such as {split[0]!r} into {example}; this kind of vocabulary is not supported"
        )


def split_controls(tokenizer: PreTrainedTokenizerBase, metadata: Mapping[str, Any]) -> list[str]:
    """Control tokens of the file that are read as several tokens."""
    tokens, types = _field(metadata, "tokens") or [], _field(metadata, "token_type") or []
    control = [t for t, kind in zip(tokens, types, strict=False) if kind == CONTROL]
    return [token for token in control if len(_read(tokenizer, token)) != 1]


def _read(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def _field(metadata: Mapping[str, Any], name: str, default: Any = None) -> Any:
    return metadata.get(f"tokenizer.ggml.{name}", default)
