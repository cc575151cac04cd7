from __future__ import annotations

import dataclasses
from typing import Any

from app.engine.client import JsonObject
from app.engine.responses import Decode, choice_json
from app.request_context import RequestContext
from app.settings import Settings
from app.storage.results import ResultStore
from nnsight_engine.plans.collect.results import CollectedMarks
from nnsight_engine.vllm_backend.call import InterventionCall
from nnsight_engine.vllm_backend.trace_call import TraceCall

Call = InterventionCall | TraceCall


@dataclasses.dataclass(frozen=True, slots=True)
class CallResults:
    """The results that a call has read so far, as JSON of the choices of its answer."""

    call: Call
    num_choices: int
    asked: RequestContext
    store: ResultStore
    settings: Settings
    decode: Decode
    base_path: str = ""
    inline: bool = False

    async def part(self, choice: int) -> JsonObject | None:
        """Return the results that belong to the tokens delivered so far; None if none are new."""
        if isinstance(self.call, TraceCall):
            return await self._json(choice, await self.call.take_part(choice, self.num_choices))
        return await self._json(choice, self.call.take_part(choice, self.num_choices))

    async def rest(self, choice: int) -> JsonObject | None:
        """Return the remaining results of a choice that has ended."""
        return await self._json(choice, self.call.take_final(choice, self.num_choices))

    def stopped(self) -> set[int]:
        call = self.call
        return call.stopped(self.num_choices) if isinstance(call, InterventionCall) else set()

    async def _json(self, choice: int, collected: Any) -> JsonObject | None:
        if collected is None:
            return None
        call = self.call
        self.asked.marked |= {
            (result.kind, choice)
            for result in collected.results
            if isinstance(result, CollectedMarks) and result.positions
        }
        # Code reports its own results.
        operations = call.operations(choice, self.num_choices) if isinstance(call, InterventionCall) else ()
        answer = await choice_json(
            collected,
            store=self.store,
            work=self.asked,
            settings=self.settings,
            decode=self.decode,
            base_path=self.base_path,
            operations=operations,
            inline=self.inline,
        )
        images = call.images(choice, self.num_choices) if collected.final else ()
        return {**answer, "images": images} if images else answer


__all__ = ["Call", "CallResults"]
