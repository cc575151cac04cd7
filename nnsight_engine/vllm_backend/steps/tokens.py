"""Tokens that steps need: ids that the host knows, stop tokens, and samples of steps computed again.

The scheduler may see a stop token only after it has planned the next step, which vLLM then discards. A block
must not see that step, so the worker looks at the tokens itself.

If a step is computed again, its blocks have been given the sampled token already, and sampling again would
yield another. Later samples are not affected: vLLM draws by seed and position.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from nnsight_engine.plans.step.host_arena import HostArena, HostCopy, to_device
from nnsight_engine.vllm_backend.compat import brings
from nnsight_engine.vllm_backend.traces.context import TRACE_KEY


class KnownIds(dict[str, npt.NDArray[np.int32]]):
    """The ids that the host knows for certain: those of prompts, and from before a preemption; no drafts."""

    def begin_step(self, scheduled: Any, live: Collection[str]) -> None:
        """Record the requests that arrive with a step, and forget those that have finished.

        The runner receives a preempted request as a new one, with the tokens that it had generated.
        """
        if not (live or self):
            return
        for request_id in scheduled.finished_req_ids:
            self.pop(request_id, None)
        for request in scheduled.scheduled_new_reqs:
            if request.req_id in live:
                self[request.req_id] = _ids_of(request)


def _ids_of(request: Any) -> npt.NDArray[np.int32]:
    """Return the ids with which a request arrives; -1 at positions that are given as embeddings."""
    ids = np.asarray(request.prefill_token_ids or request.prompt_token_ids or [], np.int32)
    if request.prompt_token_ids is None and request.prompt_embeds is not None:
        # No rule about tokens names a position of embeddings.
        num_embeds = len(request.prompt_embeds)
        ids = np.concatenate([np.full(num_embeds, -1, np.int32), ids[num_embeds:]])
    return ids


class StopTokens:
    """Finds traced requests that sampled a stop token, before the scheduler knows it; see ``ended``."""

    def __init__(self, device: torch.device, *, is_asynchronous: bool) -> None:
        self._arena = HostArena(device)
        self._is_asynchronous = is_asynchronous
        self._stops: dict[str, frozenset[int]] = {}
        self._last_copy: tuple[Sequence[str], HostCopy] | None = None
        self.ended: set[str] = set()

    def begin_step(self, scheduled: Any) -> None:
        """Take in the stop tokens of new requests, and forget finished ones; only with asynchronous steps."""
        if not self._is_asynchronous:
            return
        for request_id in scheduled.finished_req_ids if self._stops else ():
            self._stops.pop(request_id, None)
            self.ended.discard(request_id)
        for request in scheduled.scheduled_new_reqs:
            params = request.sampling_params
            if params is not None and brings(params, TRACE_KEY):
                stops = {*(params.stop_token_ids or ()), params.eos_token_id}
                self._stops[request.req_id] = frozenset(stops - {None})

    def find_ended(self, request_ids: Sequence[str]) -> None:
        """Find the requests that the last step has ended; wait for its tokens if any of these had one."""
        if self._last_copy is None or set(self._last_copy[0]).isdisjoint(request_ids):
            return
        (names, copy), self._last_copy = self._last_copy, None
        with copy.arrived():
            pairs = zip(names, copy.values[0].tolist(), strict=True)
            self.ended.update(name for name, token in pairs if token in self._stops.get(name, ()))

    def note(self, rows: dict[str, int], sampled: torch.Tensor) -> None:
        """Start to copy a step's samples to the host; ``rows`` are the rows of traced requests in them."""
        names = [name for name in rows if self._stops.get(name)]
        if names:
            index = to_device(np.array([rows[name] for name in names], np.int64), sampled.device)
            self._last_copy = names, self._arena.start_copy([sampled[:, 0].index_select(0, index)])


class _StoredSample(NamedTuple):
    tokens: torch.Tensor
    logprobs: list[torch.Tensor]


class ReplayedSamples:
    """The samples of undone steps, which the steps that repeat them must return as well."""

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
        for request_id in [stored for stored in self._stored if stored in rows and stored not in undone]:
            kept, row = self._stored.pop(request_id), rows[request_id]
            output.sampled_token_ids[row, :1] = kept.tokens
            logprobs_row = logprobs_rows[row]
            for part, stored_part in zip(_parts(output), kept.logprobs, strict=False):
                if stored_part.ndim:  # width: the most logprobs that any request of the batch asks for
                    width = min(len(stored_part), part.shape[1])
                    part[logprobs_row, :width] = stored_part[:width]
                else:
                    part[logprobs_row] = stored_part

    def forget(self, finished: Collection[str]) -> None:
        for request_id in finished:
            self._stored.pop(request_id, None)


def _parts(output: Any) -> list[torch.Tensor]:
    """Return the tensors of an output's logprobs, each with a row for each row of logits."""
    logprobs = output.logprobs_tensors
    if logprobs is None:
        return []
    return [logprobs.logprob_token_ids, logprobs.logprobs, logprobs.selected_token_ranks]
