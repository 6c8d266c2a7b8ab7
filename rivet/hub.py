"""Checkpoints by their Hub name: `user/name` where no such folder exists is downloaded once."""

from __future__ import annotations

import re
from pathlib import Path

from rivet.checkpoints import CheckpointError, find_checkpoint

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_hub_name(name: str) -> bool:
    """Whether a name is a Hub's `user/name` and no path that exists here."""
    return _NAME.fullmatch(name) is not None and not Path(name).exists()


def local_checkpoint(name: str | Path) -> Path:
    """The checkpoint folder of a path or a Hub name; with the network cut, from the Hub's cache.

    Raises:
        CheckpointError: It is neither, or cannot be fetched.
    """
    if not is_hub_name(str(name)):
        return find_checkpoint(name)
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return find_checkpoint(snapshot_download(str(name)))
    except (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        httpx.HTTPError,
        OSError,
    ) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise CheckpointError(
            f"{name}: no such folder, and not to be had from the Hub as a model of that name "
            f"({type(error).__name__}: {first})"
        ) from error
