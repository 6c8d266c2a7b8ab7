"""What a server is told: its limits, its name, its key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# What a choice's `message.content` is: the bare answer, the answer as the model wrote it with its
# box, or the whole completion.
Content = Literal["answer", "boxed", "completion"]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How a server behaves.

    Attributes:
        model: Name of the model in the API.
        max_concurrent: Completions that are sampled at the same time.
        max_queue: Completions that may wait; more are refused with 429.
        deadline_s: Seconds that a request may take, waiting included.
        max_body_bytes: Largest body of a request.
        content: What a message holds unless a request says otherwise.
        api_key: Key that `/v1` and `/metrics` want; empty wants none.
        hosts: Host names that requests may name; empty allows all. On loopback this keeps pages
            of other sites from reaching the server under a name of their own.
        logs_text: Whether problems and answers go to the log.
    """

    model: str
    max_concurrent: int = 16
    max_queue: int = 64
    deadline_s: float = 120.0
    max_body_bytes: int = 256 * 1024
    content: Content = "answer"
    api_key: str = ""
    hosts: tuple[str, ...] = ()
    logs_text: bool = False

    def __post_init__(self) -> None:
        if self.max_concurrent < 1 or self.max_queue < 0 or self.max_body_bytes < 1:
            raise ValueError(f"limits must be positive, got {self}")
        if not 0 < self.deadline_s < float("inf"):
            raise ValueError(f"deadline_s is {self.deadline_s}; expected a number above 0")
