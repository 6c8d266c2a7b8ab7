"""Upload of an export to the Hub: what would go, then all of it in one commit, or nothing.

Files that an interrupted push has already stored are not sent again; the commit is the last step,
so that nobody ever sees half a model. It also removes what an earlier push left and this one has
not: loaders prefer an old `model.safetensors` to new shards. HF_ENDPOINT names another Hub.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from rivet.files import is_leftover
from stages.model_card import PLACEHOLDER

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

logger = logging.getLogger(__name__)

T = TypeVar("T")
ATTEMPTS = 5
_WORTH_RETRYING = (408, 429, 500, 502, 503, 504)
# What some export has and another has not; a folder's loader takes what it finds.
_SUPERSEDED = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "adapter_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "LICENSE",
)


class PushError(RuntimeError):
    """An upload did not happen; the message says what to do."""


def files_to_push(folder: Path) -> list[tuple[str, int]]:
    """Paths within an export and their sizes in bytes, sorted; hidden files stay here."""
    found = []
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in relative.parts) or is_leftover(path)
        if path.is_file() and not is_hidden:
            found.append((relative.as_posix(), path.stat().st_size))
    return found


def describe_push(folder: Path, repo_id: str, *, private: bool) -> str:
    """What a push would upload, for `--dry-run`."""
    files = files_to_push(folder)
    width = max((len(name) for name, _ in files), default=0)
    lines = [f"  {name:<{width}}  {_size(size):>9}" for name, size in files]
    total = _size(sum(size for _, size in files))
    kind = "private" if private else "public"
    head = f"would upload {len(files)} files, {total}, from {folder} to {repo_id} ({kind} if new):"
    return "\n".join([head, *lines])


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def push(
    folder: Path,
    repo_id: str,
    *,
    private: bool = False,
    wait_s: float = 1.0,
) -> str:
    """Upload an export in one commit.

    Args:
        folder: The export.
        repo_id: `user/name`; made if it does not exist.
        private: Whether a new repository is private.
        wait_s: Before the second attempt; doubled before each further one.

    Returns:
        Address of the model.

    Raises:
        PushError: No token, no right to write, or the Hub did not answer.
    """
    from huggingface_hub import CommitOperationDelete, HfApi, get_token

    check_repo_id(repo_id)
    if not get_token():
        raise PushError(
            "no Hub token: set HF_TOKEN to a token that may write, or run `hf auth login`"
        )
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
    additions = [_addition(folder, name, repo_id) for name, _ in files_to_push(folder)]
    names = {addition.path_in_repo for addition in additions}
    retry = _Retry(folder, repo_id, wait_s)

    def commit() -> None:
        # Listed anew by each attempt: one whose answer was lost has removed them already.
        superseded = superseded_files(api.list_repo_files(repo_id), names)
        if superseded:
            logger.info("removing from %s: %s", repo_id, ", ".join(superseded))
        # Not upload_folder, which commits in batches.
        api.create_commit(
            repo_id,
            [*(CommitOperationDelete(name) for name in superseded), *additions],
            commit_message=f"Upload {folder.name}",
        )

    logger.info("uploading %d files to %s", len(names), repo_id)
    retry(lambda: api.create_repo(repo_id, private=private, exist_ok=True))
    retry(commit)
    missing = sorted(names - set(retry(lambda: api.list_repo_files(repo_id))))
    if missing:
        raise PushError(f"{repo_id}: {missing[0]} is not there after the upload; push again")
    return f"{api.endpoint}/{repo_id}"


def superseded_files(there: Iterable[str], coming: set[str]) -> list[str]:
    """Files of an earlier export in a repository that the coming one does not hold."""
    old = [name for name in there if name not in coming]
    return [name for name in old if "/" not in name and any(fnmatch(name, p) for p in _SUPERSEDED)]


def _addition(folder: Path, name: str, repo_id: str) -> CommitOperationAdd:
    """A file as it goes up: the card with the name that its commands can use from now on."""
    from huggingface_hub import CommitOperationAdd

    path = folder / name
    if name != "README.md":
        return CommitOperationAdd(name, path)
    return CommitOperationAdd(
        name, path.read_bytes().replace(PLACEHOLDER.encode(), repo_id.encode())
    )


def check_repo_id(repo_id: str) -> None:
    """Refuse what is no `user/name`.

    Raises:
        PushError: It is none.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise PushError(f"push: {error}") from error
    if repo_id.count("/") != 1:
        raise PushError(f"push: got {repo_id!r}, expected user/name")


class _Retry:
    """Calls the Hub again after failures that pass, and explains those that do not."""

    def __init__(self, folder: Path, repo_id: str, wait_s: float) -> None:
        self._again = f"rivet export {folder} --push {repo_id}"
        self._repo_id, self._wait_s = repo_id, wait_s

    def __call__(self, call: Callable[[], T]) -> T:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return call()
            except (httpx.HTTPError, OSError, RuntimeError, ValueError) as error:
                self._check(error)
                if attempt == ATTEMPTS:
                    raise PushError(
                        f"{self._repo_id}: the upload was interrupted ({_short(error)}); nothing "
                        f"half-written is visible there. Go on with: {self._again}"
                    ) from error
                wait_s = self._wait_s * 2 ** (attempt - 1) * (0.5 + random.random())
                logger.warning(
                    "attempt %d of %d failed (%s); again in %.0f s",
                    attempt,
                    ATTEMPTS,
                    _short(error),
                    wait_s,
                )
                time.sleep(wait_s)
        raise AssertionError

    def _check(self, error: Exception) -> None:
        """Raise where another attempt would fail like this one."""
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise PushError(
                f"{self._repo_id}: the Hub refuses ({_short(error)}); the token needs the right to "
                "write there: check HF_TOKEN, or run `hf auth login`"
            ) from error
        is_refused = status is not None and status not in _WORTH_RETRYING
        if is_refused or (status is None and isinstance(error, ValueError)):
            raise PushError(f"{self._repo_id}: the Hub refuses: {_short(error)}") from error


def _short(error: Any) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}"
