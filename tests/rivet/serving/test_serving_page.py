"""The web page in Chromium, where there is one: what is seen, by keyboard, on a phone, unharmed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_solver import FakeSolver
from running_server import running

from rivet.pieces import Piece

pytest.importorskip("websockets", reason="Chromium is driven over a WebSocket")
from browser import CHROMIUM, Page, chromium  # noqa: E402

PAGE = Path(__file__).parents[3] / "rivet" / "serving" / "page"
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
PIECES = (
    Piece("controller", "format", "<think>"),
    Piece("controller", "reasoning", f"Let $x^2$ be {HOSTILE} and pay $5 or $6."),
    Piece("controller", "format", '</think><expert name="'),
    Piece("controller", "route", "calc"),
    Piece("controller", "format", '">'),
    Piece("controller", "request", "3 + 4", "calc"),
    Piece("controller", "format", '</expert><reply name="calc">'),
    Piece("controller", "reply", r"Use \(3 + 4\).", "calc"),
    Piece("controller", "format", "<python>"),
    Piece("controller", "code", f"print('{HOSTILE}')", "calc"),
    Piece("controller", "format", "</python>"),
    Piece("environment", "output", HOSTILE, "calc"),
    Piece("controller", "format", "</reply><answer>"),
    Piece("controller", "answer", "7"),
)
ANSWER = r"\frac{1}{2}\href{javascript:alert(3)}{x}\htmlId{status}{y}"

needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")


def seen(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that looks at the page in a browser."""
    return pytest.mark.slow(needs_chromium(test))


def test_the_page_builds_no_html_from_text_and_loads_nothing_from_elsewhere() -> None:
    script = (PAGE / "page.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", script)
    assert "trust: false" in script
    for file in ("index.html", "page.js", "page.css"):
        assert "//" not in re.sub(r"^\s*//.*$| // .*$", "", (PAGE / file).read_text(), flags=re.M)


def test_katex_is_shipped_whole_with_its_licence() -> None:
    style = (PAGE / "katex" / "katex.min.css").read_text()
    fonts = set(re.findall(r"fonts/[\w-]+\.woff2", style))
    assert fonts and all((PAGE / "katex" / font).is_file() for font in fonts)
    assert "MIT License" in (PAGE / "katex" / "LICENSE").read_text()
    assert sum(file.stat().st_size for file in PAGE.rglob("*") if file.is_file()) < 700_000


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A browser for all tests."""
    with chromium(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


def text_of(page: Page, selector: str) -> list[str]:
    """Texts of all nodes that a selector finds."""
    return page.evaluate(f"[...document.querySelectorAll('{selector}')].map((n) => n.textContent)")


@seen
def test_an_attempt_is_shown_by_author_and_hostile_text_stays_text(page: Page) -> None:
    page.complaints.clear()
    with running(FakeSolver(PIECES, ANSWER)) as url:
        page.open(url)
        page.until("document.getElementById('model').textContent === 'm'")
        assert page.evaluate("document.activeElement.id") == "problem"
        page.type(f"What is 3 + 4? {HOSTILE}")
        page.press("Enter")
        page.until("!!document.querySelector('.answer')")
        assert page.evaluate("document.querySelectorAll('article :is(img, script, a)').length") == 0
        headings = ["Reasoning", "Request to calc", "Reply as calc, written by the model itself"]
        assert text_of(page, "h3") == [*headings, "Python", "Output of the sandbox"]
        assert text_of(page, ".block.expert > .block.environment pre") == [HOSTILE]
        assert HOSTILE in text_of(page, ".block.reasoning .text")[0]
        assert page.evaluate("document.querySelectorAll('.block.reasoning .katex').length") == 1
        assert page.evaluate("document.querySelectorAll('.block.reply .katex').length") == 1
        assert page.evaluate("!!document.querySelector('.answer .katex .mfrac')")
        assert page.evaluate("document.querySelectorAll('#status').length") == 1
    # Fonts, styles and scripts all came from the server, and no policy was broken. KaTeX names
    # each forbidden command; that is a warning of its own.
    assert [c for c in page.complaints if "Content Security" in c or "404" in c] == []


@seen
def test_the_keyboard_is_enough(page: Page) -> None:
    solver = FakeSolver()
    with running(solver) as url:
        page.open(url)
        page.until("document.getElementById('model').textContent === 'm'")
        page.type("a")
        page.press("Enter", shift=True)
        page.type("b")
        assert page.evaluate("document.getElementById('problem').value") == "a\nb"
        page.press("Tab")
        assert page.evaluate("document.activeElement.id") == "send"
        solver.go.clear()
        page.press("Enter")
        page.until("document.getElementById('send').disabled")
        page.press("Escape")
        page.until("document.getElementById('status').textContent === 'stopped'")
        assert not page.evaluate("document.getElementById('send').disabled")


@seen
def test_it_fits_a_phone_and_shows_what_went_wrong(page: Page) -> None:
    wide = Piece("controller", "code", "x = " + "1234567890" * 40)
    with running(FakeSolver((wide,), "1" * 200), api_key="k") as url:
        page.open(url, width=360, height=740, is_dark=True)
        page.until("document.getElementById('model').textContent === 'm'")
        page.type("3 + 4")
        page.press("Enter")
        page.until("document.getElementById('status').className === 'alarm'")
        assert "key is missing" in page.evaluate("document.getElementById('status').textContent")
        page.evaluate("document.getElementById('key').value = 'k'")
        page.press("Enter")
        page.until("!!document.querySelector('.answer')")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
