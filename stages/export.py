"""Export: a checkpoint becomes a folder that anyone can load, verified before it gets its name.

    rivet export CHECKPOINT --to exports/mine [--results runs/demo/eval/stage2/results.json]
    rivet export exports/mine --push user/name

Written: merged safetensors (a PEFT adapter is merged in float32), tokenizer with a chat template
that asks as rivet does, generation config with every stop id, `rivet.json`, a model card with
measured results, the licence. A fresh process then loads the folder with plain transformers and
must give the same logits and the same greedy trajectories.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rivet.checkpoints import (
    CheckpointError,
    Dtype,
    check_weights,
    find_checkpoint,
    is_adapter,
    load_model,
    load_tokenizer,
)
from rivet.config import ConfigError, parse_config
from rivet.files import atomic_folder
from rivet.interrupt import terminable
from rivet.settings import ProtocolSettings
from stages.export_files import with_ends_of, write_adapter, write_licence, write_model
from stages.export_licences import Licences, find_licences
from stages.export_push import check_repo_id, describe_push, push
from stages.export_target import is_export, prepare_target
from stages.export_verify import ExportError, verify
from stages.measurements import ResultRow, check_measured_on, read_results
from stages.model_card import ModelFacts, TrainingRun, write_card

if TYPE_CHECKING:
    from transformers import PreTrainedModel


logger = logging.getLogger(__name__)

_SHARD_SIZE = re.compile(r"(?=.*[1-9])\d+(\.\d+)? ?[KMGT]B", re.IGNORECASE)


@dataclass(frozen=True)
class ExportConfig:
    """Settings of `rivet export`."""

    checkpoint: str = field(
        metadata={"help": "Checkpoint folder, or a run folder that holds one as checkpoint/."}
    )
    output_dir: str = field(
        default="exports/controller",
        metadata={"help": "Folder to write, also --to; it must not exist."},
    )
    name: str = field(
        default="", metadata={"help": "Name of the model on its card; empty: the folder's name."}
    )
    base_model: str = field(
        default="",
        metadata={
            "help": "Model that was trained on from, a folder or a Hub name; empty: what an "
            "adapter names, and none for whole weights (trained from scratch)."
        },
    )
    base_license: str = field(
        default="",
        metadata={"help": "Licence of the base model; empty: as its card says."},
    )
    adapter_only: bool = field(
        default=False,
        metadata={
            "help": "Export the LoRA adapter (of the checkpoint, or of its run) without its base."
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
        default="",
        metadata={
            "help": "Licence of the weights, as the Hub names it; empty: that of the base model, "
            "apache-2.0 without one."
        },
    )
    data: list[str] = field(
        default_factory=list,
        metadata={"help": "Data sets of the training with their licences, as `NAME: LICENCE`."},
    )
    verify_problems: int = field(
        default=20,
        metadata={"help": "Problems whose greedy attempts are compared after loading; 0: none."},
    )
    verify_tokens: int = field(
        default=256, metadata={"help": "Tokens of each of these attempts, at least 1."}
    )
    push: str = field(
        default="",
        metadata={
            "help": "Hub repository, user/name, that the export is uploaded to. With --dry-run "
            "the files are listed instead. If CHECKPOINT is an export, it goes as it is."
        },
    )
    private: bool = field(default=False, metadata={"help": "Make a new Hub repository private."})
    overwrite: bool = field(
        default=False, metadata={"help": "Replace an earlier export of the same name."}
    )

    def __post_init__(self) -> None:
        faults = []
        if not self.tolerance > 0:
            faults.append(f"tolerance: got {self.tolerance}, expected a number above 0")
        if self.verify_problems < 0:
            faults.append(f"verify_problems: got {self.verify_problems}, expected at least 0")
        if self.verify_tokens < 1:
            faults.append(f"verify_tokens: got {self.verify_tokens}, expected at least 1")
        if not _SHARD_SIZE.fullmatch(self.max_shard_size):
            faults.append(
                f"max_shard_size: got {self.max_shard_size!r}, expected a size such as 5GB or 500MB"
            )
        if self.adapter_only and self.dtype != "auto":
            faults.append(
                f"dtype: got {self.dtype!r}, expected auto with adapter_only, which copies files"
            )
        if faults:
            raise ConfigError(faults)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rivet export`."""
    arguments = [
        "--output_dir" if a == "--to" else a for a in (sys.argv[1:] if argv is None else argv)
    ]
    is_dry = "--dry-run" in arguments and any(a.partition("=")[0] == "--push" for a in arguments)
    if is_dry:  # besides the settings, say what would be uploaded
        arguments.remove("--dry-run")
    parsed = parse_config(
        ExportConfig,
        arguments,
        prog="rivet export",
        description="Package a checkpoint: weights, tokenizer, settings, card; then verify it.",
        positional=("checkpoint",),
    )
    config = parsed.config
    if config.push:
        check_repo_id(config.push)
    is_made = is_export(Path(config.checkpoint)) and "output_dir" not in parsed.given
    folder = Path(config.checkpoint if is_made else config.output_dir)
    if is_made and config.push:
        _check_bare_push(folder, parsed.given)
    if is_dry:
        print(_describe(folder, config))
        return 0
    if not (is_made and config.push):
        with terminable():
            folder = run(config)
    print(folder)
    if config.push:
        check_weights(folder)
        print(push(folder, config.push, private=config.private))
    return 0


def _check_bare_push(folder: Path, given: frozenset[str]) -> None:
    ignored = sorted(given - {"checkpoint", "push", "private"})
    if ignored:
        raise ConfigError(
            [
                f"{name}: has no effect: {folder} is an export already and is pushed as it is; "
                "expected it left out, or --to for a new export"
                for name in ignored
            ]
        )


def _describe(folder: Path, config: ExportConfig) -> str:
    if is_export(folder):
        return describe_push(folder, config.push, private=config.private)
    return (
        f"{folder}: no export yet; without --dry-run it is made and uploaded to {config.push}, "
        f"at most {config.max_shard_size} a weight file"
    )


def run(config: ExportConfig) -> Path:
    """Export a checkpoint.

    Returns:
        The export folder.

    Raises:
        CheckpointError: The folder is no checkpoint, or a broken one.
        ConfigError: A latent policy's export has no use for one of the settings.
        LicenceError: The licence of the base model is not known.
        ResultsError: A results file is broken, or was measured on other weights.
        ExportError: The target is taken or cannot be written, or the export does not reproduce
            the original.
        SettingsError: Its `rivet.json` is missing or of another version.
    """
    from rivet.latent.policy import is_latent

    source = find_checkpoint(config.checkpoint)
    target = Path(config.output_dir)
    prepare_target(target, overwrite=config.overwrite)
    if is_latent(source):
        from stages.latent.export import export_latent

        return export_latent(config, source, target)
    settings = ProtocolSettings.load(source)
    results = _results(config, source)
    runs = [TrainingRun.load(folder) for folder in _run_folders(config, source)]
    weights = _adapter_of(source) if config.adapter_only else source
    licences = find_licences(
        base_model=config.base_model or _base_of(weights),
        base_license=config.base_license,
        weights=config.license,
        data=config.data,
    )
    logger.info("loading %s", weights)
    model = _load(weights, config)
    tokenizer = with_ends_of(model, load_tokenizer(source))
    with atomic_folder(target) as folder:
        if config.adapter_only:
            write_adapter(weights, licences.base_model or "", tokenizer, settings, folder)
        else:
            write_model(model, tokenizer, settings, folder, max_shard_size=config.max_shard_size)
        write_licence(licences.weights, folder)
        write_card(folder, _facts(model, target, config, licences), settings, results, runs)
        logger.info("verifying the export in a fresh process")
        difference = verify(
            model,
            tokenizer,
            settings,
            folder,
            tolerance=config.tolerance,
            problems=config.verify_problems,
            max_tokens=config.verify_tokens,
        )
    logger.info(
        "exported %s; after loading, logits differ by at most %.1g and %d greedy attempts are the "
        "same",
        target,
        difference,
        config.verify_problems,
    )
    return target


def _facts(
    model: PreTrainedModel, target: Path, config: ExportConfig, licences: Licences
) -> ModelFacts:
    return ModelFacts(
        name=config.name or target.name,
        parameters=sum(p.numel() for p in model.parameters()),
        architecture=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        licences=licences,
        repo_id=config.push,
        is_adapter=config.adapter_only,
    )


# --- what is read -------------------------------------------------------------------------------


def _load(weights: Path, config: ExportConfig) -> PreTrainedModel:
    """The model as the export will hold it: merged, or with its adapter apart."""
    if not config.adapter_only:
        return load_model(weights, dtype=config.dtype, base_model=config.base_model)
    from transformers import AutoModelForCausalLM

    check_weights(weights)
    base = config.base_model or _base_of(weights)
    try:
        model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
        model.load_adapter(str(weights))
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{weights}: cannot be loaded with {base!r}: {error}") from error
    return model.eval()


def _adapter_of(source: Path) -> Path:
    """The adapter that a checkpoint is, or that its run keeps beside the merged weights."""
    for folder in (source, source.parent / "adapter"):
        if is_adapter(folder):
            return folder
    raise ExportError(
        f"{source}: no LoRA adapter here or in {source.parent / 'adapter'}; leave adapter_only out "
        "to export whole weights"
    )


def _base_of(weights: Path) -> str:
    """The model that an adapter names; empty for whole weights."""
    if not is_adapter(weights):
        return ""
    config = json.loads((weights / "adapter_config.json").read_text(encoding="utf-8"))
    return str(config.get("base_model_name_or_path") or "")


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


if __name__ == "__main__":
    raise SystemExit(main())
