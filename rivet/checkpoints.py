"""Checkpoint folders: finding one, checking its weights before loading, loading it.

A checkpoint is a Hugging Face model (whole, or a PEFT adapter) with tokenizer and `rivet.json`; a
run folder holds one as `checkpoint/`. Errors name the file, before anything large is loaded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rivet.settings import FILE_NAME, ProtocolSettings

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from rivet.tokenization import ProtocolTokenizer

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
_DEPTH, _NAMED = 5, 3  # how deep below a folder checkpoints are looked for, how many are named


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
        f"{_named_inside(folder)}"
    )


def _named_inside(folder: Path) -> str:
    """The checkpoints nearest inside a folder that is none, as the end of an error."""
    depths = range(1, _DEPTH + 1)
    nearest = (sorted(folder.glob("*/" * depth + FILE_NAME)) for depth in depths)
    found = [str(path.parent) for path in next(filter(None, nearest), [])]
    more = f" ({len(found)} in all)" if len(found) > _NAMED else ""
    return f"; did you mean one of {', '.join(found[:_NAMED])}{more}?" if found else ""


def check_weights(folder: Path) -> None:
    """Find missing and truncated weight files without loading them.

    Raises:
        CheckpointError: Names the file.
    """
    from safetensors import SafetensorError, safe_open

    for index in folder.glob("*.safetensors.index.json"):
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            missing = sorted(shard for shard in shards if not (folder / shard).is_file())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{index}: cannot be read ({error!r}); expected the index of the weights' files: "
                "copy the checkpoint again"
            ) from error
        if missing:
            raise CheckpointError(f"{folder / missing[0]}: missing, but named by {index.name}")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder}: no weights; expected *.safetensors{_named_inside(folder)}"
        )
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

    if not folder.is_dir():  # transformers would take it for a name on the Hub
        raise CheckpointError(f"{folder}: no such folder; expected a checkpoint with a tokenizer")
    try:
        tokenizer = ProtocolTokenizer.from_pretrained(folder)
    except TokenizerError:
        raise
    except Exception as error:  # the tokenizers library raises bare exceptions
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{folder}: its tokenizer cannot be loaded: {why}") from error
    if len(tokenizer.token_bytes) < 2:
        # Without any file transformers builds an empty tokenizer and says nothing.
        raise CheckpointError(f"{folder}: its tokenizer cannot be loaded: it has no vocabulary")
    return tokenizer


@dataclass(frozen=True, slots=True)
class OpenedCheckpoint:
    """A checked checkpoint, short of its weights: where it lies, how it speaks, its tokenizer."""

    folder: Path
    settings: ProtocolSettings
    tokenizer: ProtocolTokenizer


def check_checkpoint(
    folder: str | Path, *, default: ProtocolSettings | None = None
) -> OpenedCheckpoint:
    """Open everything that a checkpoint folder holds, short of loading its weights.

    Args:
        folder: The checkpoint.
        default: Settings of one without `rivet.json`, such as a pretrained model; None refuses it.

    Raises:
        CheckpointError: Something is missing, broken, or does not fit the rest.
        rivet.settings.SettingsError: It has no `rivet.json` and there is no default, or it has one
            of another version.
    """
    from transformers import AutoConfig

    folder = Path(folder)
    if default is not None and folder.is_dir() and not (folder / FILE_NAME).exists():
        settings = default
    else:
        settings = ProtocolSettings.load(folder)
    check_weights(folder)
    tokenizer = load_tokenizer(folder)
    opened = OpenedCheckpoint(folder, settings, tokenizer)
    if is_adapter(folder):
        return opened  # the model's own configuration is with its base
    try:
        size = AutoConfig.from_pretrained(folder).get_text_config().vocab_size
    except (OSError, ValueError, AttributeError) as error:
        _refuse_latent(folder)
        raise CheckpointError(f"{folder}/config.json: cannot be read: {error}") from error
    if len(tokenizer.token_bytes) > size:
        raise CheckpointError(
            f"{folder}: the tokenizer has {len(tokenizer.token_bytes)} tokens, the model {size}; "
            "expected the tokenizer that the model was trained with"
        )
    return opened


def load_model(
    folder: Path, *, dtype: Dtype = "auto", base_model: str = "", **init: Any
) -> PreTrainedModel:
    """The controller of a checkpoint, in evaluation mode, on the CPU; an adapter is merged.

    Args:
        folder: From `find_checkpoint`.
        dtype: Number format of the weights; `auto` keeps theirs.
        base_model: Folder or Hub name that an adapter belongs to; empty: what the adapter names.
        **init: Further arguments of `from_pretrained`.

    Raises:
        CheckpointError: It is broken, incomplete, or no causal language model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    check_weights(folder)
    _refuse_latent(folder)
    torch_dtype: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
    try:
        if is_adapter(folder):
            return _load_merged(folder, base_model, dtype=torch_dtype, **init).eval()
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch_dtype, output_loading_info=True, **init
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


def _refuse_latent(folder: Path) -> None:
    from rivet.latent.policy import is_latent

    if is_latent(folder):
        raise CheckpointError(
            f"{folder}: a latent policy, which answers only together with its experts; expected a "
            "controller. `rivet eval` takes either"
        )


def is_adapter(folder: Path) -> bool:
    """Whether a checkpoint holds a PEFT adapter instead of whole weights."""
    return (folder / "adapter_config.json").is_file()


def _load_merged(folder: Path, base_model: str, **init: Any) -> PreTrainedModel:
    """Base model plus adapter."""
    from peft import PeftConfig, PeftModel
    from transformers import AutoModelForCausalLM

    base = base_model or PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
    if not base:
        raise CheckpointError(f"{folder}: the adapter names no base model; set --base_model")
    model = AutoModelForCausalLM.from_pretrained(base, **init)
    return merge_adapter(PeftModel.from_pretrained(model, str(folder)))


def merge_adapter(adapted: PeftModel) -> PreTrainedModel:
    """Add an adapter to the weights of its base and return the base.

    Each sum is made in float32 and rounded once; in 16 bits it would be rounded twice. One layer
    at a time is held in float32.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in adapted.modules():
        if isinstance(module, BaseTunerLayer):
            weight: Any = module.get_base_layer().weight
            kept = weight.dtype
            weight.data = weight.data.float()
            module.merge(safe_merge=True)
            weight = module.get_base_layer().weight
            weight.data = weight.data.to(kept)
    return adapted.unload()
