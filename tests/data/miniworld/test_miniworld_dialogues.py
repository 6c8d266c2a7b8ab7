"""Claims about the scripted dialogues: uniform experts, answers from the output, learnable text."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import islice

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from data.miniworld.dialogues import (
    NO_ANSWER,
    code_of,
    scripted_dialogues,
    tokenizer_corpus,
)
from data.miniworld.experts import EXPERTS, route, run_script
from data.miniworld.tasks import FAMILIES, build_split, request_for


@pytest.fixture(scope="module")
def dialogues():
    return list(islice(scripted_dialogues(build_split("train", 100, 0), 7), 6000))


def test_the_expert_is_uniform_and_independent_of_the_family(dialogues):
    counts = Counter((d.problem.meta["family"], d.expert) for d in dialogues)
    assert len(counts) == len(FAMILIES) * len(EXPERTS)
    expected = 6000 / len(counts)
    chi2 = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi2 < 45  # 18 degrees of freedom beyond the fixed families: p = 0.0004


def run_script_or_none(dialogue):
    return None if dialogue.is_failing else run_script(code_of(dialogue.reply))


def test_the_answer_is_the_output_of_the_reply_and_often_not_the_gold(dialogues):
    assert all(d.answer == d.output for d in dialogues if not d.is_failing)
    sound = [d for d in dialogues if d.output == run_script_or_none(d)]
    wrong = sum(dialogue.answer != dialogue.problem.answer for dialogue in sound)
    assert 0.6 < wrong / len(sound) < 0.72  # 1 - (1 + 0.35) / 4 = 0.66


def test_some_outputs_are_long_numbers_that_cannot_be_guessed(dialogues):
    ran = [d for d in dialogues if not d.is_failing]
    surprising = [d for d in ran if d.output != run_script(code_of(d.reply))]
    assert 0.09 < len(surprising) / len(ran) < 0.11
    assert {len(d.output) for d in surprising} == {4, 5, 6}


def test_a_few_programs_fail_and_leave_nothing_to_answer(dialogues):
    failing = [d for d in dialogues if d.is_failing]
    assert 0.04 < len(failing) / len(dialogues) < 0.06
    assert {d.answer for d in failing} == {NO_ANSWER}
    kinds = {d.output.splitlines()[-1].split(":")[0] for d in failing}
    assert kinds == {"NameError", "SyntaxError"}


def test_the_gold_answer_has_no_influence(dialogues):
    from dataclasses import replace

    problems = [replace(p, answer="nonsense") for p in build_split("train", 100, 0)]
    other = islice(scripted_dialogues(problems, 7), 500)
    assert [d.reply for d in other] == [d.reply for d in dialogues[:500]]


def test_requests_copy_the_operands(dialogues):
    assert all(d.request == request_for(d.problem) for d in dialogues)


def test_dialogues_are_reproducible_and_pass_over_every_problem():
    problems = build_split("train", 10, 0)
    one, two = (list(islice(scripted_dialogues(problems, 3), 120)) for _ in range(2))
    assert one == two
    assert {d.problem.id for d in one[:60]} == {p.id for p in problems}
    assert [d.problem.id for d in one[:60]] != [d.problem.id for d in one[60:]]
    with pytest.raises(ValueError, match="at least one"):
        next(scripted_dialogues([], 0))


def test_a_small_bpe_has_one_token_for_every_name_and_verb():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{1,2}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=620, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(tokenizer_corpus(), trainer)
    words = [*EXPERTS, *(family.verb for family in FAMILIES.values()), "print", "from"]
    assert {word: len(tokenizer.encode(word).ids) for word in words} == dict.fromkeys(words, 1)
    pieces = [tokenizer.encode(text).ids for text in tokenizer_corpus(600)]
    assert sum(map(len, pieces)) / 600 < 57  # a dialogue without its dozen tags


def test_the_corpus_never_shows_held_out_operands():
    held_out = {p.problem for p in build_split("test", 100, 0)}
    assert held_out.isdisjoint(tokenizer_corpus(3000))


def test_the_scripts_load_without_torch_or_the_data_sets():
    code = (
        "import sys; import data.miniworld.dialogues;"
        "bad = {'torch', 'transformers', 'reasoning_gym', 'sympy'} & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_competent_route_is_a_quarter_of_uniform_choices(dialogues):
    share = sum(d.expert == route(d.problem.meta["family"]) for d in dialogues) / len(dialogues)
    assert 0.22 < share < 0.28


async def test_an_output_is_what_the_sandbox_shows(dialogues):
    from sandbox import PythonSandbox

    async with PythonSandbox() as box:
        failing = [d for d in dialogues if d.is_failing]
        honest = [d for d in dialogues if d.output == run_script_or_none(d)]
        for dialogue in [*honest[:60], *failing[:30]]:
            result = await box.run(code_of(dialogue.reply))
            status = "error" if dialogue.is_failing else "ok"
            assert (result.status, result.text()) == (status, dialogue.output)
