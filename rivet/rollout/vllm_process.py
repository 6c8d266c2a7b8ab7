"""A managed vLLM server: its command line, its environment, and its life.

vLLM may live in another virtual environment than rivet (`make setup-vllm` builds one, since the CPU
build pins other versions of what we use), so it is found, not imported.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rivet.experts.server import HOST
from rivet.experts.server_process import RunningServer, start_server
from rivet.rollout.backend import BackendError

logger = logging.getLogger(__name__)

PYTHON_VARIABLE = "RIVET_VLLM_PYTHON"
SERVED_NAME = "controller"
# Loading a large model from a network disk takes many minutes.
START_TIMEOUT_S = 1800.0
# For every server; what the user has set stays.
# The development endpoints are those that TRL's weight sync uses.
_ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
# On a CPU: 1 GiB of key-value cache instead of a share of all memory, threads as OMP_NUM_THREADS
# says instead of one bound to each core.
_CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


class VLLMNotFoundError(BackendError):
    """There is no vLLM to start."""


@dataclass(frozen=True, slots=True)
class VLLMSettings:
    """How a server is started.

    Attributes:
        model: Folder or Hub name.
        dtype: Number format; vLLM's own `auto` would make float32 weights 16-bit.
        max_model_len: Tokens of prompt and completion together; None: what the model allows.
        max_num_seqs: Rollouts that are sampled at the same time.
        max_lora_rank: Serve LoRA adapters up to this rank; 0: none.
        use_weight_transfer: Let a trainer on a GPU send all weights (TRL's sync, over NCCL).
        host: Address to listen on.
        port: 0 picks a free one.
        arguments: Further arguments of vLLM's own; they win.
    """

    model: str
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_lora_rank: int = 0
    use_weight_transfer: bool = False
    host: str = HOST
    port: int = 0
    arguments: tuple[str, ...] = ()


def find_python() -> str:
    """The interpreter that has vLLM: `RIVET_VLLM_PYTHON`, this one, or that of `.venv-vllm`.

    Raises:
        VLLMNotFoundError: None has.
    """
    if named := os.environ.get(PYTHON_VARIABLE):
        if os.access(named, os.X_OK):
            return named
        raise VLLMNotFoundError(f"{PYTHON_VARIABLE} is {named}; expected a Python interpreter")
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    beside = Path(sys.prefix).parent / ".venv-vllm" / "bin" / "python"
    if beside.is_file():
        return str(beside)
    raise VLLMNotFoundError(
        "vLLM is not installed: on a GPU `pip install -e '.[vllm]'` in the clone, without one "
        f"`make setup-vllm`; or name an interpreter that has it in {PYTHON_VARIABLE}, or give the "
        "urls of running servers"
    )


def server_command(settings: VLLMSettings, python: str, port: int) -> list[str]:
    """The command line of a server."""
    command = [
        # `vllm serve` fails in the CPU build: it asks for the version of a distribution `vllm`.
        *(python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", settings.model, "--served-model-name", SERVED_NAME),
        *("--host", settings.host, "--port", str(port)),
        *("--dtype", settings.dtype, "--max-num-seqs", str(settings.max_num_seqs)),
        # Log-probabilities of what was drawn from: after temperature and truncation.
        *("--logprobs-mode", "processed_logprobs"),
        # No defaults from the model's generation_config.json: requests say everything.
        *("--generation-config", "vllm"),
        *("--enable-prefix-caching", "--disable-uvicorn-access-log"),
    ]
    if settings.max_model_len is not None:
        command += ["--max-model-len", str(settings.max_model_len)]
    if settings.max_lora_rank:
        # Two are kept: a new version is loaded before the old one is let go.
        command += ["--enable-lora", "--max-loras", "1", "--max-cpu-loras", "2"]
        command += ["--max-lora-rank", str(_lora_rank(settings.max_lora_rank))]
    if settings.use_weight_transfer:
        command += ["--weight-transfer-config", '{"backend": "nccl"}']
    if not _has_gpu():
        # Compiling costs minutes and gains little here.
        command += ["--enforce-eager"]
    return [*command, *settings.arguments]


def set_environment() -> None:
    """Set what a server needs in this process, for its children; what is set already stays."""
    for name, value in (_ENVIRONMENT | ({} if _has_gpu() else _CPU_ENVIRONMENT)).items():
        os.environ.setdefault(name, value)


@contextmanager
def managed_server(
    settings: VLLMSettings, *, timeout_s: float = START_TIMEOUT_S
) -> Iterator[RunningServer]:
    """Start a server, wait until it answers, stop it at the end, or when this process dies.

    Raises:
        VLLMNotFoundError: There is no vLLM.
        rivet.experts.server.ServerError: It did not come up; the last lines of its log.
    """
    python = find_python()
    set_environment()
    port = settings.port or free_port(settings.host)
    guard = [sys.executable, "-m", "rivet.rollout.vllm_guard", "--port", str(port)]
    command = [*guard, "--parent", "{parent}", "--", *server_command(settings, python, port)]
    logger.info("starting vLLM with %s; loading takes a minute or more", settings.model)
    with start_server(command, timeout_s=timeout_s, name="vLLM") as server:
        logger.info("vLLM serves %s at %s", settings.model, server.base_url)
        yield server


def free_port(host: str) -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _lora_rank(rank: int) -> int:
    """The least rank that vLLM knows and that holds this one."""
    known = (8, 16, 32, 64, 128, 256, 320, 512)
    return next((size for size in known if size >= rank), rank)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def as_arguments(values: Sequence[str]) -> tuple[str, ...]:
    """Arguments as a recipe lists them: each entry may hold a name and its value."""
    return tuple(part for value in values for part in value.split())
