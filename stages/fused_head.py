"""TRL's fused LM head off the GPU: score trained positions only, in tiles that fit the caches.

Written against TRL 1.16, `trl.trainer.utils._use_triton` and `_CHUNKED_LOGPROB_CHUNK_SIZE`; a
contract test pins both. Where Triton runs, TRL leaves untrained positions out itself. Elsewhere it
scores every position, so that compilers see one shape, in tiles of 32,768 columns: on a CPU with a
small vocabulary those are rows 128 KB apart in memory, with a large one half a gigabyte of
temporaries. Nothing is compiled here, so both only cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import trl.trainer.utils as trl_utils

COLUMNS = 4096  # of a tile of logits


@contextmanager
def score_trained_only(device: torch.device, model: torch.nn.Module) -> Iterator[None]:
    """In the body, `model(..., fused_lm_head=True)` on a CPU skips labels of -100.

    Args:
        device: Where the model is; anything but a CPU is left alone.
        model: Tells how large the vocabulary is; may be wrapped.
    """
    if device.type != "cpu":
        yield
        return
    before = trl_utils._use_triton, trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE
    config: Any = getattr(getattr(model, "module", model), "config", None)
    vocabulary = getattr(config, "vocab_size", COLUMNS)
    trl_utils._use_triton = lambda device: True
    trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE = min(COLUMNS, vocabulary)
    try:
        yield
    finally:
        trl_utils._use_triton, trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE = before
