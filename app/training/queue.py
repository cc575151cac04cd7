"""Trainings take turns, tenants in turn; a client that disconnects ends its training."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Sequence
from typing import Final

from starlette.requests import Request

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.points import LayerSelection, resolve_layer
from api_schemas.training import LabelledPrompts
from app.admission.slot_pool import SlotPool
from app.auth.principal import Principal
from app.engine.client import EngineClient
from app.settings import Settings
from app.tenant_budget import TenantBudget
from app.training.activations import SIDES, ActivationReader, Report, Values
from app.training.split import Split, split

ALL_LAYERS: Final = "all"
_ITEM_BYTES: Final = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Examples:
    """The values of a training's prompts, ``[prompts, points, width]``; ``chosen`` are trained on."""

    positive: Values
    negative: Values
    chosen: Split


class TrainingQueue:
    def __init__(self, settings: Settings, engine: EngineClient) -> None:
        self._settings = settings
        self._engine = engine
        budget = TenantBudget.of(settings)
        self._slots = SlotPool(budget.trainings, budget.waiting_trainings)

    @property
    def num_waiting(self) -> int:
        return self._slots.num_waiting

    def check(self, wanted: LabelledPrompts, num_points: int, width: int) -> None:
        """Raise ApiError ``invalid_value``: too many prompts or values; ``training_failed``: duplicates."""
        num_prompts = len(wanted.positive) + len(wanted.negative)
        if num_prompts > self._settings.max_training_prompts:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"A training has at most {self._settings.max_training_prompts} prompts, got "
                f"{num_prompts} (NNSIGHT_ENGINE_MAX_TRAINING_PROMPTS).",
                "positive",
            )
        _check_different(wanted)
        num_bytes = num_prompts * num_points * width * _ITEM_BYTES
        if num_bytes > self._settings.max_training_bytes:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"A training has at most {self._settings.max_training_bytes} bytes of values, and "
                f"these prompts and layers have {num_bytes}; name fewer of one of them "
                "(NNSIGHT_ENGINE_MAX_TRAINING_BYTES).",
                "layers",
            )

    @contextlib.asynccontextmanager
    async def examples(
        self, wanted: LabelledPrompts, points: Sequence[str], http: Request, caller: Principal, report: Report
    ) -> AsyncIterator[Examples]:
        """Wait for a training's turn, and hold it while its examples are used; raises ApiError."""
        async with self._slots.request(caller.tenant, object()):
            reader = ActivationReader(self._engine, wanted, points, http, caller)
            positive, negative = await reader.read(report)
            chosen = split(len(positive), len(negative), holdout=wanted.holdout, seed=wanted.seed)
            yield Examples(positive, negative, chosen)


def layers_of(wanted: str | list[int], num_layers: int) -> list[int]:
    """Return the layers, ascending; raises ApiError ``unknown_layer``, ``invalid_value`` for duplicates."""
    if isinstance(wanted, str):
        text = "*" if wanted == ALL_LAYERS else wanted
        return list(LayerSelection.parse(text, "layers").resolve(num_layers, "layers"))
    layers = [resolve_layer(layer, num_layers, f"layers.{index}") for index, layer in enumerate(wanted)]
    if len(set(layers)) < len(layers):
        raise ApiError(ErrorCode.INVALID_VALUE, "A layer may be named once.", "layers")
    return sorted(layers)


def _check_different(wanted: LabelledPrompts) -> None:
    """Refuse duplicate prompts: one that is both trained on and held out would make the scores too good."""
    seen: dict[str, str] = {}
    for side, prompts in zip(SIDES, (wanted.positive, wanted.negative), strict=True):
        for index, prompt in enumerate(prompts):
            param = f"{side}.{index}"
            text = prompt if isinstance(prompt, str) else json.dumps([one.model_dump() for one in prompt])
            first = seen.setdefault(text, param)
            if first != param:
                raise ApiError(
                    ErrorCode.TRAINING_FAILED,
                    f"Each prompt may be there once; `{param}` is the same as `{first}`.",
                    param,
                )


__all__ = ["Examples", "TrainingQueue", "layers_of"]
