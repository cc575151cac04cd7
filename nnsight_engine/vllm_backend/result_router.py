"""Where results meet their request again in the API process.

vLLM's output processor turns engine outputs into request outputs; just before, the router
takes our parcels out of them and gives each to the collector of its choice. Requests are
known by a key of our own, never by vLLM's request ids, which it rewrites.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.plans.collector import RequestCollector
from nnsight_engine.plans.records import Payload
from nnsight_engine.plans.request_plan import PLAN_KEY, RequestPlan
from nnsight_engine.vllm_backend.output_payloads import on_parcels


class ResultRouter:
    """Routes parcels to collectors.

    Args:
        spec: The model's description.
    """

    def __init__(self, spec: ModelSpec) -> None:
        """Start with no open request."""
        self._spec = spec
        self._collectors: dict[str, list[RequestCollector]] = {}

    def __len__(self) -> int:
        """Return how many requests are open."""
        return len(self._collectors)

    def attach(self, output_processor: Any) -> None:
        """Take parcels out of everything that ``output_processor`` will process."""
        on_parcels(output_processor, PLAN_KEY, self._deliver)

    def open(
        self,
        key: str,
        plan: RequestPlan,
        *,
        prompt_token_ids: Sequence[int],
        op_names: Sequence[str],
        num_choices: int,
    ) -> list[RequestCollector]:
        """Return one collector for each choice of the request; ``close`` it in the end."""
        collectors = [
            RequestCollector(plan, self._spec, prompt_token_ids=prompt_token_ids, op_names=op_names)
            for _ in range(num_choices)
        ]
        self._collectors[key] = collectors
        return collectors

    def close(self, key: str) -> None:
        """Forget the request; what still arrives for it is dropped."""
        self._collectors.pop(key, None)

    def _deliver(self, parcel: Any, choice: int) -> None:
        collectors = self._collectors.get(parcel["key"])
        if collectors is not None:
            collectors[choice].add(Payload.decode(parcel["data"]))
