"""Prompts: a problem becomes the token ids that a controller is asked with.

The problem is untrusted text. It is never rendered through the chat template as text: the template
is rendered once around a marker, and the problem's own ids are put in the marker's place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import datetime

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


def strftime_fixed(form: str) -> str:
    """What a chat template that asks for today's date gets: one day, so that prompts never change.

    It is the one that Llama 3.2's template falls back on.
    """
    return datetime(2024, 7, 26).strftime(form)


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

    def statements_in(self, prompt_ids: Sequence[int]) -> list[str]:
        """What may be the problem of a prompt that was built with any system message.

        The text behind each place where the chat template begins a user's message; more than one
        only where a statement itself reads like such a place.
        """
        text = self._tokenizer.decode(prompt_ids)
        found = []
        for before, after in self._frames():
            if text.endswith(after):
                body = text.removesuffix(after)
                found += [body[m.end() :] for m in re.finditer(re.escape(before), body)]
        return [self._tokenizer.unescape(statement) for statement in found]

    def _frames(self) -> list[tuple[str, str]]:
        """What stands right before and behind a user's message, whatever the system message."""
        frames = [self._split("")]
        if self._settings.prompt == "instruct":
            (one, after), (two, _) = self._split("1"), self._split("2")
            frames.append((os.path.commonprefix([one[::-1], two[::-1]])[::-1], after))
        return frames

    def _render(self, mode: Mode) -> tuple[list[int], list[int]]:
        before, after = self._split(self.system_message(mode))
        return self._tokenizer.encode(before), self._tokenizer.encode(after)

    def _split(self, system: str) -> tuple[str, str]:
        """What the chat template puts before and behind a user's message."""
        # An explicit system message: some templates insert a default one otherwise.
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": _MARKER})
        text = str(
            self._tokenizer.hf.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, strftime_now=strftime_fixed
            )
        )
        if text.count(_MARKER) != 1:
            raise TokenizerError("the chat template does not render the user message once")
        before, after = text.split(_MARKER)
        return before, after
