"""Stores the examples of the bundled model, each once in the life of a database.

They belong to the tenant of callers without keys and are shared. Each is stored only as the first version of
its name: not at the next start, nor by another server of the database, nor after its deletion. The lifecycle
calls this each time that an engine becomes ready. No request waits for it. ``scripts/bundled_examples.py``
makes the files, which are read in threads.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.resources
import json
import logging
from collections.abc import Awaitable
from importlib.resources.abc import Traversable
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from api_schemas.administration import Scope
from api_schemas.detectors import DetectorTraining
from api_schemas.errors import ApiError
from api_schemas.fields import StoredName
from api_schemas.vectors import Training
from app.auth.principal import ANONYMOUS, Principal
from app.catalog.detector_files import new_version
from app.catalog.detector_files import read_file as read_detector
from app.catalog.detectors import Detectors
from app.catalog.dictionaries import Dictionaries
from app.catalog.rows import rows_of
from app.catalog.vector_files import read_file as read_vector
from app.catalog.vectors import Vectors
from app.engine.client import EngineClient
from app.formats.uploads import FILE
from app.settings import Settings
from app.storage.versions import NameUsedError
from nnsight_engine.modeling.bundled import is_bundled_model


class ExampleVector(BaseModel):
    """A vector; its file has a tensor for each layer."""

    model_config = ConfigDict(extra="forbid")

    name: StoredName
    training: Training


class ExampleDetector(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: StoredName
    training: DetectorTraining


class ExampleDictionary(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: StoredName
    cfg: dict[str, Any]
    labels: dict[int, str]


class ExampleIndex(BaseModel):
    model_config = ConfigDict(extra="forbid")

    vectors: list[ExampleVector]
    detectors: list[ExampleDetector]
    dictionaries: list[ExampleDictionary]


class ExampleFiles:
    def __init__(self, folder: Traversable | None = None) -> None:
        self._folder = folder or importlib.resources.files(__package__) / "data"

    def index(self) -> ExampleIndex:
        return ExampleIndex.model_validate_json((self._folder / "index.json").read_bytes())

    def content(self, name: str) -> bytes:
        return (self._folder / f"{name}.safetensors").read_bytes()


logger = logging.getLogger(__name__)

_OWNER: Final[Principal] = dataclasses.replace(ANONYMOUS, scopes=frozenset(Scope))


@dataclasses.dataclass(frozen=True, slots=True)
class ExampleStores:
    vectors: Vectors
    detectors: Detectors
    dictionaries: Dictionaries


async def store_examples(
    settings: Settings, engine: EngineClient, stores: ExampleStores, files: ExampleFiles | None = None
) -> None:
    """Store the examples if the (ready) engine serves the bundled model; errors are only logged."""
    cache_dir = settings.bundled_model_dir
    if not settings.examples or not is_bundled_model(engine.served().source, cache_dir=cache_dir):
        return
    try:
        await _store(stores, files or ExampleFiles())
    except Exception:
        logger.exception("the examples could not be stored")


async def _store(stores: ExampleStores, files: ExampleFiles) -> None:
    index = await asyncio.to_thread(files.index)
    for vector in index.vectors:
        content = await asyncio.to_thread(files.content, vector.name)
        await _add_once(vector.name, _add_vector(stores.vectors, vector, content))
    for detector in index.detectors:
        content = await asyncio.to_thread(files.content, detector.name)
        await _add_once(detector.name, _add_detector(stores.detectors, detector, content))
    for dictionary in index.dictionaries:
        content = await asyncio.to_thread(files.content, dictionary.name)
        cfg = json.dumps(dictionary.cfg, indent=2).encode()
        adding = stores.dictionaries.add_first(dictionary.name, content, cfg, dictionary.labels, _OWNER)
        await _add_once(dictionary.name, adding)


async def _add_once(name: str, adding: Awaitable[object]) -> None:
    """Await the storing of one example, unless its name was used before; refusals are logged."""
    try:
        await adding
    except NameUsedError:
        return
    except ApiError as error:
        logger.warning("the example %s could not be stored: %s", name, error.message)
    else:
        logger.info("the example %s is stored", name)


async def _add_vector(vectors: Vectors, example: ExampleVector, content: bytes) -> None:
    _, tensors = await asyncio.to_thread(read_vector, content, "")
    rows = rows_of(tensors, None, vectors.shape, FILE)
    new = rows.new_version(example.name, "trained", shared=True, training=example.training, is_first=True)
    await vectors.add(new, _OWNER)


async def _add_detector(detectors: Detectors, example: ExampleDetector, content: bytes) -> None:
    spec, max_bytes = detectors.spec, detectors.max_bytes
    detector, calibration = await asyncio.to_thread(read_detector, content, "", None, spec, max_bytes)
    new = await asyncio.to_thread(
        new_version,
        detector,
        calibration,
        example.name,
        "trained",
        shared=True,
        training=example.training,
        is_first=True,
    )
    await detectors.add(new, _OWNER)
