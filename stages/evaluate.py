"""`rivet eval`: the evaluation of `eval.main`, with the mini-world's experts served where named.

rivet eval [RECIPE.yaml] --model RUN/checkpoint [--conditions experts local]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rivet.experts.types import Experts


@contextmanager
def open_experts(experts: str) -> Iterator[Experts]:
    """The experts of a file, or with `embedded` the mini-world's own, served while this is open."""
    from rivet.experts.config import load_experts
    from rivet.experts.pool import ExpertPool

    if experts == "embedded":
        from stages.experts import start_miniworld_experts

        with start_miniworld_experts() as configs:
            yield ExpertPool(configs)
    else:
        yield ExpertPool(load_experts(experts))


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rivet eval`."""
    from eval.main import main as evaluate

    return evaluate(None if argv is None else list(argv), open_experts=open_experts)


if __name__ == "__main__":
    raise SystemExit(main())
