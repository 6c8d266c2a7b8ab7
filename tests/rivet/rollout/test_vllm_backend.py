"""The server backend against fake vLLM servers: what is sent, where it stops, what is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from fake_vllm import FakeVLLM, completion, sampled

from rivet.rollout.backend import BackendError, Generation, SamplingParams
from rivet.rollout.vllm_backend import VLLMBackend, call_seed
from rivet.rollout.vllm_server import RequestRefusedError
from rivet.tokenization import ProtocolTokenizer

QUICK: dict[str, Any] = {"health_interval_s": 0.02, "recovery_s": 5.0}


async def generate(
    backend: VLLMBackend, prompt: Sequence[int] = (5, 6), **changes: Any
) -> Generation:
    values: dict[str, Any] = {
        "stop": (),
        "max_new_tokens": 8,
        "sampling": SamplingParams(),
        "seed": 1,
    }
    return await backend.generate(prompt, **(values | changes))


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def test_a_request_says_all_that_the_server_could_have_a_default_for(
    tag_tokenizer: ProtocolTokenizer,
) -> None:
    async with FakeVLLM() as server, VLLMBackend([server.url + "/v1/"], tag_tokenizer) as backend:
        got = await generate(backend, stop=("ab",), banned_ids=(3,), sampling=SamplingParams(0.5))
    (body,) = server.bodies
    assert body == {
        "model": "controller",
        "prompt": [5, 6],
        "max_tokens": 8,
        "n": 1,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
        "seed": call_seed(1, 2),
        "stop": ["ab"],
        "stop_token_ids": sorted(tag_tokenizer.eos_ids),
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logit_bias": {"3": -100.0},
    }
    assert got.finish_reason == "length"
    assert got.ids == sampled([5, 6], call_seed(1, 2), 8, server.vocabulary)
    assert got.logprobs == [-0.5 - n for n in range(8)]


async def test_it_cuts_behind_the_token_that_completes_a_stop_string_or_ends_the_turn(
    tag_tokenizer: ProtocolTokenizer,
) -> None:
    encode, eos = tag_tokenizer.encode, tag_tokenizer.eos_id
    for text, stop, reason in (
        (encode("12 and</python>after"), ("</python>",), "stop"),
        (encode("a greatest x"), ("eates",), "stop"),
        ([*encode("end"), eos, *encode("more")], (), "eos"),
    ):
        wanted = next(
            n
            for n in range(1, len(text) + 1)
            if (text[n - 1] == eos or any(s in tag_tokenizer.decode(text[:n]) for s in stop))
        )
        async with FakeVLLM() as server, VLLMBackend([server.url], tag_tokenizer) as backend:
            server.answer = lambda body, text=text: (200, completion(text, "stop"))
            got = await generate(backend, stop=stop, max_new_tokens=64)
        assert (got.ids, got.finish_reason) == (text[:wanted], reason)
        assert len(got.logprobs) == wanted and len(server.bodies) == 1


async def test_it_goes_on_where_the_server_saw_a_stop_that_the_bytes_do_not_hold(
    tag_tokenizer: ProtocolTokenizer,
) -> None:
    parts = [tag_tokenizer.encode("12 and"), tag_tokenizer.encode(" 18")]
    async with FakeVLLM() as server, VLLMBackend([server.url], tag_tokenizer) as backend:
        server.answer = lambda body: (200, completion(parts[len(server.bodies) - 1], "stop"))
        limit = sum(map(len, parts))
        got = await generate(backend, stop=("zzz",), max_new_tokens=limit)
    assert (got.ids, got.finish_reason) == ([*parts[0], *parts[1]], "length")
    assert server.bodies[1]["prompt"] == [5, 6, *parts[0]]
    assert server.bodies[1]["max_tokens"] == limit - len(parts[0])
    assert server.bodies[1]["seed"] != server.bodies[0]["seed"]


async def test_a_token_that_the_tokenizer_does_not_have_ends_the_call_before_it(
    tag_tokenizer: ProtocolTokenizer,
) -> None:
    known, unknown = tag_tokenizer.encode("12 and"), len(tag_tokenizer.token_bytes)
    async with FakeVLLM() as server, VLLMBackend([server.url], tag_tokenizer) as backend:
        server.answer = lambda body: (200, completion([*known, unknown, *known], "length"))
        shown: list[int] = []
        got = await generate(backend, stop=("</python>",), on_token=shown.append)
    assert (got.ids, got.finish_reason) == (known, "unknown_token")
    assert len(got.logprobs) == len(known) and shown == known


async def test_the_context_bounds_what_is_asked_for(tag_tokenizer: ProtocolTokenizer) -> None:
    async with FakeVLLM(length=10) as server, VLLMBackend([server.url], tag_tokenizer) as backend:
        assert backend.max_context == 10
        assert len((await generate(backend, range(7), max_new_tokens=50)).ids) == 3
        with pytest.raises(BackendError, match="10 tokens; expected less than 10.*max-model-len"):
            await generate(backend, range(10))


async def test_a_server_that_is_killed_in_flight_loses_and_repeats_no_trajectory(
    tag_tokenizer: ProtocolTokenizer,
) -> None:
    async with FakeVLLM() as dying, FakeVLLM() as living:
        dying.delay_s = living.delay_s = 0.05
        urls = [dying.url, living.url]
        async with VLLMBackend(urls, tag_tokenizer, **QUICK) as backend:
            done: list[int] = []

            async def trajectory(n: int) -> list[int]:
                context = [5, n]
                for _ in range(3):  # as the engine does: sample, splice, sample on
                    got = await generate(backend, tuple(context), seed=n, session=str(n))
                    context += [*got.ids, 7]
                done.append(n)
                return context

            tasks = [asyncio.create_task(trajectory(n)) for n in range(40)]
            await until(lambda: len(dying.bodies) >= 30)
            await dying.kill()
            contexts = await asyncio.gather(*tasks)
            assert backend.pool.failovers > 0
    assert sorted(done) == list(range(40))
    for n, context in enumerate(contexts):
        wanted = [5, n]
        for _ in range(3):
            wanted += sampled(wanted, call_seed(n, len(wanted)), 8, living.vocabulary)
            wanted.append(7)
        assert context == wanted


async def test_requests_move_away_from_a_server_that_hangs(
    tag_tokenizer: ProtocolTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeVLLM() as hanging, FakeVLLM() as living:
        async with VLLMBackend([hanging.url, living.url], tag_tokenizer, **QUICK) as backend:
            monkeypatch.setattr("rivet.rollout.vllm_server._QUICK_S", 0.3)
            hanging.is_hung = True
            got = await asyncio.gather(*(generate(backend, seed=n) for n in range(8)))
    assert [g.ids for g in got] == [
        sampled([5, 6], call_seed(n, 2), 8, living.vocabulary) for n in range(8)
    ]
    assert hanging.heads, "it was asked, and kept nobody"


async def test_requests_wait_for_a_server_that_comes_back_and_gets_its_adapter_again(
    tag_tokenizer: ProtocolTokenizer,
) -> None:
    async with FakeVLLM() as server, VLLMBackend([server.url], tag_tokenizer, **QUICK) as backend:
        await backend.use_adapter("step-1", "/one")
        await server.kill()
        waiting = asyncio.create_task(generate(backend))
        await until(lambda: backend.pool.failovers > 0 or backend.pool.left_out())
        await server.start()
        assert len((await waiting).ids) == 8
        assert server.adapters == {"step-1": "/one"}
        assert server.bodies[-1]["model"] == "step-1"


async def test_a_server_of_whole_weights_that_comes_back_is_not_used_again(
    tag_tokenizer: ProtocolTokenizer,
) -> None:
    async with FakeVLLM() as one, FakeVLLM() as two:
        async with VLLMBackend([one.url, two.url], tag_tokenizer, **QUICK) as backend:
            backend.pool.takes_back = False
            await one.kill()
            await asyncio.gather(*(generate(backend, seed=n) for n in range(4)))
            assert backend.pool.left_out() == [one.url]
            await one.start()
            assert await backend.pool._members[0].server.is_healthy()
            await asyncio.sleep(5 * QUICK["health_interval_s"])
            await asyncio.gather(*(generate(backend, seed=n) for n in range(4)))
            assert backend.pool.left_out() == [one.url] and not one.bodies
            await two.kill()
            with pytest.raises(BackendError, match="no vllm server is left"):
                await generate(backend)


async def test_a_server_that_was_started_anew_unnoticed_gets_its_adapter_again(
    tag_tokenizer: ProtocolTokenizer,
) -> None:
    async with FakeVLLM() as server, VLLMBackend([server.url], tag_tokenizer) as backend:
        await backend.use_adapter("step-1", "/one")
        server.adapters.clear()
        assert len((await generate(backend)).ids) == 8
        assert server.adapters == {"step-1": "/one"}


async def test_adapters_are_versions_on_every_server_and_old_ones_are_let_go(
    tag_tokenizer: ProtocolTokenizer,
) -> None:
    async with FakeVLLM() as one, FakeVLLM() as two:
        async with VLLMBackend([one.url, two.url], tag_tokenizer, **QUICK) as backend:
            await backend.use_adapter("step-1", "/1")
            await backend.use_adapter("step-2", "/2")
            for server in (one, two):
                assert server.adapters == {"step-2": "/2"}
            await backend.use_adapter("step-3", "/3", load=False)  # as other processes do
            await asyncio.gather(*(generate(backend, seed=n) for n in range(6)))
            assert {body["model"] for body in one.bodies + two.bodies} == {"step-3"}


async def test_no_server_for_too_long_is_a_fault_that_says_so(
    tag_tokenizer: ProtocolTokenizer,
) -> None:
    quick = QUICK | {"recovery_s": 0.1}
    async with FakeVLLM() as server, VLLMBackend([server.url], tag_tokenizer, **quick) as backend:
        await server.kill()
        with pytest.raises(BackendError, match=f"no vllm server is up since 0.1 s: {server.url}"):
            await generate(backend)


async def test_a_refused_request_is_not_sent_again(tag_tokenizer: ProtocolTokenizer) -> None:
    async with FakeVLLM() as one, FakeVLLM() as two:
        one.answer = two.answer = lambda body: (400, {"error": {"message": "bad top_k"}})
        async with VLLMBackend([one.url, two.url], tag_tokenizer, **QUICK) as backend:
            with pytest.raises(RequestRefusedError, match="400: bad top_k"):
                await generate(backend)
        assert len(one.bodies) + len(two.bodies) == 1


@pytest.mark.parametrize(
    "reply",
    [
        (500, {"error": {"message": "engine"}}),
        (503, b"overloaded"),
        (429, {}),
        (200, b"{ half a rep"),
        (200, {"choices": []}),
        (200, completion([99], "abort")),
    ],
)
async def test_a_failed_reply_is_asked_for_again(
    tag_tokenizer: ProtocolTokenizer, reply: tuple[int, Any]
) -> None:
    async with FakeVLLM() as server, VLLMBackend([server.url], tag_tokenizer, **QUICK) as backend:
        server.answer = lambda body: (
            reply if len(server.bodies) == 1 else (200, completion([98, 99]))
        )
        assert (await generate(backend, max_new_tokens=2)).ids == [98, 99]


async def test_one_failed_request_takes_the_server_from_no_other(
    tag_tokenizer: ProtocolTokenizer,
) -> None:
    async with FakeVLLM() as one, FakeVLLM() as two:
        one.delay_s = two.delay_s = 0.2
        bad = (500, {"error": {"message": "bad luck"}})

        def answer(body: dict[str, Any]) -> tuple[int, Any]:
            return bad if body["prompt"] == [5, 0] else (200, completion([98, 99]))

        one.answer, two.answer = answer, lambda body: (200, completion([98, 99]))
        async with VLLMBackend([one.url, two.url], tag_tokenizer, **QUICK) as backend:
            await asyncio.gather(*(generate(backend, (5, n), max_new_tokens=2) for n in range(8)))
            assert backend.pool.failovers == 1
            assert backend.pool.left_out() == []
    prompts = [body["prompt"][1] for body in one.bodies + two.bodies]
    assert sorted(prompts) == [0, *range(8)]


async def test_one_broken_connection_loses_no_other_request_of_the_server(
    tag_tokenizer: ProtocolTokenizer,
) -> None:
    async with FakeVLLM() as server, VLLMBackend([server.url], tag_tokenizer, **QUICK) as backend:
        server.delay_s = 0.2

        def answer(body: dict[str, Any]) -> tuple[int, Any]:
            if body["prompt"] == [5, 0] and server.bodies.count(body) == 1:
                raise ConnectionError("closed without a reply")
            return 200, completion([98, 99])

        server.answer = answer
        await asyncio.gather(*(generate(backend, (5, n), max_new_tokens=2) for n in range(8)))
        assert backend.pool.failovers == 1
    assert sorted(body["prompt"][1] for body in server.bodies) == [0, *range(8)]


async def test_a_request_that_fails_everywhere_is_a_fault(tag_tokenizer: ProtocolTokenizer) -> None:
    async with FakeVLLM() as server, VLLMBackend([server.url], tag_tokenizer, **QUICK) as backend:
        server.answer = lambda body: (500, {"error": {"message": "broken"}})
        with pytest.raises(BackendError, match="3 attempts failed.*500: broken"):
            await generate(backend)
        assert len(server.bodies) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": None},
        {"logprobs": None},
        {"token_ids": [98, 99, 97]},
        {"logprobs": {"token_logprobs": [None, -1.0]}},
    ],
)
async def test_a_reply_without_ids_and_logprobs_is_refused(
    tag_tokenizer: ProtocolTokenizer, changes: dict[str, Any]
) -> None:
    async with FakeVLLM() as server, VLLMBackend([server.url], tag_tokenizer) as backend:
        server.answer = lambda body: (200, completion([98, 99], **changes))
        with pytest.raises(RequestRefusedError, match="token ids"):
            await generate(backend)


async def test_a_banned_token_and_an_empty_completion_are_faults(
    tag_tokenizer: ProtocolTokenizer,
) -> None:
    async with FakeVLLM() as server, VLLMBackend([server.url], tag_tokenizer) as backend:
        server.answer = lambda body: (200, completion([98, 99]))
        with pytest.raises(BackendError, match="sampled token 99, which is banned"):
            await generate(backend, banned_ids=(99,))
        server.answer = lambda body: (200, completion([]))
        with pytest.raises(BackendError, match="no token"):
            await generate(backend)


async def test_load_is_spread_and_a_session_stays_where_its_prefix_is(
    tag_tokenizer: ProtocolTokenizer,
) -> None:
    async with FakeVLLM() as one, FakeVLLM() as two:
        one.delay_s = two.delay_s = 0.02
        async with VLLMBackend([one.url, two.url], tag_tokenizer, **QUICK) as backend:
            await asyncio.gather(*(generate(backend, (5, n), session=str(n)) for n in range(20)))
            assert (len(one.bodies), len(two.bodies)) == (10, 10)
            await asyncio.gather(*(generate(backend, (5, n), session=str(n)) for n in range(20)))
    for server in (one, two):
        prompts = [body["prompt"] for body in server.bodies]
        assert sorted(prompts[:10]) == sorted(prompts[10:])


async def test_servers_of_different_models_are_refused(tag_tokenizer: ProtocolTokenizer) -> None:
    async with FakeVLLM(root="/a") as one, FakeVLLM(root="/b") as two:
        with pytest.raises(BackendError, match="from /b, but .* from /a; expected the same model"):
            async with VLLMBackend([one.url, two.url], tag_tokenizer):
                pass


@pytest.mark.parametrize("url", ["localhost:8000", "", "ftp://x"])
def test_a_url_must_be_one(tag_tokenizer: ProtocolTokenizer, url: str) -> None:
    with pytest.raises(ValueError, match="expected http://HOST:PORT"):
        VLLMBackend([url], tag_tokenizer)


async def test_a_key_comes_from_the_environment(
    tag_tokenizer: ProtocolTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret-of-mine")
    async with FakeVLLM() as server, VLLMBackend([server.url], tag_tokenizer) as backend:
        server.answer = lambda body: (401, {"error": "Unauthorized"})
        with pytest.raises(RequestRefusedError, match="401: Unauthorized") as caught:
            await generate(backend)
    assert "authorization: bearer secret-of-mine\r\n" in server.heads[-1]
    assert "secret-of-mine" not in str(caught.value)


async def test_who_watches_sees_each_token_before_the_call_is_over(
    tag_tokenizer: ProtocolTokenizer,
) -> None:
    async with FakeVLLM() as server, VLLMBackend([server.url], tag_tokenizer) as backend:
        seen: list[int] = []
        got = await generate(backend, max_new_tokens=30, on_token=seen.append)
    assert seen == got.ids and len(seen) == 30
    assert [body["max_tokens"] for body in server.bodies] == [12, 12, 6]
    assert server.bodies[1]["prompt"] == [5, 6, *got.ids[:12]]
