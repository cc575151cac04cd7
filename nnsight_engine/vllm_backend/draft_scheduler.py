"""Speculative decoding in the scheduler: which requests take drafts, and how many tokens a step yields."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request

from nnsight_engine.vllm_backend.fair_scheduler import FairScheduler


class DraftScheduler(FairScheduler):
    """The fair scheduler, with ``undrafted`` requests; ``num_tokens`` are those of a step before a stop."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.undrafted: set[str] = set()
        self.num_tokens: dict[str, int] = {}
        drafts = self.vllm_config.speculative_config
        self._num_draft_slots: int = 0 if drafts is None else drafts.max_num_new_slots_for_drafting
        self._num_batched_tokens: int = self.scheduler_config.max_num_batched_tokens

    @property
    def longest_whole_prompt(self) -> int:
        return min(self.whole_step_tokens, self._num_batched_tokens - self._num_draft_slots)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        if self.num_spec_tokens:
            self.undrafted &= self.requests.keys()
            drafts = scheduler_output.scheduled_spec_decode_tokens
            for request_id in self.undrafted & drafts.keys():
                num_drafts = len(drafts.pop(request_id))
                scheduler_output.num_scheduled_tokens[request_id] -= num_drafts
                scheduler_output.total_num_scheduled_tokens -= num_drafts
        super()._update_after_schedule(scheduler_output)
        self._drop_drafts()

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        super().update_draft_token_ids(draft_token_ids)
        self._drop_drafts()

    def _drop_drafts(self) -> None:
        for request_id in self.undrafted if self.num_spec_tokens else ():
            if request_id in self.requests:
                self.requests[request_id].spec_token_ids = []

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], **others: Any
    ) -> tuple[list[int], bool]:
        kept, is_stopped = super()._update_request_with_output(request, new_token_ids, **others)
        if self.num_spec_tokens:
            self.num_tokens[request.request_id] = len(kept)
        return kept, is_stopped
