"""Experts' states on disk: an expert reads a problem once per run, and once for runs that share it.

    CACHE/NAME-KEY/expert.json        what the states depend on (`FrozenExpert.identity`)
    CACHE/NAME-KEY/00000.safetensors  values, mask, digests of the problems, the expert's key

The folder's key is the digest of the identity: weights, tokenizer, layers, last tokens, number
format. Another revision of a model has another folder. Files that were put into the wrong folder
are refused by the key that each of them carries, and states that were changed in place by reading a
few problems again when a cache is opened.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rivet.files import atomic_write_json, explain_full_disk, temporary_beside
from rivet.latent.experts import FrozenExpert
from rivet.latent.states import ExpertStates, ProblemStates

logger = logging.getLogger(__name__)

_MANIFEST = "expert.json"
_SHARD = 512  # problems in a file: what a kill can lose
_DIGEST = 16
# States of one problem differ a little with the batch that it was read in.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


class CacheError(ValueError):
    """A cache does not hold what this expert would say; the message names the file."""


class StateCache:
    """States of one expert on disk.

    Args:
        root: Folder of all experts' caches; None keeps nothing on disk.
        expert: Reads what is not there.
        checks: Problems that are read again when a cache is opened.

    Raises:
        CacheError: The folder holds states of another expert, or states that were changed.
    """

    def __init__(self, root: str | Path | None, expert: FrozenExpert, *, checks: int = 2) -> None:
        self._expert = expert
        self._identity = expert.identity()
        text = json.dumps(self._identity, sort_keys=True)
        self.key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self.folder = None if root is None else Path(root) / f"{expert.spec.name}-{self.key[:12]}"
        self.num_read = 0
        self._values: list[torch.Tensor] = []
        self._mask: list[torch.Tensor] = []
        self._row: dict[bytes, int] = {}
        self._checks = checks
        self._shards = 0
        if self.folder is not None and self.folder.is_dir():
            self._load(self.folder)

    def states(self, problems: Sequence[str]) -> ProblemStates:
        """States of some problems, read where they are not cached, in the order given."""
        digests = [_digest(problem) for problem in problems]
        self._spot_check(problems, digests)
        missing = {d: p for d, p in zip(digests, problems, strict=True) if d not in self._row}
        todo = list(missing.items())
        for start in range(0, len(todo), _SHARD):
            part = todo[start : start + _SHARD]
            fresh = self._expert.read([problem for _, problem in part])
            self.num_read += len(part)
            self._add([digest for digest, _ in part], fresh)
            self._write([digest for digest, _ in part], fresh)
        rows = torch.tensor([self._row[digest] for digest in digests], dtype=torch.long)
        if not self._values:
            shape = (0, self._expert.slots)
            return ProblemStates(
                torch.zeros(*shape, self._expert.width), torch.zeros(shape, dtype=torch.bool)
            )
        return ProblemStates(torch.cat(self._values)[rows], torch.cat(self._mask)[rows])

    def _add(self, digests: Sequence[bytes], states: ProblemStates) -> None:
        first = sum(map(len, self._values))  # not of digests: two processes may have read one each
        self._row |= {digest: first + n for n, digest in enumerate(digests)}
        self._values.append(states.values)
        self._mask.append(states.mask)

    def _load(self, folder: Path) -> None:
        manifest = folder / _MANIFEST
        if manifest.is_file() and _manifest(manifest) != self._identity:
            raise CacheError(
                f"{manifest}: describes another expert than {self._expert.spec.path}; expected "
                f"key {self.key}: remove {folder}"
            )
        for path in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    found = (file.metadata() or {}).get("key")
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise CacheError(
                    f"{path}: cannot be read ({error}); remove the file, and its problems are read "
                    "again"
                ) from error
            if found != self.key:
                raise CacheError(
                    f"{path}: holds states of another expert or revision (key {found}), expected "
                    f"{self.key} of {self._expert.spec.path}; remove the file"
                )
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            count = shapes.get("digests", (0,))[0] // _DIGEST
            slots, width = self._expert.slots, self._expert.width
            expected = {
                "values": (count, slots, width),
                "mask": (count, slots),
                "digests": (count * _DIGEST,),
            }
            if shapes != expected:
                raise CacheError(
                    f"{path}: holds {shapes}, expected {expected}; remove the file, and its "
                    "problems are read again"
                )
            raw = bytes(tensors["digests"].tolist())
            digests = [raw[n : n + _DIGEST] for n in range(0, len(raw), _DIGEST)]
            self._add(digests, ProblemStates(tensors["values"], tensors["mask"].bool()))
            self._shards += 1

    def _spot_check(self, problems: Sequence[str], digests: Sequence[bytes]) -> None:
        """Read a few cached problems again, spread evenly; once per opened cache."""
        cached = [n for n, digest in enumerate(digests) if digest in self._row]
        if not cached or not self._checks:
            return
        chosen = [cached[i * len(cached) // self._checks] for i in range(self._checks)]
        self._checks = 0
        fresh = self._expert.read([problems[n] for n in chosen])
        rows = [self._row[digests[n]] for n in chosen]
        kept = torch.cat(self._values)[rows].float()
        tolerance = _TOLERANCE[fresh.values.dtype]
        scale = fresh.values.float().abs().amax().clamp(min=1.0)
        worst = (kept - fresh.values.float()).abs().amax() / scale
        if not worst <= tolerance:
            raise CacheError(
                f"{self.folder}: cached states are not what {self._expert.spec.path} gives now "
                f"(they differ by {worst:.2g} of their size, expected at most {tolerance}); the "
                "files were changed: remove the folder"
            )

    def _write(self, digests: Sequence[bytes], states: ProblemStates) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / _MANIFEST).is_file():
            atomic_write_json(self.folder / _MANIFEST, self._identity)
        # Named by content as well: two processes that read at the same time do not collide.
        name = hashlib.blake2b(b"".join(digests), digest_size=6).hexdigest()
        path = self.folder / f"{self._shards:05d}-{name}.safetensors"
        self._shards += 1
        tensors = {
            "values": states.values.contiguous(),
            "mask": states.mask.to(torch.uint8),
            "digests": torch.tensor(list(b"".join(digests)), dtype=torch.uint8),
        }
        temporary = temporary_beside(path)
        with explain_full_disk(path):
            try:
                save_file(tensors, temporary, metadata={"key": self.key})
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)


def read_states(
    experts: Sequence[FrozenExpert], problems: Sequence[str], root: str | Path | None
) -> ExpertStates:
    """H of every problem, cached on disk.

    Args:
        experts: In the order that the adapter sees them.
        problems: Texts; equal texts are read once.
        root: Folder of the caches; None keeps nothing.

    Raises:
        CacheError: A cache holds what an expert would not say.
    """
    joined: Mapping[str, ProblemStates] = {
        expert.spec.name: _logged(StateCache(root, expert), problems) for expert in experts
    }
    return ExpertStates.of(joined)


def _logged(cache: StateCache, problems: Sequence[str]) -> ProblemStates:
    states = cache.states(problems)
    logger.info(
        "expert %s: read %d of %d problems, the others were cached",
        cache._expert.spec.name,
        cache.num_read,
        len(problems),
    )
    return states


def _manifest(path: Path) -> object:
    """What a cache says of its expert; None where it cannot be read."""
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError:
        return None


def _digest(problem: str) -> bytes:
    return hashlib.blake2b(problem.encode("utf-8", "replace"), digest_size=_DIGEST).digest()
