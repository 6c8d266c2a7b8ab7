"""Prompts of a latent policy: the problem, then K placeholders, then the policy's turn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rivet.latent.policy import PLACEHOLDER
from rivet.prompts import PromptBuilder
from rivet.settings import ProtocolSettings
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Mode


class LatentPrompts(PromptBuilder):
    """Builds prompts with placeholders behind the problem, [x || C].

    The problem's text is encoded as foreign text, so it cannot hold a placeholder.

    Args:
        tokenizer: The policy's.
        settings: How the policy is asked.
        placeholder_id: Token of the policy's vocabulary that stands for a context token.
        num_context_tokens: K; 0 for a policy without experts.
    """

    def __init__(
        self,
        tokenizer: ProtocolTokenizer,
        settings: ProtocolSettings,
        placeholder_id: int,
        num_context_tokens: int,
    ) -> None:
        super().__init__(tokenizer, settings)
        self._context = [placeholder_id] * num_context_tokens

    @property
    def context(self) -> list[int]:
        """The K placeholders."""
        return list(self._context)

    def build(
        self, problem: str, mode: Mode = "plain", context: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """Prompt ids of a problem, shape (P,).

        Args:
            problem: Its statement, untrusted.
            mode: Makes no difference: what is heard changes with the condition, not what is asked.
            context: Tokens in the place of the placeholders; None puts the placeholders there.
        """
        return super().build(problem, "plain", self._context if context is None else context)


def add_placeholder(tokenizer: ProtocolTokenizer) -> tuple[ProtocolTokenizer, int]:
    """The tokenizer with the placeholder as a control token, and the placeholder's id."""
    hf = tokenizer.hf
    if PLACEHOLDER not in hf.get_vocab():
        hf.add_special_tokens(
            {"additional_special_tokens": [PLACEHOLDER]}, replace_extra_special_tokens=False
        )
        tokenizer = ProtocolTokenizer(hf, tokenizer.eos_ids)
    return tokenizer, hf.get_vocab()[PLACEHOLDER]


@torch.no_grad()
def fit_embeddings(model: PreTrainedModel, num_tokens: int) -> None:
    """Make room for new tokens, each the mean of the old ones: unlikely to be sampled."""
    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, torch.nn.Embedding)
    old = embeddings.weight.size(0)
    if num_tokens <= old:
        return
    model.resize_token_embeddings(num_tokens, mean_resizing=False)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        weight = module.weight
        assert isinstance(weight, Tensor)
        weight[old:] = weight[:old].mean(0)
