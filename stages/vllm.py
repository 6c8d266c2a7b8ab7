"""`rivet vllm`: a vLLM server for a checkpoint, set up as rivet's sampling needs it.

    rivet vllm runs/stage1/checkpoint --port 8000 --max_lora_rank 32 [vLLM's own arguments]

Runs until it is stopped or the shell that started it is gone. A recipe with `backend: vllm` starts
such a server by itself; this command is for several of them, or for another machine.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import replace

from rivet.rollout import vllm_guard
from rivet.rollout.backend import BackendError
from rivet.rollout.vllm_process import (
    HOST,
    find_python,
    free_port,
    server_command,
    set_environment,
)

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rivet vllm`; what it does not know goes to vLLM.

    Raises:
        BackendError: There is no vLLM, or the port is taken.
        rivet.checkpoints.CheckpointError: The folder is no checkpoint, or an adapter.
    """
    from rivet.hub import local_checkpoint
    from rivet.rollout.vllm_open import server_settings
    from rivet.settings import ProtocolSettings

    arguments, rest = _parser().parse_known_args(argv)
    folder = local_checkpoint(arguments.model)
    settings = server_settings(
        folder,
        dtype=arguments.dtype,
        max_completion_length=ProtocolSettings.load(folder).limits.max_completion_length,
        max_batch=arguments.max_num_seqs,
        max_lora_rank=arguments.max_lora_rank,
        use_weight_transfer=arguments.weight_transfer,
    )
    if arguments.max_model_len is not None:
        settings = replace(settings, max_model_len=arguments.max_model_len)
    settings = replace(
        settings, host=arguments.host, arguments=tuple(part for part in rest if part != "--")
    )
    port = arguments.port or free_port(arguments.host)
    check_port(arguments.host, port)
    command = server_command(settings, find_python(), port)
    set_environment()
    threading.Thread(target=_announce, args=(arguments.host, port), daemon=True).start()
    code = vllm_guard.run(command, port=port, parent_pid=os.getppid())
    if code:
        print(f"rivet vllm: vLLM ended with code {code}; its messages are above", file=sys.stderr)
    return int(code != 0)


def check_port(host: str, port: int) -> None:
    """Refuse a port on which somebody listens: vLLM shares it silently (SO_REUSEPORT).

    Raises:
        BackendError: It is taken.
    """
    with socket.socket() as probe:
        probe.settimeout(2.0)
        if probe.connect_ex((host if host != "0.0.0.0" else HOST, port)) == 0:
            raise BackendError(
                f"{host}:{port}: somebody listens there already; choose another --port, or 0 for "
                "a free one"
            )


def _announce(host: str, port: int) -> None:
    """Print the URL as soon as the server answers."""
    url = f"http://{host if host != '0.0.0.0' else HOST}:{port}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        try:
            with opener.open(f"{url}/health", timeout=5):
                print(f"ready: vllm_urls: ['{url}']", flush=True)
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rivet vllm",
        description="Serve a checkpoint with vLLM. Other arguments are passed on to vLLM.",
        allow_abbrev=False,
    )
    parser.add_argument("model", help="checkpoint or run folder, or a model on the Hub")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 picks a free one (8000)")
    parser.add_argument("--host", default=HOST, help=f"address to listen on ({HOST})")
    parser.add_argument("--dtype", default="auto", help="number format; auto keeps the weights'")
    parser.add_argument(
        "--max_model_len",
        "--max-model-len",
        type=int,
        help="tokens of prompt and completion together",
    )
    parser.add_argument(
        "--max_num_seqs",
        "--max-num-seqs",
        type=int,
        default=256,
        help="rollouts that are sampled at the same time (256)",
    )
    parser.add_argument(
        "--max_lora_rank",
        "--max-lora-rank",
        type=int,
        default=0,
        help="serve the adapters of a Stage I run with lora_r up to this; 0 serves none (0)",
    )
    parser.add_argument(
        "--weight_transfer",
        action="store_true",
        help="let a Stage I run without an adapter send all its weights (GPUs)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
