"""An untrained mini controller as a checkpoint folder, for what does not depend on its answers."""

from __future__ import annotations

from pathlib import Path

import torch

from data.miniworld.dialogues import tokenizer_corpus
from data.miniworld.experts import EXPERTS
from rivet.rollout.types import RolloutLimits
from rivet.settings import ExpertCard, ProtocolSettings
from stages.mini_controller import build_model, build_tokenizer


def write_untrained(folder: Path, limits: RolloutLimits) -> Path:
    """Write one layer of width 32, the mini-world's tokenizer and experts; returns the folder."""
    torch.set_num_threads(1)
    tokenizer = build_tokenizer(tokenizer_corpus(300), words=list(EXPERTS))
    build_model(tokenizer, seed=0, hidden_size=32, num_hidden_layers=1).save_pretrained(folder)
    tokenizer.hf.save_pretrained(folder)
    cards = tuple(ExpertCard(expert.name, expert.skill) for expert in EXPERTS.values())
    ProtocolSettings("bare", "", cards, limits).save(folder)
    return folder
