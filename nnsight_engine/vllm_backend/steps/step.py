"""One step as the runner is about to run it: which rows of its tensors belong to which request."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch


@dataclasses.dataclass(frozen=True, slots=True)
class RequestRows:
    """The rows of one request; ``index`` is its row of values with one row per request.

    With asynchronous steps, ``start`` is an upper bound for requests that take drafts, which are the last
    rows.
    """

    request_id: str
    index: int
    row: int
    num_rows: int
    start: int
    num_drafts: int = 0


@dataclasses.dataclass(eq=False)
class Step:
    """The rows of one step; ``token_ids`` is ``[padded rows]`` on the device.

    Attributes:
        known_ids: The ids of each request's tokens by absolute position, as far as the host knows them.
        prefill_lens: Number of given tokens: of the prompt, and those generated before a preemption.
        is_repeatable: Whether the model can be run on the same inputs again.
        num_drafts: Drafted tokens, which are the last rows of each request; None if there are none.
    """

    request_ids: Sequence[str]
    starts: npt.NDArray[np.integer]
    row_counts: npt.NDArray[np.integer]
    _: dataclasses.KW_ONLY
    num_padded_rows: int
    token_ids: torch.Tensor
    known_ids: Mapping[str, npt.NDArray[np.int32]]
    prefill_lens: npt.NDArray[np.integer]
    is_repeatable: bool
    num_drafts: npt.NDArray[np.integer] | None = None
    num_rows: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.num_rows = int(self.row_counts.sum())

    def is_sampled(self, rows: RequestRows) -> bool:
        """Return whether a token of the request is sampled: its prompt ends in this step or has ended."""
        return rows.start + rows.num_rows >= int(self.prefill_lens[rows.index])

    @property
    def has_one_row_each(self) -> bool:
        """Whether each request has one row: it decodes, or computes its prompt's last token."""
        return self.num_rows == len(self.request_ids)

    def rows(self) -> Iterator[RequestRows]:
        row = 0
        drafts = [0] * len(self.request_ids) if self.num_drafts is None else self.num_drafts.tolist()
        for index, (request_id, count, start, num_drafts) in enumerate(
            zip(self.request_ids, self.row_counts.tolist(), self.starts.tolist(), drafts, strict=True)
        ):
            yield RequestRows(request_id, index, row, count, start, num_drafts)
            row += count

    def logits_rows(self) -> npt.NDArray[np.int64]:
        """Return the rows with logits: each request's last row, and the one before each of its drafts."""
        if self.has_one_row_each:
            return np.arange(self.num_rows, dtype=np.int64)
        ends = np.cumsum(self.row_counts, dtype=np.int64) - 1
        if self.num_drafts is None:
            return ends
        counts = self.num_drafts.astype(np.int64) + 1
        before = np.cumsum(counts) - counts
        return np.repeat(ends + 1 - counts - before, counts) + np.arange(counts.sum())

    def logits_ends(self) -> npt.NDArray[np.int64]:
        if self.num_drafts is None:
            return np.arange(len(self.request_ids), dtype=np.int64)
        return np.cumsum(self.num_drafts + 1, dtype=np.int64) - 1
