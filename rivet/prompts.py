"""Prompts: a problem becomes the token ids that a controller is asked with.

The problem is untrusted text. It is never rendered through the chat template as text: the template
is rendered once around a marker, and the problem's own ids are put in the marker's place.
"""

from __future__ import annotations

from collections.abc import Sequence

from rivet.settings import ProtocolSettings
from rivet.tokenization import ProtocolTokenizer, TokenizerError
from rivet.trajectory import Mode

_MARKER = "\u241aPROBLEM\u241a"

_INTRO = "Solve the problem. Put the final answer in <answer>\\boxed{...}</answer>."
_PYTHON = (
    "You may run Python: write <python>code</python>; what it prints comes back in "
    "<output>...</output>, which you never write yourself."
)
_EXPERTS = (
    'You may consult an expert: write <expert name="NAME">request</expert>, giving everything that '
    'is needed in the request; the reply comes in <reply name="NAME">...</reply>. Experts:'
)
_PLAIN = "Solve the problem. Put the final answer in \\boxed{...}."


class PromptBuilder:
    """Builds prompts for one checkpoint; the same ids for the same problem everywhere.

    Args:
        tokenizer: The controller's tokenizer, with a chat template.
        settings: The protocol as the checkpoint speaks it.
    """

    def __init__(self, tokenizer: ProtocolTokenizer, settings: ProtocolSettings) -> None:
        if not tokenizer.hf.chat_template:
            raise TokenizerError(
                f"{tokenizer.hf.name_or_path or 'the tokenizer'} has no chat template; set one "
                "(tokenizer.chat_template) and save the tokenizer again"
            )
        self._tokenizer = tokenizer
        self._settings = settings
        self._around: dict[Mode, tuple[list[int], list[int]]] = {}

    @property
    def tokenizer(self) -> ProtocolTokenizer:
        """The controller's tokenizer, which reads what the prompts lead to."""
        return self._tokenizer

    def build(
        self, problem: str, mode: Mode = "experts", context: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Prompt ids of a problem, shape (n,). `experts` and `local` share one prompt.

        Args:
            problem: Its statement, untrusted.
            mode: The condition.
            context: Token ids of ours that go behind the problem (`rivet.latent`).
        """
        if mode not in self._around:
            self._around[mode] = self._render(mode)
        before, after = self._around[mode]
        return (*before, *self._tokenizer.encode_untrusted(problem), *context, *after)

    def system_message(self, mode: Mode) -> str:
        """The instructions for a mode; empty for `bare` prompts."""
        if self._settings.prompt == "bare":
            return ""
        if mode == "plain":
            return _PLAIN
        parts = [_INTRO]
        if mode != "no-python":
            parts.append(_PYTHON)
        if mode != "no-expert" and self._settings.experts:
            cards = [f"- {card.name}: {card.skill}" for card in self._settings.experts]
            parts.append("\n".join([_EXPERTS, *cards]))
        return "\n".join(parts)

    def _render(self, mode: Mode) -> tuple[list[int], list[int]]:
        # An explicit system message: some templates insert a default one otherwise.
        system = self.system_message(mode)
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": _MARKER})
        text = str(
            self._tokenizer.hf.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        )
        if text.count(_MARKER) != 1:
            raise TokenizerError("the chat template does not render the user message once")
        before, after = text.split(_MARKER)
        return self._tokenizer.encode(before), self._tokenizer.encode(after)
