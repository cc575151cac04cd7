from __future__ import annotations

import ctypes
from typing import Final

import torch

WORD_BITS: Final = 32


def lengths_of(starts: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the lengths of the first rows, given where each row starts and the last one ends."""
    return starts[: num_rows + 1].diff()


def rows_and_places(lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row of each element, and its place in the row, for rows of these lengths in a sequence."""
    lengths = lengths.long()
    rows = torch.repeat_interleave(lengths)
    return rows, torch.arange(len(rows)) - (lengths.cumsum(0) - lengths)[rows]


def count_in(counts: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
    """Add one at each given place of a table, places that are given twice twice."""
    counts.index_put_((rows, columns), counts.new_ones(()), accumulate=True)


def unpack_bits(words: torch.Tensor, width: int) -> torch.Tensor:
    """Return ``[rows, width]`` booleans of ``[rows, ceil(width / 32)]`` integers, lowest bit first."""
    bits = words[:, :, None] >> torch.arange(WORD_BITS, dtype=words.dtype) & 1
    return bits.bool().flatten(1)[:, :width]


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Return ``[rows, width / 32]`` int32 of ``[rows, width]`` booleans, lowest bit first."""
    by_word = bits.view(len(bits), bits.shape[1] // WORD_BITS, WORD_BITS).long()
    return (by_word << torch.arange(WORD_BITS)).sum(-1).to(torch.int32)


def tensor_at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the memory at an address as a tensor of ``count`` elements, without a copy."""
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)
