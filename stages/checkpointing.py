"""Checkpoints of a training stage: the trainer's own to resume from, and the controller's.

    run/trainer/checkpoint-N   the trainer's own state, for resuming
    run/checkpoint             the result: weights, tokenizer, rivet.json
    run/adapter                the same as a LoRA adapter, where one was trained

A trainer's checkpoint counts once it has `files.json`, the list of its files, which is written when
every process has saved its own; what a kill cut short is removed. One with a file that is gone or
cut short (a bad copy, a lost disk cache) is passed over and kept as `damaged-checkpoint-N`, so that
step N can be saved again. Without this the trainer would go on with a fresh optimizer where its
state is gone, and say nothing. Folders with other names are left alone.

The result has an adapter merged into it, except where the weights are spread over processes (FSDP,
ZeRO-3): there it is the adapter, which everything that loads a checkpoint merges.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from rivet.checkpoints import check_weights, is_adapter, load_model, merge_adapter
from rivet.files import atomic_folder, atomic_write_text, broken_file, remove
from rivet.runs import RunDir
from rivet.settings import ProtocolSettings
from rivet.tokenization import ProtocolTokenizer

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
FILES_FILE = "files.json"
_CHECKPOINT = re.compile(r"checkpoint-\d+")
TRAINER = "trainer"
ADAPTER = "adapter"


def load_controller(folder: str, args: TrainingArguments) -> PreTrainedModel:
    """The model that training starts from; an adapter is merged into its base.

    Args:
        folder: Checkpoint folder.
        args: TRL's; `model_init_kwargs` reach the model, float32 unless they say otherwise.

    Raises:
        rivet.checkpoints.CheckpointError: The folder's weights are missing or broken.
    """
    if Path(folder).is_dir():  # else a name on the Hub
        check_weights(Path(folder))
    given = getattr(args, "model_init_kwargs", None)
    arguments = {"dtype": "float32", **(given if isinstance(given, dict) else {})}
    if is_adapter(Path(folder)):
        return load_model(Path(folder), **arguments)
    return AutoModelForCausalLM.from_pretrained(folder, **arguments)


def save_controller(
    run: RunDir,
    target: Path,
    trainer: Trainer,
    tokenizer: ProtocolTokenizer,
    settings: ProtocolSettings,
) -> None:
    """Write weights, tokenizer and `rivet.json`, whole or not at all. Every process calls it.

    Args:
        run: The run; only its writer writes.
        target: The checkpoint folder; a trained adapter goes beside it.
        trainer: Holds the model, whose adapter is merged by this.
        tokenizer: Saved with the weights.
        settings: Saved with the weights.
    """
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    state = None
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if not run.is_writer:
        return

    def write(folder: Path) -> None:
        with atomic_folder(folder) as temporary:
            model.save_pretrained(temporary, state_dict=state)
            if hasattr(model, "merge_and_unload"):  # PEFT writes none, and some turns end by it
                ends = GenerationConfig(eos_token_id=sorted(tokenizer.eos_ids))
                ends.save_pretrained(temporary)
            tokenizer.hf.save_pretrained(temporary)
            settings.save(temporary)

    if hasattr(model, "merge_and_unload"):
        write(target.parent / ADAPTER)
        if state is None:
            model = merge_adapter(model)
    write(target)


class WorldSizeError(RuntimeError):
    """A run is resumed with another number of processes than it began with."""


def resume_point(run: RunDir, world_size: int) -> str | None:
    """Where training goes on, the same for every process; None at its beginning.

    The writer clears away checkpoints that are not whole and the metrics of steps that will be done
    again. Every process calls this, after `RunDir.open` and before it reads from the folder.

    Args:
        run: The opened run.
        world_size: Processes of this run.

    Raises:
        WorldSizeError: The checkpoint is one of a run with another number of processes.
    """
    found: list[str | None] = [None]
    if run.is_writer:
        found = [last_checkpoint(run.path / TRAINER, clean=True)]
        run.trim_metrics(0 if found[0] is None else state_of(Path(found[0]))["global_step"])
    broadcast_object_list(found)
    checkpoint = found[0]
    if checkpoint is not None:
        # The trainer keeps the state of each process's random generator.
        before = len(list(Path(checkpoint).glob("rng_state*.pth")))
        if before != world_size:
            raise WorldSizeError(
                f"{checkpoint}: saved by {before} processes, this run has {world_size}; a resumed "
                "run would not equal an undisturbed one: start as many, or take another "
                "output_dir"
            )
        logger.info("resuming from %s", checkpoint)
    return checkpoint


def last_checkpoint(folder: Path, *, clean: bool = False) -> str | None:
    """The trainer's last whole checkpoint, None if there is none.

    Args:
        folder: The trainer's output folder.
        clean: Remove what a kill left half-written and put aside what is damaged.
    """
    found: list[tuple[int, str]] = []
    for path in sorted(folder.glob("checkpoint-*")):
        if not _CHECKPOINT.fullmatch(path.name):
            continue
        state = state_of(path) if (path / FILES_FILE).exists() else {}
        broken = (_missing_file(path) or broken_file(path)) if state else None
        if state and not broken:
            found.append((state["global_step"], str(path)))
        elif clean and not state:
            logger.warning("%s: not whole, left by an interrupted save; removed", path)
            remove(path)
        elif clean:
            kept = path.with_name(f"damaged-{path.name}")
            logger.warning(
                "%s: %s; its checkpoint is passed over and kept as %s (remove it if you like): "
                "training goes on from an earlier checkpoint or from the start",
                broken,
                "cut short" if broken and broken.exists() else "missing",
                kept,
            )
            remove(kept)
            path.rename(kept)
    return max(found)[1] if found else None


def list_files(checkpoint: Path) -> None:
    """Write down what a checkpoint that was just saved consists of: it is whole, and complete."""
    names = sorted(str(f.relative_to(checkpoint)) for f in checkpoint.rglob("*") if f.is_file())
    atomic_write_text(checkpoint / FILES_FILE, json.dumps(names, indent=1) + "\n")


def _missing_file(checkpoint: Path) -> Path | None:
    """The first listed file that is gone, or the list itself if it is broken; else None."""
    try:
        names = json.loads((checkpoint / FILES_FILE).read_text(encoding="utf-8"))
        return next((checkpoint / name for name in names if not (checkpoint / name).exists()), None)
    except (OSError, ValueError, TypeError):
        return checkpoint / FILES_FILE


def state_of(checkpoint: Path) -> dict[str, Any]:
    """The trainer's state in a checkpoint, empty if the checkpoint is not whole."""
    try:
        state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    step = state.get("global_step") if isinstance(state, dict) else None
    return state if checkpoint.name == f"checkpoint-{step}" else {}
