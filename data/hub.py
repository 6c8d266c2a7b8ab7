"""Rows of a benchmark's dataset from the Hugging Face Hub, or from its cache without a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data.benchmarks import Benchmark


def load_rows(benchmark: Benchmark) -> list[Mapping[str, Any]]:
    """Rows of the dataset in the Hub's order.

    What was loaded once is in the cache of `datasets` and is read from there without a network
    (`HF_HUB_OFFLINE=1` does not even try one).

    Raises:
        BenchmarkError: It cannot be reached and is not in the cache, or is gated.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    from data.benchmarks import BenchmarkError

    try:
        return list(load_dataset(benchmark.hub, benchmark.config, split=benchmark.split))
    except DatasetNotFoundError as error:
        why = f"the Hub does not give it out ({_first_line(error)})"
        if benchmark.is_gated:
            why += "; accept its conditions on its page and log in with `hf auth login`"
    except (OSError, ValueError) as error:  # no network, no cache, another form than it had
        why = f"it cannot be loaded ({_first_line(error)})"
    raise BenchmarkError(
        f"{benchmark.name}: {benchmark.hub}: {why}. Without a network, give a folder that holds "
        f"{benchmark.files[0]}.jsonl (--data_dir), or fill the cache on a machine that has one: "
        f"`rivet benchmarks {benchmark.name}`"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
