"""Load an export with plain transformers and compare its logits with saved ones.

    python -m stages.export_check FOLDER REFERENCE.safetensors

Run by `stages.export` in a fresh process, so that nothing in memory can stand in for a missing
file. Prints one JSON line.
"""

from __future__ import annotations

import json
import sys


def main(argv: list[str] | None = None) -> int:
    """Compare; the caller judges the numbers.

    Args:
        argv: Export folder and reference file.
    """
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, reference = sys.argv[1:] if argv is None else argv
    saved = load_file(reference)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    worst, tokens_differ = 0.0, False
    for n in range(sum(name.startswith("ids.") for name in saved)):
        text = bytes(saved[f"text.{n}"].tolist()).decode()
        ids = tokenizer(text, add_special_tokens=False).input_ids
        tokens_differ |= ids != saved[f"text_ids.{n}"].tolist()
        with torch.inference_mode():
            logits = model(saved[f"ids.{n}"][None]).logits[0].float()
        # NaN compares as different: max() would hide it.
        difference = (logits - saved[f"logits.{n}"]).abs().nan_to_num(nan=float("inf"))
        worst = max(worst, difference.max().item())
    print(json.dumps({"max_difference": worst, "tokens_differ": tokens_differ}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
