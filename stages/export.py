"""Export: a checkpoint becomes a folder that anyone can load, verified before it gets its name.

    rivet export CHECKPOINT --output_dir exports/mine [--results runs/demo/results.json]

Written: merged safetensors (a PEFT adapter is merged in float32), tokenizer with its chat template,
generation config with every stop id, `rivet.json`, a model card with measured results, the licence.
A fresh process then loads the folder with plain transformers and must give the same logits.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rivet.checkpoints import Dtype, find_checkpoint, load_model, load_tokenizer
from rivet.config import ConfigError, parse_config
from rivet.files import atomic_folder, recover_folder
from rivet.settings import FILE_NAME, ProtocolSettings
from stages.measurements import ResultRow, check_measured_on, read_results
from stages.model_card import ModelFacts, TrainingRun, write_card

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from rivet.tokenization import ProtocolTokenizer

logger = logging.getLogger(__name__)

# Asked when logits are compared. Any text would do; these reach digits, words and notation.
PROBES = (
    "What is the greatest common divisor of 84 and 36?",
    "Solve 3*x + 7 = 22 for x.",
    "Let $a_n = 2^n - 1$. Find $\\sum_{n=1}^{5} a_n$.",
)


class ExportError(RuntimeError):
    """The target is taken, or the export is not what the checkpoint was."""


@dataclass(frozen=True)
class ExportConfig:
    """Settings of `rivet export`."""

    checkpoint: str = field(
        metadata={"help": "Checkpoint folder, or a run folder that holds one as checkpoint/."}
    )
    output_dir: str = field(
        default="exports/controller", metadata={"help": "Folder to write; it must not exist."}
    )
    name: str = field(
        default="", metadata={"help": "Name of the model on its card; empty: the folder's name."}
    )
    base_model: str = field(
        default="",
        metadata={
            "help": "Model that an adapter belongs to, a folder or a Hub name; empty: what the "
            "adapter names. For a full checkpoint it is only named on the card."
        },
    )
    dtype: Dtype = field(
        default="auto", metadata={"help": "Number format of the weights; auto keeps theirs."}
    )
    max_shard_size: str = field(
        default="5GB", metadata={"help": "Largest weight file, such as 5GB or 500MB."}
    )
    tolerance: float = field(
        default=1e-5,
        metadata={"help": "Largest difference of a logit after loading, absolute; above 0."},
    )
    results: list[str] = field(
        default_factory=list,
        metadata={"help": "JSON files with measured `rows`, put on the card."},
    )
    results_checkpoint: str = field(
        default="",
        metadata={"help": "Take only rows of this checkpoint (warm, stage1, stage2); empty: all."},
    )
    benchmark: str = field(
        default="",
        metadata={
            "help": "What the results were measured on, where neither a row nor its run says."
        },
    )
    runs: list[str] = field(
        default_factory=list,
        metadata={"help": "Run folders of the training, oldest first, summarised on the card."},
    )
    license: str = field(
        default="apache-2.0", metadata={"help": "Licence of the weights, as the Hub names it."}
    )
    overwrite: bool = field(
        default=False, metadata={"help": "Replace an earlier export of the same name."}
    )

    def __post_init__(self) -> None:
        if not self.tolerance > 0:
            raise ConfigError([f"tolerance: got {self.tolerance}, expected a number above 0"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rivet export`."""
    parsed = parse_config(
        ExportConfig,
        argv,
        prog="rivet export",
        description="Package a checkpoint: weights, tokenizer, settings, card; then verify it.",
        positional=("checkpoint",),
    )
    print(run(parsed.config))
    return 0


def run(config: ExportConfig) -> Path:
    """Export a checkpoint.

    Returns:
        The export folder.

    Raises:
        CheckpointError: The folder is no checkpoint, or a broken one.
        ResultsError: A results file is broken, or was measured on other weights.
        ExportError: The target is taken, or the export does not reproduce the logits.
        SettingsError: Its `rivet.json` is missing or of another version.
    """
    source = find_checkpoint(config.checkpoint)
    target = Path(config.output_dir)
    recover_folder(target)
    _check_target(target, config.overwrite)
    settings = ProtocolSettings.load(source)
    results = _results(config, source)
    runs = [TrainingRun.load(folder) for folder in _run_folders(config, source)]
    logger.info("loading %s", source)
    tokenizer = load_tokenizer(source)
    model = load_model(source, dtype=config.dtype, base_model=config.base_model)
    with atomic_folder(target) as folder:
        _write_model(model, tokenizer, settings, folder, config)
        facts = ModelFacts(
            name=config.name or target.name,
            parameters=sum(p.numel() for p in model.parameters()),
            architecture=type(model).__name__,
            dtype=str(model.dtype).removeprefix("torch."),
            license=config.license,
            base_model=config.base_model or None,
        )
        write_card(folder, facts, settings, results, runs)
        logger.info("verifying the export in a fresh process")
        difference = _verify(model, tokenizer, settings, folder, config.tolerance)
    logger.info("exported %s; logits differ by at most %.1g after loading", target, difference)
    return target


# --- what is read -------------------------------------------------------------------------------


def _check_target(target: Path, overwrite: bool) -> None:
    """An export replaces an export, and only when told to."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not (target / FILE_NAME).is_file() or not (target / "README.md").is_file():
        raise ExportError(f"{target}: exists and is no export of ours; choose another output_dir")
    if not overwrite:
        raise ExportError(
            f"{target}: holds an export already; replace it with --overwrite true, or choose "
            "another output_dir"
        )


def _results(config: ExportConfig, source: Path) -> list[ResultRow]:
    found = []
    for path in map(Path, config.results):
        rows = read_results(path, benchmark=config.benchmark, checkpoint=config.results_checkpoint)
        check_measured_on(path, rows, source)
        found += rows
    return found


def _run_folders(config: ExportConfig, source: Path) -> list[Path]:
    """The runs that were named, and the one that the checkpoint lies in."""
    folders = [Path(path) for path in config.runs]
    if source.name == "checkpoint" and TrainingRun.is_run(source.parent):
        if source.parent.resolve() not in [folder.resolve() for folder in folders]:
            folders.append(source.parent)
    return folders


# --- what is written ----------------------------------------------------------------------------


def _write_model(
    model: PreTrainedModel,
    tokenizer: ProtocolTokenizer,
    settings: ProtocolSettings,
    folder: Path,
    config: ExportConfig,
) -> None:
    from transformers import GenerationConfig

    known = model.generation_config.eos_token_id if model.generation_config else None
    stops = {*tokenizer.eos_ids, *([known] if isinstance(known, int) else known or [])}
    pad = tokenizer.hf.pad_token_id
    # A fresh one: sampling settings of the base model are not what this model was measured with.
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.hf.bos_token_id,
        eos_token_id=sorted(stops),
        pad_token_id=tokenizer.eos_id if pad is None else pad,
        do_sample=False,
        max_new_tokens=settings.limits.max_completion_length,
    )
    model.save_pretrained(folder, max_shard_size=config.max_shard_size)
    tokenizer.hf.save_pretrained(folder)
    settings.save(folder)
    if config.license == "apache-2.0" and (text := _apache_text()) is not None:
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


def _verify(
    model: PreTrainedModel,
    tokenizer: ProtocolTokenizer,
    settings: ProtocolSettings,
    folder: Path,
    tolerance: float,
) -> float:
    """Largest logit difference between this model and the export as a fresh process loads it.

    Raises:
        ExportError: It is above the tolerance, or the export cannot be loaded.
    """
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as scratch:
        reference = Path(scratch) / "reference.safetensors"
        save_file(_reference(model, tokenizer, settings), reference)
        done = subprocess.run(
            [sys.executable, "-m", "stages.export_check", str(folder.resolve()), str(reference)],
            capture_output=True,
            text=True,
            cwd=Path(__file__).resolve().parents[1],
            # The export must be complete in itself.
            env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "RANK": "0"},
        )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ExportError(f"{folder}: a fresh process cannot use the export: {last}")
    report = json.loads(done.stdout.strip().splitlines()[-1])
    if report["tokens_differ"]:
        raise ExportError(f"{folder}: its tokenizer reads the probes otherwise than the original")
    if not report["max_difference"] <= tolerance:
        raise ExportError(
            f"{folder}: logits differ by {report['max_difference']:.3g} after loading, expected "
            f"at most {tolerance:.3g}; nothing was exported"
        )
    return report["max_difference"]


def _reference(
    model: PreTrainedModel, tokenizer: ProtocolTokenizer, settings: ProtocolSettings
) -> dict[str, torch.Tensor]:
    """Prompt ids, logits of shape (T, V) and plain encodings of each probe."""
    import torch

    from rivet.prompts import PromptBuilder

    prompts = PromptBuilder(tokenizer, settings)
    tensors = {}
    for n, probe in enumerate(PROBES):
        ids = torch.tensor(prompts.build(probe, "local"))
        tensors[f"ids.{n}"] = ids
        tensors[f"text.{n}"] = torch.tensor(list(probe.encode()))
        tensors[f"text_ids.{n}"] = torch.tensor(
            tokenizer.hf(probe, add_special_tokens=False).input_ids
        )
        with torch.inference_mode():
            tensors[f"logits.{n}"] = model(ids[None]).logits[0].float().contiguous()
    return tensors


if __name__ == "__main__":
    raise SystemExit(main())
