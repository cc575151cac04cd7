"""Resolution of dictionaries and features that a request names, before the request is compiled.

The points of a dictionary are those of the hook that its cfg names, or those that the upload gives.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Final

from api_schemas.dictionaries import DictionaryName, DictionaryUsed
from api_schemas.errors import ApiError, ErrorCode, clip
from api_schemas.points import Point, PointPattern
from api_schemas.server import Capabilities, PointCapability
from app.storage.dictionaries import DictionaryStore, FoundDictionary
from app.storage.dictionary_files import DictionaryFiles
from app.storage.vectors import LAYER_PREFIX
from app.vectors.rows import points_of
from nnsight_engine.features.config import StoredDictionary
from nnsight_engine.features.saelens import SaeLensConfig, point_of, read_config


def places_of(
    read: SaeLensConfig, at: str | None, output_at: str | None, capabilities: Capabilities
) -> tuple[str, str | None]:
    """Return the points that a dictionary reads and that a transcoder writes, None for others.

    ``at`` and ``output_at`` are the points that the upload gives; None for those of the cfg's hooks.

    Raises:
        ApiError: ``invalid_dictionary``, ``unknown_point``, ``unknown_layer``, ``wrong_width``.
    """
    config = read.config
    place = _place(at, read.hook, "hook_name", "at", config.input_width, capabilities)
    if config.architecture.is_transcoder:
        return place, _place(
            output_at, read.output_hook, "hook_name_out", "output_at", config.output_width, capabilities
        )
    if output_at is not None:
        raise ApiError(
            ErrorCode.INVALID_DICTIONARY,
            f"Only a transcoder has a second point, and this is of the architecture {config.architecture}; "
            "leave `output_at` out.",
            "output_at",
        )
    return place, None


def point_in(capabilities: Capabilities, point: Point) -> PointCapability | None:
    return next(
        (
            one
            for one in capabilities.points
            if one.name == f"{LAYER_PREFIX}{point.leaf}" and (one.layers is None or point.layer in one.layers)
        ),
        None,
    )


def _place(
    given: str | None, hook: str, field: str, param: str, width: int, capabilities: Capabilities
) -> str:
    text = given if given is not None else point_of(hook, capabilities.architecture)
    if text is None:
        named = f"is {clip(hook)!r}, which is no point of this model" if hook else "is missing"
        raise ApiError(
            ErrorCode.INVALID_DICTIONARY,
            f"The cfg's `{field}` {named}: give the point as `{param}`, such as layers.8.output.",
            param,
        )
    points = points_of(text, capabilities.sizes.num_layers, param)
    if len(points) != 1:
        raise ApiError(
            ErrorCode.INVALID_DICTIONARY,
            f"A dictionary belongs to one point, and {clip(text)!r} are {len(points)}.",
            param,
        )
    (point,) = points
    found = point_in(capabilities, point)
    if found is None or "steer" not in found.operations:
        raise ApiError(
            ErrorCode.UNKNOWN_POINT,
            f"This model has no point {point} that a dictionary could belong to; GET /v1/capabilities lists "
            "its points.",
            param,
        )
    if found.width != width:
        raise ApiError(
            ErrorCode.WRONG_WIDTH,
            f"The values at {point} have {found.width} numbers, and those of the dictionary {width}.",
            param,
        )
    return str(point)


_NUM_CANDIDATES: Final = 8


@dataclasses.dataclass(frozen=True, slots=True)
class ResolvedDictionary:
    """The dictionary that a name stands for; ``number`` is its number in the database."""

    used: DictionaryUsed
    shared: bool
    content: StoredDictionary
    number: int
    labels: FeatureLabels


class FeatureLabels:
    """The labels of a dictionary's features, read as they are needed and remembered for one request."""

    def __init__(self, store: DictionaryStore, number: int, num_labels: int) -> None:
        self._store = store
        self._number = number
        self._num_labels = num_labels
        self._known: dict[int, str | None] = {}

    async def of(self, ids: Sequence[int]) -> dict[int, str]:
        """Return the labels of those features that have one."""
        new = [one for one in ids if one not in self._known] if self._num_labels else []
        if new:
            self._known |= dict.fromkeys(new) | await self._store.labels_of(self._number, new)
        return {one: label for one in ids if (label := self._known.get(one)) is not None}

    def num_bytes(self, ids: Sequence[int]) -> int:
        """Return the bytes of the labels of some features, as far as they have been read."""
        return sum(len((self._known.get(one) or "").encode()) for one in ids)


class DictionaryResolver:
    def __init__(
        self,
        store: DictionaryStore,
        files: DictionaryFiles,
        capabilities: Capabilities,
        models: Sequence[str],
        tenant: str,
    ) -> None:
        self._store = store
        self._files = files
        self._capabilities = capabilities
        self._models = models
        self._tenant = tenant
        self._resolved: dict[tuple[str, str | None], ResolvedDictionary] = {}
        self._ids: dict[tuple[int, str], int] = {}

    async def dictionary(self, given: DictionaryName, param: str) -> ResolvedDictionary:
        """Raise ApiError ``unknown_dictionary`` or ``dictionary_mismatch`` for the field ``param``."""
        key = given.name, given.id
        if key not in self._resolved:
            found = await self._store.find(given.name, given.id, self._tenant, self._models)
            if found is None:
                what = repr(clip(given.name)) + (
                    "" if given.id is None else f" with the id {clip(given.id)!r}"
                )
                raise ApiError(
                    ErrorCode.UNKNOWN_DICTIONARY,
                    f"There is no dictionary {what}; GET /v1/dictionaries lists them, POST /v1/dictionaries "
                    "makes one.",
                    param,
                )
            self._resolved[key] = self._checked(found, param)
            await self._files.read_ahead(found.about.sha256)
        return self._resolved[key]

    async def features(self, dictionary: ResolvedDictionary, given: Mapping[str, int | str]) -> list[int]:
        """Return the ids of features, given by id or exact label; raises ApiError."""
        labels = {one for one in given.values() if isinstance(one, str)}
        new = [label for label in labels if (dictionary.number, label) not in self._ids]
        found = await self._store.ids_of(dictionary.number, new, _NUM_CANDIDATES + 1) if new else {}
        ids: dict[int, None] = {}
        for param, feature in given.items():
            if isinstance(feature, int):
                own = _checked_id(dictionary, feature, param)
            else:
                key = dictionary.number, feature
                if key not in self._ids:
                    self._ids[key] = _only_id(dictionary, feature, found[feature], param)
                own = self._ids[key]
            if own in ids:
                raise ApiError(ErrorCode.INVALID_VALUE, f"The feature {own} is named twice.", param)
            ids[own] = None
        return list(ids)

    def _checked(self, found: FoundDictionary, param: str) -> ResolvedDictionary:
        about = found.about
        what = f"The dictionary {about.name}@{about.version}"
        if about.model not in self._models:
            raise ApiError(
                ErrorCode.DICTIONARY_MISMATCH,
                f"{what} is of the model {clip(about.model)!r}, and this server has {self._models[0]!r}.",
                param,
            )
        places = {about.at: about.input_width, about.output_at or about.at: about.output_width}
        for place, width in places.items():
            if self._width(place) != width:
                raise ApiError(
                    ErrorCode.DICTIONARY_MISMATCH,
                    f"{what} is of values with {width} numbers, and this model has none such at {place}.",
                    param,
                )
        return ResolvedDictionary(
            DictionaryUsed(name=about.name, version=about.version, id=about.id),
            about.shared,
            StoredDictionary(
                read_config(json.loads(found.cfg.decode("utf-8-sig"))).config,
                about.at,
                about.output_at or about.at,
                about.sha256,
                str(self._files.path(about.sha256)),
                about.dtype,
            ),
            found.number,
            FeatureLabels(self._store, found.number, about.num_labels),
        )

    def _width(self, place: str) -> int | None:
        num_layers = self._capabilities.sizes.num_layers
        try:
            (point,) = PointPattern.parse(place, "at").resolve(num_layers, "at")
        except ApiError:  # the model has fewer layers than the one that it was stored for
            return None
        found = point_in(self._capabilities, point)
        return None if found is None else found.width


def _only_id(dictionary: ResolvedDictionary, label: str, ids: Sequence[int], param: str) -> int:
    if len(ids) == 1:
        return ids[0]
    name, search = dictionary.used.name, f"GET /v1/dictionaries/{dictionary.used.id}/features?query="
    if not ids:
        message = f"No feature of {name!r} has the label {clip(label)!r}; {search} searches for words."
    else:
        several = ", ".join(map(str, ids[:_NUM_CANDIDATES])) + (", …" if len(ids) > _NUM_CANDIDATES else "")
        message = (
            f"Several features of {name!r} have the label {clip(label)!r}: {several}. Name one by its id."
        )
    raise ApiError(ErrorCode.UNKNOWN_FEATURE, message, param)


def _checked_id(dictionary: ResolvedDictionary, feature: int, param: str) -> int:
    num_features = dictionary.content.config.num_features
    if not 0 <= feature < num_features:
        raise ApiError(
            ErrorCode.UNKNOWN_FEATURE,
            f"{dictionary.used.name!r} has the features 0 to {num_features - 1}, got {feature}.",
            param,
        )
    return feature
