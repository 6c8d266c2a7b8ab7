"""Settings that choose what samples from the controller, shared by every command that samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rivet.config import setting

BackendName = Literal["local", "vllm"]

# What may change when a run goes on: where the servers are and how they are run.
MAY_CHANGE = ("vllm_urls", "vllm_args")


@dataclass
class BackendSettings:
    """What samples; mixed into a command's settings."""

    backend: BackendName = setting(
        "local", "What samples: `local`, transformers in this process, or `vllm`, vLLM servers."
    )
    vllm_urls: list[str] = setting(
        [],
        "With backend vllm: running servers of the same model, such as http://127.0.0.1:8000; "
        "empty starts one for this run.",
    )
    vllm_args: list[str] = setting(
        [],
        "Further arguments of the server that is started, such as '--gpu-memory-utilization 0.5'.",
    )

    def check_backend(self) -> None:
        """Refuse combinations that mean nothing.

        Raises:
            ValueError: What is wrong, and what is expected.
        """
        if self.backend != "vllm" and (self.vllm_urls or self.vllm_args):
            name = "vllm_urls" if self.vllm_urls else "vllm_args"
            raise ValueError(f"{name} is set, but backend is {self.backend}; expected vllm")
        if self.vllm_urls and self.vllm_args:
            raise ValueError(
                "vllm_args is set together with vllm_urls; expected one of them: the arguments are "
                "for a server that this run starts"
            )
