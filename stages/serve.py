"""Serve a checkpoint behind the OpenAI chat API, with a web page.

rivet serve exports/controller --port 8000
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rivet.checkpoints import Dtype
from rivet.config import ConfigError, parse_config
from rivet.serving.options import Content, ServerOptions


@dataclass(frozen=True)
class ServeConfig:
    """Settings of `rivet serve`."""

    checkpoint: str = field(metadata={"help": "Checkpoint, export or run folder, or a Hub name."})
    host: str = field(
        default="127.0.0.1",
        metadata={"help": "Address to listen on; other than loopback needs a key."},
    )
    port: int = field(default=8000, metadata={"help": "Port, 0 to 65535; 0 picks a free one."})
    vllm: list[str] = field(
        default_factory=list,
        metadata={"help": "Base URLs of vLLM servers that hold the weights; none: load them here."},
    )
    name: str = field(
        default="", metadata={"help": "Name of the model in the API; empty: the folder's name."}
    )
    api_key_env: str = field(
        default="RIVET_API_KEY",
        metadata={"help": "Variable that holds the key which clients must send; unset: no key."},
    )
    allowed_hosts: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Host names that requests may name, besides the loopback ones; for a server "
            "on loopback behind a proxy. On another address every name is allowed unless set."
        },
    )
    max_concurrent: int = field(
        default=16, metadata={"help": "Completions sampled at the same time, at least 1."}
    )
    max_queue: int = field(
        default=64,
        metadata={"help": "Completions that may wait; beyond it 429 with Retry-After."},
    )
    deadline_s: float = field(
        default=120.0,
        metadata={"help": "Seconds that a request may take, waiting included; above 0."},
    )
    max_body_bytes: int = field(
        default=256 * 1024, metadata={"help": "Largest body of a request, in bytes."}
    )
    content: Content = field(
        default="answer",
        metadata={
            "help": "What a message holds: answer (content of the box), boxed (the answer with "
            "its box), completion (everything). A request may choose."
        },
    )
    max_completion_length: int | None = field(
        default=None,
        metadata={"help": "Tokens of a completion, at least 1; null: the checkpoint's limit."},
    )
    log_text: bool = field(
        default=False, metadata={"help": "Write problems and answers to the log."}
    )
    device: str | None = field(
        default=None, metadata={"help": "Such as cpu or cuda:0; null: a GPU if there is one."}
    )
    dtype: Dtype = field(
        default="auto", metadata={"help": "Number format of the weights; auto keeps theirs."}
    )
    parent_pid: int | None = field(
        default=None, metadata={"help": "Stop when this is no longer the parent process."}
    )

    def __post_init__(self) -> None:
        from rivet.serving.run import is_loopback
        from stages.solve_config import faults_of_urls

        faults = faults_of_urls(self.vllm)
        if not 0 <= self.port <= 65535:
            faults.append(f"port: got {self.port}, expected 0 to 65535")
        for name, low in (("max_concurrent", 1), ("max_queue", 0), ("max_body_bytes", 1)):
            if getattr(self, name) < low:
                faults.append(f"{name}: got {getattr(self, name)}, expected at least {low}")
        if not 0 < self.deadline_s < float("inf"):
            faults.append(f"deadline_s: got {self.deadline_s}, expected a number above 0")
        if self.max_completion_length is not None and self.max_completion_length < 1:
            faults.append(
                f"max_completion_length: got {self.max_completion_length}, expected at least 1"
            )
        if not is_loopback(self.host) and not self.api_key:
            faults.append(
                f"host: {self.host} can be reached by others, and {self.api_key_env or 'no key'} "
                "is not set; set the variable that api_key_env names to a key of your choice"
            )
        if faults:
            raise ConfigError(faults)

    @property
    def api_key(self) -> str:
        """The key, from the environment; empty without one."""
        return os.environ.get(self.api_key_env, "").strip() if self.api_key_env else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rivet serve` until it is stopped."""
    config = parse_config(
        ServeConfig,
        argv,
        prog="rivet serve",
        description="Serve a checkpoint behind the OpenAI chat API, with a web page at /.",
        positional=("checkpoint",),
    ).config
    run(config)
    return 0


def run(config: ServeConfig) -> None:
    """Load the checkpoint and serve it."""
    from transformers.utils import logging as transformers_logging

    from rivet.async_solver import AsyncSolver
    from rivet.hub import local_checkpoint
    from rivet.serving.run import serve
    from stages.solve_config import check_device

    check_device(config.device)
    transformers_logging.disable_progress_bar()
    folder = local_checkpoint(config.checkpoint)  # before the port is taken
    serve(
        lambda: AsyncSolver(
            folder,
            vllm=config.vllm,
            device=config.device,
            dtype=config.dtype,
            max_completion_length=config.max_completion_length,
            max_batch=config.max_concurrent,
        ),
        options_of(config),
        host=config.host,
        port=config.port,
        parent_pid=config.parent_pid,
    )


def options_of(config: ServeConfig) -> ServerOptions:
    """The server's options as the settings have them."""
    from rivet.serving.run import LOOPBACK_NAMES, is_loopback, name_in_url

    hosts = tuple(name.lower() for name in config.allowed_hosts)
    if hosts or is_loopback(config.host):
        hosts = (*LOOPBACK_NAMES, name_in_url(config.host).lower(), *hosts)
    return ServerOptions(
        model=config.name or Path(config.checkpoint).resolve().name,
        max_concurrent=config.max_concurrent,
        max_queue=config.max_queue,
        deadline_s=config.deadline_s,
        max_body_bytes=config.max_body_bytes,
        content=config.content,
        api_key=config.api_key,
        hosts=hosts,
        logs_text=config.log_text,
    )


if __name__ == "__main__":
    raise SystemExit(main())
