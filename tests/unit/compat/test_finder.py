"""``import nnsight`` gives this library, once it is asked to."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nnsight_engine
from nnsight_engine.compat import OriginalInstalledError, install, uninstall


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    finders = list(sys.meta_path)
    yield
    uninstall()
    assert sys.meta_path == finders


@pytest.fixture
def original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Something else that is installed under the name."""
    package = tmp_path / "nnsight"
    package.mkdir()
    (package / "__init__.py").write_text("NAME = 'the original'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package
    sys.modules.pop("nnsight", None)


@pytest.mark.parametrize("name", ["", ".intervention", ".intervention.tracing.globals", ".modeling.language"])
def test_modules_are_the_very_same(name: str) -> None:
    install()
    theirs, ours = importlib.import_module(f"nnsight{name}"), importlib.import_module(f"nnsight_engine{name}")
    assert theirs is ours is sys.modules[f"nnsight{name}"] is sys.modules[f"nnsight_engine{name}"]
    assert ours.__name__ == f"nnsight_engine{name}"
    assert ours.__spec__ is not None
    assert ours.__spec__.name == f"nnsight_engine{name}"


def test_statements_as_people_write_them() -> None:
    install()
    finders = list(sys.meta_path)
    install()
    assert sys.meta_path == finders
    namespace: dict[str, object] = {}
    exec(
        "import nnsight\n"
        "import nnsight.intervention.hooks as hooks\n"
        "from nnsight import CONFIG, NNsight, intervention\n"
        "from nnsight.intervention.envoy import Envoy, eproperty\n",
        namespace,
    )
    assert namespace["nnsight"] is nnsight_engine
    assert namespace["Envoy"] is nnsight_engine.Envoy
    assert namespace["CONFIG"] is nnsight_engine.CONFIG


def test_nothing_happens_unasked() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'nnsight'"):
        importlib.import_module("nnsight")


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            "from nnsight import Nothing",
            r"nnsight has no 'Nothing' in nnsight_engine.*; it has .*CONFIG.*NNsight",
        ),
        ("import nnsight.nothing", r"nnsight has no 'nothing'.*; it has .*intervention, .*modeling"),
        (
            "import nnsight.intervention.nothing.more",
            r"nnsight\.intervention has no 'nothing'.*; it has .*envoy",
        ),
        (
            "from nnsight.intervention import nothing",
            r"nnsight\.intervention has no 'nothing'.*; it has .*envoy",
        ),
    ],
)
def test_unknown_name_says_which_there_are(statement: str, message: str) -> None:
    install()
    with pytest.raises(ImportError, match=message):
        exec(statement, {})
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'; it offers .*NNsight"):
        _ = importlib.import_module("nnsight").nothing


def test_the_originals_name_stays_its_own(original: Path) -> None:
    with pytest.raises(
        OriginalInstalledError, match=r"nnsight itself is installed, at .*__init__\.py; uninstall it, or"
    ):
        install()


def test_force_hides_the_original(original: Path) -> None:
    install(force=True)
    assert importlib.import_module("nnsight") is nnsight_engine


def test_an_imported_original_is_never_replaced(original: Path) -> None:
    importlib.import_module("nnsight")
    with pytest.raises(OriginalInstalledError, match="nnsight is imported already"):
        install(force=True)


def test_a_folder_that_is_called_so_is_no_original(original: Path) -> None:
    (original / "__init__.py").unlink()
    install()
    assert importlib.import_module("nnsight") is nnsight_engine
