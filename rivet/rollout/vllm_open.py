"""Opens the vLLM backend for a checkpoint: over running servers, or one that is started for it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from rivet.checkpoints import CheckpointError, is_adapter
from rivet.rollout.backend import BackendError, context_for
from rivet.rollout.vllm_backend import VLLMBackend
from rivet.rollout.vllm_process import SERVED_NAME, VLLMSettings, as_arguments, managed_server
from rivet.tokenization import ProtocolTokenizer

logger = logging.getLogger(__name__)


@asynccontextmanager
async def open_vllm(
    folder: Path,
    tokenizer: ProtocolTokenizer,
    *,
    urls: Sequence[str] = (),
    arguments: Sequence[str] = (),
    dtype: str = "auto",
    max_completion_length: int = 0,
    max_batch: int = 256,
) -> AsyncIterator[VLLMBackend]:
    """The backend over `urls`, or over a server of its own that ends with it.

    Args:
        folder: The checkpoint.
        tokenizer: The checkpoint's.
        urls: Running servers; empty starts one.
        arguments: Further arguments of the server that is started.
        dtype: Number format; `auto` keeps that of the weights.
        max_completion_length: What the context must hold beside the prompt.
        max_batch: Rollouts that are sampled at the same time.

    Raises:
        BackendError: No vLLM, no answer, or servers of other weights.
        rivet.experts.server.ServerError: The server did not come up.
        CheckpointError: The checkpoint is an adapter.
    """
    async with AsyncExitStack() as stack:
        if not urls:
            settings = server_settings(
                folder,
                dtype=dtype,
                max_completion_length=max_completion_length,
                max_batch=max_batch,
                arguments=arguments,
            )
            server = stack.enter_context(managed_server(settings))
            urls = [server.base_url]
        backend = await stack.enter_async_context(VLLMBackend(urls, tokenizer))
        check_served(backend, folder)
        yield backend


def server_settings(
    folder: Path,
    *,
    dtype: str = "auto",
    max_completion_length: int = 0,
    max_batch: int = 256,
    max_lora_rank: int = 0,
    use_weight_transfer: bool = False,
    arguments: Sequence[str] = (),
) -> VLLMSettings:
    """How a server for a checkpoint is started; see `open_vllm`.

    Raises:
        CheckpointError: The checkpoint is an adapter.
    """
    from transformers import AutoConfig

    if is_adapter(folder):
        raise CheckpointError(
            f"{folder}: a LoRA adapter; vLLM needs whole weights: merge it (`rivet export`)"
        )
    config = AutoConfig.from_pretrained(folder)
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return VLLMSettings(
        str(folder),
        dtype=resolve_dtype(folder, dtype),
        max_model_len=context_for(max_completion_length, limit),
        max_num_seqs=max_batch,
        max_lora_rank=max_lora_rank,
        use_weight_transfer=use_weight_transfer,
        arguments=as_arguments(arguments),
    )


def resolve_dtype(folder: Path, dtype: str = "auto") -> str:
    """The number format that `auto` stands for: that of the weights, which vLLM would change."""
    from transformers import AutoConfig

    if dtype != "auto":
        return dtype
    return str(AutoConfig.from_pretrained(folder).dtype or "float32").removeprefix("torch.")


def check_served(backend: VLLMBackend, folder: Path) -> None:
    """Refuse servers that were started with another checkpoint, as far as can be seen from here.

    Raises:
        BackendError: The server's folder is here, and is not the checkpoint's.
    """
    root = backend.served.root
    if not root or not Path(root).is_dir():
        if backend.served.name != SERVED_NAME or root:
            logger.warning(
                "the vllm servers serve %s from %s; whether those are the weights of %s cannot be "
                "seen from here",
                backend.served.name,
                root or "somewhere",
                folder,
            )
        return
    if Path(root).resolve() != folder.resolve() and not _same_weights(Path(root), folder):
        raise BackendError(
            f"the vllm servers serve {root}; expected {folder}: start them with it "
            "(`rivet vllm`), or give no vllm_urls"
        )


def _same_weights(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in one.glob("*.safetensors"))
    if not names or names != sorted(path.name for path in other.glob("*.safetensors")):
        return False
    return all(_same_file(one / name, other / name) for name in names)


def _same_file(one: Path, other: Path) -> bool:
    if one.stat().st_size != other.stat().st_size:
        return False
    block = 1 << 20
    with open(one, "rb") as a, open(other, "rb") as b:
        while part := a.read(block):
            if part != b.read(block):
                return False
    return True
