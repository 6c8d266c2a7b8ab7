"""Where the answer is found in a model's text, and when there is none."""

import time

import pytest

from rivet.grading import Grader
from rivet.grading.extract import extract
from rivet.grading.local_kinds import decide_integer


@pytest.fixture(scope="module")
def grader():
    with Grader(workers=1) as shared:
        yield shared


BOXES = [
    (r"so \boxed{5}", "5"),
    (r"\boxed{5} was wrong, hence \boxed{7}.", "7"),
    (r"\boxed {11}", "11"),
    (r"\fbox{42}", "42"),
    (r"\\boxed{42}", "42"),
    (r"\boxed{\boxed{9}}", r"\boxed{9}"),
    (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
    (r"\boxed{\{1,2\}} and \{3\}", r"\{1,2\}"),
    (r"\boxed{14} because \{a,b\} and {x} agree}", "14"),
    (r"Write it in \boxed{}. It is \boxed{9}.", "9"),
    (r"\boxed{9}, as asked in \boxed{}", "9"),
    (r"\boxed{9} and \boxed{\text{ }}", "9"),
    (r"<think>\boxed{5}</think> \boxed{6}", "6"),
    (r"<think>a</think> \boxed{6} <think>b</think> \boxed{7}", "7"),
    (r"scratch \boxed{5}</think> \boxed{6}", "6"),
    (r"{ \boxed{3}", "3"),
    (r"\boxed{12 and later \boxed{15}", "15"),
    ("\\boxed{\n 8 \n}", "8"),
]


@pytest.mark.parametrize(("text", "answer"), BOXES)
def test_the_last_closed_box_is_the_answer(text, answer):
    found = extract(text)
    assert (found.answer, found.source) == (answer, "box")


JOINED = [
    (r"\boxed{3}, \boxed{5}, \boxed{7}", "3, 5, 7"),
    (r"$\boxed{3}$, $\boxed{5}$ and $\boxed{7}$", "3, 5, 7"),
    (r"\boxed{7} \text{ or } \boxed{8}", "7, 8"),
    (r"\boxed{x=1}; \boxed{y=2}", "x=1, y=2"),
    (r"\boxed{4} \boxed{5}", "4, 5"),
    (r"\boxed{2}, \boxed{2}, \boxed{3}", "2, 2, 3"),
    ("$$\\boxed{5}$$\n\n$$\\boxed{5}$$", "5"),
    (r"\boxed{2}. No: \boxed{3}", "3"),
    (r"\boxed{2} plus \boxed{3}", "3"),
    (r"\boxed{2} = \boxed{3}", "3"),
]


@pytest.mark.parametrize(("text", "answer"), JOINED)
def test_boxes_are_one_answer_only_when_nothing_but_a_joiner_stands_between(text, answer):
    assert extract(text).answer == answer


NONE = [
    "",
    "the answer is 5",
    r"so the count is \boxed{12",
    r"\boxed{5} no, \boxed{12",
    r"\boxed{\frac{3}{",
    r"\boxed{}",
    r"<think> maybe \boxed{5} </think> I do not know",
    r"<think> maybe \boxed{5}",
    r"\boxed{5} <think> wait, \boxed{6}",
    r"\boxed 5",
    "5",
]


@pytest.mark.parametrize("text", NONE)
def test_without_a_closed_box_there_is_no_answer_to_reward(text):
    assert extract(text).answer is None


LINES = [
    ("The final answer is 42.", "42"),
    ("**Answer:** 4.", "4"),
    ("Answer: 12\nThat was wrong.\nAnswer: 15", "15"),
    (r"Thus the answer is \[ 42 \]", "42"),
    ("Thus the answer is\n$$ 42 $$", "42"),
    ("Answer: m+n = 256+37 = 293", "m+n = 256+37 = 293"),
    ("48/2 = 24\n#### 24", "24"),
    ("The answer is $\\frac{1}{2}$. I checked it.", r"$\frac{1}{2}$"),
    ("the answer is 3.5", "3.5"),
    ("答案是 5。", "5"),
    ("Final Answer: **(B)**", "(B)"),
]


@pytest.mark.parametrize(("text", "answer"), LINES)
def test_evaluation_may_read_an_explicit_answer_line(text, answer):
    found = extract(text, "eval")
    assert found.answer is not None
    assert found.answer.strip() == answer
    assert found.source == "line"
    assert extract(text, "reward").answer is None


@pytest.mark.parametrize(
    "text",
    [
        "There are 5 red pens and 6 blue ones, and I am not sure how to go on.",
        "Trying 6 gives a contradiction, so 6 is impossible.",
        r"The answer is 5, so \boxed{12",
        r"<think> The answer is 5",
        "I cannot answer 5 questions",
        "Answer:",
    ],
)
def test_evaluation_reads_no_number_in_passing(text):
    assert extract(text, "eval").answer is None


def test_a_box_wins_over_an_answer_line():
    assert extract(r"\boxed{4} Answer: 5", "eval").answer == "4"


def test_an_answer_line_is_reported_apart(grader):
    found = grader.grade_sync("The answer is 42.", "42", mode="eval")
    assert (found.outcome, found.source) == ("right", "line")
    assert grader.grade_sync("The answer is 42.", "42").outcome == "no_answer"
    boxed = grader.grade_sync(r"\boxed{42}", "42", mode="eval")
    assert (boxed.outcome, boxed.source) == ("right", "box")


def test_a_box_without_a_letter_gives_way_to_a_line_with_one(grader):
    text = "We need \\boxed{K \\ll E}, so it is frozen.\n\n**Answer: D**"
    assert grader.grade_sync(text, "D", mode="eval").source == "line"
    assert grader.grade_sync(text, "D", mode="eval").outcome == "right"
    assert grader.grade_sync(text, "D", kind="choice", mode="eval").outcome == "right"
    assert grader.grade_sync(text, "D", kind="choice").outcome == "no_answer"


CHOICES = ["a small cat", "5 m/s", "the flux is conserved", "none of these"]


@pytest.mark.parametrize(
    ("boxed", "outcome"),
    [
        ("C", "right"), ("(C)", "right"), (r"\text{C}", "right"), ("c", "right"), ("C.", "right"),
        ("C: the flux is conserved", "right"), (r"\textbf{(C)} the flux is conserved", "right"),
        ("Option C", "right"), ("[C]", "right"), ("B", "wrong"), ("B) 5 m/s", "wrong"),
        ("F", "wrong"), ("C or D", "no_answer"), ("C, D", "no_answer"), ("5 m/s", "no_answer"),
        ("the flux is conserved", "no_answer"), ("", "no_answer"), ("CD", "no_answer"),
        ("C: none of these", "no_answer"), ("the answer", "no_answer"), ("3", "no_answer"),
        ("(C) or (D)", "no_answer"), ("neither C nor D", "no_answer"),
    ],
)  # fmt: skip
def test_multiple_choice_wants_one_letter(grader, boxed, outcome):
    text = rf"Therefore \boxed{{{boxed}}}."
    assert grader.grade_sync(text, "C", kind="choice", choices=CHOICES).outcome == outcome


def test_extraction_is_linear_in_the_text():
    # A quadratic scan of one of these takes minutes.
    started = time.process_time()
    for text in (
        r"\boxed{" * 50_000,
        "{" * 300_000,
        r"\boxed{1}" * 30_000,
        "answer is " * 30_000,
        "\\" * 300_000,
    ):
        extract(text, "eval")
    assert time.process_time() - started < 20


@pytest.mark.parametrize(
    "text", ["$" + " " * 3900 + "5x", "$" + " " * 1300 + "5" + " " * 1300 + "x"]
)
def test_a_blank_numeral_costs_the_event_loop_no_time(text):
    started = time.process_time()
    assert decide_integer("5", text) is None
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize("text", ["5", " + 5 ", "$5$", "$ -5", "\t$\n5 $ "])
def test_an_integer_is_read_with_blanks_and_dollars_around_it(text):
    expected = "wrong" if "-" in text else "right"
    assert decide_integer("5", text)[0] == expected
