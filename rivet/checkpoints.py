"""Checkpoint folders: finding one, checking its weights before loading, loading it.

A checkpoint is a Hugging Face model (whole, or a PEFT adapter) with tokenizer and `rivet.json`; a
run folder holds one as `checkpoint/`. Errors name the file, before anything large is loaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rivet.settings import FILE_NAME, ProtocolSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rivet.tokenization import ProtocolTokenizer

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class CheckpointError(ValueError):
    """A folder is no checkpoint, or a broken one; the message names the file."""


def find_checkpoint(folder: str | Path) -> Path:
    """The checkpoint that a folder is, or that a run folder holds.

    Raises:
        CheckpointError: There is none.
    """
    folder = Path(folder)
    for candidate in (folder, folder / "checkpoint"):
        if (candidate / FILE_NAME).is_file():
            return candidate
    if not folder.exists():
        raise CheckpointError(f"{folder}: no such folder; expected a checkpoint or a run folder")
    raise CheckpointError(
        f"{folder}: no checkpoint here; expected weights, tokenizer and {FILE_NAME}, or a run "
        "folder with a checkpoint/ inside (a run that is not finished may have none yet)"
    )


def check_weights(folder: Path) -> None:
    """Find missing and truncated weight files without loading them.

    Raises:
        CheckpointError: Names the file.
    """
    from safetensors import SafetensorError, safe_open

    for index in folder.glob("*.safetensors.index.json"):
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        missing = sorted({shard for shard in shards if not (folder / shard).is_file()})
        if missing:
            raise CheckpointError(f"{folder / missing[0]}: missing, but named by {index.name}")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: no weights; expected *.safetensors")
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file}: broken weights ({error}); a copy was cut short or the disk was full: "
                "copy the checkpoint again"
            ) from error


def load_tokenizer(folder: Path) -> ProtocolTokenizer:
    """The tokenizer of a checkpoint.

    Raises:
        CheckpointError: It cannot be loaded.
        TokenizerError: It cannot carry the protocol.
    """
    from rivet.tokenization import ProtocolTokenizer, TokenizerError

    try:
        tokenizer = ProtocolTokenizer.from_pretrained(folder)
    except TokenizerError:
        raise
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise CheckpointError(f"{folder}: its tokenizer cannot be loaded: {error}") from error
    if len(tokenizer.token_bytes) < 2:
        # Without any file transformers builds an empty tokenizer and says nothing.
        raise CheckpointError(f"{folder}: its tokenizer cannot be loaded: it has no vocabulary")
    return tokenizer


def check_checkpoint(folder: str | Path) -> ProtocolSettings:
    """Open everything that a checkpoint folder holds, short of loading its weights.

    Returns:
        Its protocol settings.

    Raises:
        CheckpointError: Something is missing, broken, or does not fit the rest.
        rivet.settings.SettingsError: It has no `rivet.json`, or one of another version.
    """
    from transformers import AutoConfig

    folder = Path(folder)
    settings = ProtocolSettings.load(folder)
    check_weights(folder)
    tokenizer = load_tokenizer(folder)
    if (folder / "adapter_config.json").is_file():
        return settings  # the model's own configuration is with its base
    try:
        size = AutoConfig.from_pretrained(folder).get_text_config().vocab_size
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder}/config.json: cannot be read: {error}") from error
    if len(tokenizer.token_bytes) > size:
        raise CheckpointError(
            f"{folder}: the tokenizer has {len(tokenizer.token_bytes)} tokens, the model {size}; "
            "expected the tokenizer that the model was trained with"
        )
    return settings


def load_model(folder: Path, *, dtype: Dtype = "auto", base_model: str = "") -> PreTrainedModel:
    """The controller of a checkpoint, in evaluation mode, on the CPU; an adapter is merged.

    Args:
        folder: From `find_checkpoint`.
        dtype: Number format of the weights; `auto` keeps theirs.
        base_model: Folder or Hub name that an adapter belongs to; empty: what the adapter names.

    Raises:
        CheckpointError: It is broken, incomplete, or no causal language model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    check_weights(folder)
    torch_dtype: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
    try:
        if (folder / "adapter_config.json").is_file():
            return _merge_adapter(folder, base_model, torch_dtype).eval()
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch_dtype, output_loading_info=True
        )
    except CheckpointError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: cannot be loaded as a causal LM: {error}") from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} weights are missing, {missing[0]} first; the checkpoint "
            "is incomplete"
        )
    return model.eval()


def _merge_adapter(folder: Path, base_model: str, dtype: Any) -> PreTrainedModel:
    """Base model plus adapter, added in float32: in 16 bits the sum would be rounded twice."""
    from peft import PeftConfig, PeftModel
    from transformers import AutoModelForCausalLM

    base = base_model or PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
    if not base:
        raise CheckpointError(f"{folder}: the adapter names no base model; set --base_model")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    kept = model.dtype
    adapted = PeftModel.from_pretrained(model.float(), str(folder))
    return adapted.merge_and_unload(safe_merge=True).to(kept)
