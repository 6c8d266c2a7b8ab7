"""`rivet eval`: the evaluation of `eval.main`, with the mini-world's experts served where named.

rivet eval [RECIPE.yaml] --model RUN/checkpoint [--conditions experts local]
"""

from __future__ import annotations

from collections.abc import Sequence

from stages.experts import open_experts


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rivet eval`."""
    from eval.main import main as evaluate

    return evaluate(None if argv is None else list(argv), open_experts=open_experts)


if __name__ == "__main__":
    raise SystemExit(main())
