"""Tokens that were sampled in a step that is computed again for their request.

A block that was shown a token, and had not answered when the step ended, goes on with this very token: the
step is computed again for its request, and another draw would give another one. So the token is kept, with
its probabilities, and takes the place of what is drawn then; the request's own stream of random numbers is
put back, to be where it would be without.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch


class _Kept(NamedTuple):
    tokens: torch.Tensor
    logprobs: list[torch.Tensor]


class ReplayedSamples:
    """What was sampled for requests whose step is to be computed again."""

    def __init__(self) -> None:
        """Start with none."""
        self._kept: dict[str, _Kept] = {}

    @staticmethod
    def states(batch: Any) -> dict[int, tuple[torch.Generator, torch.Tensor]]:
        """Return where the random streams of a batch are, by row; those of a GPU vLLM puts back itself."""
        return {
            index: (generator, generator.get_state())
            for index, generator in batch.generators.items()
            if generator.device.type == "cpu"
        }

    def keep(
        self,
        request_id: str,
        row: int,
        tokens: torch.Tensor,
        output: Any,
        states: Mapping[int, tuple[torch.Generator, torch.Tensor]],
    ) -> None:
        """Keep what was sampled for a request.

        Args:
            request_id: The request.
            row: Its row of the batch.
            tokens: All rows' as they were sampled.
            output: The sampler's.
            states: Where the random streams were before, see ``states``.
        """
        logprobs = [part[row].clone() for part in _parts(output)]
        self._kept[request_id] = _Kept(tokens[row].clone(), logprobs)
        if row in states:
            generator, state = states[row]
            generator.set_state(state)

    def put_back(self, output: Any, rows: Mapping[str, int], undone: Collection[str]) -> None:
        """Put what was kept for the requests of a step into what the sampler gave.

        Args:
            output: The sampler's.
            rows: The requests' rows of the batch.
            undone: Those whose step is to be computed again once more.
        """
        for request_id in [one for one in self._kept if one in rows and one not in undone]:
            kept, row = self._kept.pop(request_id), rows[request_id]
            output.sampled_token_ids[row] = kept.tokens
            for part, own in zip(_parts(output), kept.logprobs, strict=False):
                if own.ndim:  # as many of the most likely as anybody in the batch asks for, then and now
                    width = min(len(own), part.shape[1])
                    part[row, :width] = own[:width]
                else:
                    part[row] = own

    def forget(self, finished: Collection[str]) -> None:
        """Forget requests that have ended."""
        for request_id in finished:
            self._kept.pop(request_id, None)


def _parts(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a sampler's probabilities, each with a row per request."""
    found = output.logprobs_tensors
    if found is None:
        return []
    return [found.logprob_token_ids, found.logprobs, found.selected_token_ranks]


__all__ = ["ReplayedSamples"]
