"""Export of a latent policy: a folder that names the experts it needs, verified before it is named.

    rivet export runs/latent/mini/full --output_dir exports/latent

Written: policy and adapter as safetensors, tokenizer, `rivet.json`, a card with the measured rows
and the experts with their revisions. `rivet export` comes here by itself for a latent policy. A
fresh process loads the folder (which needs rivet: the architecture is ours), and must give the
same logits and the same attention.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from rivet.checkpoints import load_tokenizer
from rivet.config import ConfigError
from rivet.files import atomic_folder, atomic_write_text
from rivet.latent.needed import check_named
from rivet.latent.policy import LatentPolicy, load_policy
from rivet.latent.prompts import LatentPrompts
from rivet.latent.sampling import pad_left
from rivet.settings import ProtocolSettings
from stages.export_files import write_licence
from stages.export_licences import Licences, find_licences
from stages.model_card import TAG, licence_data, licence_section

if TYPE_CHECKING:
    from stages.export import ExportConfig

logger = logging.getLogger(__name__)

# Settings of `rivet export` that are a controller's alone.
_IGNORED = (
    "adapter_only",
    "dtype",
    "results",
    "results_checkpoint",
    "benchmark",
    "runs",
    "verify_problems",
    "verify_tokens",
)
PROBES = ("Primes from 12 to 57.", "Calculate 3 + 4 - 1 + 8.", "Solve 5*x - 8 = 12.")


class LatentExportError(RuntimeError):
    """An export does not give what its policy gives."""


def export_latent(config: ExportConfig, source: Path, target: Path) -> Path:
    """Write a checked export; `target` must not exist.

    Args:
        config: Settings of `rivet export`.
        source: Checkpoint folder of a latent run.
        target: The export.

    Raises:
        ConfigError: A setting is given that means nothing here.
        stages.export_licences.LicenceError: The licence of the base model is not known.
        LatentExportError: The export does not reproduce logits.
        rivet.latent.policy.LatentPolicyError: The checkpoint is broken.
        rivet.latent.experts.ExpertError: It does not say which experts it needs.
    """
    _check_settings(config)
    licences = find_licences(
        base_model=config.base_model,
        base_license=config.base_license,
        weights=config.license,
        data=config.data,
    )
    policy, tokenizer = load_policy(source), load_tokenizer(source)
    check_named(policy.config, source)
    settings = ProtocolSettings.load(source)
    with atomic_folder(target) as folder:
        policy.save_pretrained(folder, max_shard_size=config.max_shard_size)
        tokenizer.hf.save_pretrained(folder)
        settings.save(folder)
        write_licence(licences.weights, folder)
        text = card(policy, config.name or target.name, licences, _results(source))
        atomic_write_text(folder / "README.md", text)
        difference = _verify(source, folder)
        if not difference <= config.tolerance:
            raise LatentExportError(
                f"{target}: logits differ by {difference:.3g} after loading, expected at most "
                f"{config.tolerance:.3g}; nothing was exported"
            )
    logger.info("exported %s; logits differ by at most %.1g after loading", target, difference)
    return target


def _check_settings(config: ExportConfig) -> None:
    plain = type(config)(config.checkpoint)
    ignored = [name for name in _IGNORED if getattr(config, name) != getattr(plain, name)]
    if ignored:
        raise ConfigError(
            [
                f"{name}: got {getattr(config, name)!r}, expected it left out: the export of a "
                "latent policy holds the whole policy as it is and the results of its own run"
                for name in ignored
            ]
        )


def _results(source: Path) -> Mapping[str, Any]:
    """Results of the run that a checkpoint lies in; empty without one."""
    path = source.parent / "results.json"
    if source.name != "checkpoint" or not path.is_file():
        return {}
    return json.loads(path.read_text(encoding="utf-8"))


def card(policy: LatentPolicy, name: str, licences: Licences, results: Mapping[str, Any]) -> str:
    """The model card."""
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        **licence_data(licences),
        library_name="transformers",
        tags=[TAG, "latent-collaboration"],
    )
    parameters = sum(p.numel() for p in policy.parameters())
    adapter = policy.model.context_adapter
    phi = 0 if adapter is None else sum(p.numel() for p in adapter.parameters())
    lines = [
        "---",
        data.to_yaml(),
        "---",
        f"# {name}",
        "",
        "A policy that listens to the hidden states of frozen experts (n-Musketeers, "
        f"arXiv:2602.09173). {parameters:,} parameters, {phi:,} of them the adapter's. "
        "Load it with `rivet.latent.policy.load_policy(folder)`.",
        "",
        "## Experts that it needs",
        "",
        "| expert | model | revision | layers | last tokens | read as | fingerprint |",
        "|---|---|---|---|---:|---|---|",
        *[
            f"| {e['name']} | {e['path']} | {e.get('revision') or '-'} | {e['layers']} | "
            f"{e['last_k']} | {e['reading']} | {e['fingerprint']} |"
            for e in policy.config.experts
        ],
        "",
        "The fingerprint is a digest of weights and tokenizer: other experts than these were not "
        "listened to in training.",
        "",
        "## Measured",
        "",
        *_measured(results.get("rows", [])),
        "",
        licence_section(licences),
    ]
    return "\n".join(lines) + "\n"


def _measured(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return ["Nothing was measured."]
    return [
        "| condition | family | accuracy % | 95% interval | problems |",
        "|---|---|---:|---:|---:|",
        *[
            f"| {r['condition']} | {r['family']} | {100 * r['accuracy']:.1f} | "
            f"{100 * r['ci_low']:.1f} to {100 * r['ci_high']:.1f} | {r['n']} |"
            for r in rows
        ],
    ]


@torch.no_grad()
def probe(folder: Path) -> dict[str, torch.Tensor]:
    """Logits of some prompts with made-up expert states, which need no expert."""
    policy, tokenizer = load_policy(folder), load_tokenizer(folder)
    config, settings = policy.config, ProtocolSettings.load(folder)
    prompts = LatentPrompts(tokenizer, settings, config.placeholder_id, config.num_context_tokens)
    ids, mask = pad_left([prompts.build(text) for text in PROBES], 0)
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    adapter = policy.config.adapter
    if adapter and adapter["routing"] != "constant":
        shape = (len(adapter["expert_names"]), adapter["num_slots"])
        generator = torch.Generator().manual_seed(0)
        width = max(adapter["expert_widths"])
        given["expert_states"] = torch.randn(len(PROBES), *shape, width, generator=generator)
        given["expert_mask"] = torch.ones(len(PROBES), *shape, dtype=torch.bool)
    return {"ids": ids, "logits": policy(**given).logits.float().contiguous()}


def _verify(source: Path, folder: Path) -> float:
    """Largest difference between logits of the source, here, and of the export, elsewhere."""
    expected = probe(source)
    with tempfile.TemporaryDirectory() as scratch:
        found_path = Path(scratch) / "found.safetensors"
        done = subprocess.run(
            [sys.executable, "-m", "stages.latent.export", str(folder.resolve()), str(found_path)],
            capture_output=True,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "RANK": "0"},
        )
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise LatentExportError(f"{folder}: a fresh process cannot use the export: {last}")
        found = load_file(found_path)
    if not torch.equal(found["ids"], expected["ids"]):
        raise LatentExportError(f"{folder}: its tokenizer reads the probes otherwise")
    difference = (found["logits"] - expected["logits"]).abs()
    return float(difference.nan_to_num(nan=float("inf")).max())


def main(argv: Sequence[str] | None = None) -> int:
    """For `_verify`: write the probes' logits of FOLDER to FILE."""
    folder, file = sys.argv[1:] if argv is None else argv
    save_file(probe(Path(folder)), file)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
