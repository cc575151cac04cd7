"""What comes with vLLM's outputs of a request: payloads, the routes of its results, and its usage.

Payloads by kind are in the field for KV cache connectors. Results have this project's own keys, since vLLM
rewrites its request ids. Tokens are those that vLLM's own state of a request has counted, even after an
abort; it is read once the request is over.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.core.work_context import UsageMeter, current_work
from nnsight_engine.plans.collect.collector import RequestCollector
from nnsight_engine.plans.records import Payload
from nnsight_engine.plans.request_plan import RequestPlan

Deliver = Callable[[Any, int], None]
"""Receives a payload and the number of the choice it belongs to."""


def deliver_payloads(output_processor: Any, handlers: Mapping[str, Deliver]) -> None:
    """Pass every payload from now on to the handler of its key, before vLLM's output processor runs."""
    process = output_processor.process_outputs

    @functools.wraps(process)
    def process_outputs(engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            params = output.kv_transfer_params
            if not params:
                continue
            state = output_processor.request_states.get(output.request_id)
            for kind in handlers.keys() & params.keys():
                payload = params.pop(kind)
                if state is not None:
                    handlers[kind](payload, state.request_index)
            output.kv_transfer_params = params or None
        return process(engine_core_outputs, *args, **kwargs)

    output_processor.process_outputs = process_outputs


class ResultRouter:
    """Passes payloads on to the collectors of their request, by the key that ``open`` was given."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._collectors: dict[str, list[RequestCollector]] = {}

    def __len__(self) -> int:
        return len(self._collectors)

    def open(
        self,
        key: str,
        plan: RequestPlan,
        *,
        prompt_token_ids: Sequence[int],
        op_names: Sequence[str],
        num_choices: int,
    ) -> list[RequestCollector]:
        """Register a request and return one collector per choice; the caller must ``close`` it."""
        collectors = [
            RequestCollector(plan, self._spec, prompt_token_ids=prompt_token_ids, op_names=op_names)
            for _ in range(num_choices)
        ]
        self._collectors[key] = collectors
        return collectors

    def close(self, key: str) -> None:
        """Remove the request; results that still arrive for it are dropped."""
        self._collectors.pop(key, None)

    def deliver(self, payload: Any, choice: int) -> None:
        collectors = self._collectors.get(payload["key"])
        if collectors is not None:
            collectors[choice].add(Payload.decode(payload["data"]))


_STOP: Final = "stop"


def count_tokens(output_processor: Any) -> None:
    """Have a request's tokens and finish reasons counted in the ``UsageMeter`` of the task that adds it."""
    add, process = output_processor.add_request, output_processor.process_outputs
    states = output_processor.request_states
    generating: weakref.WeakValueDictionary[str, UsageMeter] = weakref.WeakValueDictionary()

    @functools.wraps(add)
    def add_request(
        request: Any, prompt: Any, parent: Any = None, index: int = 0, *args: Any, **kwargs: Any
    ) -> None:
        add(request, prompt, parent, index, *args, **kwargs)
        work = current_work()
        if work is not None:
            state = states[request.request_id]
            if index == 0:  # a prompt with several choices is one prompt, as in OpenAI's usage
                work.meter.prompt_tokens += state.prompt_len
            if state.detokenizer is not None:  # the request does not pool
                work.meter.watch(state.detokenizer.num_output_tokens)
                generating[request.request_id] = work.meter

    @functools.wraps(process)
    def process_outputs(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        processed = process(outputs, *args, **kwargs)
        for output in outputs:
            if output.request_id not in states:
                meter, reason = generating.pop(output.request_id, None), output.finish_reason
                if meter is not None:
                    # A stop string is found here, and the engine does not know of it yet.
                    meter.finish_reasons.append(_STOP if reason is None else str(reason))
        return processed

    output_processor.add_request = add_request
    output_processor.process_outputs = process_outputs


def note_spent(seconds: float | None) -> None:
    """Add the seconds that operations or blocks took in the engine to the current request's meter."""
    work = current_work()
    if work is not None and seconds:
        work.meter.intervention_s += seconds
