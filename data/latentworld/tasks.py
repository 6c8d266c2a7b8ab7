"""Problems of the latent world, for latent collaboration at laptop scale.

Three Reasoning Gym families are hard for the policy, each known to one specialist: `primes`
(count_primes), `equations` (simple_equations), `sums` (chain_sum). One, `reading` (chain_sum of one
term: read the number off), the policy solves alone: there experts have nothing to add. Statements
are short, and answers of the hard families lie in 0 to 99, one token of the policy.

A problem belongs to one split by its operands alone, as in `data.miniworld.tasks`: no reordered sum
or rewritten equation of one split is in another. Graded by the data set's own scorer.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from data.miniworld.tasks import Split, operand_key, split_of
from data.problems import Problem

SOURCE = "latentworld"
_MAX_DRAWS_PER_PROBLEM = 100
_MAX_ANSWER = 99


@dataclass(frozen=True, slots=True)
class LatentFamily:
    """One kind of problem.

    Attributes:
        name: Ours.
        dataset: The Reasoning Gym data set.
        config: Its parameters.
        statement: Short statement made of an entry's metadata.
        key: Operands of an entry's metadata, whatever their order.
        is_hard: Whether the policy needs an expert.
    """

    name: str
    dataset: str
    config: dict[str, Any]
    statement: Callable[[dict[str, Any]], str]
    key: Callable[[dict[str, Any]], str]
    is_hard: bool = True


FAMILIES: dict[str, LatentFamily] = {
    family.name: family
    for family in (
        LatentFamily(
            "primes",
            "count_primes",
            {"min_n": 1, "max_n": 99},
            lambda m: f"Primes from {m['start']} to {m['end']}.",
            lambda m: f"count_primes/{m['start']},{m['end']}",
        ),
        LatentFamily(
            "equations",
            "simple_equations",
            {
                "min_terms": 2,
                "max_terms": 2,
                "min_value": 1,
                "max_value": 12,
                "operators_weights": [0.5, 0.5, 0.0],
            },
            lambda m: "Solve {}.".format(re.sub("[a-z]", "x", m["equation"])),
            lambda m: operand_key("simple_equations", m["equation"]),
        ),
        LatentFamily(
            "sums",
            "chain_sum",
            {"min_terms": 4, "max_terms": 4, "min_digits": 1, "max_digits": 1},
            lambda m: f"Calculate {m['expression']}.",
            lambda m: operand_key("chain_sum", m["expression"]),
        ),
        LatentFamily(
            "reading",
            "chain_sum",
            {"min_terms": 1, "max_terms": 1, "min_digits": 4, "max_digits": 4},
            lambda m: f"Calculate {m['expression']}.",
            lambda m: operand_key("chain_sum", m["expression"]),
            is_hard=False,
        ),
    )
}
HARD = tuple(name for name, family in FAMILIES.items() if family.is_hard)


def build_splits(
    counts: Mapping[Split, int], seed: int, families: Sequence[str] = tuple(FAMILIES)
) -> dict[Split, list[Problem]]:
    """Draw problems of some families, interleaved so that any prefix is balanced.

    Args:
        counts: Problems of each family, at least 1, for every split that is wanted.
        seed: Same seed and counts, same problems in the same order.
        families: Names.

    Raises:
        ValueError: A split or a family is unknown, or a family has too few distinct problems.
    """
    wrong = [name for name in counts if name not in get_args(Split)]
    if wrong or not counts:
        raise ValueError(f"splits {list(counts)}; expected some of {', '.join(get_args(Split))}")
    unknown = [name for name in families if name not in FAMILIES]
    if min(counts.values()) < 1 or unknown or not families:
        raise ValueError(
            f"counts are {dict(counts)}, families are {list(families)}; expected at least 1 "
            f"problem of families among {', '.join(FAMILIES)}"
        )
    drawn = [_draw(FAMILIES[name], counts, seed) for name in families]
    return {
        split: [problem for row in zip(*(d[split] for d in drawn), strict=True) for problem in row]
        for split in counts
    }


def _draw(
    family: LatentFamily, counts: Mapping[Split, int], seed: int
) -> dict[Split, list[Problem]]:
    problems: dict[Split, list[Problem]] = {split: [] for split in counts}
    seen: set[str] = set()
    for draws, entry in enumerate(_entries(family, seed)):
        missing = {s: n - len(problems[s]) for s, n in counts.items() if len(problems[s]) < n}
        if not missing:
            break
        if draws > sum(counts.values()) * _MAX_DRAWS_PER_PROBLEM:
            raise ValueError(
                f"{family.name}: no more distinct problems after {draws} draws, {missing} are "
                "missing: ask for fewer per family"
            )
        statement = family.statement(entry["metadata"])
        split = split_of(family.key(entry["metadata"]))
        if split not in missing or statement in seen:
            continue
        if (family.is_hard and not _is_short(entry["answer"])) or _is_degenerate(family, statement):
            continue
        # Orders of one sum are different statements of one split.
        seen.add(statement)
        problems[split].append(_problem(family, entry, statement))
    return problems


def _is_short(answer: str) -> bool:
    return answer.isdecimal() and int(answer) <= _MAX_ANSWER


def _is_degenerate(family: LatentFamily, statement: str) -> bool:
    """True for an equation without its unknown, such as `0 = 0`."""
    return family.name == "equations" and "x" not in statement


def _entries(family: LatentFamily, seed: int) -> Iterator[dict[str, Any]]:
    from reasoning_gym import create_dataset  # slow to import

    # Entry i of a data set depends on seed + i, so neighbouring seeds would share their entries.
    digest = hashlib.blake2b(f"{SOURCE}\x1f{family.name}\x1f{seed}".encode(), digest_size=6)
    size = 10**9
    dataset = create_dataset(
        family.dataset, seed=int.from_bytes(digest.digest(), "big"), size=size, **family.config
    )
    return (dataset[i] for i in range(size))


def _problem(family: LatentFamily, entry: dict[str, Any], statement: str) -> Problem:
    # The scorer needs neither the list of primes nor the difficulty.
    metadata = {k: v for k, v in entry["metadata"].items() if k not in ("difficulty", "primes")}
    meta = {
        "family": family.name,
        "dataset": family.dataset,
        "entry": {"question": entry["question"], "answer": entry["answer"], "metadata": metadata},
    }
    name = re.sub(r"\s+", "", statement)
    return Problem(
        f"{SOURCE}/{family.name}/{name}", statement, entry["answer"], SOURCE, "reasoning_gym", meta
    )
