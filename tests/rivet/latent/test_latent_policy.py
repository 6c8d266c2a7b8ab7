"""The policy that listens: what changes with the experts' states, and that all else is ordinary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load, save_file
from torch import Tensor
from transformers import LlamaForCausalLM
from trl.trainer.utils import add_fused_lm_head

from rivet.checkpoints import CheckpointError
from rivet.latent.adapter import AdapterSettings
from rivet.latent.cache import read_states
from rivet.latent.experts import FrozenExpert, weights_digest
from rivet.latent.policy import PLACEHOLDER, LatentPolicy, LatentPolicyError, load_policy
from rivet.latent.prompts import LatentPrompts, add_placeholder
from rivet.latent.sampling import pad_left, pad_right, sample
from rivet.latent.scoring import positions_of, score
from rivet.latent.states import ExpertStates
from rivet.settings import ProtocolSettings
from rivet.tokenization import ProtocolTokenizer
from tests.conftest import build_tokenizer
from tests.rivet.latent.conftest import NUM_CONTEXT, tiny_llama

PROBLEMS = ["What is 12 + 18?", "3", "Compute 3 + 4 * 5 and say what is 23 and what is 12."]
Inputs = dict[str, Tensor]


@pytest.fixture
def states(experts: list[FrozenExpert]) -> ExpertStates:
    return read_states(experts, PROBLEMS, None)


@pytest.fixture
def prompts(policy: LatentPolicy, tokenizer: ProtocolTokenizer) -> list[tuple[int, ...]]:
    settings = ProtocolSettings(prompt="bare")
    latent = LatentPrompts(tokenizer, settings, policy.config.placeholder_id, NUM_CONTEXT)
    return [latent.build(problem) for problem in PROBLEMS]


@pytest.fixture
def inputs(prompts: list[tuple[int, ...]], states: ExpertStates) -> Inputs:
    """A ragged batch, padded on the left."""
    ids, mask = pad_left(prompts, 1)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": positions_of(mask),
        "expert_states": states.values,
        "expert_mask": states.mask,
    }


def test_placeholders_stand_behind_the_problem_in_each_row_of_a_ragged_batch(
    policy: LatentPolicy, inputs: Inputs, prompts: list[tuple[int, ...]]
) -> None:
    assert len({len(prompt) for prompt in prompts}) == 3
    context = policy.attend(inputs["expert_states"], inputs["expert_mask"]).tokens
    embeds = policy.model._with_context(
        inputs["input_ids"], policy.get_input_embeddings()(inputs["input_ids"]), context
    )
    for row, prompt in enumerate(prompts):
        first = (
            inputs["input_ids"].size(1) - len(prompt) + prompt.index(policy.config.placeholder_id)
        )
        assert torch.equal(embeds[row, first : first + NUM_CONTEXT], context[row])
        others = inputs["input_ids"][row] != policy.config.placeholder_id
        plain = policy.get_input_embeddings()(inputs["input_ids"][row])
        assert torch.equal(embeds[row][others], plain[others])


def test_rows_of_a_padded_batch_are_what_they_are_alone(
    policy: LatentPolicy, inputs: Inputs, prompts: list[tuple[int, ...]], states: ExpertStates
) -> None:
    batched = policy(**inputs).logits
    for row, prompt in enumerate(prompts):
        one = states.rows([row])
        alone = policy(
            input_ids=torch.tensor([prompt]), expert_states=one.values, expert_mask=one.mask
        ).logits
        torch.testing.assert_close(batched[row, -len(prompt) :], alone[0], rtol=1e-4, atol=1e-4)


def test_a_changed_state_changes_the_output_and_shuffled_states_differ(
    policy: LatentPolicy, inputs: Inputs
) -> None:
    before = policy(**inputs).logits[:, -1]
    changed = inputs["expert_states"].clone()
    changed[0, 1, -1, 0] += 1.0
    after = policy(**{**inputs, "expert_states": changed}).logits[:, -1]
    assert not torch.allclose(before[0], after[0], atol=1e-4)
    assert torch.equal(before[1:], after[1:])
    rolled = {name: inputs[name].roll(1, 0) for name in ("expert_states", "expert_mask")}
    shuffled = policy(**{**inputs, **rolled}).logits[:, -1]
    assert all(not torch.allclose(a, b, atol=1e-4) for a, b in zip(before, shuffled, strict=True))


def test_gradients_reach_the_adapter_and_the_policy_and_never_an_expert(
    policy: LatentPolicy, inputs: Inputs, experts: list[FrozenExpert]
) -> None:
    digests = [weights_digest(expert.model) for expert in experts]
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.1)
    policy(**inputs).logits[:, -1].square().mean().backward()
    optimizer.step()
    without = [n for n, p in policy.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []
    for expert in experts:
        assert all(not p.requires_grad and p.grad is None for p in expert.model.parameters())
    assert digests == [weights_digest(expert.model) for expert in experts]


def test_greedy_generation_is_the_same_with_and_without_a_cache_and_from_our_sampler(
    policy: LatentPolicy, inputs: Inputs, prompts: list[tuple[int, ...]], states: ExpertStates
) -> None:
    given = {name: value for name, value in inputs.items() if name != "position_ids"}
    common = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    cached = policy.generate(**given, **common, use_cache=True)
    uncached = policy.generate(**given, **common, use_cache=False)
    assert torch.equal(cached, uncached)
    ours = sample(policy, prompts, states, rows=range(3), seeds=None, max_new_tokens=6, eos_ids=[])
    width = inputs["input_ids"].size(1)
    assert [list(s.ids) for s in ours] == cached[:, width:].tolist()


def test_sampled_logprobs_are_those_that_training_scores(
    policy: LatentPolicy, inputs: Inputs, prompts: list[tuple[int, ...]], states: ExpertStates
) -> None:
    rows = [0, 0, 1, 2, 2]
    eos = int(sample_one_token(policy, prompts, states))
    samples = sample(
        policy,
        prompts,
        states,
        rows=rows,
        seeds=[7, 8, 9, 10, 11],
        max_new_tokens=5,
        eos_ids=[eos],
        temperature=0.7,
    )
    ids, mask = pad_right([s.ids for s in samples], 1)
    scores = policy(
        **inputs,
        completion_ids=ids,
        completion_mask=mask,
        prompt_rows=torch.tensor(rows),
        temperature=0.7,
    )
    for n, one in enumerate(samples):
        expected = torch.tensor(one.logprobs)
        torch.testing.assert_close(
            scores.log_probs[n, : len(expected)], expected, rtol=1e-4, atol=1e-4
        )
        assert one.is_finished == (one.ids[-1] == eos)
        assert eos not in one.ids[:-1]


def sample_one_token(
    policy: LatentPolicy, prompts: list[tuple[int, ...]], states: ExpertStates
) -> int:
    """The token that greedy decoding begins with, so that some samples end early."""
    first = sample(policy, prompts, states, rows=[0], seeds=None, max_new_tokens=1, eos_ids=[])
    return first[0].ids[0]


def test_a_sample_depends_on_its_own_seed_alone(
    policy: LatentPolicy, prompts: list[tuple[int, ...]], states: ExpertStates
) -> None:
    common = {"max_new_tokens": 5, "eos_ids": []}
    together = sample(policy, prompts, states, rows=[0, 1, 2], seeds=[1, 2, 3], **common)
    alone = sample(policy, prompts[1:2], states.rows([1]), rows=[0], seeds=[2], **common)
    assert alone[0].ids == together[1].ids
    assert len({s.ids for s in together}) == 3


def test_a_draw_that_rounds_to_one_never_yields_a_token_that_was_cut_off(
    policy: LatentPolicy,
    prompts: list[tuple[int, ...]],
    states: ExpertStates,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("random.Random.random", lambda self: 1 - 2.0**-26)
    common = {"rows": [0, 1, 2], "max_new_tokens": 2, "eos_ids": []}
    samples = sample(policy, prompts, states, seeds=[1, 2, 3], top_k=2, **common)  # type: ignore
    assert all(logprob > -50 for s in samples for logprob in s.logprobs)


def test_shared_prompts_score_what_whole_rows_and_trls_fused_head_score(
    policy: LatentPolicy, inputs: Inputs
) -> None:
    rows, completion = torch.tensor([0, 2, 2, 1]), torch.randint(2, 200, (4, 3))
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]])
    shared = policy(**inputs, completion_ids=completion, completion_mask=mask, prompt_rows=rows)
    ids = torch.cat([inputs["input_ids"][rows], completion], 1)
    attention = torch.cat([inputs["attention_mask"][rows], mask], 1)
    given = {
        "input_ids": ids,
        "attention_mask": attention,
        "expert_states": inputs["expert_states"][rows],
        "expert_mask": inputs["expert_mask"][rows],
    }
    whole = score(policy(**given).logits[:, -4:-1], completion)
    add_fused_lm_head(policy, outputs=("log_probs", "entropy"))
    fused = policy(**given, labels=ids.masked_fill(attention == 0, -100), fused_lm_head=True)
    there = mask.bool()
    for name in ("log_probs", "entropy"):
        ours = getattr(shared, name)[there]
        torch.testing.assert_close(ours, getattr(whole, name)[there], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours, getattr(fused, name)[:, -3:][there], rtol=1e-4, atol=1e-4)


def test_the_placeholder_leaves_every_end_of_a_turn_in_place() -> None:
    hf = build_tokenizer(["<|im_start|>", "<|im_end|>"], []).hf
    before = ProtocolTokenizer(hf, [5])
    after, placeholder = add_placeholder(before)
    assert after.eos_ids == before.eos_ids == {5, hf.eos_token_id}
    assert after.token_bytes[placeholder] == PLACEHOLDER.encode()


def test_a_placeholder_that_is_sampled_is_an_ordinary_token(
    policy: LatentPolicy, inputs: Inputs
) -> None:
    extra = torch.full((3, 1), policy.config.placeholder_id)
    ids = torch.cat([inputs["input_ids"], extra], 1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 1, dtype=torch.long)], 1)
    given = {**inputs, "input_ids": ids, "attention_mask": mask, "position_ids": positions_of(mask)}
    whole = policy(**given).logits[:, -1]
    first = policy(**inputs, use_cache=True)
    step = policy(
        input_ids=extra,
        attention_mask=mask,
        position_ids=positions_of(mask)[:, -1:],
        past_key_values=first.past_key_values,
        expert_states=inputs["expert_states"],
        expert_mask=inputs["expert_mask"],
    ).logits[:, -1]
    torch.testing.assert_close(whole, step, rtol=1e-4, atol=1e-4)


def test_missing_placeholders_or_states_are_named(policy: LatentPolicy, inputs: Inputs) -> None:
    ids = inputs["input_ids"].clone()
    ids[1][ids[1] == policy.config.placeholder_id] = 5
    with pytest.raises(
        LatentPolicyError, match=f"row 1 .* 0 placeholder .* expected {NUM_CONTEXT}"
    ):
        policy(**{**inputs, "input_ids": ids})
    with pytest.raises(ValueError, match="expected expert_states"):
        policy(**{**inputs, "expert_states": None})
    with pytest.raises(ValueError, match=r"expected \(B, 2 experts"):
        policy(**{**inputs, "expert_states": inputs["expert_states"][:, :1]})


def test_a_saved_policy_reloads_to_equal_logits_and_names_its_experts(
    policy: LatentPolicy, inputs: Inputs, tmp_path: Path
) -> None:
    policy.config.experts = [{"name": "llama", "revision": "abc"}]
    policy.save_pretrained(tmp_path)
    loaded = load_policy(tmp_path)
    assert torch.equal(loaded(**inputs).logits, policy(**inputs).logits)
    assert loaded.config.experts == [{"name": "llama", "revision": "abc"}]
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight


@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16])
def test_the_adapter_of_a_policy_in_bfloat16_is_loaded_as_it_was_trained(
    policy: LatentPolicy, inputs: Inputs, tmp_path: Path, dtype: Any
) -> None:
    tiny_llama(policy.config.text_config.vocab_size).save_pretrained(tmp_path / "causal")
    trained = LatentPolicy.from_causal_lm(
        LlamaForCausalLM.from_pretrained(tmp_path / "causal", dtype=torch.bfloat16),
        placeholder_id=policy.config.placeholder_id,
        adapter=AdapterSettings(**policy.config.adapter),
    )
    trained.save_pretrained(tmp_path / "saved")
    loaded = load_policy(tmp_path / "saved", dtype=dtype)
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded(**inputs).logits, trained(**inputs).logits)
    kept = loaded.state_dict()
    assert all(torch.equal(kept[name], value) for name, value in trained.state_dict().items())


def test_a_broken_checkpoint_is_refused(policy: LatentPolicy, tmp_path: Path) -> None:
    policy.save_pretrained(tmp_path)
    path, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    config, tensors = json.loads(path.read_text()), load(weights.read_bytes())
    path.write_text(json.dumps(config | {"adapter": config["adapter"] | {"num_heads": 7}}))
    with pytest.raises(LatentPolicyError, match=r"cannot be loaded .* no multiple of 7 heads"):
        load_policy(tmp_path)
    path.write_text(json.dumps(config | {"placeholder_id": 10**6}))
    with pytest.raises(LatentPolicyError, match="placeholder_id is 1000000; expected a token"):
        load_policy(tmp_path)
    path.write_text(json.dumps(config))
    del tensors[next(name for name in tensors if "context_adapter" in name)]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(LatentPolicyError, match="1 weights are missing"):
        load_policy(tmp_path)
    weights.write_bytes(b"cut short")
    with pytest.raises(CheckpointError, match="broken weights"):
        load_policy(tmp_path)


def test_a_plain_model_is_no_latent_policy(policy: LatentPolicy, tmp_path: Path) -> None:
    tiny_llama(64).save_pretrained(tmp_path)
    with pytest.raises(LatentPolicyError, match="no latent policy"):
        load_policy(tmp_path)


def test_lora_trains_the_language_model_beside_the_whole_adapter(
    policy: LatentPolicy, inputs: Inputs
) -> None:
    before = policy(**inputs).logits
    adapted = get_peft_model(
        policy,
        LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["context_adapter"]),
    )
    assert torch.equal(adapted(**inputs).logits, before)
    adapted(**inputs).logits.square().mean().backward()
    trained = {n for n, p in adapted.named_parameters() if p.grad is not None}
    assert all("lora_" in n or "context_adapter" in n for n in trained)
    assert any("lora_" in n for n in trained) and any("context_adapter" in n for n in trained)


def test_without_an_adapter_it_is_the_language_model(tokenizer: ProtocolTokenizer) -> None:
    model = tiny_llama(len(tokenizer.hf))
    ids = torch.randint(2, 200, (2, 7))
    expected = model(input_ids=ids).logits
    plain = LatentPolicy.from_causal_lm(model, placeholder_id=4, adapter=None).eval()
    assert torch.equal(plain(input_ids=ids).logits, expected)
    with pytest.raises(LatentPolicyError, match="no adapter"):
        plain.attend(torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1))


def test_heads_that_cap_their_logits_are_refused() -> None:
    model = tiny_llama(64)
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(LatentPolicyError, match="final_logit_softcapping"):
        LatentPolicy.from_causal_lm(model, placeholder_id=4, adapter=None)


@pytest.mark.parametrize("routing", ["static", "constant"])
def test_controls_attend_alike_whatever_the_states_say(routing: str, inputs: Inputs) -> None:
    settings = AdapterSettings(
        ("llama", "gpt"), (48, 24), 2, 32, num_context_tokens=3, width=16, routing=routing
    )
    policy = LatentPolicy.from_causal_lm(tiny_llama(300), placeholder_id=4, adapter=settings)
    context = policy.attend(inputs["expert_states"], inputs["expert_mask"])
    if routing == "constant":
        assert context.attention is None
        assert torch.equal(context.tokens[0], context.tokens[1])
    else:
        assert context.attention is not None
        assert torch.equal(context.attention[0], context.attention[2])
        assert not torch.allclose(context.tokens[0], context.tokens[2])


def test_context_tokens_have_the_size_of_token_embeddings(
    policy: LatentPolicy, inputs: Inputs
) -> None:
    context = policy.attend(inputs["expert_states"], inputs["expert_mask"]).tokens
    size = policy.get_input_embeddings().weight.square().mean().sqrt()
    torch.testing.assert_close(
        context.square().mean(-1).sqrt(), size.expand(3, NUM_CONTEXT), rtol=1e-3, atol=1e-5
    )


def test_attention_sums_to_one_and_leaves_masked_experts_out(
    policy: LatentPolicy, states: ExpertStates
) -> None:
    masked = states.without("gpt")
    attention = policy.attend(masked.values, masked.mask).attention
    assert attention is not None
    torch.testing.assert_close(attention.sum(-1), torch.ones_like(attention.sum(-1)))
    assert not attention[..., 2:4].any()
    nobody = masked.without("llama")
    alone = policy.attend(nobody.values, nobody.mask).attention
    assert alone is not None and bool((alone[..., -1] == 1).all())
