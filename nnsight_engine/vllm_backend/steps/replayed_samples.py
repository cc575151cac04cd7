"""Sampled tokens of requests whose step is computed again.

A block that was given a sampled token and had not answered when the step ended continues with that token. The
step is computed again for its request, and sampling again would yield another token. So the token and its
logprobs are stored, and replace the newly sampled ones in the repeated step. Later samples are those of a run
without the repetition: vLLM draws by seed and position.
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
    """Stored samples of requests whose step is to be computed again."""

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
        """Store the sample of a request.

        Args:
            request_id: The request.
            row: Its row of the batch.
            tokens: The tokens of all rows as they were sampled.
            output: The sampler's output.
            logprobs_row: Its row of the logprobs.
        """
        logprobs = [part[logprobs_row].clone() for part in _parts(output)]
        self._stored[request_id] = _StoredSample(tokens[row, :1].clone(), logprobs)

    def put_back(
        self,
        output: Any,
        rows: Mapping[str, int],
        logprobs_rows: Sequence[int] | npt.NDArray[np.integer],
        undone: Collection[str],
    ) -> None:
        """Write the stored samples of the step's requests into the sampler's output.

        Args:
            output: The sampler's output.
            rows: The requests' rows of the batch.
            logprobs_rows: The row of the logprobs of each row of the batch.
            undone: Requests whose step is to be computed yet again; their samples stay stored.
        """
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
        """Drop the samples of requests that have ended."""
        for request_id in finished:
            self._stored.pop(request_id, None)


def _parts(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a sampler's logprobs, each with one row for each request and draft."""
    found = output.logprobs_tensors
    if found is None:
        return []
    return [found.logprob_token_ids, found.logprobs, found.selected_token_ranks]


__all__ = ["ReplayedSamples"]
