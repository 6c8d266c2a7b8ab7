"""The load of `stages.bench_rollouts`: who says how much when, in TRL's words and in ours.

Every row has the same prompt ids, the same number of sampled tokens in each turn, the same expert
latencies and the same number of tokens that an expert adds, whoever samples it. Only the text
differs: a tool call of Qwen3's template on one side, `<expert>` and `<reply>` on the other.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import get_training_chat_template, qwen3_chat_template

from rivet.tokenization import ProtocolTokenizer

EXPERT = "ask"
_MEDIAN_S, _P99_S = 1.0, 8.0
_SIGMA = math.log(_P99_S / _MEDIAN_S) / 2.3263  # of the log-normal; 2.3263 is the normal's 99%
_VOCABULARY = 640
_CALL_TEXT = '<tool_call>\n{{"name": "{}", "arguments": {{"call": {}}}}}\n</tool_call>'
_TOOL_RESULT = "The result is 42."


async def ask(call: int) -> str:
    """Ask an expert.

    Args:
        call: Number of the call.

    Returns:
        The reply.
    """
    raise NotImplementedError("only its signature is shown to the model")


@dataclass(frozen=True, slots=True)
class Row:
    """One trajectory.

    Attributes:
        lengths: Tokens that the model samples in each turn; one turn more than calls.
        latencies_s: Of each call.
    """

    lengths: tuple[int, ...]
    latencies_s: tuple[float, ...]


def draw_rows(
    count: int, *, max_calls: int, lengths: tuple[int, int], scale: float, seed: int
) -> list[Row]:
    """Rows with 1 to `max_calls` calls each.

    Args:
        count: Rows.
        max_calls: At most so many calls.
        lengths: Least and most tokens of a turn.
        scale: Latencies are log-normal with median 1 s and 99th percentile 8 s, times this.
        seed: Of the draw.
    """
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        calls = rng.randint(1, max_calls)
        waits = [scale * _MEDIAN_S * math.exp(rng.gauss(0.0, _SIGMA)) for _ in range(calls)]
        rows.append(Row(tuple(rng.randint(*lengths) for _ in range(calls + 1)), tuple(waits)))
    return rows


@dataclass
class Load:
    """Rows, and the tokens that both sides are made to write.

    Attributes:
        rows: From `draw_rows`.
        tokenizer: From `build_tokenizer`.
        prompts: Prompt ids of each row.
        spliced: Tokens that a reply adds with all that is around it.
    """

    rows: Sequence[Row]
    tokenizer: ProtocolTokenizer
    prompts: list[list[int]] = field(init=False)
    spliced: int = field(init=False)

    def __post_init__(self) -> None:
        hf: Any = self.tokenizer.hf
        self.prompts = hf.apply_chat_template(
            [self.messages(n) for n in range(len(self.rows))],
            chat_template=_template(hf),
            tools=[ask],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
        )["input_ids"]
        self.spliced = self._tool_tokens()
        tags = f'<reply name="{EXPERT}">', "</reply>"
        around = sum(len(self.tokenizer.encode(tag)) for tag in tags)
        self._reply = self._filler(self.spliced - around)
        shortest = min(min(row.lengths) for row in self.rows)
        for n, row in enumerate(self.rows):
            for turn in range(len(row.lengths)):
                for script in (self.tool_script(n, turn), self.expert_script(n, turn)):
                    if len(script) != row.lengths[turn]:
                        raise ValueError(f"turns of {shortest} tokens are too short for the tags")

    @property
    def sampled(self) -> int:
        """Tokens that the model writes, all rows."""
        return sum(sum(row.lengths) for row in self.rows)

    @property
    def longest_completion(self) -> int:
        """Tokens of the longest completion, replies included."""
        return max(self.completion_length(n) for n in range(len(self.rows)))

    def rows_of_turn(self, turn: int) -> list[int]:
        """Rows that have a turn of this number."""
        return [n for n, row in enumerate(self.rows) if turn < len(row.lengths)]

    def completion_length(self, n: int) -> int:
        """Tokens of a row's completion, replies included."""
        row = self.rows[n]
        return sum(row.lengths) + len(row.latencies_s) * self.spliced

    @property
    def tool_result(self) -> str:
        """What the tool returns."""
        return _TOOL_RESULT

    @property
    def reply(self) -> str:
        """What the expert says: as many tokens as the tool's result with its template."""
        return self._reply

    def messages(self, n: int) -> list[dict[str, str]]:
        """The prompt of a row, as a conversation."""
        return [{"role": "user", "content": f"Problem {100 + n}: what is the result?"}]

    def call_number(self, n: int, turn: int) -> int:
        """Number of a call, of three digits."""
        return 100 + 3 * n + turn

    def row_of_call(self, call: int) -> tuple[int, int]:
        """Row and turn of a call."""
        return divmod(call - 100, 3)

    def tool_script(self, n: int, turn: int) -> list[int]:
        """What the model writes in a turn with TRL."""
        text = ""
        if turn < len(self.rows[n].latencies_s):
            text = _CALL_TEXT.format(EXPERT, self.call_number(n, turn))
        return self._filled("", [*self.tokenizer.encode(text), self.tokenizer.eos_id], n, turn)

    def expert_script(self, n: int, turn: int) -> list[int]:
        """What the model writes in a turn with rivet."""
        if turn < len(self.rows[n].latencies_s):
            end = self.tokenizer.encode(
                f'</think><expert name="{EXPERT}">{self.call_number(n, turn)}</expert>'
            )
        else:
            end = self.tokenizer.encode("</think><answer>\\boxed{42}</answer>")
            end = [*end, self.tokenizer.eos_id]
        return self._filled("<think>", end, n, turn)

    def _filled(self, start: str, end: list[int], n: int, turn: int) -> list[int]:
        head = self.tokenizer.encode(start)
        missing = self.rows[n].lengths[turn] - len(head) - len(end)
        return [*head, *[self.tokenizer.encode("x")[0]] * missing, *end]

    def _filler(self, count: int) -> str:
        """Text of exactly so many tokens."""
        text = "0 " * count
        while len(self.tokenizer.encode_untrusted(text)) > count:
            text = text[:-1]
        if len(self.tokenizer.encode_untrusted(text)) != count:
            raise ValueError(f"found no text of {count} tokens")
        return text

    def _tool_tokens(self) -> int:
        """Tokens between a tool call and the next turn, as TRL counts them."""
        hf: Any = self.tokenizer.hf
        call = {"type": "function", "function": {"name": EXPERT, "arguments": {}}}
        before: list[dict[str, Any]] = [
            {"role": "user", "content": "dummy"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        after = [*before, {"role": "tool", "name": EXPERT, "content": _TOOL_RESULT}]
        settings = {"chat_template": _template(hf), "tokenize": True, "return_dict": False}
        short = hf.apply_chat_template(before, **settings)
        whole = hf.apply_chat_template(after, add_generation_prompt=True, **settings)
        last = max(n for n, i in enumerate(short) if i == self.tokenizer.eos_id)
        return len(whole) - last - 1


def build_tokenizer() -> ProtocolTokenizer:
    """A small byte-level BPE with Qwen3's chat template, trained on what this load says."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = _wrap(Tokenizer(models.BPE(vocab={p: n for n, p in enumerate(alphabet)}, merges=[])))
    text = plain.apply_chat_template(
        [{"role": "user", "content": "Problem 100: what is the result?"}],
        tools=[ask],
        tokenize=False,
        add_generation_prompt=True,
    )
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        initial_alphabet=alphabet,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator([text, text], trainer)
    return ProtocolTokenizer(_wrap(tokenizer))


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer of the library, with the template that TRL knows how to read tool calls of."""
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    fast.chat_template = qwen3_chat_template
    return fast


def _template(tokenizer: Any) -> str:
    """The template that TRL trains with in the place of the tokenizer's."""
    template = get_training_chat_template(tokenizer)
    if template is None:  # TRL trains with the tokenizer's own
        raise RuntimeError("TRL has no training template for the Qwen3 chat template any more")
    return template
