"""The trajectory viewer's data: trajectories as compressed blocks that only its script reads.

Model text is data. It travels as gzip in base64, whose alphabet holds no markup, inside script
elements of a type that browsers do not run, and `viewer.js` puts it on the page as text nodes only.
An index with what the list shows is unpacked at once, the texts in chunks when they are looked at
or searched, the tokens (where each begins, its log-probability, what it weighed in training) in
chunks of their own when a trajectory is opened.
"""

from __future__ import annotations

import base64
import codecs
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eval.summary import RESULTS, result_of, routes_of
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Trajectory

_SHOWN_ELSEWHERE = "gold extracted reason routes family source kind segment_weights choices".split()
CHUNK = 200  # trajectories per block of texts


@dataclass(frozen=True, slots=True)
class Shelf:
    """Trajectories of one run, such as `stage1 / experts`.

    Attributes:
        label: Its name in the filter.
        trajectories: In the order shown.
        tokenizer: Turns their ids into text.
        total: How many the run has in all, where only some are shown.
        weights: What tokens weighed in a training on them, by its name and then by `author/kind`.
            Weights that a trajectory carries itself (`segment_weights` of Stage I) come on top.
    """

    label: str
    trajectories: Sequence[Trajectory]
    tokenizer: ProtocolTokenizer
    total: int
    weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def thin_out(count: int, keep: int) -> list[int]:
    """Positions of `keep` rows spread evenly over `count`, in order; all if there are fewer."""
    if count <= keep:
        return list(range(count))
    return [n * count // keep for n in range(keep)]


def pack_blocks(shelves: Sequence[Shelf]) -> str:
    """Script elements that hold the index and the texts."""
    rows: list[list[Any]] = []
    texts: list[dict[str, Any]] = []
    tokens: list[list[Any]] = []
    for number, shelf in enumerate(shelves):
        for trajectory in shelf.trajectories:
            rows.append(_index_row(number, trajectory))
            texts.append(_text_row(trajectory, shelf.tokenizer))
            tokens.append(_token_row(trajectory, shelf))
    index = {
        "runs": [
            {"label": s.label, "shown": len(s.trajectories), "total": s.total} for s in shelves
        ],
        "results": list(RESULTS),
        "chunk": CHUNK,
        "rows": rows,
    }
    blocks = [_block("viewer-index", index)]
    for number, start in enumerate(range(0, len(texts), CHUNK)):
        blocks.append(_block(f"viewer-chunk-{number}", texts[start : start + CHUNK]))
        blocks.append(_block(f"viewer-tokens-{number}", tokens[start : start + CHUNK]))
    return "\n".join(blocks)


def unpack_block(text: str) -> Any:
    """Inverse of what a block's content went through."""
    return json.loads(gzip.decompress(base64.b64decode(text)))


def _block(name: str, value: Any) -> str:
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    # mtime 0: the same run gives the same page, byte for byte.
    content = base64.b64encode(gzip.compress(data, mtime=0)).decode("ascii")
    return f'<script type="application/octet-stream" id="{name}">{content}</script>'


def _index_row(run: int, t: Trajectory) -> list[Any]:
    """What the list and the filters need, in the order that `viewer.js` reads it."""
    return [
        run,
        t.id,
        RESULTS.index(result_of(t)),
        " ".join(routes_of(t)),
        str(t.info.get("family") or t.info.get("source") or ""),
        t.step,
        t.mode,
    ]


def _text_row(t: Trajectory, tokenizer: ProtocolTokenizer) -> dict[str, Any]:
    return {
        "prompt": tokenizer.decode(t.prompt_ids),
        "spans": [[s.author, s.kind, tokenizer.decode(s.ids)] for s in t.segments],
        # As text: JSON has no NaN, and a script would round a seed.
        "facts": [
            [name, "; ".join(value) if isinstance(value, list) else str(value)]
            for name, value in _facts(t).items()
            if value not in (None, "", [])
        ],
    }


def _token_row(t: Trajectory, shelf: Shelf) -> list[Any]:
    """Per span: lengths of its tokens in UTF-16 units, log-probabilities in hundredths, weights."""
    own = t.info.get("segment_weights")
    if not isinstance(own, list) or len(own) != len(t.segments):
        own = None
    row = []
    for number, segment in enumerate(t.segments):
        name = f"{segment.author}/{segment.kind}"
        weights = {"Stage I": own[number]} if own is not None else {}
        weights |= {label: table.get(name, 0.0) for label, table in shelf.weights.items()}
        logprobs = None
        if segment.logprobs:
            # JSON has neither infinity nor NaN: such a value is shown as the least likely one.
            finite = (value if math.isfinite(value) else -1000.0 for value in segment.logprobs)
            logprobs = [round(100 * value) for value in finite]
        row.append([token_lengths(segment.ids, shelf.tokenizer), logprobs, weights or None])
    return row


def token_lengths(ids: Sequence[int], tokenizer: ProtocolTokenizer) -> list[int]:
    """How much of a span's text each token is, in UTF-16 units, as a browser counts.

    A character of several tokens belongs to the one that completes it; the lengths add up to that
    of `tokenizer.decode(ids)`.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    last = len(ids) - 1
    pieces = [decoder.decode(tokenizer.bytes_of([i]), final=n == last) for n, i in enumerate(ids)]
    return [
        len(piece) if piece.isascii() else len(piece.encode("utf-16-le")) // 2 for piece in pieces
    ]


def _facts(t: Trajectory) -> Mapping[str, Any]:
    facts = {
        "gold": t.info.get("gold"),
        "answer": t.info.get("extracted", t.answer),
        "verdict": t.outcome,
        "why": t.info.get("reason"),
        "ended by": t.finish,
        "well formed": "yes" if t.well_formed else f"no: {t.malformed_reason}",
        "fault": t.fault,
        "mode": t.mode,
        "reward": t.reward,
        "tokens": sum(map(len, t.segments)),
        "expert calls": [f"{c.name} ({c.status}, {c.latency_s:.2f} s)" for c in t.expert_calls],
        "programs": [f"{r.author}: {r.status}" for r in t.code_runs],
        "step": t.step or None,
        "seed": t.seed,
    }
    labels = {
        name: json.dumps(value) if isinstance(value, (dict, list)) else value
        for name, value in t.info.items()
        if name not in facts and name not in _SHOWN_ELSEWHERE
    }
    return facts | labels
