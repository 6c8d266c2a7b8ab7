"""Replies on disk: what was paid for once is never asked again, and a run can be replayed offline.

A reply is found by what was sent (the expert's name, the model, the messages, the sampling
settings) and by the sample that it belongs to (`sample_key`: seed, step, problem, sample index and
number of the call), so that repeated samples of one problem stay different samples. Only replies
are kept, never faults; no key is stored, nor anything else of the connection. Several processes and
runs may share a file: the first reply to come stays, and whoever comes second is given that one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rivet.experts.config import CacheConfig, ExpertsFileError
from rivet.experts.database import Database, DatabaseError

_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS replies (
  key BLOB PRIMARY KEY,
  expert TEXT NOT NULL,
  sample_key TEXT NOT NULL,
  body TEXT NOT NULL,
  text TEXT NOT NULL,
  prompt_tokens INTEGER NOT NULL,
  completion_tokens INTEGER NOT NULL,
  is_metered INTEGER NOT NULL,
  at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
) STRICT, WITHOUT ROWID
"""


@dataclass(frozen=True, slots=True)
class CachedReply:
    """A reply as it was recorded.

    Attributes:
        text: What the expert wrote.
        prompt_tokens, completion_tokens: What it took, failed attempts included.
        is_metered: Whether the provider said so; else they are estimates.
    """

    text: str
    prompt_tokens: int
    completion_tokens: int
    is_metered: bool


class ReplyCache:
    """The recorded replies of one file.

    Args:
        config: `record` or `replay`, and where.
        path: The file.

    Raises:
        ExpertsFileError: It is to be replayed and is not there.
        DatabaseError: The file cannot be used.
    """

    def __init__(self, config: CacheConfig, path: Path) -> None:
        self.is_replay = config.mode == "replay"
        self.path = path
        if self.is_replay and not path.is_file():
            raise ExpertsFileError(
                [
                    f"cache: mode is replay, but {path} does not exist; expected a database that "
                    "a run with mode record wrote: run it once with record, or set cache.path"
                ]
            )
        self._database = Database(path, _SCHEMA, _VERSION, is_read_only=self.is_replay)

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is recorded yet."""
        return not self._database.rows("SELECT 1 FROM replies LIMIT 1")

    def counts(self) -> dict[str, int]:
        """Recorded replies of each expert."""
        rows = self._database.rows("SELECT expert, count(*) FROM replies GROUP BY expert")
        return {str(name): _int(count) for name, count in rows}

    def get(self, expert: str, body: Mapping[str, Any], sample_key: str) -> CachedReply | None:
        """The recorded reply, None if there is none."""
        rows = self._database.rows(
            "SELECT text, prompt_tokens, completion_tokens, is_metered FROM replies WHERE key = ?",
            (cache_key(expert, body, sample_key),),
        )
        if not rows:
            return None
        text, prompt_tokens, completion_tokens, is_metered = rows[0]
        return CachedReply(
            str(text), _int(prompt_tokens), _int(completion_tokens), bool(is_metered)
        )

    def put(
        self, expert: str, body: Mapping[str, Any], sample_key: str, reply: CachedReply
    ) -> CachedReply:
        """Keep a reply; gives the one that is kept, which another process may have been first with.

        Raises:
            DatabaseError: It cannot be written, on a full disk for instance.
        """
        with self._database.writing() as connection:
            changed = connection.execute(
                "INSERT OR IGNORE INTO replies (key, expert, sample_key, body, text, "
                "prompt_tokens, completion_tokens, is_metered) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    cache_key(expert, body, sample_key),
                    expert,
                    sample_key,
                    json.dumps(body, sort_keys=True),
                    reply.text,
                    reply.prompt_tokens,
                    reply.completion_tokens,
                    int(reply.is_metered),
                ),
            ).rowcount
        if changed:
            return reply
        kept = self.get(expert, body, sample_key)
        if kept is None:
            raise DatabaseError(f"{self.path}: a reply vanished; expected nobody to remove rows")
        return kept


def cache_key(expert: str, body: Mapping[str, Any], sample_key: str) -> bytes:
    """What a reply is found by: 16 bytes, the same in every process."""
    content = json.dumps([_VERSION, expert, body, sample_key], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).digest()


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value
