"""Sampled tokens of requests whose step is computed again, for blocks that have been given the token.

Sampling again would yield another token. Later samples are not affected: vLLM draws by seed and position.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch


class _StoredSample(NamedTuple):
    tokens: torch.Tensor
    logprobs: list[torch.Tensor]


class ReplayedSamples:
    def __init__(self) -> None:
        self._stored: dict[str, _StoredSample] = {}

    def keep(
        self,
        request_id: str,
        row: int,
        tokens: torch.Tensor,
        output: Any,
        logprobs_row: int,
    ) -> None:
        """Store a sample; ``row`` is the request's in the batch, ``logprobs_row`` that in the logprobs."""
        logprobs = [part[logprobs_row].clone() for part in _parts(output)]
        self._stored[request_id] = _StoredSample(tokens[row, :1].clone(), logprobs)

    def put_back(
        self,
        output: Any,
        rows: Mapping[str, int],
        logprobs_rows: Sequence[int] | npt.NDArray[np.integer],
        undone: Collection[str],
    ) -> None:
        """Write the stored samples into the output; those of ``undone`` requests stay stored as well."""
        for request_id in [one for one in self._stored if one in rows and one not in undone]:
            kept, row = self._stored.pop(request_id), rows[request_id]
            output.sampled_token_ids[row, :1] = kept.tokens
            at = logprobs_rows[row]
            for part, own in zip(_parts(output), kept.logprobs, strict=False):
                if own.ndim:  # width: the most logprobs that any request of the batch asks for
                    width = min(len(own), part.shape[1])
                    part[at, :width] = own[:width]
                else:
                    part[at] = own

    def forget(self, finished: Collection[str]) -> None:
        for request_id in finished:
            self._stored.pop(request_id, None)


def _parts(output: Any) -> list[torch.Tensor]:
    found = output.logprobs_tensors
    if found is None:
        return []
    return [found.logprob_token_ids, found.logprobs, found.selected_token_ranks]


__all__ = ["ReplayedSamples"]
