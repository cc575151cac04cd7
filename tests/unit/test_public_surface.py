"""What ``import nnsight_engine`` offers and what it must not cost."""

from __future__ import annotations

import subprocess
import sys

import pytest

import nnsight_engine

HEAVY = {
    "torch",
    "transformers",
    "vllm",
    "fastapi",
    "starlette",
    "numpy",
    "diffusers",
    "IPython",
    "matplotlib",
}
NAMES = [
    "BUNDLED_MODEL_NAME",
    "BundledModelError",
    "CONFIG",
    "DiffusionModel",
    "Envoy",
    "LanguageModel",
    "NNsight",
    "RemoteBackend",
    "RemoteConnectionError",
    "RemoteError",
    "VLLM",
    "VisionLanguageModel",
    "__version__",
    "bundled_model_path",
    "eproperty",
    "harvest",
    "is_model_running",
    "ndif_status",
    "register_by_value",
    "save",
    "status",
    "unregister_by_value",
]


def loaded_by(statement: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has after ``statement``."""
    program = f"{statement}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(answer.stdout.split())


def test_public_names() -> None:
    assert dir(nnsight_engine) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_public_name_is_there_and_stays_the_same(name: str) -> None:
    assert getattr(nnsight_engine, name) is not None
    assert getattr(nnsight_engine, name) is getattr(nnsight_engine, name)


def test_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'trace_all'; it offers .*bundled_model_path"):
        _ = nnsight_engine.trace_all  # type: ignore[attr-defined] # the point of the test


def test_packages_need_no_import_of_their_own() -> None:
    assert nnsight_engine.intervention.envoy.Envoy is nnsight_engine.Envoy


@pytest.mark.parametrize("package", ["nnsight_engine", "api_schemas", "nnsight_engine.compat"])
def test_import_loads_nothing_heavy(package: str) -> None:
    assert not loaded_by(f"import {package}") & HEAVY


def test_saving_and_configuring_load_nothing_heavy() -> None:
    assert not loaded_by("from nnsight_engine import CONFIG, save") & HEAVY


def test_errors_of_the_wire_load_nothing_heavy() -> None:
    assert not loaded_by("import api_schemas.errors") & HEAVY


def test_save_is_not_mistaken_for_the_method_that_every_object_has_in_a_trace() -> None:
    program = """
import nnsight_engine.tracing.tracer
from nnsight_engine.core.saves import SAVES
import nnsight_engine
SAVES.enter()
assert nnsight_engine.save([1]) == [1]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("name", "arguments", "value"),
    [
        ("list", ([1, 2],), [1, 2]),
        ("dict", (), {}),
        ("int", ("3",), 3),
        ("apply", (max, 1, 2), 2),
        ("trace", (len,), len),
        ("local", (len,), len),
    ],
)
def test_deprecated_names_do_what_replaces_them_and_warn(
    name: str, arguments: tuple[object], value: object
) -> None:
    function = getattr(nnsight_engine, name)
    with pytest.warns(DeprecationWarning, match=rf"{name}.* is deprecated: write ") as caught:
        assert function(*arguments) == value
    assert caught[0].filename == __file__


def test_deprecated_names_are_offered_nowhere() -> None:
    _ = nnsight_engine.list  # type: ignore[attr-defined] # not for new code
    assert "list" not in dir(nnsight_engine)
    assert "list" not in vars(nnsight_engine)
