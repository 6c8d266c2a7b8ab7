"""Configuration of a latent policy: that of its language model, its adapter, whom it listens to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig, PretrainedConfig


class LatentPolicyConfig(PretrainedConfig):
    """Configuration of a latent policy.

    Args:
        text_config: That of the language model, or its dictionary.
        adapter: Fields of `AdapterSettings`; None is a policy without experts.
        placeholder_id: Token whose embedding is replaced.
        experts: Whom it listens to: name, path, revision, fingerprint, layers, last_k, dtype,
            reading; `is_heard` is false where the expert was masked in training.
    """

    model_type = "rivet_latent"
    sub_configs = {"text_config": AutoConfig}  # type: ignore[dict-item] # as transformers does

    def __init__(
        self,
        text_config: PretrainedConfig | dict[str, Any] | None = None,
        adapter: dict[str, Any] | None = None,
        placeholder_id: int = -1,
        experts: Sequence[dict[str, Any]] = (),
        **kwargs: Any,
    ) -> None:
        if text_config is None:
            text_config = AutoConfig.for_model("qwen3")
        if isinstance(text_config, dict):
            given = dict(text_config)
            text_config = AutoConfig.for_model(given.pop("model_type"), **given)
        self.text_config = text_config
        self.adapter = adapter
        self.placeholder_id = placeholder_id
        self.experts = list(experts)
        kwargs.setdefault("tie_word_embeddings", text_config.tie_word_embeddings)
        # Set on both together; left out, the base class would unset that of a loaded model.
        kwargs.setdefault("attn_implementation", text_config._attn_implementation)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            kwargs.setdefault(name, getattr(text_config, name, None))
        super().__init__(**kwargs)

    @property
    def num_context_tokens(self) -> int:
        """K."""
        return self.adapter["num_context_tokens"] if self.adapter else 0
