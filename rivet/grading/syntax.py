"""Parse the mathematics of an answer into a small tree, without sympy.

A recursive-descent parser over normalised LaTeX and the plain text that models write. It knows a
fixed list of notations and raises `Unreadable` on everything else: nothing is guessed, skipped or
executed. Depth is bounded, and time is linear in the text.
"""

import re
from fractions import Fraction

from rivet.grading.notation import (
    ACCENTS,
    FUNCTIONS,
    GREEK,
    INVERSE,
    LETTERS,
    MIXED,
    NUMBER,
    NUMBER_FRACTION,
    PLAIN_NAMES,
    POINTS,
    REPEATING,
    TEXT,
    decimal,
)
from rivet.grading.scanner import Scanner
from rivet.grading.tree import Node, number
from rivet.grading.verdict import Unreadable


def parse(text: str) -> Node:
    """Parse a whole normalised text as one expression.

    Raises:
        Unreadable: The text is not one expression in the notations known here.
    """
    parser = _Parser(text)
    node = parser.sum()
    parser.space()
    if parser.at < len(text):
        raise Unreadable(f"cannot read {text[parser.at : parser.at + 20]!r}")
    return node


class _Parser(Scanner):
    """One method for each rule of the grammar, from the loosest binding to the tightest."""

    def sum(self) -> Node:
        self.enter()
        terms = [self.signed_product()]
        while self.peek() in ("+", "-"):
            terms.append(self.signed_product())
        self.depth -= 1
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def signed_product(self) -> Node:
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.text[self.at] == "-"
            self.at += 1
        node = self.product()
        return Node("neg", (node,)) if negative else node

    def product(self) -> Node:
        node = self.power()
        while True:
            char, command = self.peek(), self.command()
            if char == "*" and self.text[self.at + 1 : self.at + 2] == "*":
                return node
            if char == "*" or command in ("cdot", "times", "ast"):
                self.operator(command)
                node = Node("mul", (node, self.signed_power()))
            elif char == "/" or command == "div":
                self.operator(command)
                node = Node("div", (node, self.signed_power()))
            elif self.starts_factor():
                node = Node("mul", (node, self.adjacent(node)))
            else:
                return node

    def adjacent(self, before: Node) -> Node:
        """Read a factor written without an operator.

        A bare number does not stand behind another factor: `7 8` is not 56, and `x1` is not x; but
        `n 2^n` is a product, and so is `\\frac{1}{n}4\\cos x`.
        """
        behind = self.text[: self.at].rstrip()[-1:]
        starts_number = self.peek().isdigit() or self.peek() == "."
        if before.op == "number" and NUMBER_FRACTION.match(self.text, self.at):
            raise self.fail("a mixed number that is none")
        factor = self.power()
        is_coefficient = behind in "})" and self.starts_factor()
        if starts_number and (behind.isdigit() or (factor.op == "number" and not is_coefficient)):
            raise self.fail("a number behind another factor")
        return factor

    def operator(self, command: str) -> None:
        if command:
            self.take_command()
        else:
            self.at += 1

    def signed_power(self) -> Node:
        """Read the operand of a written operator, which may carry a sign: `3 / -4`."""
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.text[self.at] == "-"
            self.at += 1
        node = self.power()
        return Node("neg", (node,)) if negative else node

    def starts_factor(self) -> bool:
        char = self.peek()
        if not char or char in ")}]+-*/=<>,;:&^_!%'\"?@#`":
            return False
        if char == "|":
            return self.bars == 0
        command = self.command()
        if char == "\\":
            return command not in ("rfloor", "rceil", "degree") and bool(command)
        return True

    def power(self) -> Node:
        node = self.postfix(self.atom())
        if self.peek() == "^" or self.text.startswith("**", self.at):
            self.at += 1 + (self.text[self.at] == "*")
            exponent = self.exponent()
            node = self.postfix(Node("pow", (node, exponent)))
        return node

    def exponent(self) -> Node:
        """Read an exponent: a group, or the number, symbol or call that follows."""
        self.enter()
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.text[self.at] == "-"
            self.at += 1
        node = self.group() if self.peek() == "{" else self.atom()
        if self.peek() == "^":
            self.at += 1
            node = Node("pow", (node, self.exponent()))
        self.depth -= 1
        return Node("neg", (node,)) if negative else node

    def postfix(self, node: Node) -> Node:
        while True:
            self.grow()
            if self.peek() == "!":
                self.at += 1
                double = self.text[self.at : self.at + 1] == "!"
                self.at += double
                node = Node("factorial2" if double else "factorial", (node,))
            elif self.peek() == "%":
                self.at += 1
                node = Node("div", (node, number(100)))
            elif self.command() == "degree":
                self.take_command()
                half_turn = Node("div", (Node("constant", name="pi"), number(180)))
                node = Node("mul", (node, half_turn))
            else:
                return node

    def group(self) -> Node:
        self.take("{")
        node = self.sum()
        self.take("}")
        return node

    def atom(self) -> Node:
        char = self.peek()
        if char.isdigit() or char == ".":
            return self.numeral()
        if char == "(" or char == "[":
            self.at += 1
            node = self.sum()
            self.take(")" if char == "(" else "]")
            return node
        if char == "{":
            return self.group()
        if char == "|":
            self.at += 1
            self.bars += 1
            node = self.sum()
            self.take("|")
            self.bars -= 1
            return Node("abs", (node,))
        if char == "\\":
            return self.macro()
        if char.isascii() and char.isalpha():
            return self.word()
        raise self.fail("cannot read")

    def numeral(self) -> Node:
        repeating = REPEATING.match(self.text, self.at)
        if repeating:
            self.at = repeating.end()
            whole, fixed, cycle = repeating.groups()
            tail = Fraction(int(cycle), 10 ** len(cycle) - 1) / 10 ** len(fixed)
            return number(decimal(f"{whole or 0}.{fixed or 0}") + tail)
        mixed = MIXED.match(self.text, self.at)
        if mixed:
            whole = int(mixed.group(1))
            over = int(mixed.group(2) or mixed.group(3))
            under = int(mixed.group(4) or mixed.group(5))
            if 0 < over < under and whole > 0:
                self.at = mixed.end()
                return number(whole + Fraction(over, under))
        match = NUMBER.match(self.text, self.at)
        if match is None:
            raise self.fail("cannot read")
        self.at = match.end()
        if self.peek() == "_":
            raise self.fail("a number with an index")
        return number(decimal(match.group()))

    def word(self) -> Node:
        self.space()
        match = LETTERS.match(self.text, self.at)
        if match is None:
            raise self.fail("cannot read")
        run = match.group()
        if run in PLAIN_NAMES:
            self.at = match.end()
            return self.named(PLAIN_NAMES[run])
        if len(run) > 3:
            if not run.isupper():
                raise self.fail("a word in the mathematics")
            self.at = match.end()
            return Node("symbol", name=run)
        self.at += 1
        return self.symbol(run[0])

    def symbol(self, name: str) -> Node:
        """Finish a symbol: its index, its primes, and its argument when it is a function."""
        name += self.decoration()
        if name == "e":
            return Node("constant", name="e")
        if name == "i":
            return Node("constant", name="i")
        if self.peek() == "(" and (name in "fghFGHPQ" or self.argument_is_number()):
            return Node("opaque", self.arguments(), name=name)
        return Node("symbol", name=name)

    def argument_is_number(self) -> bool:
        return re.match(r"\(\s*-?[\d.]+\s*\)", self.rest()) is not None

    def arguments(self) -> tuple[Node, ...]:
        self.take("(")
        args = [self.sum()]
        while self.peek() == ",":
            self.at += 1
            args.append(self.sum())
        self.take(")")
        return tuple(args)

    def argument(self) -> Node:
        """Take a macro's argument: a group, a command, one letter or one digit (`\\frac12`)."""
        char = self.peek()
        if char.isdigit():
            self.at += 1
            return number(int(char))
        if char == "{":
            return self.group()
        if char.isascii() and char.isalpha():
            self.at += 1
            return Node("symbol", name=char) if char not in "ei" else Node("constant", name=char)
        if char == "\\":
            return self.macro()
        raise self.fail("an argument is missing")

    def macro(self) -> Node:
        self.enter()
        node = self.letter_or_command()
        self.depth -= 1
        return node

    def letter_or_command(self) -> Node:
        letter = TEXT.match(self.text, self.at)
        if letter:
            self.at = letter.end()
            return self.symbol(letter.group(1))
        name = self.command()
        if not name:
            raise self.fail("cannot read")
        self.take_command()
        return self.named(name)

    def named(self, name: str) -> Node:
        if name in FUNCTIONS:
            return self.function(name)
        if name in ("pi", "infty"):
            return Node("constant", name=name)
        if name == "frac":
            over = self.argument()
            return Node("div", (over, self.argument()))
        if name == "sqrt":
            return self.root()
        if name == "binom":
            if self.peek() == "(":
                return Node("binom", self.exactly(2))
            upper = self.argument()
            return Node("binom", (upper, self.argument()))
        if name in ("lfloor", "lceil"):
            node = self.sum()
            if self.command() != name.replace("l", "r", 1):
                raise self.fail("a floor or ceiling is never closed")
            self.take_command()
            return Node(name[1:], (node,))
        if name in ("sum", "prod"):
            return self.series(name)
        if name in GREEK:
            return self.symbol("\\" + name)
        if name in ACCENTS:
            return Node("symbol", name=f"{name}({self.raw_argument()}){self.decoration()}")
        if name in ("angle", "triangle", "overarc"):
            match = POINTS.match(self.text, self.at)
            if match:
                self.at = match.end()
                return Node("symbol", name=name + match.group().replace(" ", ""))
        raise Unreadable(f"unknown notation \\{name}")

    def exactly(self, count: int) -> tuple[Node, ...]:
        args = self.arguments()
        if len(args) != count:
            raise self.fail(f"expected {count} arguments")
        return args

    def series(self, name: str) -> Node:
        """Read a finite sum or product with written bounds."""
        self.take("_")
        self.take("{")
        index = self.word()
        self.take("=")
        low = self.sum()
        self.take("}")
        self.take("^")
        high = self.exponent()
        if index.op != "symbol":
            raise self.fail("a sum without an index")
        return Node(name, (self.product(), low, high), name=index.name)

    def root(self) -> Node:
        degree: Node | None = None
        if self.peek() == "[":
            self.at += 1
            degree = self.sum()
            self.take("]")
        # `\sqrt12` is meant as the root of twelve, whatever LaTeX makes of it.
        node = self.atom() if self.peek().isdigit() or self.peek() == "(" else self.argument()
        if degree is None:
            return Node("sqrt", (node,))
        return Node("root", (node, degree))

    def function(self, name: str) -> Node:
        exponent: Node | None = None
        base: Node | None = None
        if self.peek() == "^":
            self.at += 1
            exponent = self.exponent()
        if self.peek() == "_":
            self.at += 1
            base = self.argument_or_number()
        if name in ("max", "min", "gcd", "lcm"):
            args = self.arguments()
        elif self.peek() == "(":
            self.at += 1
            args = (self.sum(),)
            self.take(")")
        elif self.peek() == "{":
            args = (self.group(),)
        else:
            args = (self.bare_argument(),)
        if name == "log" and base is not None:
            node = Node("log_base", (args[0], base))
        elif base is not None:
            raise self.fail("an index on a function")
        elif exponent is not None and exponent == Node("neg", (number(1),)):
            if name not in INVERSE:
                raise self.fail("an inverse function")
            return Node(INVERSE[name], args)
        else:
            node = Node(name, args)
        return node if exponent is None else Node("pow", (node, exponent))

    def argument_or_number(self) -> Node:
        return self.atom() if self.peek().isdigit() else self.argument()

    def bare_argument(self) -> Node:
        """Read `2x` in `\\sin 2x`: factors up to an operator or the next function."""
        negative = self.peek() == "-"
        if negative:
            self.at += 1
        node = self.power()
        while self.starts_factor() and self.command() not in FUNCTIONS and self.peek() not in "([":
            node = Node("mul", (node, self.adjacent(node)))
        return Node("neg", (node,)) if negative else node
