"""The server backend: samples from one or several vLLM servers, token ids in and out.

The same contract as the local backend (`rivet.rollout.local`), token for token: a call ends with
the token that completes a stop string or ends the turn, ids are as sampled, and log-probabilities
are those of the distribution that was drawn from. The servers find stop strings in decoded text; it
is our own search by bytes that counts, so both backends cut at the same token.

Each call sends its whole prefix; the servers' prefix cache finds what they computed before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import httpx

from rivet.rollout.backend import BackendError, Generation, SamplingParams, room_for
from rivet.rollout.stops import StopStrings
from rivet.rollout.vllm_pool import ServerPool
from rivet.rollout.vllm_server import ServedModel, VLLMServer
from rivet.tokenization import ProtocolTokenizer

_WATCHED = 12  # tokens a request while somebody watches
_BAN = -100.0  # what the OpenAI protocol has for "never"


class VLLMBackend:
    """Implements `rivet.rollout.backend.Backend` over vLLM servers. Use it in `async with`.

    Args:
        urls: Of the servers, such as `http://127.0.0.1:8000`; all serve the same model.
        tokenizer: The controller's.
        request_timeout_s: A single request that takes longer is lost.
        health_interval_s: Between two health checks of a server.
        recovery_s: How long requests wait while no server is up.

    Raises:
        ValueError: A URL is none, or there is none.
    """

    streams = True  # `generate` takes `on_token`

    def __init__(
        self,
        urls: Sequence[str],
        tokenizer: ProtocolTokenizer,
        *,
        request_timeout_s: float = 1800.0,
        health_interval_s: float = 2.0,
        recovery_s: float = 120.0,
    ) -> None:
        # Everyone waits for the same servers: our own engine bounds what is in flight.
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(request_timeout_s, connect=10.0, pool=None),
            # An idle connection is let go before the server does it, after 5 s: a request that is
            # sent meanwhile would be lost.
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0
            ),
            trust_env=False,
            # Reading the certificates takes longer than opening everything else.
            verify=any(url.startswith("https") for url in urls),
        )
        self._tokenizer = tokenizer
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        self._served: ServedModel | None = None
        self._model = ""
        self.pool = ServerPool(
            [VLLMServer(url, self._client) for url in dict.fromkeys(urls)],
            health_interval_s=health_interval_s,
            recovery_s=recovery_s,
        )

    async def __aenter__(self) -> VLLMBackend:
        try:
            self._served = await self.pool.open()
        except BaseException:
            await self.close()
            raise
        self._model = self._served.name
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; the servers go on."""
        await self.pool.close()
        await self._client.aclose()

    @property
    def served(self) -> ServedModel:
        """What the servers serve."""
        if self._served is None:
            raise BackendError("the backend is not open; use it in `async with`")
        return self._served

    @property
    def max_context(self) -> int:
        """Longest context in tokens, prompt included."""
        return self.served.max_model_len

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        stop: Sequence[str],
        max_new_tokens: int,
        sampling: SamplingParams,
        seed: int,
        banned_ids: Sequence[int] = (),
        session: str | None = None,
        on_token: Callable[[int], None] | None = None,
    ) -> Generation:
        """Sample a continuation; see `rivet.rollout.backend.Backend.generate`.

        With `on_token` the servers are asked for a few tokens at a time, so that somebody who
        watches sees them come; at a temperature above 0 that is another sample.

        The same seed gives the same tokens on the same server, batch and hardware; unlike the local
        backend's, the draw of a token is not fixed across them.
        """
        room = room_for(
            prompt_ids,
            max_new_tokens,
            self.max_context,
            remedy="start the servers with a larger --max-model-len, or lower the rollout's limits",
        )
        limit = min(max_new_tokens, room)
        stops = self._stop_strings(tuple(stop))
        body = self._body(sampling, stop, banned_ids)
        ids: list[int] = []
        logprobs: list[float] = []
        most = limit if on_token is None else _WATCHED
        while True:
            completion = await self._complete(
                body, [*prompt_ids, *ids], min(most, limit - len(ids)), seed, session
            )
            if not completion.ids:
                raise BackendError("vLLM sampled no token; expected at least one")
            for token, logprob in zip(completion.ids, completion.logprobs, strict=True):
                if token in banned_ids:
                    raise BackendError(f"vLLM sampled token {token}, which is banned")
                if token >= len(self._tokenizer.token_bytes):  # it pads the model's embeddings
                    return Generation(ids, logprobs, "unknown_token")
                ids.append(token)
                logprobs.append(logprob)
                if on_token is not None:
                    on_token(token)
                reason = self._finish_reason(ids, stops, limit)
                if reason is not None:
                    return Generation(ids, logprobs, reason)
            # Somebody watches; or the server saw a stop string in its text that the bytes do not
            # hold: go on from there.

    async def release(self, session: str) -> None:
        """Forget a session's server."""
        self.pool.release(session)

    async def use_adapter(self, name: str, folder: str, *, load: bool = True) -> None:
        """Sample with a LoRA adapter from now on; see `ServerPool.use_adapter`."""
        await self.pool.use_adapter(name, folder, load=load)
        self._model = name

    async def score(self, ids: Sequence[int]) -> dict[str, list[float]]:
        """Log-probabilities of a text on every server: url -> shape (n - 1,), at temperature 1."""
        return await self.pool.on_each(lambda server: server.score(self._model, ids))

    async def _complete(
        self,
        body: dict[str, Any],
        prompt: list[int],
        max_tokens: int,
        seed: int,
        session: str | None,
    ) -> Any:
        asked = {
            **body,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "seed": call_seed(seed, len(prompt)),
        }

        async def work(server: VLLMServer) -> Any:
            # The adapter may have changed since the request was first sent.
            return await server.complete({**asked, "model": self._model})

        return await self.pool.run(work, session=session)

    def _body(
        self, sampling: SamplingParams, stop: Sequence[str], banned_ids: Sequence[int]
    ) -> dict[str, Any]:
        """What does not depend on the position. All that the server could have a default for."""
        body: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop": list(stop),
            "stop_token_ids": sorted(self._tokenizer.eos_ids),
            # The end of the turn is what our tokenizer says, not the model's files.
            "ignore_eos": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
        if banned_ids:
            body["logit_bias"] = {str(token): _BAN for token in banned_ids}
        return body

    def _stop_strings(self, stop: tuple[str, ...]) -> StopStrings:
        if stop not in self._stops:
            self._stops[stop] = StopStrings(stop, self._tokenizer.token_bytes)
        return self._stops[stop]

    def _finish_reason(
        self, ids: Sequence[int], stops: StopStrings, limit: int
    ) -> Literal["stop", "eos", "length"] | None:
        if ids[-1] in self._tokenizer.eos_ids:
            return "eos"
        if stops.completed_by_last(ids):
            return "stop"
        return "length" if len(ids) >= limit else None


def call_seed(seed: int, position: int) -> int:
    """Seed of one request, in [0, 2**63).

    The calls of one trajectory must not repeat the random numbers of its first.
    """
    key = f"{seed}\x1f{position}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
