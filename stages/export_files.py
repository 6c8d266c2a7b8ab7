"""What an export folder holds besides its card: weights, tokenizer, template, settings, licence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from rivet.prompts import PromptBuilder
from rivet.settings import ProtocolSettings

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

    from rivet.tokenization import ProtocolTokenizer

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def with_ends_of(model: PreTrainedModel, tokenizer: ProtocolTokenizer) -> ProtocolTokenizer:
    """The tokenizer with the model's own ends of a turn, which an adapter's folder may not name."""
    from rivet.tokenization import ProtocolTokenizer

    known = model.generation_config.eos_token_id if model.generation_config else None
    ends = [known] if isinstance(known, int) else known or []
    return ProtocolTokenizer(tokenizer.hf, {*tokenizer.eos_ids, *ends})


def write_model(
    model: PreTrainedModel,
    tokenizer: ProtocolTokenizer,
    settings: ProtocolSettings,
    folder: Path,
    *,
    max_shard_size: str,
) -> None:
    """Write whole weights with everything that loading and prompting them needs."""
    model.generation_config = _generation_config(tokenizer, settings)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(tokenizer, settings, folder)


def write_adapter(
    adapter: Path,
    base_model: str,
    tokenizer: ProtocolTokenizer,
    settings: ProtocolSettings,
    folder: Path,
) -> None:
    """Write a LoRA adapter alone; whoever loads it needs its base model."""
    for name in ADAPTER_FILES:
        shutil.copyfile(adapter / name, folder / name)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = base_model
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _generation_config(tokenizer, settings).save_pretrained(folder)
    write_tokenizer(tokenizer, settings, folder)


def _generation_config(
    tokenizer: ProtocolTokenizer, settings: ProtocolSettings
) -> GenerationConfig:
    """A fresh one: sampling settings of the base model are not what was measured."""
    from transformers import GenerationConfig

    pad = tokenizer.hf.pad_token_id
    return GenerationConfig(
        bos_token_id=tokenizer.hf.bos_token_id,
        eos_token_id=sorted(tokenizer.eos_ids),
        pad_token_id=tokenizer.eos_id if pad is None else pad,
        do_sample=False,
        max_new_tokens=settings.limits.max_completion_length,
    )


def write_tokenizer(tokenizer: ProtocolTokenizer, settings: ProtocolSettings, folder: Path) -> None:
    """Write the tokenizer with a chat template that asks as rivet does, and `rivet.json`."""
    tokenizer.hf.save_pretrained(folder)
    template = with_protocol(tokenizer, settings)
    if template != tokenizer.hf.chat_template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    settings.save(folder)


def with_protocol(tokenizer: ProtocolTokenizer, settings: ProtocolSettings) -> str:
    """The chat template of an export.

    A conversation without a system message gets the one that explains the protocol, so that a
    client which sends the problem alone asks exactly as rivet does. Controllers with `bare` prompts
    were trained without one; their template stays as it is.
    """
    template = str(tokenizer.hf.chat_template)
    system = PromptBuilder(tokenizer, settings).system_message("local")
    if not system:
        return template
    # Jinja reads JSON's escapes of quotes and line ends, but not its surrogate pairs.
    literal = json.dumps(system, ensure_ascii=False)
    message = f"{{'role': 'system', 'content': {literal}}}"
    return (
        "{%- if messages and messages[0]['role'] != 'system' %}"
        f"{{%- set messages = [{message}] + messages %}}"
        "{%- endif %}" + template
    )


def write_licence(licence: str, folder: Path) -> None:
    """Put the licence's text beside the weights, where it is ours to give."""
    if licence == "apache-2.0" and (text := _apache_text()) is not None:
        shutil.copyfile(text, folder / "LICENSE")


def _apache_text() -> Path | None:
    """Our own licence file, in a checkout or in an installed copy."""
    from importlib import metadata

    here = Path(__file__).resolve().parents[1] / "LICENSE"
    if here.is_file():
        return here
    try:
        files = metadata.files("rivet") or []
    except metadata.PackageNotFoundError:
        return None
    found = [Path(str(f.locate())) for f in files if f.name == "LICENSE"]
    return found[0] if found else None
