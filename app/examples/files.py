"""The files of the examples, which ``scripts/bundled_examples.py`` makes.

``index.json`` describes them; the numbers of each are in a safetensors file of its name. Runs in threads.
"""

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
    """A detector; its file has its head."""

    model_config = ConfigDict(extra="forbid")

    name: StoredName
    training: DetectorTraining


class ExampleDictionary(BaseModel):
    """A dictionary.

    Attributes:
        name: Its name.
        cfg: SAELens' ``cfg.json``.
        labels: Labels of features by id.
    """

    model_config = ConfigDict(extra="forbid")

    name: StoredName
    cfg: dict[str, Any]
    labels: dict[int, str]


class ExampleIndex(BaseModel):
    """All examples."""

    model_config = ConfigDict(extra="forbid")

    vectors: list[ExampleVector]
    detectors: list[ExampleDetector]
    dictionaries: list[ExampleDictionary]


class ExampleFiles:
    """The files of all examples.

    Args:
        folder: Where they are; by default those of this package.
    """

    def __init__(self, folder: Traversable | None = None) -> None:
        self._folder = folder or importlib.resources.files(__package__) / "data"

    def index(self) -> ExampleIndex:
        """Return what ``index.json`` says."""
        return ExampleIndex.model_validate_json((self._folder / "index.json").read_bytes())

    def content(self, name: str) -> bytes:
        """Return the safetensors file of an example."""
        return (self._folder / f"{name}.safetensors").read_bytes()


__all__ = ["ExampleDetector", "ExampleDictionary", "ExampleFiles", "ExampleIndex", "ExampleVector"]
