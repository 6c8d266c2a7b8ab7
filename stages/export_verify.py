"""Verifies an export: a fresh process that has only the folder must give what the original gave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.export_check import reference_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rivet.settings import ProtocolSettings
    from rivet.tokenization import ProtocolTokenizer

# Asked when logits are compared. Any text would do; these reach digits, words and notation.
PROBES = (
    "What is the greatest common divisor of 84 and 36?",
    "Solve 3*x + 7 = 22 for x.",
    "Let $a_n = 2^n - 1$. Find $\\sum_{n=1}^{5} a_n$.",
)


class ExportError(RuntimeError):
    """The target is taken, or the export is not what the checkpoint was."""


def problems_to_verify(count: int) -> list[str]:
    """Problems for the comparison of greedy attempts; any would do."""
    kinds = (
        "Find the GCD of {a}, {b}.",
        "What is {a} + {b}?",
        "Solve {b}*x + {a} = 0 for x.",
        "How many divisors does {a} have?",
    )
    return [kinds[n % len(kinds)].format(a=84 + 36 * n, b=12 + 7 * n) for n in range(count)]


def verify(
    model: PreTrainedModel,
    tokenizer: ProtocolTokenizer,
    settings: ProtocolSettings,
    folder: Path,
    *,
    tolerance: float,
    problems: int,
    max_tokens: int,
) -> float:
    """Largest logit difference between this model and the export as a fresh process loads it.

    Args:
        model: The original.
        tokenizer: Its tokenizer.
        settings: Its protocol.
        folder: The export.
        tolerance: Largest difference allowed.
        problems: How many greedy attempts are compared.
        max_tokens: Tokens of each.

    Raises:
        ExportError: It is above the tolerance, an attempt differs, or the export cannot be loaded.
    """
    from safetensors.torch import save_file

    reference = reference_of(
        model,
        tokenizer,
        settings,
        probes=PROBES,
        problems=problems_to_verify(problems),
        max_tokens=max_tokens,
    )
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "reference.safetensors"
        save_file(reference, file)
        report = _check_elsewhere(folder, file, max_tokens)
    if report["tokens_differ"]:
        raise ExportError(f"{folder}: its tokenizer reads the probes otherwise than the original")
    if not report["max_difference"] <= tolerance:
        raise ExportError(
            f"{folder}: logits differ by {report['max_difference']:.3g} after loading, expected "
            f"at most {tolerance:.3g}; nothing was exported"
        )
    if report["differing"]:
        raise ExportError(
            f"{folder}: {len(report['differing'])} of {problems} greedy attempts "
            f"differ after loading, {report['differing'][0]!r} first; nothing was exported"
        )
    return report["max_difference"]


def _check_elsewhere(folder: Path, reference: Path, max_tokens: int) -> dict[str, Any]:
    """Run the comparison in a process that has only the folder."""
    command = [sys.executable, "-m", "stages.export_check", str(folder.resolve()), str(reference)]
    done = subprocess.run(
        [*command, str(max_tokens)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[1],
        # The export must be complete in itself.
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "RANK": "0"},
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ExportError(f"{folder}: a fresh process cannot use the export: {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])
