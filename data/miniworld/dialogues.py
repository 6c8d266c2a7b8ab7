"""Scripted dialogues for the warm start, and the text that the tokenizer is trained on.

A dialogue shows the form of a consultation and nothing of the solution: the expert is drawn
uniformly, whatever the family, its reply is what its script says, and the answer is copied from the
program's output, right or wrong, never from the gold. In a small share the program fails: a
controller that has to write its own replies will write broken programs at first, and must know how
a turn goes on behind a traceback. In another share the output is a number that no program gave: an
output that can be guessed from the operands invites a tiny model to guess long answers instead of
copying them, and one seed in seven never stopped doing so. No tokens here; the warm start renders
them.
"""

from __future__ import annotations

import linecache
import random
import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from data.miniworld.experts import EXPERTS, run_script
from data.miniworld.tasks import FAMILIES, build_split, request_for
from data.problems import Problem

FAILING_SHARE = 0.05
SURPRISING_SHARE = 0.10
NO_ANSWER = "?"  # what a turn is closed with when there is no output to copy
_FENCE = "```python\n"
_CELL = "<cell>"  # the file name in the sandbox's tracebacks


@dataclass(frozen=True, slots=True)
class Dialogue:
    """One scripted attempt at a problem.

    Attributes:
        problem: What is asked.
        expert: Who is consulted.
        request: The request, with the problem's operands.
        reply: The expert's reply: a sentence and one fenced program.
        output: What the program prints, as the sandbox shows it; in `SURPRISING_SHARE` of the
            dialogues an arbitrary number of four to six digits.
        answer: The final answer: the output, or `NO_ANSWER` where the program fails.
        is_failing: Whether the program fails. No expert of the mini-world writes such a program.
    """

    problem: Problem
    expert: str
    request: str
    reply: str
    output: str
    answer: str
    is_failing: bool = False


def scripted_dialogues(problems: Sequence[Problem], seed: int) -> Iterator[Dialogue]:
    """Endless dialogues: every problem once in a random order, then again in another one."""
    if not problems:
        raise ValueError("problems is empty; expected at least one, as from build_split")
    rng = random.Random(f"dialogues\x1f{seed}")
    names = list(EXPERTS)
    order = list(range(len(problems)))
    while True:
        rng.shuffle(order)
        for index in order:
            yield scripted_dialogue(problems[index], rng.choice(names), rng.getrandbits(31))


def scripted_dialogue(problem: Problem, expert: str, seed: int) -> Dialogue:
    """The dialogue of one problem with one expert."""
    request = request_for(problem)
    reply = EXPERTS[expert].reply(request, seed)
    code = code_of(reply)
    rng = random.Random(f"failing\x1f{seed}")
    if rng.random() < FAILING_SHARE:
        broken = _broken(code, rng)
        reply = reply.replace(code, broken)
        return Dialogue(problem, expert, request, reply, _error_of(broken), NO_ANSWER, True)
    output = run_script(code)
    if rng.random() < SURPRISING_SHARE:
        output = str(rng.randrange(1000, 10**6))
    return Dialogue(problem, expert, request, reply, output, output)


def _broken(code: str, rng: random.Random) -> str:
    """The program with a name that nobody defined, or without its last bracket."""
    if rng.random() < 0.5:
        return code[:-1]
    names = "abcdefghijklmnopqrstuvwxyz"
    return re.sub(r"(?<=\()[^()]*?\b\d+", rng.choice(names), code, count=1)


def _error_of(code: str) -> str:
    """What the sandbox shows of a program that fails."""
    linecache.cache[_CELL] = (len(code), None, code.splitlines(keepends=True), _CELL)
    try:
        exec(compile(code, _CELL, "exec"), {"print": lambda *_, **__: None})
    except Exception as error:
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        return "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    raise AssertionError(f"this program does not fail: {code}")


def code_of(reply: str) -> str:
    """The program in a scripted reply."""
    return reply.split(_FENCE, 1)[1].removesuffix("\n```")


def tokenizer_corpus(count: int = 3000, seed: int = 0) -> Iterator[str]:
    """Pieces of text for training a tokenizer: statements, names, requests, replies, outputs.

    Each piece is one span's content, as it stands between two tags, so that no merge learnt here
    crosses a tag. Statements come from the training split only.

    Args:
        count: Number of dialogues.
        seed: Same seed, same text.
    """
    per_family = max(1, min(500, count // len(FAMILIES)))
    dialogues = scripted_dialogues(build_split("train", per_family, seed), seed)
    for _, dialogue in zip(range(count), dialogues, strict=False):
        sentence = dialogue.reply.split(_FENCE, 1)[0].strip()
        yield dialogue.problem.problem
        yield dialogue.expert
        yield dialogue.request
        yield sentence
        yield code_of(dialogue.reply)
        yield dialogue.output
