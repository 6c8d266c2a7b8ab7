"""A key-value cache of slots: every row of a batch writes at its own position.

The model's own forward runs on top of it, for any causal language model of `transformers` whose
layers all attend to the whole context and call the library's attention interface. A caller says
which slots take part and where each token goes (`begin`), then runs the forward with the mask that
it got.
Right of a row's last token the slots hold rubbish that the mask hides; padding is written to one
extra column that is never read. Rows that are a block at the front are read in place, so a caller
that decodes for long had better `swap` its rows there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface, Cache

ATTENTION = "rivet_slots"
_FIRST_COLUMNS = 128


class SlotCache(Cache):
    """Keys and values of up to `slots` sequences of up to `max_context` tokens.

    Memory grows with use: rows and columns double until the limits are reached.
    """

    def __init__(
        self, slots: int, max_context: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(layers=[])
        self.slots, self.max_context = slots, max_context
        self._device, self._dtype = device, dtype
        self._keys: list[torch.Tensor] = []  # per layer (rows, heads, columns + 1, head_dim)
        self._values: list[torch.Tensor] = []
        self._rows = min(slots, 8)
        self._columns = min(max_context, _FIRST_COLUMNS)
        self._read: int | torch.Tensor = 0  # so many rows at the front, or which ones
        self._length = self._last = 0
        self._mask = self._visible = torch.zeros(0)
        self._write_rows = self._write_columns = torch.zeros(0, dtype=torch.long)
        self._write_flat: dict[int, torch.Tensor] = {}

    def clear(self) -> None:
        """Free the memory; every slot is empty afterwards."""
        self._keys, self._values = [], []

    def begin(
        self,
        rows: Sequence[int],
        positions: torch.Tensor,
        *,
        is_real: torch.Tensor,
        length: int,
        ahead: int = 0,
    ) -> torch.Tensor:
        """Prepare a forward over some slots.

        Args:
            rows: Slots that take part, in the order of the batch, length B.
            positions: Position of each token, shape (B, Q); 0 for padding.
            is_real: False for padding, shape (B, Q).
            length: One past the largest position, L.
            ahead: So many forwards may follow by `advance`; Q must be 1 then.

        Returns:
            The additive attention mask for it, shape (B, 1, Q, L).
        """
        self._reserve(max(rows) + 1, length)
        self._length = length
        length = self._last = min(length + ahead, self._columns)
        contiguous = list(rows) == list(range(len(rows)))
        index = torch.tensor(rows, device=self._device)
        self._read = len(rows) if contiguous else index
        self._write_rows = index[:, None].expand_as(positions)
        self._write_columns = torch.where(is_real, positions, self._columns)
        self._write_flat = {}
        columns = torch.arange(length, device=self._device)
        hidden = columns > positions[..., None]  # (B, Q, L)
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        mask.masked_fill_(hidden, torch.finfo(self._dtype).min)
        self._mask = mask[:, None]
        self._visible = positions[:, 0] + length * torch.arange(len(rows), device=self._device)
        return self._mask[..., : self._length]

    def advance(self) -> torch.Tensor | None:
        """Prepare the forward after a `begin` with one token a row: each row's next position.

        Returns:
            The mask, of one more column; None where `begin` is needed again.
        """
        if self._length >= self._last:
            return None
        self._length += 1
        self._visible += 1
        self._mask.view(-1).index_fill_(0, self._visible, 0.0)
        for flat in self._write_flat.values():
            flat += 1
        return self._mask[..., : self._length]

    def swap(self, pairs: Sequence[tuple[int, int]], length: int) -> None:
        """Exchange the first columns of pairs of rows; no row occurs twice."""
        self._reserve(max(map(max, pairs)) + 1, length)
        one, other = zip(*pairs, strict=True)
        source = torch.tensor([*one, *other], device=self._device)
        target = torch.tensor([*other, *one], device=self._device)
        for stored in (*self._keys, *self._values):
            part = stored[:, :, :length]
            part.index_copy_(0, target, part.index_select(0, source))

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first columns of one row to others."""
        self._reserve(max(targets) + 1, length)
        index = torch.tensor(targets, device=self._device)
        for stored in (*self._keys, *self._values):
            stored[index, :, :length] = stored[source, :, :length]

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values, shape (B, heads, Q, head_dim); return those of L columns."""
        while len(self._keys) <= layer_idx:
            self._keys.append(self._allocate(key_states))
            self._values.append(self._allocate(value_states))
        where = self._flat_index(key_states.shape[1])
        result = []
        for stored, new in (
            (self._keys[layer_idx], key_states),
            (self._values[layer_idx], value_states),
        ):
            width = new.shape[-1]
            stored.view(-1, width).index_copy_(0, where, new.reshape(-1, width).to(stored.dtype))
            seen = stored[:, :, : self._length]
            # A block at the front is read in place; `index_select` copies faster than indexing.
            result.append(
                seen[: self._read]
                if isinstance(self._read, int)
                else seen.index_select(0, self._read)
            )
        return result[0], result[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that the current forward sees, its own tokens not included."""
        return 0

    def _flat_index(self, heads: int) -> torch.Tensor:
        """Where (B, heads, Q) goes in the cache seen as a list of head vectors."""
        if heads not in self._write_flat:
            head = torch.arange(heads, device=self._device)[:, None]
            row = self._write_rows[:, None] * heads + head  # (B, heads, Q)
            flat = row * (self._columns + 1) + self._write_columns[:, None]
            self._write_flat[heads] = flat.reshape(-1)
        return self._write_flat[heads]

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros, not rubbish: a hidden NaN times a weight of zero would still be NaN.
        shape = (self._rows, like.shape[1], self._columns + 1, like.shape[3])
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def _reserve(self, rows: int, columns: int) -> None:
        """Grow so that this many rows and columns fit, keeping what is stored."""
        wanted_rows, wanted_columns = self._rows, self._columns
        while wanted_rows < rows:
            wanted_rows = min(2 * wanted_rows, self.slots)
        while wanted_columns < columns:
            wanted_columns = min(2 * wanted_columns, self.max_context)
        if (wanted_rows, wanted_columns) == (self._rows, self._columns):
            return
        old_columns = self._columns
        self._rows, self._columns = wanted_rows, wanted_columns
        for tensors in (self._keys, self._values):
            for n, old in enumerate(tensors):
                tensors[n] = self._allocate(old)
                tensors[n][: old.shape[0], :, :old_columns] = old[:, :, :old_columns]


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Grouped-query attention for the attention interface of `transformers`.

    For one query a row it reads each key once; the library's own function copies the keys once
    per query head.

    Args:
        query: Shape (B, H, Q, D).
        key, value: Shape (B, heads, L, D).
        attention_mask: Additive, shape (B, 1, Q, L).
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with {name} is not supported")
    batch, query_heads, length, width = query.shape
    heads = key.shape[1]
    scaling = width**-0.5 if scaling is None else scaling
    if length > 1:
        output = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            scale=scaling,
            enable_gqa=query_heads != heads,
        )
        return output.transpose(1, 2).contiguous(), None
    output = attend(query[:, :, 0], key, value, attention_mask, scaling)
    return output[:, None], None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Grouped-query attention of one query a row: the heads of a group are one small matrix.

    Args:
        query: Shape (B, H, D).
        key, value: Shape (B, heads, L, D).
        mask: Additive, shape (B, 1, 1, L).

    Returns:
        Shape (B, H, D).
    """
    batch, heads, columns, _ = key.shape
    grouped = query.reshape(batch * heads, -1, query.shape[-1])
    if heads > 1:
        mask = mask.expand(batch, heads, 1, columns).reshape(batch * heads, 1, 1, columns)
    scores = torch.baddbmm(mask[:, 0], grouped, key.flatten(0, 1).transpose(1, 2), alpha=scaling)
    weights = scores.float().softmax(-1).to(value.dtype)
    return torch.bmm(weights, value.flatten(0, 1)).view(batch, -1, value.shape[-1])


AttentionInterface.register(ATTENTION, slot_attention)
