"""Keeps a key out of everything that an endpoint says: replies, error messages, stores.

A provider may quote the key it was sent, in an error or in a reply. A key is replaced as it stands
and percent-encoded, whatever the case. An endpoint that disguises it on purpose is not stopped: it
has the key already.
"""

from __future__ import annotations

import json
import re
from urllib.parse import quote

_SHOWN = 300
# Nobody's secret, and replacing such a word would spoil replies ("EMPTY" is customary locally).
_SHORTEST_KEY = 8
# Providers quote a rejected key with its middle starred out: the rest is still part of a key.
_KEY_LIKE = re.compile(r"(?i)\b(?:(?:sk|pk|gsk|xai)[-_]\S+|(?:bearer|key)[-_: ]+\S*[\d*]\S*)")


class Redactor:
    """Removes one key from texts.

    Args:
        key: The key; empty for none.
    """

    def __init__(self, key: str) -> None:
        self._pattern: re.Pattern[str] | None = None
        if len(key) >= _SHORTEST_KEY:
            forms = {key, quote(key, safe=""), json.dumps(key)[1:-1], repr(key)[1:-1]}
            longest_first = sorted(forms, key=len, reverse=True)
            self._pattern = re.compile("|".join(map(re.escape, longest_first)), re.IGNORECASE)

    def __repr__(self) -> str:
        return "Redactor()"

    def reply(self, text: str) -> str:
        """An expert's reply without the key, otherwise unchanged."""
        return text if self._pattern is None else self._pattern.sub("[key]", text)

    def detail(self, text: str) -> str:
        """A message for people: neither the key nor what looks like one, on one short line."""
        # The key first: a text that is cut could end in half of it.
        text = _KEY_LIKE.sub("[key]", self.reply(text))
        text = " ".join(text.split())[:_SHOWN]
        return "".join(c if c.isprintable() else "\ufffd" for c in text)
