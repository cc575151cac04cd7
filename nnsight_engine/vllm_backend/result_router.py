"""Routing of results to their requests, by this project's own keys: vLLM rewrites its request ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.plans.collect.collector import RequestCollector
from nnsight_engine.plans.records import Payload
from nnsight_engine.plans.request_plan import RequestPlan


class ResultRouter:
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
