"""Grade Reasoning Gym answers with the data set's own scorer.

Only scorers that were read and found safe for model text are called: the base class's (a string
comparison) and those named in `REVIEWED`. Others may evaluate the answer as code or algebra.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any

from rivet.grading.verdict import BadRequest, Outcome

REVIEWED = frozenset(
    {"chain_sum", "products", "gcd", "lcm", "simple_equations", "fraction_simplification"}
)
MAX_ANSWER = 1000


def parse_entry(gold: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return the Reasoning Gym entry that a gold states.

    Args:
        gold: The entry as a mapping or as JSON: `answer` and `metadata` with `source_dataset`.

    Raises:
        BadRequest: It is no such entry.
    """
    entry: Any = gold
    if isinstance(gold, str):
        try:
            entry = json.loads(gold)
        except ValueError as error:
            raise BadRequest(
                "gold of kind 'reasoning_gym': expected an entry (a mapping or its JSON) with "
                f"'answer' and 'metadata', got {gold[:60]!r}"
            ) from error
    metadata = entry.get("metadata") if isinstance(entry, Mapping) else None
    if not isinstance(metadata, Mapping) or not isinstance(metadata.get("source_dataset"), str):
        raise BadRequest("gold of kind 'reasoning_gym': metadata.source_dataset is missing")
    answer = entry.get("answer")
    if not isinstance(answer, str) or not answer:
        raise BadRequest("gold of kind 'reasoning_gym': answer is missing or empty")
    return {"answer": answer, "metadata": dict(metadata)}


def decide_reasoning_gym(entry: dict[str, Any], answer: str) -> tuple[Outcome, str]:
    """Score an extracted answer; right when the data set's own scorer gives 1.0.

    Raises:
        BadRequest: The data set is unknown, or its scorer was not reviewed.
    """
    name = entry["metadata"]["source_dataset"]
    dataset = _dataset(name)
    if len(answer) > MAX_ANSWER:
        return "wrong", "refused: too long"
    score = dataset.score_answer(answer.strip(), entry)
    return ("right" if score == 1.0 else "wrong"), f"{name} scores {score:g}"


@functools.lru_cache(maxsize=64)
def _dataset(name: str) -> Any:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS, ProceduralDataset

    if name not in DATASETS:
        raise BadRequest(f"unknown Reasoning Gym data set {name!r}")
    inherits_scorer = DATASETS[name][0].score_answer is ProceduralDataset.score_answer
    if name not in REVIEWED and not inherits_scorer:
        raise BadRequest(f"the scorer of {name!r} was not reviewed for use on model text")
    return reasoning_gym.create_dataset(name, size=1, seed=0)
