"""The messages between two pipeline stages, beside those of all roads (``traces.messages``)."""

from __future__ import annotations

from typing import Final

import msgspec

from nnsight_engine.vllm_backend.traces.messages import (
    CallOrder,
    CallResult,
    Continue,
    End,
    InvalidValue,
    Offer,
)
from nnsight_engine.vllm_backend.traces.request import TraceSpan
from nnsight_engine.vllm_backend.traces.row_payloads import Form


class StageStep(msgspec.Struct, frozen=True, tag=True):
    """A stage begins its part of a step of ``num_rows`` rows, over all requests."""

    spans: list[TraceSpan]
    num_rows: int


class StageOffer(Offer, frozen=True, tag=True):
    forms: list[Form] = msgspec.field(default_factory=list)


class StageReply(Continue, frozen=True, tag=True):
    """Let the model continue; ``live`` is None except in answers to ``StageStep``."""

    live: list[str] | None = None
    sources: list[str] = msgspec.field(default_factory=list)


ToLastStage = StageStep | StageOffer | InvalidValue | End | CallResult
ToEarlyStage = StageReply | CallOrder
by_last_stage: Final[msgspec.msgpack.Decoder[ToLastStage]] = msgspec.msgpack.Decoder(ToLastStage)
by_early_stage: Final[msgspec.msgpack.Decoder[ToEarlyStage]] = msgspec.msgpack.Decoder(ToEarlyStage)
