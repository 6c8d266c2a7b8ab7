"""Who holds which row of the cache: calls under way, sessions between calls, shared prefixes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rivet.rollout.backend import Generation
from rivet.rollout.sampling import Draw
from rivet.rollout.stops import StopStrings

# Copying a prefix pays from about this many tokens; it is also how prefixes are looked up.
_HEAD = 16


@dataclass(slots=True, eq=False)
class Call:
    """One `generate` call on its way. `ids` and `logprobs` are what it has sampled so far."""

    prompt: list[int]
    stop: StopStrings
    max_new_tokens: int
    draw: Draw
    session: str | None
    future: asyncio.Future[Generation]
    loop: asyncio.AbstractEventLoop
    on_token: Callable[[int], None] | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_cancelled: bool = False
    _slot: Slot | None = None

    @property
    def slot(self) -> Slot:
        """Its row of the cache, from admission on."""
        assert self._slot is not None
        return self._slot

    @property
    def new_ids(self) -> list[int]:
        """The part of the prompt that its slot has not seen."""
        return self.prompt[len(self.slot.seen) :]


@dataclass(slots=True, eq=False)
class Slot:
    """One row of the cache.

    Attributes:
        row: Its index.
        seen: Ids whose keys and values it holds.
        session: Whose it is; None if nobody's.
        epoch: Which weights computed it (see `SlotTable.epoch`).
        last_used: Orders idle slots for eviction.
        is_busy: A call under way uses it.
        keys: Under which prefixes it can be found.
    """

    row: int
    seen: list[int] = field(default_factory=list)
    session: str | None = None
    epoch: int = 0
    last_used: int = 0
    is_busy: bool = False
    keys: list[tuple[int, ...]] = field(default_factory=list)


class SlotTable:
    """The slots of one cache.

    Args:
        count: How many rows the cache has.
    """

    def __init__(self, count: int) -> None:
        self._slots = [Slot(row) for row in range(count)]
        self._by_session: dict[str, Slot] = {}
        self._by_prefix: dict[tuple[int, ...], Slot] = {}
        self._clock = 0

    def clear(self) -> None:
        """Empty every slot, whoever uses it."""
        self._slots = [Slot(row) for row in range(len(self._slots))]
        self._by_session.clear()
        self._by_prefix.clear()

    def holds(self, session: str | None) -> bool:
        """Whether a session still has its slot."""
        return session in self._by_session

    def admit(self, call: Call, epoch: int) -> bool:
        """Give a call its slot: its session's own, else a free one, else the longest idle one.

        Afterwards `call.new_ids` is what is to be computed, at least one token: what the slot has
        seen beyond the common prefix, or with the weights of another epoch, is forgotten.

        Returns:
            False if every slot is busy.
        """
        slot = self._find(call.session)
        if slot is None:
            return False
        self._clock += 1
        slot.is_busy, slot.last_used = True, self._clock
        if slot.epoch != epoch:
            slot.seen, slot.epoch = [], epoch
        # The last prompt token is always computed: its logits are needed.
        del slot.seen[common_prefix(slot.seen, call.prompt[:-1]) :]
        self._unlist(slot)
        call._slot = slot
        return True

    def forget(self, session: str) -> None:
        """A session is over: its slot is free, at once or when its call is done."""
        slot = self._by_session.pop(session, None)
        if slot is not None:
            slot.session = None

    def swap(self, one: int, other: int) -> int:
        """Exchange the rows of two slots; so many columns of the cache go with them."""
        slots = self._slots
        slots[one], slots[other] = slots[other], slots[one]
        slots[one].row, slots[other].row = one, other
        return max(len(slots[one].seen), len(slots[other].seen))

    def list_prefix(self, call: Call) -> None:
        """Let others find the slot of a call whose prompt has been computed."""
        slot = call.slot
        for key in _keys(call):
            self._by_prefix[key] = slot
            slot.keys.append(key)

    def donor(self, call: Call) -> tuple[Slot, int] | None:
        """A slot that has seen more of a call's prompt than its own has, and how much of it."""
        for key in _keys(call):
            slot = self._by_prefix.get(key)
            if slot is not None and slot.epoch == call.slot.epoch:
                saved = _shared(slot.seen, call)
                if saved >= _HEAD:
                    return slot, len(call.slot.seen) + saved
        return None

    def _find(self, session: str | None) -> Slot | None:
        own = self._by_session.get(session) if session is not None else None
        if own is not None and not own.is_busy:
            return own
        idle = [slot for slot in self._slots if not slot.is_busy]
        if not idle:
            return None
        # Low rows first: rows in a block at the front are read without a copy.
        slot = min(idle, key=lambda s: (s.last_used if s.session is not None else 0, s.row))
        if slot.session is not None:
            del self._by_session[slot.session]
            slot.session = None
        if session is not None and own is None:
            slot.session = session
            self._by_session[session] = slot
        return slot

    def _unlist(self, slot: Slot) -> None:
        for key in slot.keys:
            if self._by_prefix.get(key) is slot:
                del self._by_prefix[key]
        slot.keys.clear()


def split_shared(calls: Sequence[Call]) -> tuple[list[Call], list[Call]]:
    """Calls to compute now, and those that had better copy a prefix from one of these first."""
    now: list[Call] = []
    later: list[Call] = []
    leaders: dict[tuple[int, ...], Call] = {}
    for call in calls:
        keys = _keys(call)
        leader = leaders.get(keys[0]) or leaders.get(keys[1])
        saved = 0 if leader is None else _shared(leader.prompt, call)
        if saved >= max(_HEAD, len(call.new_ids) // 2):
            later.append(call)
            continue
        now.append(call)
        for key in keys:
            leaders.setdefault(key, call)
    return now, later


def _keys(call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Under which prefixes a call's slot is looked for: its prompt, then the head of it."""
    return tuple(call.prompt), tuple(call.prompt[:_HEAD])


def _shared(ids: Sequence[int], call: Call) -> int:
    """Tokens of a call's prompt that `ids` begin with and that its own slot lacks."""
    return common_prefix(ids, call.prompt[:-1]) - len(call.slot.seen)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix of two lists."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return next(n for n in range(shorter) if a[n] != b[n])
