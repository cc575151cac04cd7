"""Resolution of dictionaries and features that a request names, before the request is compiled."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from api_schemas.capabilities import Capabilities
from api_schemas.dictionaries import DictionaryName, DictionaryUsed
from api_schemas.errors import ApiError, ErrorCode
from api_schemas.excerpt import clip
from api_schemas.points import PointPattern
from app.storage.dictionaries import DictionaryStore, FoundDictionary
from app.storage.dictionary_files import DictionaryFiles
from app.storage.vector_rows import LAYER_PREFIX
from nnsight_engine.features.config import DictionaryConfig
from nnsight_engine.features.saelens import read_config

_NUM_CANDIDATES: Final = 8


@dataclasses.dataclass(frozen=True, slots=True)
class ResolvedDictionary:
    """What the name of a dictionary stands for.

    Attributes:
        used: Its name, version and id, for the answer.
        config: Its definition.
        at: The point that it reads.
        output_at: The point whose value it changes: that of a transcoder's output, otherwise ``at``.
        sha256: The SHA-256 of the file of its weights, which is the same as long as the numbers are.
        path: The file of its weights, for ``nnsight_engine.features.weights_file.load_dictionary``.
        number: The argument of ``DictionaryStore.ids_of``.
    """

    used: DictionaryUsed
    config: DictionaryConfig
    at: str
    output_at: str
    sha256: str
    path: Path
    number: int


class DictionaryResolver:
    """Resolves names, for one request.

    Args:
        store: Looks up the dictionaries.
        files: Knows the paths of their weights.
        capabilities: The model's.
        models: The model's names.
        tenant: The tenant that sent the request.
    """

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

    async def dictionary(self, given: DictionaryName, param: str) -> ResolvedDictionary:
        """Return what a name stands for; ``param`` is the field of the request that has it.

        Raises:
            ApiError: ``unknown_dictionary``, ``dictionary_mismatch``.
        """
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
        return self._resolved[key]

    async def features(
        self, dictionary: ResolvedDictionary, given: Sequence[int | str], param: str
    ) -> list[int]:
        """Return the ids of features that are given by id or by their exact label, in order.

        Args:
            dictionary: The dictionary.
            given: Ids and labels.
            param: The field of the request that has them, for messages.

        Raises:
            ApiError: ``unknown_feature``; ``invalid_value``: a feature is named twice.
        """
        ids: list[int] = []
        for index, feature in enumerate(given):
            place = f"{param}.{index}"
            if isinstance(feature, str):
                found = await self._id_of(dictionary, feature, place)
            else:
                found = _checked_id(dictionary, feature, place)
            if found in ids:
                raise ApiError(ErrorCode.INVALID_VALUE, f"The feature {found} is named twice.", place)
            ids.append(found)
        return ids

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
            read_config(json.loads(found.cfg.decode("utf-8-sig"))).config,
            about.at,
            about.output_at or about.at,
            about.sha256,
            self._files.path(about.sha256),
            found.number,
        )

    def _width(self, place: str) -> int | None:
        num_layers = self._capabilities.sizes.num_layers
        try:
            (point,) = PointPattern.parse(place, "at").resolve(num_layers, "at")
        except ApiError:  # the model has fewer layers than the one that it was stored for
            return None
        for one in self._capabilities.points:
            is_there = one.layers is None or point.layer in one.layers
            if one.name == f"{LAYER_PREFIX}{point.leaf}" and is_there:
                return one.width
        return None

    async def _id_of(self, dictionary: ResolvedDictionary, label: str, param: str) -> int:
        ids = await self._store.ids_of(dictionary.number, label, _NUM_CANDIDATES + 1)
        if len(ids) == 1:
            return ids[0]
        name, search = dictionary.used.name, f"GET /v1/dictionaries/{dictionary.used.id}/features?query="
        if not ids:
            message = f"No feature of {name!r} has the label {clip(label)!r}; {search} searches for words."
        else:
            several = ", ".join(map(str, ids[:_NUM_CANDIDATES])) + (
                ", …" if len(ids) > _NUM_CANDIDATES else ""
            )
            message = (
                f"Several features of {name!r} have the label {clip(label)!r}: {several}. Name one by its id."
            )
        raise ApiError(ErrorCode.UNKNOWN_FEATURE, message, param)


def _checked_id(dictionary: ResolvedDictionary, feature: int, param: str) -> int:
    num_features = dictionary.config.num_features
    if not 0 <= feature < num_features:
        raise ApiError(
            ErrorCode.UNKNOWN_FEATURE,
            f"{dictionary.used.name!r} has the features 0 to {num_features - 1}, got {feature}.",
            param,
        )
    return feature


__all__ = ["DictionaryResolver", "ResolvedDictionary"]
