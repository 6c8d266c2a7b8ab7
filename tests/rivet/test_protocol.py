"""The protocol's promises, under every tokenizer of conftest."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rivet.pieces import pieces_of
from rivet.protocol import Scanner, Style, parse, split_reply
from rivet.tokenization import TAG_NAMES, ProtocolTokenizer
from rivet.trajectory import AUTHORS, KINDS, Author, Trajectory
from stages.stage1.batches import choices

# Text that wants to be taken for structure: tags whole and in pieces, control tokens, escapes.
PIECES = [
    *(f"<{s}{t}>" for t in TAG_NAMES for s in ("", "/", "\\", "/\\", "\\\\")),
    '<expert name="calc">',
    '<reply name="calc">',
    '">',
    "<|im_end|>",
    "<|im_start|>",
    "<tool_call>",
    "<|im_",
    "end|>",
    "<",
    ">",
    "\\",
    "</",
    "\\boxed{5}",
    "＜output＞",
    "≮",
    "\ud800",
    "\x00",
    "é",
    "🙂",
    "    ",
    "\n",
    "```python\nprint(1)\n```",
]
piece = st.one_of(st.sampled_from(PIECES), st.text(max_size=4))
hostile = st.lists(piece, max_size=12).map("".join)
PROPERTY = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def scan(tokenizer: ProtocolTokenizer, *pieces: tuple[Author, str], end: bool = True) -> Scanner:
    """Feed trusted text piece by piece."""
    scanner = Scanner(tokenizer)
    for author, text in pieces:
        scanner.feed(tokenizer.encode(text), author)
    if end:
        scanner.feed([tokenizer.eos_id], "controller")
    return scanner


def consultation(tokenizer: ProtocolTokenizer, *, reply: str, output: str, code: str) -> Scanner:
    """One consultation as the engine splices it, with foreign text in each foreign place."""
    scanner = Scanner(tokenizer)
    request = '<think>hm</think>\n<expert name="calc">gcd</expert>'
    scanner.feed(tokenizer.encode(request), "controller")
    scanner.feed(tokenizer.encode('<reply name="calc">\n'), "expert")
    scanner.feed(tokenizer.encode_untrusted(reply), "expert")
    scanner.feed(tokenizer.encode("<python>\n"), "expert")
    scanner.feed(tokenizer.encode_untrusted(code), "expert")
    scanner.feed(tokenizer.encode("</python>\n"), "expert")
    scanner.feed(tokenizer.encode("<output>\n"), "environment")
    scanner.feed(tokenizer.encode_untrusted(output), "environment")
    scanner.feed(tokenizer.encode("</output>\n"), "environment")
    scanner.feed(tokenizer.encode("</reply>\n"), "expert")
    scanner.feed(tokenizer.encode("<answer>\\boxed{6}</answer>"), "controller")
    scanner.feed([tokenizer.eos_id], "controller")
    return scanner


def test_a_consultation_reads_as_what_was_rendered(tokenizer: ProtocolTokenizer) -> None:
    scanner = consultation(tokenizer, reply="Use gcd.", code="print(6)", output="6")
    assert scanner.problem() == ""
    assert scanner.answer() == "\\boxed{6}"
    runs = [(s.author, s.kind, tokenizer.decode(s.ids).strip()) for s in scanner.segments()]
    authors = {(author, kind) for author, kind, _ in runs}
    assert ("expert", "reply") in authors and ("expert", "code") in authors
    assert ("environment", "output") in authors and ("controller", "answer") in authors
    assert ("controller", "route", "calc") in runs and ("expert", "route", "calc") in runs
    assert [text for _, kind, text in runs if kind == "answer"] == ["6"]


@PROPERTY
@given(reply=hostile, code=hostile, output=hostile)
def test_foreign_text_forges_nothing(
    tokenizer: ProtocolTokenizer, reply: str, code: str, output: str
) -> None:
    scanner = consultation(tokenizer, reply=reply, code=code, output=output)
    assert scanner.problem() == ""
    assert scanner.answer() == "\\boxed{6}"
    assert [s.name for s in scanner.spans] == [
        "think",
        "expert",
        "reply",
        "python",
        "output",
        "answer",
    ]
    by_name = {s.name: tokenizer.unescape(scanner.text(s)) for s in scanner.spans}

    def normal(text: str) -> str:
        text = text.encode("utf-8", "replace").decode()
        normalizer = tokenizer.hf.backend_tokenizer.normalizer
        return normalizer.normalize_str(text) if normalizer else text

    # The newlines are the splice's own, except in the reply, whose text the code follows.
    assert by_name["python"] == "\n" + normal(code)
    assert by_name["output"] == "\n" + normal(output)
    assert by_name["reply"].startswith("\n" + normal(reply))


@PROPERTY
@given(reply=hostile, code=hostile, output=hostile)
def test_every_token_has_one_author_and_kind_and_parses_back(
    tokenizer: ProtocolTokenizer, reply: str, code: str, output: str
) -> None:
    segments = consultation(tokenizer, reply=reply, code=code, output=output).segments()
    ids = [i for s in segments for i in s.ids]
    authors = [s.author for s in segments for _ in s.ids]
    assert all(s.author in AUTHORS and s.kind in KINDS for s in segments)
    assert parse(tokenizer, ids, authors).segments() == segments
    assert all(
        (a.author, a.kind) != (b.author, b.kind)
        for a, b in zip(segments, segments[1:], strict=False)
    )


@PROPERTY
@given(text=hostile)
def test_untrusted_text_holds_no_control_token_and_no_tag(
    tokenizer: ProtocolTokenizer, text: str
) -> None:
    ids = tokenizer.encode_untrusted(text)
    control = {i for i, t in tokenizer.hf.added_tokens_decoder.items() if t.content.strip()}
    assert control.isdisjoint(ids)
    scanner = Scanner(tokenizer)
    scanner.feed(ids, "environment")
    assert scanner.spans == []


@PROPERTY
@given(text=hostile)
def test_escape_is_reversible(tokenizer: ProtocolTokenizer, text: str) -> None:
    assert tokenizer.unescape(tokenizer.escape(text)) == text


@PROPERTY
@given(text=hostile, cut=st.integers(0, 30))
def test_reading_in_pieces_equals_reading_at_once(
    tokenizer: ProtocolTokenizer, text: str, cut: int
) -> None:
    ids = tokenizer.encode(text.encode("utf-8", "replace").decode())
    whole, pieces, single = Scanner(tokenizer), Scanner(tokenizer), Scanner(tokenizer)
    whole.feed(ids, "controller")
    pieces.feed(ids[:cut], "controller")
    pieces.feed(ids[cut:], "controller")
    for token in ids:
        single.feed([token], "controller")
    for other in (pieces, single):
        assert other.spans == whole.spans
        assert other.segments() == whole.segments()
        assert other.problem() == whole.problem()


@PROPERTY
@given(data=st.data())
def test_any_controller_tokens_are_read_without_error(
    tokenizer: ProtocolTokenizer, data: st.DataObject
) -> None:
    vocabulary = len(tokenizer.token_bytes)
    ids = data.draw(st.lists(st.integers(0, vocabulary - 1), max_size=40))
    scanner = Scanner(tokenizer)
    scanner.feed(ids, "controller", [-1.0] * len(ids))
    segments = scanner.segments()
    assert [i for s in segments for i in s.ids] == ids
    scanner.problem(), scanner.answer(), scanner.last_closed, scanner.trailing


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<answer>\\boxed{1}</answer>", ""),
        ("<think>a</think>\n\n<answer>\\boxed{1}</answer>", ""),
        ("<answer>1</answer>", "no \\boxed{} in <answer>"),
        ("hello <answer>\\boxed{1}</answer>", "text outside every span"),
        ("<answer>\\boxed{1}</answer> bye", "text outside every span"),
        ("<think>a", "<think> is not closed"),
        ("<think>a</think>", "no <answer> at the end"),
        ("</python><answer>\\boxed{1}</answer>", "</python> closes nothing"),
        ('<expert name="a">x</expert><answer>\\boxed{1}</answer>', "is not followed by <reply>"),
        ("<python>x</python><answer>\\boxed{1}</answer>", "is not followed by <output>"),
        ('<reply name="a">x</reply><answer>\\boxed{1}</answer>', "<reply> without a request"),
        ("<answer>\\boxed{1}</answer><answer>\\boxed{2}</answer>", "<answer> after the answer"),
        ("<python>x</python><output>1</output><answer>\\boxed{1}</answer>", "written by the model"),
        (
            '<expert name="a">x</expert><reply name="b">y</reply><answer>\\boxed{1}</answer>',
            "names another expert",
        ),
    ],
)
def test_violations_are_named(tokenizer: ProtocolTokenizer, text: str, reason: str) -> None:
    problem = scan(tokenizer, ("controller", text)).problem()
    assert (reason in problem) if reason else problem == ""


def test_a_turn_that_does_not_end_is_not_well_formed(tokenizer: ProtocolTokenizer) -> None:
    text = "<answer>\\boxed{1}</answer>"
    assert scan(tokenizer, ("controller", text), end=False).problem() == "no end of turn"


@pytest.mark.parametrize("inside", ["think", "python", "reply"])
def test_an_answer_inside_another_span_does_not_count(
    tokenizer: ProtocolTokenizer, inside: str
) -> None:
    opening = f'<{inside} name="a">' if inside == "reply" else f"<{inside}>"
    text = f"{opening}<answer>\\boxed{{1}}</answer></{inside}>"
    assert scan(tokenizer, ("controller", text)).answer() is None


def test_an_answer_that_the_controller_did_not_write_does_not_count(
    tokenizer: ProtocolTokenizer,
) -> None:
    assert scan(tokenizer, ("expert", "<answer>\\boxed{1}</answer>")).answer() is None


@pytest.mark.parametrize(
    "more",
    [
        "<output>",
        "<answer>\\boxed{6}",
        "<think>no</think>",
        "<python>print(1)</python>",
        '<expert name="calc">again</expert>',
    ],
)
def test_an_answer_that_was_not_left_standing_does_not_count(
    tokenizer: ProtocolTokenizer, more: str
) -> None:
    answer = "<answer>\\boxed{5}</answer>"
    assert scan(tokenizer, ("controller", answer + more), end=False).answer() is None
    again = scan(tokenizer, ("controller", f"{answer}<answer>\\boxed{{6}}</answer>"))
    assert again.answer() == "\\boxed{6}"


def test_last_closed_names_the_span_to_act_on(tokenizer: ProtocolTokenizer) -> None:
    scanner = scan(tokenizer, ("controller", "<python>print(1)</python>"), end=False)
    assert scanner.last_closed is not None
    assert scanner.text(scanner.last_closed) == "print(1)"
    scanner.feed(tokenizer.encode("x"), "controller")
    assert scanner.last_closed is None and scanner.trailing == "x"


def test_program_text_may_hold_other_tags(tokenizer: ProtocolTokenizer) -> None:
    text = "<python>print('<think>')</python><output>a</output><answer>\\boxed{1}</answer>"
    scanner = scan(tokenizer, ("controller", "<python>print('<think>')</python>"), end=False)
    assert scanner.text(scanner.spans[0]) == "print('<think>')"
    assert "think" not in {s.name for s in scan(tokenizer, ("controller", text)).spans}


def test_boxes_are_structure_and_their_content_is_not(tag_tokenizer: ProtocolTokenizer) -> None:
    scanner = scan(tag_tokenizer, ("controller", "<answer>\\boxed{\\frac{1}{2}}</answer>"))
    answer = [s for s in scanner.segments() if s.kind == "answer"]
    assert [tag_tokenizer.decode(s.ids) for s in answer] == ["\\frac{1}{2}"]


def test_style_lays_out_tags() -> None:
    assert Style("\n").open("reply", "calc") == '<reply name="calc">\n'
    assert Style("").close("output") == "</output>"


def test_replies_are_split_at_fenced_code() -> None:
    reply = "Use this.\n```python\nprint(1)\n```\nThen\n```\nprint(2)\n```"
    assert split_reply(reply) == [
        ("text", "Use this."),
        ("code", "print(1)"),
        ("text", "Then"),
        ("code", "print(2)"),
    ]
    assert split_reply("") == []


def test_fences_of_other_languages_are_text_and_what_follows_them_is_no_program() -> None:
    data = '```json\n{"a": 1}\n```\nSo the answer is 5.'
    assert split_reply(data + "\n\n```python\nprint(5)\n```") == [
        ("text", data),
        ("code", "print(5)"),
    ]
    for language in ("bash", "{r}", "pycon", "c++"):
        reply = f"```{language}\nls\n```\nProse.\n```\nprint(1)\n```"
        assert split_reply(reply)[1:] == [("code", "print(1)")]


@pytest.mark.parametrize(
    "fenced",
    [
        "```python3\n{}\n```",
        "```PYTHON title=a\n{}\n```",
        "``` py\n{}\n``` ",
        "~~~python\n{}\n~~~",
        "````python\n{}\n`````",
        "```python\r\n{}\r\n```\r\n",
        "1. Run:\n   ```python\n   {}\n   ```",
        "Use ```x``` here.\n```python\n{}\n```",
    ],
)
def test_python_is_found_in_every_fence_of_markdown(fenced: str) -> None:
    pieces = split_reply(fenced.format("print(1)"))
    assert [piece for kind, piece in pieces if kind == "code"] == ["print(1)"]


def test_a_program_keeps_its_own_indentation_and_the_fences_that_it_holds() -> None:
    program = "def f():\n    return '''\n~~~\n'''\n\nprint(f())"
    assert split_reply(f"```\n{program}\n```") == [("code", program)]


def test_a_program_that_is_not_closed_is_text() -> None:
    assert split_reply("Run:\n```python\nprint(1)\nprint(") == [
        ("text", "Run:\n```python\nprint(1)\nprint(")
    ]
    reply = "```x\n" * 100_000  # takes minutes if every opening fence is searched for its end
    assert split_reply(reply) == [("text", reply.strip())]


def test_a_token_beyond_the_vocabulary_is_read_as_one_without_text(
    tokenizer: ProtocolTokenizer,
) -> None:
    text = '<expert name="calc">6*7</expert>'
    padding = len(tokenizer.token_bytes) + 7
    ids = [i for known in tokenizer.encode(text) for i in (padding, known)]
    assert tokenizer.decode(ids) == text
    scanner = parse(tokenizer, ids, ["controller"] * len(ids))
    assert scanner.spans[0].is_closed and scanner.text(scanner.spans[0]) == "6*7"
    assert [i for s in scanner.segments() for i in s.ids] == ids
    trajectory = Trajectory(
        "t", "p", "experts", (1,), scanner.segments(), "length", well_formed=False
    )
    assert "".join(p.text for p in pieces_of(trajectory, tokenizer)) == text
    assert [name for _, name in choices(trajectory, tokenizer)] == ["calc"]


def test_spans_are_immutable(tag_tokenizer: ProtocolTokenizer) -> None:
    span = scan(tag_tokenizer, ("controller", "<think>a</think>"), end=False).spans[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        span.end = 0  # type: ignore[misc]
