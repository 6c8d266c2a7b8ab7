"""The trajectory viewer's data: trajectories as compressed blocks that only its script reads.

Model text is data. It travels as gzip in base64, whose alphabet holds no markup, inside script
elements of a type that browsers do not run, and `viewer.js` puts it on the page as text nodes only.
An index with what the list shows is unpacked at once, the texts in chunks when they are looked at.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.summary import RESULTS, result_of, routes_of
from rivet.tokenization import ProtocolTokenizer
from rivet.trajectory import Trajectory

CHUNK = 200  # trajectories per block of texts


@dataclass(frozen=True, slots=True)
class Shelf:
    """Trajectories of one run, such as `stage1 / experts`.

    Attributes:
        label: Its name in the filter.
        trajectories: In the order shown.
        tokenizer: Turns their ids into text.
        total: How many the run has in all, where only some are shown.
    """

    label: str
    trajectories: Sequence[Trajectory]
    tokenizer: ProtocolTokenizer
    total: int


def thin_out(count: int, keep: int) -> list[int]:
    """Positions of `keep` rows spread evenly over `count`, in order; all if there are fewer."""
    if count <= keep:
        return list(range(count))
    return [n * count // keep for n in range(keep)]


def pack_blocks(shelves: Sequence[Shelf]) -> str:
    """Script elements that hold the index and the texts."""
    rows: list[list[Any]] = []
    texts: list[dict[str, Any]] = []
    for number, shelf in enumerate(shelves):
        for trajectory in shelf.trajectories:
            rows.append(_index_row(number, trajectory))
            texts.append(_text_row(trajectory, shelf.tokenizer))
    chunks = [texts[n : n + CHUNK] for n in range(0, len(texts), CHUNK)]
    index = {
        "runs": [
            {"label": s.label, "shown": len(s.trajectories), "total": s.total} for s in shelves
        ],
        "results": list(RESULTS),
        "chunk": CHUNK,
        "rows": rows,
    }
    blocks = [_block("viewer-index", index)]
    blocks += [_block(f"viewer-chunk-{n}", chunk) for n, chunk in enumerate(chunks)]
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
    ]


def _text_row(t: Trajectory, tokenizer: ProtocolTokenizer) -> dict[str, Any]:
    spans = []
    for segment in t.segments:
        mean = None
        if segment.logprobs:
            mean = round(sum(segment.logprobs) / len(segment), 3)
        spans.append(
            [segment.author, segment.kind, tokenizer.decode(segment.ids), len(segment), mean]
        )
    return {
        "prompt": tokenizer.decode(t.prompt_ids),
        "spans": spans,
        # As text: JSON has no NaN, and a script would round a seed.
        "facts": [
            [name, "; ".join(value) if isinstance(value, list) else str(value)]
            for name, value in _facts(t).items()
            if value not in (None, "", [])
        ],
    }


def _facts(t: Trajectory) -> Mapping[str, Any]:
    info = dict(t.info)
    for shown in ("gold", "extracted", "reason", "routes", "family", "source", "kind"):
        info.pop(shown, None)
    return {
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
        **{name: json.dumps(v) if isinstance(v, (dict, list)) else v for name, v in info.items()},
    }
