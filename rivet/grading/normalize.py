"""Bring an answer's text into one spelling before it is read.

Owns: Unicode signs, spacing, font and text commands, delimiters, thousands separators and a
trailing full stop. It changes how an answer is written and never what it says; what it cannot
spell out stays as it is and is refused by the reader. Words stay inside `\\text{...}`.
"""

import re
import unicodedata

MAX_LENGTH = 4000

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho "
    "varsigma sigma tau upsilon phi chi psi omega"
).split()
_SIGNS = {
    "−": "-", "–": "-", "‐": "-", "‑": "-", "﹣": "-", "－": "-",
    "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/", "⁄": "/", "∕": "/",
    "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "±": r"\pm ",
    "∓": r"\mp ", "∞": r"\infty ", "√": r"\sqrt ", "∛": r"\sqrt[3] ", "°": r"\degree ",
    "º": r"\degree ", "˚": r"\degree ",
    "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "∖": r"\setminus ",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}",
    "ℂ": r"\mathbb{C}", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ",
    "⟨": r"\langle ", "⟩": r"\rangle ", "′": "'", "’": "'", "。": ".", "，": ",", "、": ",",
    "；": ";", "：": ":", "（": "(", "）": ")", "％": r"\%", "℃": r"\degree C", "⇒": r"\to ",
    "→": r"\to ", "€": r"\euro ", "£": r"\pound ", "≈": r"\approx ", "∨": r"\lor ", "∧": r"\land ",
}  # fmt: skip
_SUPERSCRIPT_RUN = re.compile("[" + "".join(_SUPERSCRIPTS) + "]+")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060-\u2064\ufeff\u202a-\u202e]")
_THIN_SPACE = re.compile("[\u00a0\u2000-\u200a\u202f\u205f\u3000]")

_FONT = (
    r"text|textbf|textit|textrm|textsf|texttt|textnormal|textup|mbox|hbox|mathrm|mathbf|mathit|"
    r"mathsf|mathtt|mathnormal|boldsymbol|bm|bold|rm|bf|emph"
)
_FONT_GROUP = re.compile(rf"\\(?:{_FONT})\s*\{{((?:[^{{}}\\]|\\.|\^\{{-?\d\}})*)\}}")
_DECORATION = re.compile(
    r"\\(?:textcolor|colorbox)\s*\{[^{}]*\}|\\color\s*\{[^{}]*\}|\\checkmark(?![a-zA-Z])"
    r"|\\underline(?=\s*\{)"
)
_UNIT_FRACTION = re.compile(r"\\frac\s*\{\s*\\text\{([^{}]*)\}\s*\}\s*\{\s*\\text\{([^{}]*)\}\s*\}")
_LABEL = re.compile(
    r"^(?:\\text\{\s*)?(?:the\s+)?(?:final\s+)?answer\s*(?:is\s*:?|:|=)\s*(?:\}\s*:?)?(?!\s*$)",
    re.IGNORECASE,
)
_FONT_SWITCH = re.compile(r"\\(?:rm|bf|it|displaystyle|textstyle|limits|nolimits)(?![a-zA-Z])")
_OPERATOR_NAME = re.compile(r"\\operatorname\*?\s*\{\s*([a-zA-Z]+)\s*\}")
_SIZE = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\s*\.?(?=\s*\S|$)")
_SPACE_COMMAND = re.compile(
    r"\\(?:quad|qquad|thinspace|enspace|medspace|thickspace|allowbreak|nobreak)(?![a-zA-Z])"
    r"|\\[,;:> ]|\\(?:hspace|vspace|phantom|hphantom|vphantom)\*?\s*(?:\{[^{}]*\}|[^\\{}\s])|~"
)
_DELIMITER = re.compile(r"\\[()\[\]](?![a-zA-Z])|\$+")
_DEGREE = re.compile(r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degrees?(?![a-zA-Z])|\\textdegree")
_ORDINAL_ENDING = r"(?:\\text\{\s*(?:st|nd|rd|th)\s*\}|(?:st|nd|rd|th)(?![a-zA-Z]))"
_ORDINAL = re.compile(rf"(?<=\d)\s*(?:\^\s*\{{\s*{_ORDINAL_ENDING}\s*\}}|\^?\s*{_ORDINAL_ENDING})")
_OVER = re.compile(r"\{([^{}]*)\\over(?![a-z])([^{}]*)\}")
_CHOOSE = re.compile(r"\{([^{}]*)\\choose(?![a-z])([^{}]*)\}")
_SYNONYMS = [
    (re.compile(rf"\\(?:{names})(?![a-zA-Z])"), spelled)
    for names, spelled in [
        ("dfrac|tfrac|cfrac|nicefrac|sfrac", r"\\frac"),
        ("dbinom|tbinom", r"\\binom"),
        ("leq|leqslant|leqq", r"\\le "),
        ("geq|geqslant|geqq", r"\\ge "),
        ("neq", r"\\ne "),
        ("lt", "<"),
        ("gt", ">"),
        ("lbrace", r"\\{"),
        ("rbrace", r"\\}"),
        ("lbrack", "["),
        ("rbrack", "]"),
        ("lparen", "("),
        ("rparen", ")"),
        ("lvert|rvert|vert|mid", "|"),
        ("varnothing", r"\\emptyset "),
        ("backslash", r"\\setminus "),
        ("bigcup", r"\\cup "),
        ("imath", "i"),
        ("Reals|R", r"\\mathbb{R}"),
        ("colon", ":"),
        ("dots|cdots|ldots", r"\\ldots "),
        ("vee", r"\\lor "),
        ("wedge", r"\\land "),
        ("varepsilon", r"\\epsilon "),
        ("varphi", r"\\phi "),
        ("overrightarrow", r"\\vec"),
    ]
]


def normalize(text: str) -> str:
    """Return the answer in one spelling; equal answers need not become equal texts."""
    text = _plain_unicode(text)
    text = _currency(text).replace(r"\%", "%")
    if "\\begin" not in text:
        # A model that escapes its own output writes `\\\\frac` for `\\frac`.
        text = re.sub(r"\\\\(?=[a-zA-Z])", r"\\", text)
    text = text.replace("\\\\", r" \newline ")
    text = re.sub(r"\{\s*,\s*\}", ",", text)
    text = re.sub(r",\s*(?:\\!|\\,)\s*(?=\d)", ",", text)
    text = text.replace(r"\!", "")
    text = re.sub(r"(?<=\d)\\,(?=\d{3}(?!\d))", "", text)
    text = _SPACE_COMMAND.sub(" ", text)
    text = _SIZE.sub("", text)
    text = _DELIMITER.sub(" ", text)
    text = _DECORATION.sub(" ", _unbox(text))
    text = _OVER.sub(r"\\frac{\1}{\2}", text)
    text = _CHOOSE.sub(r"\\binom{\1}{\2}", text)
    text = _FONT_SWITCH.sub(" ", text)
    text = _OPERATOR_NAME.sub(r"\\\1 ", text)
    text = _DEGREE.sub(r" \\degree ", text)
    for pattern, spelled in _SYNONYMS:
        text = pattern.sub(spelled, text)
    text = _plain_text_groups(text)
    text = _UNIT_FRACTION.sub(r"\\text{ \1/\2}", text)
    text = _ORDINAL.sub("", text)
    text = re.sub(r"\*\*", "", text) if text.startswith("**") else text
    text = re.sub(r"\s+", " ", text).strip()
    label = _LABEL.match(text)
    if label:
        rest = text[label.end() :]
        text = rest if label.group().count("{") == label.group().count("}") else "\\text{" + rest
    text = re.sub(r"\bsq\.", "sq", text)
    text = re.sub(r"(?<![.\s])\s*[.,;:]$", "", text).rstrip()
    return ungroup(text)


def _currency(text: str) -> str:
    """Name the currency signs, so that a dollar sign is not taken for a mathematics delimiter."""
    text = text.replace(r"\$", r"\dollar ")
    if text.count("$") % 2 and re.match(r"\s*-?\s*\$\s*\d", text):
        text = text.replace("$", r"\dollar ", 1)
    return text


def _plain_unicode(text: str) -> str:
    if text.isascii():
        return text
    text = _INVISIBLE.sub("", text)
    text = _SUPERSCRIPT_RUN.sub(lambda match: "^{" + _translate(match.group()) + "}", text)
    text = re.sub(rf"(?<=\d){_THIN_SPACE.pattern}(?=\d{{3}}(?!\d))", "", text)
    out: list[str] = []
    for char in text:
        if char < "\x80":
            out.append(char)
        elif char in _SIGNS:
            out.append(_SIGNS[char])
        elif char in _SUBSCRIPTS:
            out.append("_{" + _SUBSCRIPTS[char] + "}")
        else:
            out.append(_spell(char))
    return "".join(out)


def _translate(superscripts: str) -> str:
    return "".join(_SUPERSCRIPTS[char] for char in superscripts)


def _spell(char: str) -> str:
    """Spell one character that is neither ASCII nor in the tables."""
    composed = unicodedata.normalize("NFKC", char)
    if len(composed) == 1 and "\u03b1" <= composed <= "\u03c9":
        return "\\" + _GREEK[ord(composed) - 0x3B1] + " "
    if unicodedata.category(char) == "Nd":
        return str(unicodedata.decimal(char))
    over, slash, under = composed.partition("⁄")
    if slash and over and under:
        return rf"\frac{{{over}}}{{{under}}}"
    return composed


def _unbox(text: str) -> str:
    """Replace each `\\boxed{x}` and `\\fbox{x}` by `{x}`."""
    return re.sub(r"\\(?:boxed|fbox)(?=\s*\{)", "", text)


def _plain_text_groups(text: str) -> str:
    """Spell every font group as `\\text{words}`, and free those that hold no letter."""

    def spell(match: re.Match[str]) -> str:
        inner = match.group(1)
        is_label = re.fullmatch(r"\s*\([A-Z]\)[\s.:]*", inner)
        inner = re.sub(r"\^\{(-?\d)\}", r"^\1", inner)
        if re.search(r"[^\W\d_]", inner) and "\\" not in inner and not is_label:
            return f"\\text{{{inner}}}"
        return f" {inner} "

    for _ in range(4):
        spelled = _FONT_GROUP.sub(spell, text)
        if spelled == text:
            break
        text = spelled
    return text


def ungroup(text: str) -> str:
    """Drop braces that enclose the whole answer."""
    for _ in range(8):
        if not (text.startswith("{") and matching(text, 0) == len(text) - 1):
            break
        text = text[1:-1].strip()
    return text


def matching(text: str, start: int) -> int:
    """Return the index of the brace that closes the one at `start`, or -1."""
    depth = 0
    index = start
    while index < len(text):
        char = text[index]
        if char == "\\":
            index += 2
            continue
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return index
        index += 1
    return -1
