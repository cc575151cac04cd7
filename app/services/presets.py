"""Presets: named lists of operations that the server keeps, and requests that name them.

``expand`` is the only place where names become operations: all that is checked, counted and cached afterwards
is that of a request with the operations written out.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Final

from starlette.requests import Request

from api_schemas.administration import Scope
from api_schemas.detectors import Detector, DetectorUsed
from api_schemas.dictionaries import Dictionary, DictionaryUsed
from api_schemas.errors import ApiError, ErrorCode, clip, excerpt
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
from api_schemas.presets import (
    FIELD,
    HEADER,
    MAX_PRESET_BYTES,
    MAX_PRESETS,
    SEPARATOR,
    NewPreset,
    PresetContent,
    PresetList,
    split_model,
)
from api_schemas.tensors import VectorUsed
from api_schemas.vectors import Vector
from app.auth.principal import Principal, check_code_allowed
from app.detectors.service import DetectorService
from app.dictionaries.service import DictionaryService
from app.engine.client import EngineClient, JsonObject
from app.engine.served_model import spec_of
from app.http.bodies import BodyLimits, read_object
from app.http.contexts import context_of
from app.http.errors import validated
from app.limits.tenant_budget import TenantBudget
from app.services.stored_names import StoredNames
from app.settings import Settings
from app.storage.database import Database
from app.storage.presets import OVERHEAD_BYTES, NewRow, PresetStore
from app.storage.quotas import StoredBytes
from app.vectors.service import VectorService
from app.versions import VersionService, check_sharing
from nnsight_engine.core.model_spec import ModelSpec
from nnsight_engine.plans.compile.request import compile_request
from nnsight_engine.plans.compile.tensors import read_tensor
from nnsight_engine.plans.request_plan import PromptMedia


def check_fit(operations: Sequence[Intervention], spec: ModelSpec) -> None:
    """Compile operations with resolved names for a made-up prompt with every position; raises ApiError."""
    declared = [one for one in operations if not isinstance(one, Trace)]
    # Each operation has an image of its own, of as many positions as it may need.
    sizes = [_num_positions(one) for one in declared]
    compile_request(
        [_anywhere(one, index) for index, one in enumerate(declared)],
        spec=spec,
        prompt_token_ids=[0] * max(sizes, default=1),
        media=PromptMedia(tuple(((0, size),) for size in sizes)),
        max_tokens=2,
        token_of=lambda _: 0,
        stream=False,
    )


def _num_positions(operation: Operation) -> int:
    if not isinstance(operation, Patch):
        return 1
    if operation.where.images is None:
        return len(operation.where.positions or ())
    shape = read_tensor(operation.values, "interventions").shape
    return shape[-2] if len(shape) > 1 else 1


def _anywhere(operation: Operation, image: int) -> Operation:
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


def used_vectors(operations: Sequence[Intervention]) -> list[VectorUsed]:
    return [used for operation in operations for used in vectors_used(operation).values()]


def used_detectors(operations: Sequence[Intervention]) -> list[DetectorUsed]:
    return [used for operation in operations for used in detectors_used(operation).values()]


def used_dictionaries(operations: Sequence[Intervention]) -> list[DictionaryUsed]:
    return [used for operation in operations for used in dictionaries_used(operation).values()]


def pinned(raw: Sequence[dict[str, Any]], operations: Sequence[Intervention]) -> list[dict[str, Any]]:
    """Return operations as sent (``raw``), with names that mean the same for everybody, at any time.

    Names have a version and an id, and features are ids, since labels can be replaced.
    """
    found = []
    for sent, operation in zip(raw, operations, strict=True):
        changed: Any = sent
        named: dict[str, VectorUsed | DetectorUsed | DictionaryUsed] = {
            **vectors_used(operation),
            **detectors_used(operation),
            **dictionaries_used(operation),
        }
        for path, used in named.items():
            name = {"name": f"{used.name}@{used.version}", "id": used.id}
            changed = _updated(changed, path.split("."), name)
        for path, feature in features_named(operation).items():
            changed = _updated(changed, path.split("."), feature)
        found.append(changed)
    return found


def _updated(value: Any, path: Sequence[str], new: Any) -> Any:
    """Return a JSON value with another one at a path; fields of an object are updated, and stay otherwise."""
    if not path:
        return {**value, **new} if isinstance(value, dict) and isinstance(new, dict) else new
    key, *rest = path
    if isinstance(value, list):
        place = int(key)
        return [*value[:place], _updated(value[place], rest, new), *value[place + 1 :]]
    return {**value, key: _updated(value[key], rest, new)}


_MODEL = "model"


@dataclasses.dataclass(frozen=True, slots=True)
class NamedPreset:
    text: str
    param: str
    model: str = ""

    @property
    def reference(self) -> Reference | None:
        """None if the text is no name."""
        return Reference.parse(self.text)

    def not_found(self, why: str) -> ApiError:
        code = ErrorCode.MODEL_NOT_FOUND if self.model else ErrorCode.PRESET_NOT_FOUND
        of_model = (
            f", so the model {clip(f'{self.model}:{self.text}')!r} does not exist" if self.model else ""
        )
        return ApiError(code, f"There is no preset {clip(self.text)!r}{of_model}; {why}.", self.param)


def named_presets(body: dict[str, Any], headers: Sequence[str], served: Collection[str]) -> list[NamedPreset]:
    """Return the presets that a request names, in the order in which they apply; raises ApiError.

    ``preset`` is removed from the body, and ``model`` becomes a name of the model alone.
    """
    named: list[NamedPreset] = []
    model = body.get(_MODEL)
    if isinstance(model, str):
        body[_MODEL], preset = split_model(model, served)
        if preset is not None:
            named.append(NamedPreset(preset, _MODEL, body[_MODEL]))
    texts = [text.strip() for header in headers for text in header.split(",")]
    named += [NamedPreset(text, HEADER) for text in texts if text]
    given = body.pop(FIELD, None)
    if isinstance(given, str):
        named.append(NamedPreset(given, FIELD))
    elif isinstance(given, list) and all(isinstance(one, str) for one in given):
        named += [NamedPreset(text, f"{FIELD}.{index}") for index, text in enumerate(given)]
    elif given is not None:
        raise ApiError(
            ErrorCode.INVALID_SHAPE,
            f'`{FIELD}` must be a preset\'s name, such as "calm" or "calm@3", or a list of names; got '
            f"{excerpt(given)}.",
            FIELD,
        )
    if len(named) > MAX_PRESETS:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"A request may name {MAX_PRESETS} presets, got {len(named)}; make one preset of several.",
            FIELD,
        )
    return named


def check_names(presets: Sequence[PresetContent], own: Sequence[object]) -> None:
    """Raise ApiError ``duplicate_name`` if two presets, or one and the request, share a name."""
    parts = [(f"the preset {one.reference}", one.interventions) for one in presets]
    taken: dict[str, tuple[str, bool]] = {}
    for source, operations in [*parts, (f"`{INTERVENTIONS}`", own)]:
        for operation in operations:
            name = operation.get("name") if isinstance(operation, dict) else None
            if not isinstance(operation, dict) or not isinstance(name, str):
                continue
            for_all = operation.get("prompts") is None
            other, other_for_all = taken.setdefault(name, (source, for_all))
            if other != source and (for_all or other_for_all):
                raise ApiError(
                    ErrorCode.DUPLICATE_NAME,
                    f"Names of operations must differ within a request; {clip(name)!r} is one of {other} and "
                    f"of {source}.",
                    INTERVENTIONS,
                )


_Used = VectorUsed | DetectorUsed | DictionaryUsed
_Get = Callable[[str, str], Awaitable[Vector | Detector | Dictionary]]

_CODE: Final = "trace"
_MAX_LISTED: Final = 1000
"""Versions that the list of models looks at."""


class PresetService(VersionService[PresetStore]):
    def __init__(
        self,
        settings: Settings,
        database: Database,
        engine: EngineClient,
        stored: StoredBytes,
        vectors: VectorService,
        detectors: DetectorService,
        dictionaries: DictionaryService,
    ) -> None:
        super().__init__(PresetStore(database, TenantBudget.of(settings).preset_bytes), stored)
        self._settings = settings
        self._making = asyncio.Lock()
        self._engine = engine
        self._vectors = vectors
        self._detectors = detectors
        self._dictionaries = dictionaries

    async def create(
        self, request: Request, caller: Principal, *, unless_same: bool = False
    ) -> tuple[PresetContent, bool]:
        """Return a preset, and whether it was stored now; nothing is stored if it is invalid (ApiError).

        ``unless_same`` stores nothing if the newest version is the same.
        """
        settings = self._settings
        max_bytes = min(settings.max_body_bytes, MAX_PRESET_BYTES)
        limits = BodyLimits(max_bytes, settings.max_json_depth, settings.upload_idle_timeout_s)
        body = await read_object(request, limits)
        new = await asyncio.to_thread(validated, NewPreset, body, settings.request_limits)
        check_sharing(caller, shared=new.shared)
        operations = await self._checked(new, caller)
        interventions = pinned(body[INTERVENTIONS], operations)
        model = self._engine.served().names[0]
        row = NewRow(caller.tenant, new.name, new.description, model, new.shared, interventions)
        async with self._making:  # or concurrent requests could each find that there is none like it
            same = await self._store.newest_if_same(row) if unless_same else None
            if same is not None:
                return same, False
            num_bytes = len(row.data) + OVERHEAD_BYTES
            return await self._add(caller.tenant, num_bytes, lambda: self._store.add(row)), True

    async def _checked(self, new: NewPreset, caller: Principal) -> Sequence[Intervention]:
        operations: Sequence[Intervention] = new.interventions
        if any(isinstance(one, Trace) for one in operations):
            check_code_allowed(self._settings, caller)
        names = StoredNames(self._vectors, self._detectors, self._dictionaries, caller.tenant)
        operations = await names.resolved(operations)
        await asyncio.to_thread(check_fit, operations, spec_of(self._engine.capabilities()))
        if new.shared:
            await self._check_shared(operations, caller.tenant)
        return operations

    async def _check_shared(self, operations: Sequence[Intervention], tenant: str) -> None:
        used: list[tuple[str, ErrorCode, _Get, Sequence[_Used]]] = [
            ("vectors", ErrorCode.UNKNOWN_VECTOR, self._vectors.get, used_vectors(operations)),
            ("detectors", ErrorCode.UNKNOWN_DETECTOR, self._detectors.get, used_detectors(operations)),
            (
                "dictionaries",
                ErrorCode.UNKNOWN_DICTIONARY,
                self._dictionaries.get,
                used_dictionaries(operations),
            ),
        ]
        for kind, code, get, several in used:
            for one in several:
                if not (await get(one.id, tenant)).shared:
                    name = f"{one.name}@{one.version}"
                    message = f"A shared preset uses shared {kind} only, and {name} is not one."
                    raise ApiError(code, message, INTERVENTIONS)

    async def page(self, tenant: str, *, name: str | None, after: str | None, limit: int) -> PresetList:
        """Return a page of a tenant's and shared presets; raises ApiError ``preset_not_found``."""
        data, has_more = await self._store.page(tenant, name=name, after=after, limit=limit)
        return PresetList.of(data, has_more=has_more)

    async def get(self, text: str, tenant: str) -> PresetContent:
        """Return the meaning of ``calm`` or ``calm@3`` for a tenant; raises ApiError ``preset_not_found``."""
        reference = Reference.parse(text)
        models = self._engine.served().names
        found = {} if reference is None else await self._store.find([reference], tenant, models)
        for preset in found.values():
            return preset
        raise ApiError(
            ErrorCode.PRESET_NOT_FOUND, f"There is no preset {clip(text)!r}; GET /v1/presets lists them."
        )

    async def remove(self, text: str, caller: Principal) -> Reference:
        """Raise ApiError ``preset_not_found``; ``missing_scope``: a shared one needs ``admin``."""
        preset = await self.get(text, caller.tenant)
        await self._remove(preset.id, caller, shared=preset.shared, own=preset.own)
        return preset.reference

    async def expand(self, request: Request, body: JsonObject) -> None:
        """Put the operations of the presets that a request names in front of its own; changes the body.

        Afterwards ``interventions`` has all operations, ``model`` is a name of the model alone, and
        ``preset`` is gone. Raises ApiError, ``model_not_found`` for a preset behind a model's name.
        """
        asked = context_of(request.scope)
        caller, own = asked.caller, body.get(INTERVENTIONS)
        model = self._engine.served()
        served, sent_model = model.names, body.get("model")
        named = named_presets(body, request.headers.getlist(HEADER), (*served, *model.adapters))
        if own:
            caller.check_free(f"`{INTERVENTIONS}` of its own", INTERVENTIONS)
        if not named:
            return
        caller.check(Scope.INTERVENTIONS)
        presets = await self._found(named, caller, served)
        if own is None or isinstance(own, list):  # anything else is refused by the parser
            check_names(presets, own or [])
            body[INTERVENTIONS] = [op for one in presets for op in one.interventions] + (own or [])
        asked.note_presets([str(one.reference) for one in presets])
        for one in presets:
            asked.record.note_named("preset", one.name, shared=one.shared)
        if body.get("model") != sent_model:
            asked.sent_model = str(sent_model)

    def drop_from_model(self, body: JsonObject) -> None:
        """Leave the model's own name of ``MODEL:PRESET``, for routes whose requests do not run the model."""
        model, served = body.get("model"), self._engine.served()
        if isinstance(model, str):
            body["model"], _ = split_model(model, (*served.names, *served.adapters))

    async def _found(
        self, named: Sequence[NamedPreset], caller: Principal, models: Sequence[str]
    ) -> list[PresetContent]:
        wanted = {one.reference for one in named if one.reference is not None}
        found = await self._store.find(wanted, caller.tenant, models)
        presets: dict[str, PresetContent] = {}
        for one in named:
            preset = None if one.reference is None else found.get(one.reference)
            if preset is None:
                raise one.not_found("GET /v1/presets lists those that there are")
            reference = preset.reference
            if preset.model not in models:
                raise one.not_found(f"{reference} is for the model {clip(preset.model)!r}")
            has_code = any(op["op"] == _CODE for op in preset.interventions)
            if not caller.may_use(reference, has_code=has_code):
                why = ", whose code needs a key that names this version" if has_code else ""
                caller.check_free(f"the preset {reference}{why}", one.param)
            presets[preset.id] = preset
        return list(presets.values())

    async def add_models(self, listed: JsonObject, caller: Principal) -> JsonObject:
        """Return the list of models with those that name a preset of the caller's, ``MODEL:PRESET``."""
        if Scope.INTERVENTIONS not in caller.scopes:
            return listed
        models = self._engine.served().names
        if caller.presets is None:
            names = [one.name for one in await self._store.newest(caller.tenant, models, _MAX_LISTED)]
        else:
            references = [one for one in map(Reference.parse, sorted(caller.presets)) if one is not None]
            found = await self._store.find(references, caller.tenant, models)
            names = [str(one) for one, preset in found.items() if preset.model in models]
        base = next((card for card in listed["data"] if card["id"] == models[0]), {"object": "model"})
        cards = [
            {**base, "id": f"{models[0]}{SEPARATOR}{name}", "parent": models[0]} for name in sorted(names)
        ]
        return {**listed, "data": [*listed["data"], *cards]}
