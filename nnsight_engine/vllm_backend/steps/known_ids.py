from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt


class KnownIds(dict[str, npt.NDArray[np.int32]]):
    """The ids that the host knows for certain: those of prompts, and from before a preemption; no drafts."""

    def begin(self, scheduled: Any, live: Collection[str]) -> None:
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
    ids = np.asarray(request.prefill_token_ids or request.prompt_token_ids or [], np.int32)
    if request.prompt_token_ids is None and request.prompt_embeds is not None:
        # No rule about tokens names a position of embeddings.
        num_embeds = len(request.prompt_embeds)
        ids = np.concatenate([np.full(num_embeds, -1, np.int32), ids[num_embeds:]])
    return ids
