"""The second run of the guide's tests, on servers: which ones have none, and what its models are."""

from __future__ import annotations

import ast
from pathlib import Path

import torch

from nnsight_engine import LanguageModel
from tests.guide.local_only import LOCAL_ONLY

HERE = Path(__file__).parent


def names_in(name: str) -> set[str]:
    tree = ast.parse((HERE / name).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_the_table_names_tests_that_there_are() -> None:
    for entry, reason in LOCAL_ONLY.items():
        file, _, name = entry.partition("::")
        assert name in names_in(file), entry
        assert reason


def test_a_client_has_no_weights(gpt2: LanguageModel, where: str) -> None:
    assert gpt2.devices == {torch.device("meta" if where == "remote" else "cpu")}
