"""Stop tokens of traced requests, which the scheduler may see only after it has planned their next step.

vLLM discards such a step. A block must not see it, so the worker looks at the tokens itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nnsight_engine.plans.step.host_arena import HostArena, HostCopy, to_device
from nnsight_engine.vllm_backend.compat import brings
from nnsight_engine.vllm_backend.traces.entry import TRACE_KEY


class StopTokens:
    def __init__(self, device: torch.device, *, is_asynchronous: bool) -> None:
        self._arena = HostArena(device)
        self._is_asynchronous = is_asynchronous
        self._stops: dict[str, frozenset[int]] = {}
        self._last: tuple[Sequence[str], HostCopy] | None = None
        self.ended: set[str] = set()

    def begin(self, scheduled: Any) -> None:
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
        if self._last is None or set(self._last[0]).isdisjoint(request_ids):
            return
        (names, copy), self._last = self._last, None
        with copy.arrived():
            pairs = zip(names, copy.values[0].tolist(), strict=True)
            self.ended.update(name for name, token in pairs if token in self._stops.get(name, ()))

    def note(self, rows: dict[str, int], sampled: torch.Tensor) -> None:
        names = [name for name in rows if self._stops.get(name)]
        if names:
            index = to_device(np.array([rows[name] for name in names], np.int64), sampled.device)
            self._last = names, self._arena.start_copy([sampled[:, 0].index_select(0, index)])
