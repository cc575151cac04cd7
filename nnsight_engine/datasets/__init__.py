"""Datasets of activations: files of rows by point, written while a model runs, and read for training.

``nnsight_engine.harvest`` makes one, ``load`` opens it. Needs ``pip install 'nnsight-engine[datasets]'``.
"""

from __future__ import annotations

from nnsight_engine.datasets.loader import ActivationDataset, PointRows, TorchDataset, load
from nnsight_engine.datasets.manifest import DatasetError, Manifest
from nnsight_engine.datasets.plan import Planner, RowSelection, remaining_shards
from nnsight_engine.datasets.prompts import PromptSource
from nnsight_engine.datasets.shards import PromptRows
from nnsight_engine.datasets.storage import Retries
from nnsight_engine.datasets.writer import DatasetWriter

__all__ = [
    "ActivationDataset",
    "DatasetError",
    "DatasetWriter",
    "Manifest",
    "Planner",
    "PointRows",
    "PromptRows",
    "PromptSource",
    "Retries",
    "RowSelection",
    "TorchDataset",
    "load",
    "remaining_shards",
]
