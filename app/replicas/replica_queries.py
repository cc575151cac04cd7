"""Queries of the front to its replicas: metrics, models, readiness, and whether a caller is accepted.

They take no lease, so that they start no replica and wait for none. Each has a timeout. The metrics of all
replicas become one page, with the label ``replica``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.engine.served_model import MODELS, model_of
from app.replicas.options import ModelOptions
from app.replicas.protocol import ReplicaAddress, Replicas, none_ready
from app.replicas.relay import Relay, ReplicaAnswer

_HEADER: Final = re.compile(r"# (?:HELP|TYPE) (\S+)")
_SAMPLE: Final = re.compile(r"([a-zA-Z_:][\w:]*)(\{?)")


@dataclasses.dataclass(slots=True)
class _Family:
    headers: list[str] = dataclasses.field(default_factory=list)
    samples: list[str] = dataclasses.field(default_factory=list)


def merge_metrics(pages: Mapping[str, str]) -> str:
    """Return the metrics of replicas, by their names, as one page whose samples have a label ``replica``."""
    families: dict[str, _Family] = {}
    for replica, page in pages.items():
        family = _Family()
        for line in page.splitlines():
            header = _HEADER.match(line)
            if header is not None:
                family = families.setdefault(header[1], _Family())
                if line not in family.headers:
                    family.headers.append(line)
            elif sample := _SAMPLE.match(line):
                name_end = sample.end(1)
                label = f'{{replica="{replica}"' + ("," if sample[2] else "} ")
                rest = line[name_end + 1 :]
                family.samples.append(f"{line[:name_end]}{label}{rest}")
    lines = [line for family in families.values() for line in (*family.headers, *family.samples)]
    return "".join(f"{line}\n" for line in lines)


_METRICS_S: Final = 10.0
_FIRST_S: Final = 2.0
_OK: Final = 200
_UNAVAILABLE: Final = 503


class ReplicaQueries:
    def __init__(
        self,
        models: Sequence[ModelOptions],
        replicas: Callable[[], list[Replicas]],
        relay: Callable[[], Relay],
    ) -> None:
        self._models = models
        self._replicas = replicas
        self._relay = relay

    async def metrics(self, request: Request) -> Response:
        """Return the metrics of all replicas, if the caller may read them."""
        addresses = await self.addresses()
        replies = await asyncio.gather(
            *(self._query(address, "/metrics", request, _METRICS_S) for address in addresses)
        )
        answers = [answer for answer in replies if answer is not None]
        refused = next((answer for answer in answers if answer.status != _OK), None)
        if refused is not None:
            return refused.response()
        pages = {answer.address.name: answer.text for answer in answers}
        return Response(merge_metrics(pages), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def models(self, request: Request, name: str = "") -> Response:
        """Return all lists as one; models without a ready replica are listed by name."""
        queries = (self._first_answer(replicas, MODELS, request) for replicas in self._replicas())
        replies = await asyncio.gather(*queries)
        answers = [answer for answer in replies if answer is not None and answer.status != _UNAVAILABLE]
        if not answers:
            raise none_ready()
        refused = next((answer for answer in answers if answer.status != _OK), None)
        if refused is not None:
            return refused.response()
        data: list[Any] = []
        for model, answer in zip(self._models, replies, strict=True):
            is_there = answer is not None and answer.status == _OK
            data += msgspec.json.decode(answer.text)["data"] if answer and is_there else _cards(model)
        listed = {"object": "list", "data": data}
        return JSONResponse(model_of(listed, name) if name else listed)

    async def ready(self, request: Request, model_indices: Collection[int]) -> Response:
        """Answer that all these models are ready, or as a replica of the first one that is not."""
        replicas = self._replicas()
        if not replicas:
            raise none_ready()
        queries = (
            self._first_answer(replicas[index], "/health/ready", request) for index in sorted(model_indices)
        )
        answers = await asyncio.gather(*queries)
        for answer in answers:
            if answer is None:
                raise none_ready()
            if answer.status != _OK:
                return answer.response()
        first_answer = next(iter(answers), None)  # empty if no model needs replicas
        return JSONResponse({"status": "ready"}) if first_answer is None else first_answer.response()

    async def refusal(self, request: Request) -> Response | None:
        """Return the replicas' rejection of a caller; None if they accept it, or none is ready."""
        for replicas in self._replicas():
            answer = await self._first_answer(replicas, MODELS, request)
            if answer is not None and answer.status != _UNAVAILABLE:
                return None if answer.status == _OK else answer.response()
        return None

    async def address_of(self, name: str) -> ReplicaAddress | None:
        """Return a replica's address, None if it has stopped; ApiError ``starting`` if there are none."""
        addresses = await self.addresses()
        if not addresses:
            raise none_ready()
        return next((address for address in addresses if address.name == name), None)

    async def addresses(self) -> list[ReplicaAddress]:
        lists = await asyncio.gather(*(replicas.addresses() for replicas in self._replicas()))
        return [address for addresses in lists for address in addresses]

    async def _first_answer(self, replicas: Replicas, path: str, request: Request) -> ReplicaAnswer | None:
        """Return the answer of the first ready replica; else that of an unavailable one, or None."""
        addresses = await replicas.addresses()
        unavailable: ReplicaAnswer | None = None
        for address in random.sample(addresses, len(addresses)):
            answer = await self._query(address, path, request, _FIRST_S)
            if answer is not None and answer.status != _UNAVAILABLE:
                return answer
            unavailable = answer or unavailable
        return unavailable

    async def _query(
        self, address: ReplicaAddress, path: str, request: Request, timeout_s: float
    ) -> ReplicaAnswer | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._relay().get(address, path, request)
        except TimeoutError:
            return None


def _cards(model: ModelOptions) -> list[dict[str, Any]]:
    return [
        {"id": name, "object": "model", "created": 0, "owned_by": "nnsight-engine"} for name in model.names
    ]
