"""The presets of one server: named lists of operations, checked when they are kept."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy.orm import Session
from starlette.requests import Request

from api_schemas.detectors import DetectorUsed
from api_schemas.dictionaries import DictionaryUsed
from api_schemas.fields import Reference
from api_schemas.interventions import FIELD as INTERVENTIONS
from api_schemas.interventions import Intervention, Operation
from api_schemas.operation_names import (
    condition_tests,
    detectors_used,
    dictionaries_used,
    features_named,
    vectors_used,
)
from api_schemas.operations import LogitLens, Patch, Trace, Where
from api_schemas.presets import MAX_PRESET_BYTES, NewPreset, Preset, PresetContent, PresetList
from api_schemas.tensors import VectorUsed
from app.auth.principal import Principal, check_code_allowed
from app.catalog.catalog import Catalog, CatalogParts, check_sharing
from app.catalog.detectors import Detectors
from app.catalog.dictionaries import Dictionaries
from app.catalog.names import StoredNames
from app.catalog.vectors import Vectors
from app.engine.served_model import spec_of
from app.http.bodies import read_object
from app.http.errors import validated
from app.storage import versions
from app.storage.tables import VersionRow
from app.storage.versions import Kind, NewVersion
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.plans.compile.request import compile_request
from nnsight_engine.plans.compile.tensors import read_tensor
from nnsight_engine.plans.request_plan import PromptMedia


class Presets(Catalog[Preset, object]):
    """Their content is operations as ASCII JSON, which preserves any text; ids are ``calm`` or ``calm@3``."""

    kind = Kind(
        "preset", "presets", "pre_", Preset, PresetList, lambda budget: budget.preset_bytes,
        counted=("preset",), overhead_bytes=1024,
    )  # fmt: skip

    def __init__(
        self, parts: CatalogParts, vectors: Vectors, detectors: Detectors, dictionaries: Dictionaries
    ) -> None:
        super().__init__(parts)
        self._catalogs = vectors, detectors, dictionaries
        self._creating = asyncio.Lock()

    async def create(
        self, request: Request, caller: Principal, *, unless_same: bool = False
    ) -> tuple[PresetContent, bool]:
        """Return a preset, and whether it was stored now; nothing is stored if it is invalid (ApiError).

        ``unless_same`` stores nothing if the newest version is the same.
        """
        limits = self.body_limits
        limits = dataclasses.replace(limits, max_bytes=min(limits.max_bytes, MAX_PRESET_BYTES))
        body = await read_object(request, limits)
        new = await asyncio.to_thread(validated, NewPreset, body, self._settings.request_limits)
        check_sharing(caller, shared=new.shared)
        operations = pinned(body[INTERVENTIONS], await self._resolved_operations(new, caller))
        head = {
            "description": new.description,
            "operations": list(dict.fromkeys(operation["op"] for operation in operations)),
        }
        data = json.dumps(operations, separators=(",", ":")).encode("ascii")
        version = NewVersion(new.name, new.shared, head, data)
        async with self._creating:  # or concurrent requests could each find that there is none like it
            row = await self._newest_if_same(version, caller.tenant) if unless_same else None
            is_new = row is None
            row = row or await self._add(version, caller)
        return await asyncio.to_thread(self._content, row, caller.tenant), is_new

    async def get(self, id_: str, tenant: str) -> PresetContent:
        return await asyncio.to_thread(self._content, await self._visible(id_, tenant), tenant)

    async def find(self, references: Collection[Reference], tenant: str) -> dict[Reference, PresetContent]:
        """Return the presets that references mean; without those that mean none."""
        rows = await self._resolved_rows(references, tenant, self.models)
        return await asyncio.to_thread(
            lambda: {reference: self._content(row, tenant) for reference, row in rows.items()}
        )

    async def names(self, tenant: str, limit: int) -> list[str]:
        """Return the names that mean a preset of the served model, by the newest ``limit`` versions."""
        return [row.name for row in await self._read(versions.newest, tenant, self.models, limit)]

    async def _visible(self, id_: str, tenant: str, *, with_data: bool = False) -> VersionRow:
        """Return the version that ``calm`` or ``calm@3`` means, always with its data."""
        del with_data
        reference = Reference.parse(id_)
        rows = {} if reference is None else await self._resolved_rows([reference], tenant, self.models)
        for row in rows.values():
            return row
        raise self.kind.not_found(id_)

    def _content(self, row: VersionRow, tenant: str) -> PresetContent:
        shown = dict(self._shown(row, tenant))
        return PresetContent.model_construct(**shown, interventions=json.loads(row.data))

    async def _resolved_rows(
        self, references: Collection[Reference], tenant: str, models: Sequence[str]
    ) -> dict[Reference, VersionRow]:
        """Return the versions, with their data, that references mean; without those that mean none."""

        def read(session: Session) -> dict[Reference, VersionRow]:
            rows = {
                reference: versions.resolve(session, self.kind, reference, tenant, models, with_data=True)
                for reference in references
            }
            return {reference: row for reference, row in rows.items() if row is not None}

        return await self._database.read(read)

    async def _newest_if_same(self, new: NewVersion, tenant: str) -> VersionRow | None:
        """Return the newest version of the tenant's name, if it is the same as one to be stored."""
        model = self.models[0]
        expected = tenant, model, new.shared, new.head, new.data
        for row in (await self._resolved_rows([Reference(new.name)], tenant, [model])).values():
            if (row.tenant, row.model, row.shared, row.head, row.data) == expected:
                return row
        return None

    async def _resolved_operations(self, new: NewPreset, caller: Principal) -> Sequence[Intervention]:
        """Return the operations with resolved names; raises ApiError."""
        if any(isinstance(operation, Trace) for operation in new.interventions):
            check_code_allowed(self._settings, caller)
        names = StoredNames(*self._catalogs, caller.tenant)
        operations = await names.resolved(new.interventions)
        await asyncio.to_thread(check_fit, operations, spec_of(self._engine.capabilities()))
        for kind, row in names.used.values():
            if new.shared and not row.shared:
                name = f"{row.name}@{row.version}"
                message = f"A shared preset uses shared {kind.plural} only, and {name} is not one."
                raise kind.error("unknown_{}", message, INTERVENTIONS)
        return operations


def check_fit(operations: Sequence[Intervention], spec: ModelSpec) -> None:
    """Compile operations with resolved names for a made-up prompt with every position; raises ApiError."""
    declared = [operation for operation in operations if not isinstance(operation, Trace)]
    # Each operation has an image of its own, of as many positions as it may need.
    sizes = [_num_positions(operation) for operation in declared]
    compile_request(
        [_at_any_position(operation, index) for index, operation in enumerate(declared)],
        spec=spec,
        prompt_token_ids=[0] * max(sizes, default=1),
        media=PromptMedia(tuple(((0, size),) for size in sizes)),
        max_tokens=2,
        token_of=lambda _: 0,
        stream=False,
    )


def _num_positions(operation: Operation) -> int:
    """Return how many positions of a prompt, or of an image, an operation needs."""
    if not isinstance(operation, Patch):
        return 1
    if operation.where.images is None:
        return len(operation.where.positions or ())
    shape = read_tensor(operation.values, "interventions").shape
    return shape[-2] if len(shape) > 1 else 1


def _at_any_position(operation: Operation, image: int) -> Operation:
    """Return an operation without the parts that depend on the prompt or the tokenizer."""
    if isinstance(operation, Patch):
        positions = list(range(len(operation.where.positions or ())))
        where = Where(positions=positions) if operation.where.images is None else Where(images=[image])
        # Positions of the made-up prompt say nothing about what its condition may read.
        return operation.model_copy(update={"where": where, "when": None})
    if isinstance(operation, LogitLens):
        return operation.model_copy(update={"where": Where(), "targets": None})
    # A condition may read too late for positions of a prompt.
    is_generated = bool(condition_tests(operation)) and operation.where.phase != "prompt"
    return operation.model_copy(update={"where": Where(phase="generated") if is_generated else Where()})


def pinned(raw: Sequence[dict[str, Any]], operations: Sequence[Intervention]) -> list[dict[str, Any]]:
    """Return operations as sent (``raw``), with names that mean the same for everybody, at any time.

    Names have a version and an id, and features are ids, since labels can be replaced.
    """
    pinned_operations = []
    for sent, operation in zip(raw, operations, strict=True):
        changed: Any = sent
        named: dict[str, VectorUsed | DetectorUsed | DictionaryUsed] = {
            **vectors_used(operation),
            **detectors_used(operation),
            **dictionaries_used(operation),
        }
        for path, used in named.items():
            name = {"name": f"{used.name}@{used.version}", "id": used.id}
            changed = _with_value_at(changed, path.split("."), name)
        for path, feature in features_named(operation).items():
            changed = _with_value_at(changed, path.split("."), feature)
        pinned_operations.append(changed)
    return pinned_operations


def _with_value_at(value: Any, path: Sequence[str], replacement: Any) -> Any:
    """Return a JSON value with another one at a path; fields of an object are updated, and stay otherwise."""
    if not path:
        return (
            {**value, **replacement}
            if isinstance(value, dict) and isinstance(replacement, dict)
            else replacement
        )
    key, *remaining = path
    if isinstance(value, list):
        index = int(key)
        return [*value[:index], _with_value_at(value[index], remaining, replacement), *value[index + 1 :]]
    return {**value, key: _with_value_at(value[key], remaining, replacement)}
