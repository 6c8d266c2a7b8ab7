"""Solutions as the chat API sends them: completions, chunks of a stream, usage, our extension.

The final answer is the message. The whole attempt rides in `rivet`, a field of each choice that
clients of the API do not know and pass over; docs/deployment.md describes it.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rivet.async_solver import Solution
from rivet.chat_api import RequestError
from rivet.pieces import Piece
from rivet.serving.chat_request import ChatRequest

DONE = b"data: [DONE]\n\n"


class Replies:
    """The reply to one request, under one id.

    Args:
        request: What was asked.
        model: Name of the model.
    """

    def __init__(self, request: ChatRequest, model: str) -> None:
        self._request = request
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def completion(self, solutions: Sequence[Solution]) -> dict[str, Any]:
        """The reply in one piece."""
        choices = []
        for index, solution in enumerate(solutions):
            extension = solution.outcome()
            if self._request.shows_trajectory:
                extension["segments"] = [asdict(piece) for piece in solution.pieces]
            message = {"role": "assistant", "content": self.content(solution), "refusal": None}
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": None,
                    "finish_reason": finish_reason(solution),
                    "rivet": extension,
                }
            )
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage_of(solutions),
            "rivet": self._about(),
        }

    def opening(self, index: int) -> bytes:
        """The first chunk of a choice; it also names the seed."""
        chunk = self._chunk_of(index, {"role": "assistant", "content": ""})
        return event({**chunk, "rivet": self._about()})

    def pieces(self, index: int, pieces: Iterable[Piece]) -> bytes:
        """A chunk with the next pieces of a trajectory."""
        segments = [asdict(piece) for piece in pieces]
        return self._chunk(index, {}, {"segments": segments})

    def ending(self, index: int, solution: Solution) -> bytes:
        """The chunks with the message and with how the choice ended."""
        content = self.content(solution)
        chunks = [self._chunk(index, {"content": content})] if content else []
        last = self._chunk(index, {}, solution.outcome(), finish_reason(solution))
        return b"".join([*chunks, last])

    def usage(self, solutions: Sequence[Solution]) -> bytes:
        """The chunk with the usage, which has no choice."""
        return event({**self._chunk_head(), "choices": [], "usage": usage_of(solutions)})

    def content(self, solution: Solution) -> str:
        """What the message of a choice says; empty without an answer."""
        text = {
            "answer": solution.answer,
            "boxed": solution.trajectory.answer,
            "completion": solution.text,
        }[self._request.content]
        return cut_at(text or "", self._request.stop)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        extension: dict[str, Any] | None = None,
        finish: str | None = None,
    ) -> bytes:
        return event(self._chunk_of(index, delta, extension, finish))

    def _chunk_of(
        self,
        index: int,
        delta: dict[str, Any],
        extension: dict[str, Any] | None = None,
        finish: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        if extension is not None:
            choice["rivet"] = extension
        return {**self._chunk_head(), "choices": [choice]}

    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"}

    def _about(self) -> dict[str, Any]:
        return {"seed": self._request.seed, "ignored_messages": self._request.ignored_messages}


def finish_reason(solution: Solution) -> str:
    """`length` where a limit of tokens ended the attempt, else `stop`."""
    return "length" if solution.trajectory.finish == "length" else "stop"


def usage_of(solutions: Sequence[Solution]) -> dict[str, int]:
    """Tokens of the prompt, once, and of all completions, spliced ones included."""
    prompt = len(solutions[0].trajectory.prompt_ids)
    completion = sum(len(solution.trajectory.completion_ids) for solution in solutions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def cut_at(text: str, stop: Sequence[str]) -> str:
    """A text up to the first of some strings."""
    return text[: min((at for s in stop if (at := text.find(s)) >= 0), default=len(text))]


def event(value: dict[str, Any]) -> bytes:
    """A server-sent event. JSON escapes line breaks, so one line holds any text."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"


def error_event(error: RequestError) -> bytes:
    """An error after the stream has begun."""
    return event(error.body)
