"""Tokens and bytes: how the protocol reads and writes token ids.

Every token stands for a fixed string of bytes, so spans found in the bytes map to tokens exactly,
without decoding windows or partial characters. Two kinds of text are encoded differently:

- *trusted* text (our own tags): control and added tokens are recognised;
- *untrusted* text (problems, expert replies, program output): our tags and the tokenizer's added
  tokens are neutralised by a reversible escape, then encoded so that no control token can appear.
  `split_special_tokens` alone does not cover added tokens with `special=False` (Qwen's `<think>`).

Byte-level BPE and SentencePiece-style vocabularies are supported; others raise `TokenizerError`.
A space that a tokenizer puts before every text (Llama 2) is left out: what is encoded here goes
between other tokens, where that space would be in the text.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TAG_NAMES = ("think", "expert", "reply", "python", "output", "answer")


class TokenizerError(ValueError):
    """The tokenizer cannot carry the protocol; the message says why and what to use."""


class ProtocolTokenizer:
    """A Hugging Face fast tokenizer seen as bytes, with trusted and untrusted encoding.

    Args:
        tokenizer: A fast tokenizer. Its chat template is used by `rivet.prompts`.
        eos_ids: Tokens that end a turn, besides the tokenizer's own end-of-sequence token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_ids: Iterable[int] = ()) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TokenizerError(
                f"{type(tokenizer).__name__} has no fast backend; expected a tokenizer.json"
            )
        from tokenizers import Tokenizer

        self.hf = tokenizer
        spec = json.loads(backend.to_str())
        unprefixed = json.dumps(_without_prefix_space(spec))
        self._trusted = Tokenizer.from_str(unprefixed)
        self._untrusted = Tokenizer.from_str(unprefixed)
        for clone in (self._trusted, self._untrusted):
            clone.no_padding()
            clone.no_truncation()
        self._untrusted.encode_special_tokens = True
        added = tokenizer.added_tokens_decoder
        self.token_bytes: tuple[bytes, ...] = _vocabulary_bytes(
            spec, {i: t.content for i, t in added.items()}
        )
        # Runs of white space are added tokens in some vocabularies: text, not control.
        self._control_ids = frozenset(i for i, t in added.items() if t.content.strip())
        self._escape = _escape_pattern(t.content for t in added.values())
        self._unescape = re.compile(self._escape.pattern.replace(r"\\*", r"\\+"))
        self.eos_ids = frozenset([*_as_ids(tokenizer.eos_token_id), *eos_ids])

    @classmethod
    def from_pretrained(cls, path: str | Path) -> ProtocolTokenizer:
        """Load from a folder or the Hub, with what its `generation_config.json` says of the end.

        Chat models of some families (Gemma) end their turn with another token than the tokenizer's
        end of sequence, and only that file says so.
        """
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(path), _generation_ends(path))

    @property
    def eos_id(self) -> int:
        """The end-of-turn token that a finished trajectory ends with."""
        token = self.hf.eos_token_id
        if token is None:
            raise TokenizerError("the tokenizer has no eos token; set one before use")
        return int(token)

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """Exact bytes of a run of tokens, control tokens as their text.

        Ids beyond the vocabulary have none: they pad the embeddings of many models, and whoever
        samples from all outputs of one may get them.
        """
        table = self.token_bytes
        return b"".join([table[i] for i in ids if i < len(table)])

    def decode(self, ids: Iterable[int]) -> str:
        """Text of a run of tokens; bytes that are no UTF-8 become U+FFFD."""
        return self.bytes_of(ids).decode("utf-8", "replace")

    def encode(self, text: str) -> list[int]:
        """Encode our own text: tags and control tokens are recognised. Adds no BOS."""
        return self._trusted.encode(text, add_special_tokens=False).ids

    def encode_untrusted(self, text: str) -> list[int]:
        """Encode foreign text so that it can forge neither a tag nor a control token.

        `unescape(decode(ids))` gives the text back, up to the tokenizer's own normalisation.
        """
        text = text.encode("utf-8", "replace").decode("utf-8")
        # Normalise first: an NFKC tokenizer turns a full-width '＜' into '<' after our escape.
        canonical = self.decode(self._untrusted.encode(text, add_special_tokens=False).ids)
        ids = self._untrusted.encode(self.escape(canonical), add_special_tokens=False).ids
        if not self._control_ids.isdisjoint(ids):
            ids = [i for char in self.escape(canonical) for i in self._encode_char(char)]
        return ids

    def _encode_char(self, char: str) -> list[int]:
        ids = self._untrusted.encode(char, add_special_tokens=False).ids
        return [i for i in ids if i not in self._control_ids]

    def escape(self, text: str) -> str:
        """Put a backslash after the first character of each tag or control string.

        One that has backslashes there already gets one more, so the escape is reversible for
        every text.
        """
        return self._escape.sub(_add_backslash, text)

    def unescape(self, text: str) -> str:
        """Inverse of `escape`."""
        return self._unescape.sub(_drop_backslash, text)


def _without_prefix_space(spec: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer's JSON that adds nothing before a text."""
    parts = {name: _part_without_prefix(spec.get(name)) for name in ("normalizer", "pre_tokenizer")}
    return {**spec, **parts}


def _part_without_prefix(part: Any) -> dict[str, Any] | None:
    """A normalizer or a pre-tokenizer that adds nothing; None if it did nothing else."""
    match part:
        case {"type": "Prepend"}:
            return None
        case {"type": "Metaspace"}:
            return {**part, "prepend_scheme": "never"}
        case {"type": "ByteLevel", "add_prefix_space": True}:
            return {**part, "add_prefix_space": False}
        case {"type": "Sequence", "normalizers": list(inner)}:
            return {**part, "normalizers": [p for p in map(_part_without_prefix, inner) if p]}
        case {"type": "Sequence", "pretokenizers": list(inner)}:
            return {**part, "pretokenizers": [p for p in map(_part_without_prefix, inner) if p]}
    return part


def _add_backslash(match: re.Match[str]) -> str:
    return match[0][0] + "\\" + match[0][1:]


def _drop_backslash(match: re.Match[str]) -> str:
    return match[0][0] + match[0][2:]


def _escape_pattern(added: Iterable[str]) -> re.Pattern[str]:
    """First character, any backslashes, then (looking ahead) the rest of a control string."""
    rests: dict[str, set[str]] = {"<": {rf"/?(?:{'|'.join(TAG_NAMES)})\b"}}
    for content in added:
        if content.strip() and len(content) > 1:
            rests.setdefault(content[0], set()).add(re.escape(content[1:]))
    parts = [f"{re.escape(c)}\\\\*(?={'|'.join(sorted(r))})" for c, r in sorted(rests.items())]
    return re.compile("|".join(parts))


def _generation_ends(path: str | Path) -> list[int]:
    """Tokens that end generation by a model's `generation_config.json`; none without one.

    Raises:
        TokenizerError: The file is broken.
    """
    file: Path | None = Path(path) / "generation_config.json"
    if not Path(path).is_dir():
        file = _from_the_hub(str(path), "generation_config.json")
    if file is None or not file.is_file():
        return []
    try:
        return _as_ids(json.loads(file.read_text(encoding="utf-8")).get("eos_token_id"))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise TokenizerError(f"{file}: cannot be read ({error}); copy it again") from error


def _from_the_hub(model: str, name: str) -> Path | None:
    """A file of a model on the Hub, from its cache where that has it; None if there is none."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, name))
    except LocalEntryNotFoundError:
        logger.warning("%s: whether it has a %s cannot be looked up: offline", model, name)
    except EntryNotFoundError:
        pass
    return None


def _as_ids(value: int | Sequence[int] | None) -> list[int]:
    """Token ids of a setting that holds one, several or none."""
    return [] if value is None else [int(i) for i in ([value] if isinstance(value, int) else value)]


@cache
def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE uses for the 256 bytes (as in GPT-2)."""
    keep = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in keep]
    return {chr(b): b for b in keep} | {chr(256 + n): b for n, b in enumerate(rest)}


def _vocabulary_bytes(spec: dict[str, Any], added: dict[int, str]) -> tuple[bytes, ...]:
    """Bytes of every token id from the tokenizer's JSON and its added tokens."""
    decoder = json.dumps(spec.get("decoder") or {})
    vocab = spec["model"].get("vocab")
    if not isinstance(vocab, dict):
        vocab = {piece[0]: i for i, piece in enumerate(vocab or [])}
    if '"ByteLevel"' in decoder:
        alphabet = _byte_alphabet()
        convert = lambda token: bytes(alphabet[c] for c in token)  # noqa: E731
    elif "\u2581" in decoder or "ByteFallback" in decoder:
        convert = _sentencepiece_bytes
    else:
        raise TokenizerError(
            "the tokenizer's decoder is neither byte-level nor SentencePiece-style: "
            f"{decoder[:80]}; use a byte-level BPE tokenizer (Qwen, Llama 3, SmolLM, ...)"
        )
    table = [b""] * (max([*vocab.values(), *added], default=-1) + 1)
    for token, i in vocab.items():
        table[i] = added[i].encode() if i in added else convert(token)
    for i, content in added.items():
        table[i] = content.encode()
    return tuple(table)


def _sentencepiece_bytes(token: str) -> bytes:
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()
