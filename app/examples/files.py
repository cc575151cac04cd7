"""The files of the examples, which ``scripts/bundled_examples.py`` makes; runs in threads."""

from __future__ import annotations

import importlib.resources
from importlib.resources.abc import Traversable
from typing import Any

from pydantic import BaseModel, ConfigDict

from api_schemas.detectors import DetectorTraining
from api_schemas.names import StoredName
from api_schemas.vectors import Training


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


__all__ = ["ExampleDetector", "ExampleDictionary", "ExampleFiles", "ExampleIndex", "ExampleVector"]
