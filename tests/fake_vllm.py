"""An HTTP server that behaves like vLLM's, or misbehaves as a test asks it to.

What it "samples" is a function of the request's seed and prompt alone, so a test knows what every
trajectory must be, whichever server made it.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

Reply = tuple[int, Any]


def sampled(prompt: list[int], seed: int, limit: int, vocabulary: range) -> list[int]:
    """The tokens of a request."""
    rng = random.Random(f"{seed}/{len(prompt)}/{prompt[-1]}")
    return [rng.choice(vocabulary) for _ in range(limit)]


class FakeVLLM:
    """One server on loopback. Use it in `async with`.

    Attributes:
        bodies: Requests for completions, in the order of arrival.
        heads: Request line and headers of each of those, in lower case.
        adapters: Loaded adapters, name -> folder.
        delay_s: Seconds that a completion takes.
        answer: Replaces the completion of a request: body -> status and reply; None is the usual.
        scores: Log-probabilities of a prompt's tokens but the first: model's name, ids -> values.
        is_hung: Accept everything and answer nothing.
    """

    def __init__(self, *, model: str = "controller", root: str = "", length: int = 512) -> None:
        self.model, self.root, self.length = model, root, length
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.adapters: dict[str, str] = {}
        self.unloaded: list[str] = []
        self.delay_s = 0.0
        self.answer: Callable[[dict[str, Any]], Reply] | None = None
        self.scores: Callable[[str, list[int]], list[float]] | None = None
        self.is_hung = False
        self.vocabulary = range(97, 123)
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> FakeVLLM:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.kill()

    async def start(self) -> None:
        """Listen; after a `kill` again on the same port, with nothing loaded."""
        self.adapters = {}
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """Break every connection and stop listening, as a SIGKILL does."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = next(
                    (
                        int(line.split(":")[1])
                        for line in head.split("\r\n")
                        if line.startswith("content-length")
                    ),
                    0,
                )
                body = json.loads(await reader.readexactly(length) or b"{}")
                if "/v1/completions" in head:
                    self.heads.append(head)
                if self.is_hung:
                    await asyncio.sleep(3600)
                status, reply = await self._reply(head.split(" ")[1], body)
                data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                writer.write(
                    f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
                    f"content-length: {len(data)}\r\n\r\n".encode()
                    + data
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _reply(self, path: str, body: dict[str, Any]) -> Reply:
        if path == "/health":
            return 200, {}
        if path == "/v1/models":
            card = {"id": self.model, "root": self.root, "max_model_len": self.length}
            return 200, {"data": [card, {"id": "an-adapter", "parent": self.model}]}
        if path == "/v1/load_lora_adapter":
            if body["lora_name"] in self.adapters:
                return 400, {"error": {"message": "adapter has already been loaded"}}
            self.adapters[body["lora_name"]] = body["lora_path"]
            return 200, {}
        if path == "/v1/unload_lora_adapter":
            self.unloaded.append(body["lora_name"])
            return (200, {}) if self.adapters.pop(body["lora_name"], None) else (404, {})
        return await self._complete(body)

    async def _complete(self, body: dict[str, Any]) -> Reply:
        self.bodies.append(body)
        await asyncio.sleep(self.delay_s)
        if self.answer is not None:
            return self.answer(body)
        if body["model"] != self.model and body["model"] not in self.adapters:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        if "prompt_logprobs" in body:
            assert self.scores is not None
            values = self.scores(body["model"], body["prompt"])
            places = [
                {str(token): {"logprob": value}}
                for token, value in zip(body["prompt"][1:], values, strict=True)
            ]
            return 200, completion([0], prompt_logprobs=[None, *places])
        ids = sampled(body["prompt"], body["seed"], body["max_tokens"], self.vocabulary)
        return 200, completion(ids)


def completion(ids: list[int], finish_reason: str = "length", **changes: Any) -> dict[str, Any]:
    """A reply with these tokens."""
    choice = {
        "token_ids": ids,
        "logprobs": {"token_logprobs": [-0.5 - n for n in range(len(ids))]},
        "finish_reason": finish_reason,
    }
    return {"choices": [choice | changes]}
