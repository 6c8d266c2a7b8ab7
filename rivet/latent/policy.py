"""The policy pi_theta(y | [x || C]): a causal language model that listens to frozen experts.

The prompt holds K placeholder tokens; in the forward pass their embeddings are replaced by the K
context tokens that the adapter makes of the experts' states. Everything else is an ordinary Hugging
Face model: `generate` with its KV cache, log-probabilities, PEFT, `save_pretrained` and
`from_pretrained`. The experts' states travel as the inputs `expert_states` and `expert_mask`.

Only the first K placeholders of a row are replaced, and only where there is no cache yet, so a
placeholder that is sampled is an ordinary token, in training as in generation. A policy with K = 0
is the plain language model (the control `single`).

Shapes: B = rows, T = completion tokens, P = prompt tokens, V = vocabulary, D = width.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from rivet.checkpoints import check_weights
from rivet.latent.adapter import AdapterSettings, Context, LatentAdapter, embedding_rms
from rivet.latent.policy_config import LatentPolicyConfig
from rivet.latent.scoring import Scores, last_token, positions_of, score

PLACEHOLDER = "<|context|>"
# Heads that do more than a matrix product; ours does not.
_HEAD_EXTRAS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


class LatentPolicyError(ValueError):
    """A model cannot become a latent policy, or its inputs do not fit it."""


class _LatentPreTrainedModel(PreTrainedModel):
    """What the two modules below share."""

    config: LatentPolicyConfig
    config_class = LatentPolicyConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    # It is trained so whatever the language model's format, and must be loaded as it was trained.
    _keep_in_fp32_modules_strict = {"context_adapter"}

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: the language model comes trained, the adapter initialises itself."""


class LatentModel(_LatentPreTrainedModel):
    """The language model's body with the adapter before it.

    Args:
        config: Its configuration.
        language_model: The body; None builds one from the configuration.
    """

    def __init__(
        self, config: LatentPolicyConfig, language_model: PreTrainedModel | None = None
    ) -> None:
        super().__init__(config)
        if language_model is None:
            language_model = AutoModel.from_config(config.text_config)
        self.language_model = language_model
        self.context_adapter: LatentAdapter | None = None
        if config.adapter:
            self.context_adapter = LatentAdapter(AdapterSettings(**config.adapter))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Token embeddings of the language model."""
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embeddings."""
        self.language_model.set_input_embeddings(value)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        expert_states: Tensor | None = None,
        expert_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Hidden states of the language model over the prompt with its context."""
        if inputs_embeds is None:
            if input_ids is None:
                raise LatentPolicyError("expected input_ids or inputs_embeds")
            has_past = past_key_values is not None and past_key_values.get_seq_length() > 0
            inputs_embeds = self.get_input_embeddings()(input_ids)
            if self.context_adapter is not None and not has_past:
                context = self.context_adapter(expert_states, expert_mask)
                inputs_embeds = self._with_context(input_ids, inputs_embeds, context.tokens)
        return self.language_model(
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **kwargs,
        )

    def _with_context(self, input_ids: Tensor, embeds: Tensor, context: Tensor) -> Tensor:
        """Embeddings (B, P, D) with the first K placeholders of each row replaced."""
        num = context.size(1)
        is_placeholder = input_ids == self.config.placeholder_id
        first = is_placeholder & (is_placeholder.cumsum(1) <= num)
        counts = first.sum(1)
        if not bool((counts == num).all()):
            row = int((counts != num).nonzero()[0])
            raise LatentPolicyError(
                f"row {row} of the batch has {int(counts[row])} placeholder tokens (id "
                f"{self.config.placeholder_id}); expected {num}: build prompts with "
                "`rivet.latent.prompts`"
            )
        # Row by row and from left to right, as both sides are laid out.
        source = context.to(embeds.dtype).expand(embeds.size(0), -1, -1)
        return embeds.masked_scatter(first[..., None], source)


class LatentPolicy(_LatentPreTrainedModel, GenerationMixin):
    """A latent policy with its language-model head. Make one with `from_causal_lm`.

    Args:
        config: Its configuration.
        model: Body and adapter; None builds them from the configuration.
        head: The output head; None builds one.
    """

    _tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}

    def __init__(
        self,
        config: LatentPolicyConfig,
        model: LatentModel | None = None,
        head: nn.Linear | None = None,
    ) -> None:
        super().__init__(config)
        self.model = LatentModel(config) if model is None else model
        text = config.text_config
        if head is None:
            head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.lm_head = head
        self.post_init()

    @classmethod
    def from_causal_lm(
        cls,
        causal: PreTrainedModel,
        *,
        placeholder_id: int,
        adapter: AdapterSettings | None,
        experts: Sequence[dict[str, Any]] = (),
        seed: int = 0,
    ) -> LatentPolicy:
        """Put an adapter before a causal language model; its weights are shared, not copied.

        Args:
            causal: The language model that becomes the policy.
            placeholder_id: Token of its vocabulary that stands for a context token.
            adapter: Shape of the adapter; None makes a policy without experts.
            experts: Kept in the configuration, so that a saved policy names whom it needs.
            seed: Of the adapter's initial weights.

        Raises:
            LatentPolicyError: The model's head does more than a matrix product, or the placeholder
                is not in its vocabulary.
        """
        text = causal.config.get_text_config()
        extra = [n for n in _HEAD_EXTRAS if getattr(text, n, None) not in (None, 1, 1.0)]
        if extra:
            raise LatentPolicyError(
                f"{type(causal).__name__} sets {extra[0]} = {getattr(text, extra[0])}; such heads "
                "are not supported as a policy (as an expert any model will do)"
            )
        embeddings: Any = causal.get_input_embeddings()
        if not 0 <= placeholder_id < embeddings.weight.size(0):
            raise LatentPolicyError(
                f"placeholder token {placeholder_id} is not among the {embeddings.weight.size(0)} "
                "embeddings; expected a token of the policy's vocabulary"
            )
        config = LatentPolicyConfig(
            text_config=text,
            adapter=None if adapter is None else adapter.to_dict(),
            placeholder_id=placeholder_id,
            experts=experts,
            dtype=causal.dtype,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            body: Any = causal.base_model
            model = LatentModel(config, body)
            policy = cls(config, model, causal.get_output_embeddings())
        if model.context_adapter is not None:
            rms = embedding_rms(embeddings.weight) * float(getattr(embeddings, "embed_scale", 1.0))
            model.context_adapter.log_gain.data.fill_(rms).log_()
            model.context_adapter.to(embeddings.weight.device)
        old = causal.generation_config
        policy.generation_config = GenerationConfig(
            eos_token_id=old.eos_token_id if old else None,
            pad_token_id=old.pad_token_id if old else None,
            bos_token_id=old.bos_token_id if old else None,
        )
        return policy.train(causal.training)

    def get_input_embeddings(self) -> nn.Module:
        """Token embeddings."""
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embeddings."""
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the head."""
        self.lm_head = new_embeddings

    def attend(self, expert_states: Tensor, expert_mask: Tensor) -> Context:
        """Context tokens and attention of some problems.

        Args:
            expert_states: Shape (B, E, S, W).
            expert_mask: Shape (B, E, S).

        Raises:
            LatentPolicyError: The policy has no adapter.
        """
        if self.model.context_adapter is None:
            raise LatentPolicyError("this policy has no adapter (K = 0): it listens to nobody")
        return self.model.context_adapter(expert_states, expert_mask)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        expert_states: Tensor | None = None,
        expert_mask: Tensor | None = None,
        completion_ids: Tensor | None = None,
        completion_mask: Tensor | None = None,
        prompt_rows: Tensor | None = None,
        temperature: float = 1.0,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | Scores:
        """Logits of every token, or scores of completions that share prompts.

        Args:
            input_ids: Shape (B, P), with K placeholders in each row.
            attention_mask: 1 for tokens, 0 for padding on either side, shape (B, P).
            position_ids: As in transformers.
            past_key_values: As in transformers.
            inputs_embeds: Instead of `input_ids`; no context is put in.
            labels: As in transformers.
            expert_states: H, shape (B, E, S, W); needed where K is above 0.
            expert_mask: True where there is a state, shape (B, E, S).
            completion_ids: Completions, padded on the right, shape (R, T). With them `input_ids`
                are prompts alone, read once each however many completions they have. It is a mode
                of `forward` so that data-parallel wrappers see every gradient.
            completion_mask: 1 for tokens, shape (R, T).
            prompt_rows: Row of each completion's prompt in `input_ids`, shape (R,).
            temperature: Of the distribution that is scored, above 0.
            logits_to_keep: As in transformers.
            **kwargs: Passed to the language model.

        Returns:
            Logits, or with `completion_ids` `Scores`.
        """
        if completion_ids is not None:
            assert input_ids is not None and attention_mask is not None
            assert completion_mask is not None and prompt_rows is not None
            hidden = self._completion_states(
                input_ids,
                attention_mask,
                expert_states,
                expert_mask,
                completion_ids,
                completion_mask,
                prompt_rows,
            )
            return score(self.lm_head(hidden), completion_ids, temperature)
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            expert_states=expert_states,
            expert_mask=expert_mask,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.size(-1), **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )

    def _completion_states(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        expert_states: Tensor | None,
        expert_mask: Tensor | None,
        completion_ids: Tensor,
        completion_mask: Tensor,
        prompt_rows: Tensor,
    ) -> Tensor:
        """Hidden states that predict each completion token, shape (R, T, D)."""
        positions = positions_of(prompt_mask)
        prompts = self.model(
            input_ids=prompt_ids,
            attention_mask=prompt_mask,
            position_ids=positions,
            expert_states=expert_states,
            expert_mask=expert_mask,
            use_cache=True,
        )
        last = last_token(prompts.last_hidden_state, prompt_mask)[prompt_rows]  # (R, D)
        if completion_ids.size(1) == 1:
            return last[:, None]
        cache = prompts.past_key_values
        cache.batch_select_indices(prompt_rows)
        mask = torch.cat([prompt_mask[prompt_rows], completion_mask[:, :-1].to(prompt_mask)], 1)
        rest = self.model(
            input_ids=completion_ids[:, :-1],
            attention_mask=mask,
            position_ids=positions_of(mask)[:, prompt_ids.size(1) :],
            past_key_values=cache,
            use_cache=True,
        )
        return torch.cat([last[:, None], rest.last_hidden_state], 1)


def register() -> None:
    """Let `AutoConfig` and `AutoModelForCausalLM` load saved policies; safe to call twice."""
    AutoConfig.register("rivet_latent", LatentPolicyConfig, exist_ok=True)
    AutoModelForCausalLM.register(LatentPolicyConfig, LatentPolicy, exist_ok=True)


def is_latent(folder: str | Path) -> bool:
    """Whether a checkpoint folder holds a latent policy."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        return False
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # whoever loads it as a model says what is broken
    return isinstance(config, dict) and config.get("model_type") == LatentPolicyConfig.model_type


def load_policy(folder: str | Path, **kwargs: Any) -> LatentPolicy:
    """Load a saved policy, in evaluation mode.

    Raises:
        LatentPolicyError: The folder holds another kind of model, or a broken one.
        rivet.checkpoints.CheckpointError: Its weights are missing or cut short.
    """
    if not is_latent(folder):
        raise LatentPolicyError(
            f"{folder}: no latent policy (model_type {LatentPolicyConfig.model_type} in "
            "config.json); expected a checkpoint as `rivet latent` writes it"
        )
    check_weights(Path(folder))
    register()  # whatever else reads the folder, such as its tokenizer, knows the type then
    try:
        loaded: Any = LatentPolicy.from_pretrained(folder, output_loading_info=True, **kwargs)
    except Exception as error:  # a broken configuration fails in many ways
        raise LatentPolicyError(
            f"{folder}: cannot be loaded as a latent policy ({type(error).__name__}: {error}); "
            "expected a checkpoint as `rivet latent` writes it: copy it again"
        ) from error
    policy, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise LatentPolicyError(
            f"{folder}: {len(missing)} weights are missing, {missing[0]} first; expected a whole "
            "checkpoint: copy it again"
        )
    vocabulary = policy.get_input_embeddings().num_embeddings
    if policy.config.adapter and not 0 <= policy.config.placeholder_id < vocabulary:
        raise LatentPolicyError(
            f"{folder}/config.json: placeholder_id is {policy.config.placeholder_id}; expected a "
            f"token below {vocabulary}: copy the checkpoint again"
        )
    return policy.eval()
