"""What ``import nnsight_engine`` offers and what it must not cost."""

from __future__ import annotations

import subprocess
import sys

import pytest

import nnsight_engine

HEAVY = {"torch", "transformers", "vllm", "fastapi", "starlette", "numpy"}


def loaded_by(statement: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has after ``statement``."""
    program = f"{statement}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(answer.stdout.split())


def test_public_names() -> None:
    assert dir(nnsight_engine) == [
        "BUNDLED_MODEL_NAME",
        "BundledModelError",
        "__version__",
        "bundled_model_path",
    ]
    for name in dir(nnsight_engine):
        assert getattr(nnsight_engine, name) is not None


def test_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'trace_all'; it offers .*bundled_model_path"):
        _ = nnsight_engine.trace_all


@pytest.mark.parametrize("package", ["nnsight_engine", "api_schemas"])
def test_import_loads_nothing_heavy(package: str) -> None:
    assert not loaded_by(f"import {package}") & HEAVY


def test_errors_of_the_wire_load_nothing_heavy() -> None:
    assert not loaded_by("import api_schemas.errors") & HEAVY
