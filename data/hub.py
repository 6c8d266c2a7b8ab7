"""Rows of a dataset from the Hugging Face Hub, or from its cache without a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class HubError(ValueError):
    """A dataset cannot be had; the message says why.

    Attributes:
        is_refused: The Hub does not give it out: it is not there, private, or gated.
    """

    def __init__(self, message: str, *, is_refused: bool) -> None:
        super().__init__(message)
        self.is_refused = is_refused


def load_rows(dataset: str, config: str | None, split: str) -> Sequence[Mapping[str, Any]]:
    """Rows of a dataset in the Hub's order, memory-mapped.

    What was loaded once is in the cache of `datasets` and is read from there without a network
    (`HF_HUB_OFFLINE=1` does not even try one).

    Raises:
        HubError: It cannot be reached and is not in the cache, or is refused.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    try:
        return load_dataset(dataset, config, split=split)
    except DatasetNotFoundError as error:
        why, is_refused = f"the Hub does not give it out ({_first_line(error)})", True
    except (OSError, ValueError) as error:  # no network, no cache, another form than it had
        why, is_refused = f"it cannot be loaded ({_first_line(error)})", False
    raise HubError(f"{dataset}: {why}", is_refused=is_refused)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
