"""The expression tree that the parser builds and the evaluator walks."""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Node:
    """One node of an expression.

    Args:
        op: "number", "symbol", "constant", an operator ("add", "mul", "div", "pow", "neg",
            "factorial", "factorial2", "binom", "sqrt", "root", "abs", "floor", "ceil", "sum",
            "prod", "opaque") or the name of a function.
        args: The operands; of a sum, its body and its two bounds.
        value: The value of a "number".
        name: The name of a "symbol", a "constant", an "opaque" function or the index of a sum.
    """

    op: str
    args: tuple["Node", ...] = ()
    value: Fraction | None = None
    name: str = ""

    def walk(self) -> list["Node"]:
        """Return this node and all below it."""
        nodes = [self]
        for node in nodes:
            nodes.extend(node.args)
        return nodes

    def symbols(self) -> frozenset[str]:
        """Return the names of the unknowns; the index of a sum is none in its body."""
        if self.op == "symbol":
            return frozenset({self.name})
        names = [arg.symbols() for arg in self.args]
        if self.op in ("sum", "prod"):
            names[0] -= {self.name}
        return frozenset[str]().union(*names)

    def has(self, *ops: str) -> bool:
        """Tell whether any node has one of these operators."""
        return any(node.op in ops for node in self.walk())


def number(value: int | Fraction) -> Node:
    """Return a number node."""
    return Node("number", value=Fraction(value))
