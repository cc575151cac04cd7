"""The files of the examples, which ``scripts/bundled_examples.py`` makes.

``index.json`` describes them; the numbers of each are in a safetensors file of its name. Paths are read as
package resources. Runs in a thread.
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


class ExampleFiles(BaseModel):
    """All examples."""

    model_config = ConfigDict(extra="forbid")

    vectors: list[ExampleVector]
    detectors: list[ExampleDetector]
    dictionaries: list[ExampleDictionary]

    @classmethod
    def read(cls) -> ExampleFiles:
        """Return what ``index.json`` says."""
        return cls.model_validate_json((_folder() / "index.json").read_bytes())

    @staticmethod
    def content(name: str) -> bytes:
        """Return the safetensors file of an example."""
        return (_folder() / f"{name}.safetensors").read_bytes()


def _folder() -> Traversable:
    return importlib.resources.files(__package__) / "data"


__all__ = ["ExampleDetector", "ExampleDictionary", "ExampleFiles", "ExampleVector"]
