"""A small controller and one real vLLM server for all tests of this folder.

Run with the interpreter that has vLLM: `make test-vllm`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from data.miniworld.dialogues import tokenizer_corpus
from data.miniworld.experts import EXPERTS
from rivet.rollout.types import RolloutLimits
from rivet.rollout.vllm_open import server_settings
from rivet.rollout.vllm_process import managed_server
from rivet.settings import ExpertCard, ProtocolSettings
from stages.mini_controller import build_model, build_tokenizer

MAX_LORA_RANK = 8


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything here, and leave it out where there is no vLLM.

    The folder is not called vllm: imports would take it for the package where that is missing.
    """
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if missing:
                item.add_marker(pytest.mark.skip(reason="needs vLLM: make test-vllm"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained controller whose probabilities are far from uniform. vLLM: head_dim >= 32."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = build_tokenizer(tokenizer_corpus(300), words=list(EXPERTS))
    model = build_model(
        tokenizer,
        seed=0,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
        max_position_embeddings=256,
        initializer_range=0.25,
    )
    model.save_pretrained(folder)
    tokenizer.hf.save_pretrained(folder)
    cards = tuple(ExpertCard(e.name, e.skill) for e in EXPERTS.values())
    ProtocolSettings("bare", "", cards, RolloutLimits(48, 2, 2, 24, 16)).save(folder)
    return folder


@pytest.fixture(scope="session")
def server(checkpoint: Path) -> Iterator[str]:
    """URL of a server of the checkpoint."""
    settings = server_settings(checkpoint, max_batch=32, max_lora_rank=MAX_LORA_RANK)
    with managed_server(settings) as running:
        yield running.base_url
