"""The local backend against the plain forward and `generate` of the same model."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rivet.rollout.backend import BackendError, Generation, SamplingParams
from rivet.rollout.decoder import SlotDecoder
from rivet.rollout.fast_step import is_supported
from rivet.rollout.local import LocalBackend
from rivet.rollout.slots import Call
from rivet.tokenization import ProtocolTokenizer

GREEDY = SamplingParams(temperature=0.0)


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(n)] for n in lengths]


async def sample(backend: LocalBackend, prompt: Sequence[int], **changes: Any) -> Generation:
    arguments: dict[str, Any] = {
        "stop": (),
        "max_new_tokens": 12,
        "sampling": SamplingParams(),
        "seed": 7,
    }
    return await backend.generate(prompt, **(arguments | changes))


@torch.no_grad()
def full_logprobs(
    model: torch.nn.Module, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probabilities of ids after the prompt by one forward over everything, shape (n, V)."""
    logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0]
    return (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)


def assert_logprobs(
    model: torch.nn.Module, prompt: Sequence[int], got: Generation, temperature: float = 1.0
) -> None:
    expected = full_logprobs(model, prompt, got.ids, temperature)
    picked = expected.gather(-1, torch.tensor(got.ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(got.logprobs), picked, atol=1e-4, rtol=1e-4)


async def test_greedy_equals_hf_generate_on_ragged_prompts(model, tag_tokenizer) -> None:
    prompts = random_prompts([3, 17, 1, 64, 9, 33, 5, 40])
    async with LocalBackend(model, tag_tokenizer, max_batch=8) as backend:
        got = await asyncio.gather(
            *[sample(backend, p, sampling=GREEDY, max_new_tokens=20) for p in prompts]
        )
    for prompt, generation in zip(prompts, got, strict=True):
        x = torch.tensor([prompt])
        with torch.no_grad():
            expected = model.generate(
                x, attention_mask=torch.ones_like(x), max_new_tokens=20, do_sample=False
            )
        eos = tag_tokenizer.eos_id
        wanted = expected[0, len(prompt) :].tolist()
        wanted = wanted[: wanted.index(eos) + 1] if eos in wanted else wanted
        assert generation.ids == wanted
        assert_logprobs(model, prompt, generation)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])  # the fast step, and the model's forward
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_tokens_that_pad_the_embeddings_are_never_sampled(
    tag_tokenizer, build_model, kind, temperature
) -> None:
    model, size = build_model(tag_tokenizer, kind), len(tag_tokenizer.token_bytes)
    model.resize_token_embeddings(size + 64, mean_resizing=False)
    with torch.no_grad():  # the most likely ones, if they counted
        model.get_output_embeddings().weight[size:] *= 100
    prompts = random_prompts([5, 30, 12, 2])
    params = SamplingParams(temperature=temperature)
    async with LocalBackend(model, tag_tokenizer) as backend:
        got = await asyncio.gather(*[sample(backend, p, sampling=params) for p in prompts])
    for prompt, generation in zip(prompts, got, strict=True):
        assert max(generation.ids) < size
        with torch.no_grad():
            x = torch.tensor([[*prompt, *generation.ids]])
            logits = model(input_ids=x).logits[0, len(prompt) - 1 : -1, :size]
        picked = logits.log_softmax(-1).gather(-1, torch.tensor(generation.ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(generation.logprobs), picked, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_equal_a_full_forward(model, tag_tokenizer, temperature) -> None:
    prompts = random_prompts([5, 30, 12, 2])
    params = SamplingParams(temperature=temperature)
    async with LocalBackend(model, tag_tokenizer) as backend:
        got = await asyncio.gather(
            *[sample(backend, p, sampling=params, seed=n) for n, p in enumerate(prompts)]
        )
    for prompt, generation in zip(prompts, got, strict=True):
        assert_logprobs(model, prompt, generation, temperature)


async def test_a_session_continued_over_splices_equals_a_fresh_run(model, tag_tokenizer) -> None:
    """Three calls with foreign tokens spliced between them, beside other sessions."""
    splices = random_prompts([9, 20, 31, 14], seed=1)

    async def continued(backend: LocalBackend, n: int) -> list[tuple[list[int], Generation]]:
        context, calls = list(random_prompts([10 + 5 * n], seed=n)[0]), []
        for splice in splices[:3]:
            got = await sample(backend, context, seed=n, session=f"s{n}")
            calls.append((context.copy(), got))
            context += got.ids + splice
        return calls

    async with LocalBackend(model, tag_tokenizer, max_batch=4) as backend:
        together = await asyncio.gather(*[continued(backend, n) for n in range(4)])
        for n, calls in enumerate(together):
            for context, got in calls:
                assert_logprobs(model, context, got)
                fresh = await sample(backend, context, seed=n)
                assert fresh.ids == got.ids
                assert fresh.logprobs == pytest.approx(got.logprobs, abs=1e-4)


def record_prefills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of tokens that are computed for calls as they begin, from now on."""
    fed: list[int] = []
    prefill = SlotDecoder.prefill

    def record(self: SlotDecoder, calls: Sequence[Call]) -> tuple[list[int], list[float]]:
        fed.extend(len(call.new_ids) for call in calls)
        return prefill(self, calls)

    monkeypatch.setattr(SlotDecoder, "prefill", record)
    return fed


async def test_a_session_computes_only_what_is_new(qwen3, tag_tokenizer, monkeypatch) -> None:
    fed = record_prefills(monkeypatch)
    prompt, splice = random_prompts([40, 6])
    async with LocalBackend(qwen3, tag_tokenizer) as backend:
        got = await sample(backend, prompt, max_new_tokens=3, session="a")
        fed.clear()
        await sample(backend, [*prompt, *got.ids, *splice], max_new_tokens=1, session="a")
        assert fed == [1 + len(splice)]  # the last sampled token was not in the cache yet
        fed.clear()
        changed = [*prompt[:30], *splice]
        await sample(backend, changed, max_new_tokens=1, session="a")
        assert fed == [len(splice)]  # a prompt that turns off is computed from there


async def test_prompts_with_a_common_beginning_share_its_computation(
    model, tag_tokenizer, monkeypatch
) -> None:
    fed: list[tuple[int, int]] = []
    prefill = SlotDecoder.prefill

    def record(self: SlotDecoder, calls: Sequence[Call]) -> tuple[list[int], list[float]]:
        fed.append((len(calls), max(len(call.new_ids) for call in calls)))
        return prefill(self, calls)

    monkeypatch.setattr(SlotDecoder, "prefill", record)
    system, one, other = random_prompts([30, 10, 7])
    prompts = [[*system, *one]] * 3 + [[*system, *other]]
    async with LocalBackend(model, tag_tokenizer) as backend:
        got = await asyncio.gather(
            *[sample(backend, p, seed=n, max_new_tokens=6) for n, p in enumerate(prompts)]
        )
        assert fed[0] == (1, 40)  # the group's prompt, once
        assert sum(rows * width for rows, width in fed[1:]) <= 3 * 7
        late = await sample(backend, [*system, *other[:2]], seed=9)  # from a slot that is free
        assert fed[-1] in ((1, 1), (1, 2))  # it depends on which slot was free
    for prompt, generation in [*zip(prompts, got, strict=True), ([*system, *other[:2]], late)]:
        assert_logprobs(model, prompt, generation)


async def test_results_do_not_depend_on_batch_mates(model, tag_tokenizer) -> None:
    prompts = random_prompts([8, 25, 3, 60, 14, 31])
    params = SamplingParams(temperature=1.3)
    async with LocalBackend(model, tag_tokenizer) as backend:
        alone = [
            await sample(backend, p, sampling=params, seed=n, max_new_tokens=24)
            for n, p in enumerate(prompts)
        ]
        crowd = [
            sample(backend, p, sampling=params, seed=n, max_new_tokens=24)
            for n, p in enumerate(prompts)
        ]
        noise = [
            sample(backend, p, seed=99 + n, max_new_tokens=5 + n)
            for n, p in enumerate(random_prompts([70] * 20, seed=3))
        ]
        together = await asyncio.gather(*noise, *crowd)
    assert [g.ids for g in together[len(noise) :]] == [g.ids for g in alone]


async def test_seeds_give_different_samples(qwen3, tag_tokenizer) -> None:
    (prompt,) = random_prompts([8])
    async with LocalBackend(qwen3, tag_tokenizer) as backend:
        got = await asyncio.gather(*[sample(backend, prompt, seed=n) for n in range(10)])
    assert len({tuple(g.ids) for g in got}) == 10


async def test_more_calls_than_slots_all_finish_with_their_own_result(qwen3, tag_tokenizer) -> None:
    """Sessions are evicted on the way, and come back."""
    prompts = random_prompts([6] * 12)

    async def two_calls(backend: LocalBackend, n: int) -> list[int]:
        first = await sample(backend, prompts[n], seed=n, session=str(n))
        context = [*prompts[n], *first.ids, 1, 2, 3]
        return first.ids + (await sample(backend, context, seed=n, session=str(n))).ids

    async with LocalBackend(qwen3, tag_tokenizer, max_batch=3) as small:
        got = await asyncio.gather(*[two_calls(small, n) for n in range(12)])
    async with LocalBackend(qwen3, tag_tokenizer, max_batch=64) as large:
        expected = await asyncio.gather(*[two_calls(large, n) for n in range(12)])
    assert got == expected


class Forced:
    """A model whose logits put a script's next token far above the others."""

    def __init__(self, model: Any, script: dict[int, int]) -> None:
        self.original, self.script = model.forward, script

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self.original(*args, **kwargs)
        logits = torch.zeros_like(output.logits)
        for row, position in enumerate(kwargs["position_ids"][:, -1].tolist()):
            logits[row, -1, self.script[position]] = 50.0
        output.logits = logits
        return output


@pytest.fixture
def scripted(tag_tokenizer: ProtocolTokenizer, build_model, monkeypatch: pytest.MonkeyPatch):
    """A backend that writes a given text after a prompt of 4 tokens."""

    def build(text_ids: list[int]) -> LocalBackend:
        model = build_model(tag_tokenizer, "qwen2")  # its own forward decodes
        script = {3 + n: token for n, token in enumerate([*text_ids, *[0] * 20])}
        monkeypatch.setattr(model, "forward", Forced(model, script))
        return LocalBackend(model, tag_tokenizer)

    return build


async def test_a_stop_string_spread_over_tokens_ends_the_call(scripted, tag_tokenizer) -> None:
    ids = [tag_tokenizer.encode(c)[0] for c in "x<b>y"]
    async with scripted(ids) as backend:
        got = await sample(backend, [1, 2, 3, 4], stop=["<b>", "never"], sampling=GREEDY)
    assert (got.ids, got.finish_reason) == (ids[:4], "stop")


async def test_the_last_token_may_reach_past_the_stop_string(scripted, tag_tokenizer) -> None:
    whole = tag_tokenizer.encode("<b>bold</b>")
    ids = next(
        ids
        for ids in (whole[:n] for n in range(1, len(whole)))
        if tag_tokenizer.decode(ids).startswith("<b>bo")
    )
    async with scripted(ids) as backend:
        got = await sample(backend, [1, 2, 3, 4], stop=["b>b"], sampling=GREEDY)
    assert got.finish_reason == "stop"
    assert got.ids == ids[: len(got.ids)]
    text = tag_tokenizer.decode(got.ids)
    assert "b>b" in text and "b>b" not in tag_tokenizer.decode(got.ids[:-1])


async def test_a_control_token_can_be_a_stop_string(scripted, tag_tokenizer) -> None:
    ids = tag_tokenizer.encode("ab</expert>")
    async with scripted(ids) as backend:
        got = await sample(backend, [1, 2, 3, 4], stop=["</expert>"], sampling=GREEDY)
    assert (got.ids, got.finish_reason) == (ids, "stop")


async def test_a_stop_string_in_the_prompt_does_not_count(scripted, tag_tokenizer) -> None:
    ids = [tag_tokenizer.encode(">")[0], tag_tokenizer.eos_id]
    prompt = [tag_tokenizer.encode(c)[0] for c in "xx<b"]
    async with scripted(ids) as backend:
        got = await sample(backend, prompt, stop=["<b>"], sampling=GREEDY)
    assert (got.ids, got.finish_reason) == (ids, "eos")


async def test_the_end_of_turn_is_kept_and_reported(scripted, tag_tokenizer) -> None:
    ids = [*tag_tokenizer.encode("abc"), tag_tokenizer.eos_id]
    async with scripted(ids) as backend:
        got = await sample(backend, [1, 2, 3, 4], stop=["z"], sampling=GREEDY)
    assert (got.ids, got.finish_reason) == (ids, "eos")


async def test_the_limit_and_the_end_of_the_context_are_length(tag_tokenizer, build_model) -> None:
    banned = tuple(tag_tokenizer.eos_ids)
    model = build_model(tag_tokenizer)
    model.config.max_position_embeddings = 20
    async with LocalBackend(model, tag_tokenizer) as backend:
        got = await sample(backend, [1] * 4, max_new_tokens=5, banned_ids=banned)
        assert (len(got.ids), got.finish_reason) == (5, "length")
        got = await sample(backend, [1] * 14, max_new_tokens=50, banned_ids=banned)
        assert (len(got.ids), got.finish_reason) == (6, "length")
        with pytest.raises(BackendError, match="20 tokens"):
            await sample(backend, [1] * 20)


async def test_banned_tokens_are_never_sampled_and_the_rest_is_renormalised(
    qwen3, tag_tokenizer
) -> None:
    (prompt,) = random_prompts([8])
    favourites = full_logprobs(qwen3, prompt, [0])[0].topk(3).indices.tolist()
    async with LocalBackend(qwen3, tag_tokenizer) as backend:
        got = await sample(
            backend, prompt, sampling=GREEDY, banned_ids=favourites, max_new_tokens=1
        )
    expected = full_logprobs(qwen3, prompt, [0])[0]
    expected[favourites] = -torch.inf
    expected = expected.log_softmax(-1)
    assert got.ids == [int(expected.argmax())]
    assert got.logprobs == pytest.approx([float(expected.max())], abs=1e-4)


async def test_an_exception_reaches_every_caller_and_the_backend_lives_on(
    tag_tokenizer, build_model, monkeypatch
) -> None:
    model = build_model(tag_tokenizer)
    good = model.forward

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory")

    async with LocalBackend(model, tag_tokenizer, max_batch=2) as backend:
        monkeypatch.setattr(model, "forward", fail)
        results = await asyncio.gather(
            *[sample(backend, p) for p in random_prompts([5] * 6)], return_exceptions=True
        )
        assert all(isinstance(r, BackendError) and "out of memory" in str(r) for r in results)
        monkeypatch.setattr(model, "forward", good)
        assert (await sample(backend, [1, 2, 3])).ids


async def test_a_watcher_that_fails_costs_its_own_call_only(qwen3, tag_tokenizer) -> None:
    def fail(token: int) -> None:
        raise ValueError("the watcher is broken")

    async with LocalBackend(qwen3, tag_tokenizer, max_batch=2) as backend:
        watched, other = await asyncio.wait_for(
            asyncio.gather(
                sample(backend, [1, 2], on_token=fail),
                sample(backend, [3, 4], on_token=lambda token: None),
                return_exceptions=True,
            ),
            timeout=60,
        )
    assert isinstance(watched, ValueError) and str(watched) == "the watcher is broken"
    assert isinstance(other, Generation)


async def test_closing_fails_what_is_under_way(qwen3, tag_tokenizer) -> None:
    backend = LocalBackend(qwen3, tag_tokenizer, max_batch=1)
    banned = tuple(tag_tokenizer.eos_ids)
    calls = [
        asyncio.create_task(sample(backend, [1, 2], max_new_tokens=500, banned_ids=banned))
        for _ in range(3)
    ]
    await asyncio.sleep(0)
    await backend.close()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert any(isinstance(r, BackendError) for r in results)
    assert all(isinstance(r, BackendError | Generation) for r in results)
    with pytest.raises(BackendError, match="closed"):
        await sample(backend, [1, 2])
    await backend.close()


async def test_a_cancelled_call_frees_its_slot(qwen3, tag_tokenizer, monkeypatch) -> None:
    steps = 0
    is_decoding, is_cancelled = asyncio.Event(), threading.Event()
    decode, loop = SlotDecoder.decode, asyncio.get_running_loop()

    def held(self: SlotDecoder, calls: Sequence[Call]) -> tuple[list[int], list[float]]:
        nonlocal steps
        steps += 1
        loop.call_soon_threadsafe(is_decoding.set)
        assert is_cancelled.wait(60)
        return decode(self, calls)

    monkeypatch.setattr(SlotDecoder, "decode", held)
    banned = tuple(tag_tokenizer.eos_ids)
    async with LocalBackend(qwen3, tag_tokenizer, max_batch=1) as backend:
        task = asyncio.create_task(sample(backend, [1, 2], max_new_tokens=500, banned_ids=banned))
        await is_decoding.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        is_cancelled.set()
        assert (await sample(backend, [3, 4], max_new_tokens=1)).ids  # prefilled, never decoded
    assert steps == 1


async def test_a_released_session_gives_up_its_slot_before_one_that_goes_on(
    qwen3, tag_tokenizer, monkeypatch
) -> None:
    fed = record_prefills(monkeypatch)
    prompts = random_prompts([20, 21, 22])
    async with LocalBackend(qwen3, tag_tokenizer, max_batch=2) as backend:
        for name, prompt in zip("abc", prompts, strict=True):
            if name == "c":
                await backend.release("b")  # used after a: else a would have to go
            await sample(backend, prompt, max_new_tokens=1, session=name)
        await sample(backend, [*prompts[0], 5], max_new_tokens=1, session="a")
    assert fed == [20, 21, 22, 1]


async def test_new_weights_count_after_reset(tag_tokenizer, build_model) -> None:
    model = build_model(tag_tokenizer)
    (prompt,) = random_prompts([30])
    async with LocalBackend(model, tag_tokenizer) as backend:
        first = await sample(backend, prompt, session="s", max_new_tokens=4)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        context = [*prompt, *first.ids, 5]
        stale = await sample(backend, context, session="s", max_new_tokens=4)
        with pytest.raises(AssertionError):
            assert_logprobs(model, context, stale)
        backend.reset()
        fresh = await sample(backend, context, session="s", max_new_tokens=4)
        assert_logprobs(model, context, fresh)


async def test_weights_written_behind_the_version_counter_count_after_reset(
    tag_tokenizer, build_model
) -> None:
    model = build_model(tag_tokenizer)
    (prompt,) = random_prompts([9])
    async with LocalBackend(model, tag_tokenizer) as backend:
        await sample(backend, prompt)
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        backend.reset()
        assert_logprobs(model, prompt, await sample(backend, prompt))


async def test_rows_that_come_and_go_are_decoded_as_one_block(
    model, tag_tokenizer, monkeypatch
) -> None:
    blocks = []
    decode = SlotDecoder.decode

    def watch(self: SlotDecoder, calls: list[Call]) -> Any:
        blocks.append([call.slot.row for call in calls])
        return decode(self, calls)

    monkeypatch.setattr(SlotDecoder, "decode", watch)
    prompts = random_prompts([5, 40, 12, 2, 33, 7, 21, 18])
    lengths = [9, 70, 3, 41, 1, 25, 140, 12]  # beyond what one mask serves, and the first columns

    got_after: list[tuple[list[int], Generation]] = []

    async def turns(backend: LocalBackend, n: int) -> list[int]:
        context = prompts[n]
        for turn in range(3):
            got = await sample(
                backend, context, session=str(n), seed=9 + n, max_new_tokens=lengths[n - turn]
            )
            got_after.append((context, got))
            context = [*context, *got.ids, 7, 8]
        return context

    async with LocalBackend(model, tag_tokenizer, max_batch=6) as backend:
        together = await asyncio.gather(*[turns(backend, n) for n in range(8)])
    async with LocalBackend(model, tag_tokenizer, max_batch=1) as backend:
        alone = [await turns(backend, n) for n in range(8)]
    assert together == alone
    for context, got in got_after:
        assert_logprobs(model, context, got)
    assert all(rows == list(range(len(rows))) for rows in blocks)
    assert {len(rows) for rows in blocks} >= {1, 2, 6}


ORIGINAL = {"original_max_position_embeddings": 16}  # shorter than the prompts below
# The local backend ends at max_position_embeddings, within which `dynamic` is `default`.
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | ORIGINAL,
    "yarn": {"factor": 8.0} | ORIGINAL,
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]} | ORIGINAL,
}


def llama_with(tokenizer: ProtocolTokenizer, kind: str) -> LlamaForCausalLM:
    """A random Llama with biases, norms that are no ones, and rotary frequencies of a kind."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer.token_bytes),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=128,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={"rope_theta": 10000.0, "rope_type": kind, **ROPES[kind]},
    )
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.mark.parametrize("kind", ROPES)
async def test_every_kind_of_rotary_frequencies_is_served(tag_tokenizer, kind) -> None:
    model = llama_with(tag_tokenizer, kind)
    assert is_supported(model)
    (prompt,) = random_prompts([30])
    async with LocalBackend(model, tag_tokenizer) as backend:
        assert_logprobs(model, prompt, await sample(backend, prompt))


def test_the_kinds_of_rotary_frequencies_differ_at_the_lengths_of_their_test(tag_tokenizer) -> None:
    plain, *others = [
        llama_with(tag_tokenizer, kind).model.rotary_emb(torch.ones(1), torch.arange(40)[None])[0]
        for kind in ROPES
        if kind != "dynamic"
    ]
    assert not any(torch.allclose(plain, other, atol=0.1) for other in others)


async def test_training_mode_is_restored_before_the_result_arrives(
    tag_tokenizer, build_model
) -> None:
    model = build_model(tag_tokenizer).train()
    model.model.layers[0].eval()  # a part that the trainer froze stays as it was
    before = [m.training for m in model.modules()]
    seen = []
    original = model.forward

    def watch(*args: Any, **kwargs: Any) -> Any:
        seen.append(any(m.training for m in model.modules()))
        return original(*args, **kwargs)

    model.forward = watch
    async with LocalBackend(model, tag_tokenizer) as backend:
        await sample(backend, [1, 2, 3])
        assert [m.training for m in model.modules()] == before
    assert seen and not any(seen)


async def test_a_cancelled_call_gives_the_model_back_before_the_backend_is_idle(
    tag_tokenizer, build_model
) -> None:
    model = build_model(tag_tokenizer).train()
    attention = model.config._attn_implementation
    is_inside, may_go_on = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        is_inside.set()
        may_go_on.wait(60)

    model.lm_head.register_forward_pre_hook(hold)
    async with LocalBackend(model, tag_tokenizer) as backend:
        await backend.idle()
        call = asyncio.create_task(sample(backend, [1, 2, 3]))
        await asyncio.to_thread(is_inside.wait)
        call.cancel()
        waiting = asyncio.create_task(backend.idle())
        await asyncio.wait([call, waiting], timeout=0.1)
        assert call.cancelled() and not waiting.done() and not model.training
        may_go_on.set()
        await waiting
        assert model.training and model.config._attn_implementation == attention
        assert (await sample(backend, [1, 2, 3])).ids


async def test_the_head_reads_no_strided_view(qwen3, tag_tokenizer) -> None:
    """On a CPU that took hundreds of times as long, in bfloat16 with a large vocabulary."""
    strides = []
    hook = qwen3.lm_head.register_forward_hook(
        lambda _, inputs, __: strides.append((inputs[0].shape, inputs[0].stride()))
    )
    try:
        async with LocalBackend(qwen3, tag_tokenizer, max_batch=4) as backend:
            await asyncio.gather(*(sample(backend, p) for p in random_prompts([9, 12, 7])))
    finally:
        hook.remove()
    prefills = [(shape, stride) for shape, stride in strides if len(shape) == 3]
    assert prefills
    for shape, stride in prefills:
        assert stride == torch.empty(shape).stride()
    assert not qwen3.lm_head._forward_pre_hooks


async def test_attention_implementation_is_restored(qwen3, tag_tokenizer) -> None:
    before = qwen3.config._attn_implementation
    async with LocalBackend(qwen3, tag_tokenizer) as backend:
        await sample(backend, [1, 2, 3])
    assert qwen3.config._attn_implementation == before


async def test_a_peft_model_samples_with_its_adapter(tag_tokenizer, build_model) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        build_model(tag_tokenizer),
        LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    ).eval()
    (prompt,) = random_prompts([12])
    async with LocalBackend(model, tag_tokenizer) as backend:
        got = await sample(backend, prompt)
    assert_logprobs(model, prompt, got)
    with model.disable_adapter(), pytest.raises(AssertionError):
        assert_logprobs(model, prompt, got)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])  # the fast step, and the model's forward
async def test_a_model_prepared_for_bf16_training_samples_in_its_own_type(
    tag_tokenizer, build_model, kind
) -> None:
    """A trainer on a GPU trains in autocast; the local backend samples from the same object."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    model = build_model(tag_tokenizer, kind)
    (prompt,) = random_prompts([12])
    async with LocalBackend(model, tag_tokenizer) as backend:
        before = await sample(backend, prompt)
    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier test's precision stays
    try:
        prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    async with LocalBackend(prepared, tag_tokenizer) as backend:
        assert await sample(backend, prompt) == before


async def test_a_sliding_window_bounds_the_context(tag_tokenizer, build_model) -> None:
    async with LocalBackend(build_model(tag_tokenizer, "gemma3"), tag_tokenizer) as backend:
        assert backend.max_context == 256


@pytest.mark.parametrize(
    ("allowed", "limit", "expected"),
    [(40_960, 0, 4096), (40_960, 8192, 10_240), (9000, 8192, 9000), (8192, 8192, 8192)],
)
async def test_the_context_holds_the_longest_completion_where_the_model_allows(
    tag_tokenizer, build_model, caplog, allowed, limit, expected
) -> None:
    model = build_model(tag_tokenizer)
    model.config.max_position_embeddings = allowed
    async with LocalBackend(model, tag_tokenizer, max_completion_length=limit) as backend:
        assert backend.max_context == expected
    is_warned = "the model's context holds 8192 tokens" in caplog.text
    assert is_warned == (allowed <= limit)


async def test_a_completion_goes_on_past_4096_tokens(tag_tokenizer, build_model) -> None:
    model = build_model(tag_tokenizer)
    model.config.max_position_embeddings = 40_960
    async with LocalBackend(model, tag_tokenizer, max_completion_length=5000) as backend:
        got = await sample(backend, [1] * 4094, max_new_tokens=5)
    assert len(got.ids) == 5
    assert_logprobs(model, [1] * 4094, got)


def test_a_model_with_other_layers_is_refused(tag_tokenizer, build_model) -> None:
    model = build_model(tag_tokenizer)
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="linear_attention"):
        LocalBackend(model, tag_tokenizer)


def test_the_fast_step_takes_only_what_it_computes(tag_tokenizer, build_model) -> None:
    from peft import LoraConfig, get_peft_model

    assert is_supported(build_model(tag_tokenizer, "qwen3"))
    assert is_supported(build_model(tag_tokenizer, "llama"))
    assert not is_supported(build_model(tag_tokenizer, "qwen2"))
    other = build_model(tag_tokenizer)
    other.config.hidden_act = "gelu"
    assert not is_supported(other)
    adapted = get_peft_model(build_model(tag_tokenizer), LoraConfig(target_modules=["q_proj"]))
    assert is_supported(adapted.get_base_model())
