"""Routing of results to their requests in the API process.

vLLM's output processor converts engine outputs to request outputs. Just before that, the router takes the
payloads out of them and passes each to the collector of its choice. Requests are identified by this project's
own keys, never by vLLM's request ids, which vLLM rewrites.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.plans.collect.collector import RequestCollector
from nnsight_engine.plans.records import Payload
from nnsight_engine.plans.request_plan import RequestPlan


class ResultRouter:
    """Routes payloads to collectors.

    Args:
        spec: The model's description.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._collectors: dict[str, list[RequestCollector]] = {}

    def __len__(self) -> int:
        """Return the number of open requests."""
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
        """Pass a request's results to the collector of their choice."""
        collectors = self._collectors.get(payload["key"])
        if collectors is not None:
            collectors[choice].add(Payload.decode(payload["data"]))
