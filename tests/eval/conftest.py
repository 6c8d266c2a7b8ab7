"""Fixtures of the evaluation tests."""

from __future__ import annotations

import pytest

from data.problems import Problem
from rivet.prompts import PromptBuilder
from rivet.settings import ProtocolSettings
from rivet.tokenization import ProtocolTokenizer


@pytest.fixture
def prompts(tag_tokenizer: ProtocolTokenizer) -> PromptBuilder:
    """Bare prompts under the tokenizer with a token per tag."""
    return PromptBuilder(tag_tokenizer, ProtocolSettings(prompt="bare"))


@pytest.fixture
def problems() -> list[Problem]:
    """Twelve problems of two families, all with the answer 6."""
    return [
        Problem(
            f"p{n}", f"gcd of {n} and 12", "6", "toy", "exact", {"family": ("gcd", "sum")[n % 2]}
        )
        for n in range(12)
    ]
