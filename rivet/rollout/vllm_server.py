"""One vLLM server through its OpenAI endpoint: token ids in and out, LoRA adapters, scores.

Nothing here retries; `rivet.rollout.vllm_pool` decides which server is asked, and what happens when
one fails. Written against vLLM 0.31.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from rivet.rollout.backend import BackendError

_KEY_VARIABLE = "VLLM_API_KEY"
_QUICK_S = 10.0  # health, models
_ADAPTER_S = 300.0


class ServerLostError(BackendError):
    """The server cannot be reached, or broke the connection; another one may do it."""


class RequestFailedError(BackendError):
    """The server is there, but failed at this request or is too busy; worth another try."""


class RequestRefusedError(BackendError):
    """The server refused the request; another one would do the same."""


class AdapterMissingError(BackendError):
    """The server does not know the adapter: it was started anew."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a server serves.

    Attributes:
        name: What requests call it.
        root: Folder or Hub name that it was loaded from, empty if the server does not say.
        max_model_len: Tokens of prompt and completion together.
    """

    name: str
    root: str
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What one request sampled: ids and log-probabilities of shape (n,), and why it ended."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: str


class VLLMServer:
    """A client of one server.

    Args:
        url: Such as `http://127.0.0.1:8000`, with or without `/v1`.
        client: Shared HTTP client.

    Raises:
        ValueError: The URL is none.
    """

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        if not re.match(r"https?://[^/\s]+", url):
            raise ValueError(f"vllm url {url!r}; expected http://HOST:PORT")
        self.url = re.sub(r"(/v1)?/*$", "", url.strip())
        self._client = client
        key = os.environ.get(_KEY_VARIABLE)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def is_healthy(self) -> bool:
        """Whether it answers its health check."""
        try:
            response = await self._client.get(f"{self.url}/health", timeout=_QUICK_S)
        except httpx.HTTPError:
            return False
        return response.status_code == 200

    async def served_model(self) -> ServedModel:
        """The base model that it serves.

        Raises:
            ServerLostError: It does not answer.
            RequestRefusedError: It is no vLLM server, or wants another key.
        """
        reply = await self._send("GET", "/v1/models", timeout_s=_QUICK_S)
        for card in _list(reply.get("data")):
            if isinstance(card, dict) and not card.get("parent"):
                length = card.get("max_model_len")
                if isinstance(length, int) and isinstance(card.get("id"), str):
                    return ServedModel(card["id"], str(card.get("root") or ""), length)
        raise RequestRefusedError(
            f"{self.url}/v1/models: no model with a max_model_len; expected a vLLM server"
        )

    async def complete(self, body: dict[str, Any]) -> Completion:
        """Sample one completion of a prompt given as token ids.

        Raises:
            ServerLostError: It does not answer.
            RequestFailedError: It failed.
            AdapterMissingError: It does not know the adapter.
            RequestRefusedError: It refused, or gave no token ids.
        """
        asked = {**body, "n": 1, "logprobs": 0, "return_token_ids": True}
        choice = self._choice(await self._send("POST", "/v1/completions", asked))
        ids, scores = choice.get("token_ids"), choice.get("logprobs")
        logprobs = scores.get("token_logprobs") if isinstance(scores, dict) else None
        if not _is_list_of(ids, int) or not _is_list_of(logprobs, (int, float)):
            raise RequestRefusedError(
                f"{self.url}: the completion has no token ids or no log-probabilities; expected "
                "vLLM 0.31, started with --logprobs-mode processed_logprobs"
            )
        assert ids is not None and logprobs is not None
        if len(ids) != len(logprobs):
            raise RequestRefusedError(
                f"{self.url}: {len(ids)} token ids, but {len(logprobs)} log-probabilities"
            )
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise RequestFailedError(f"{self.url}: the request ended with {reason!r}")
        return Completion(ids, [float(x) for x in logprobs], reason)

    async def score(self, model: str, ids: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first, given those before it, shape (n - 1,).

        At temperature 1, whatever the sampling is. Errors as in `complete`.
        """
        body = {
            "model": model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
        }
        choice = self._choice(await self._send("POST", "/v1/completions", body))
        places = _list(choice.get("prompt_logprobs"))[1:]
        try:
            return [
                float(place[str(token)]["logprob"])
                for place, token in zip(places, ids[1:], strict=True)
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise RequestRefusedError(
                f"{self.url}: no log-probability for each token of the prompt ({error})"
            ) from error

    async def load_adapter(self, name: str, folder: str) -> None:
        """Load a LoRA adapter under a name that was not used before.

        Args:
            name: A new name for each version: what the server has cached belongs to a name.
            folder: As the server sees it.

        Raises:
            ServerLostError: It does not answer.
            RequestFailedError: It failed.
            RequestRefusedError: It serves no adapters, or cannot load this one.
        """
        body = {"lora_name": name, "lora_path": folder}
        try:
            await self._send("POST", "/v1/load_lora_adapter", body, timeout_s=_ADAPTER_S)
        except (RequestRefusedError, AdapterMissingError) as error:
            if "already been loaded" in str(error):
                return
            raise RequestRefusedError(
                f"{error}. Expected a server with adapters: VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, "
                f"--enable-lora, a --max-lora-rank that is large enough, and {folder} where the "
                "server sees it (`rivet vllm` does all but the last)"
            ) from error

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; fine if it is not there."""
        try:
            await self._send("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        except (RequestRefusedError, AdapterMissingError):
            pass

    async def _send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        limits: dict[str, Any] = {} if timeout_s is None else {"timeout": timeout_s}
        try:
            response = await self._client.request(
                method, f"{self.url}{path}", json=body, headers=self._headers, **limits
            )
        except httpx.HTTPError as error:
            raise ServerLostError(f"{self.url}: {type(error).__name__}: {error}") from error
        if response.status_code == 200:
            return _json(response)
        message = f"{self.url}{path}: {response.status_code}: {_message(response)}"
        # 408, 425, 429: busy; 5xx: broken. Another server, or the same one later, may do it.
        if response.status_code >= 500 or response.status_code in (408, 425, 429):
            raise RequestFailedError(message)
        if response.status_code == 404 and body is not None and "model" in body:
            raise AdapterMissingError(message)
        raise RequestRefusedError(message)

    def _choice(self, reply: dict[str, Any]) -> dict[str, Any]:
        choices = _list(reply.get("choices"))
        if len(choices) != 1 or not isinstance(choices[0], dict):
            raise RequestFailedError(f"{self.url}: {len(choices)} choices; expected one")
        return choices[0]


def _json(response: httpx.Response) -> dict[str, Any]:
    try:
        value = response.json()
    except ValueError:
        # A successful load of an adapter is answered in plain text.
        if response.headers.get("content-type", "").startswith("application/json"):
            raise RequestFailedError(f"{response.url}: the reply is no JSON") from None
        return {}
    return value if isinstance(value, dict) else {}


def _message(response: httpx.Response) -> str:
    """The server's own words, at most 500 characters."""
    try:
        error = response.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:500]
    except (ValueError, KeyError, TypeError):
        return response.text[:500]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_list_of(value: Any, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, list) and all(isinstance(x, kind) for x in value)
