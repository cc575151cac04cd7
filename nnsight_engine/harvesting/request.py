"""What a harvest is asked for, checked as far as no model is needed. Drivers are given this alone."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from api_schemas.operations import Where
from nnsight_engine.datasets.manifest import Dtype, PlanSettings, Point, RowSettings, SettingsError
from nnsight_engine.datasets.prompts import Format, PromptSource
from nnsight_engine.datasets.storage import Retries
from nnsight_engine.datasets.writer import DEFAULT_PENDING_BYTES, Policy, WriterOptions


class HarvestOptions(TypedDict, total=False):
    """Options of ``harvest``, see there."""

    seed: int
    max_tokens: int | None
    prompt_format: Format | None
    pack_tokens: int
    pack_prompts: int
    shard_tokens: int
    shard_bytes: int
    policy: Policy
    pending_limit_bytes: int
    spool: Path | None
    retries: Retries | None
    show_progress: bool | None


@dataclasses.dataclass(frozen=True)
class HarvestRequest:
    """``points`` may have patterns, and ``where`` texts of tokens: the driver's model resolves both."""

    prompts: PromptSource
    to: str
    points: Sequence[str]
    where: Where
    reduction: str
    dtype: Dtype
    interventions: Any
    options: HarvestOptions

    @property
    def plan(self) -> PlanSettings:
        limits = {name: self.options[name] for name in _PLAN if name in self.options}  # type: ignore[literal-required] # the names are those of both
        return PlanSettings(**limits)

    @property
    def writer(self) -> WriterOptions:
        options = self.options
        return WriterOptions(
            policy=options.get("policy", "slow"),
            pending_limit_bytes=options.get("pending_limit_bytes", DEFAULT_PENDING_BYTES),
            spool=options.get("spool"),
            retries=options.get("retries"),
        )

    def rows(self, points: list[Point], where: Where) -> RowSettings:
        """Return the settings with the model's points, and with tokens by id."""
        return RowSettings(
            points=points,
            where=where.model_dump(exclude_defaults=True),
            reduction=self.reduction,
            seed=self.options.get("seed", 0),
            dtype=self.dtype,
            max_tokens=self.options.get("max_tokens"),
        )


_PLAN = PlanSettings.__struct_fields__


def request_of(
    prompts: str | os.PathLike[str] | Iterable[Any],
    to: str | os.PathLike[str],
    *,
    points: str | Sequence[str],
    where: Where | Mapping[str, Any] | None,
    reduce: str,
    dtype: Dtype,
    interventions: Any,
    options: HarvestOptions,
) -> HarvestRequest:
    """Return the request of a call of ``harvest``; raise SettingsError, or TypeError for unknown options."""
    unknown = options.keys() - HarvestOptions.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"harvest() has no option {', '.join(sorted(unknown))}; it has "
            f"{', '.join(HarvestOptions.__annotations__)}"
        )
    try:
        clause = where if isinstance(where, Where) else Where.model_validate(dict(where or {}))
    except ValueError as error:
        raise SettingsError(f"`where` has no valid conditions: {error}") from error
    return HarvestRequest(
        prompts=PromptSource(prompts, options.get("prompt_format")),
        to=os.fspath(to),
        points=[points] if isinstance(points, str) else list(points),
        where=clause,
        reduction=reduce,
        dtype=dtype,
        interventions=interventions,
        options=options,
    )
