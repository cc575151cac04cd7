"""The page that lists nnsight's names, against the code."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest

from nnsight_engine import LanguageModel, RemoteBackend, eproperty
from nnsight_engine.compat import install, uninstall
from nnsight_engine.interleaving.events import SkipException
from nnsight_engine.interleaving.interleaver import Interleaver
from nnsight_engine.interleaving.mediator import Mediator
from nnsight_engine.vllm_backend.vllm import VLLM
from tests.families.checkpoints import write_checkpoint

PAGE: Final = Path(__file__).parents[3] / "docs" / "coming-from" / "nnsight.md"
STARTED: Final = {"tracer.info", "VLLM.logits", "VLLM.samples"}
"""Names that are there only once a block or an engine runs."""


def names() -> list[tuple[str, bool]]:
    """Return each name of the page's lists and tables, and whether the page says that it is here."""
    text = PAGE.read_text(encoding="utf-8").partition("<!-- names: begin")[2].partition("<!-- names: end")[0]
    found: list[tuple[str, bool]] = []
    for line in text.splitlines():
        row = re.fullmatch(r"\| (`.+?) \| (yes|no) \| .+ \|", line)
        listed = row[1] if row else line.removeprefix("Here: ") if line.startswith("Here: ") else ""
        prefix = ""
        for name in re.findall("`(.+?)`", listed):
            path = name if "." in name else f"{prefix}.{name}"  # those after the first share its module
            prefix = path.rpartition(".")[0]
            found.append((path, row is None or row[2] == "yes"))
    return found


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Objects of the kinds that names begin with, where they are no modules."""
    model = LanguageModel(write_checkpoint("gpt2", tmp_path_factory.mktemp("gpt2")))
    tracer = model.trace()
    install()
    yield {
        "Envoy": model.transformer.h[0],
        "LanguageModel": model,
        "RemoteBackend": RemoteBackend(),
        "VLLM": VLLM,
        "invoker": tracer.invoke("Paris"),
        "session": model.session(),
        "tracer": tracer,
    }
    uninstall()


INSTANCES: dict[type, Callable[[], Any]] = {
    Interleaver: Interleaver,
    Mediator: lambda: Mediator(lambda: None),
    SkipException: lambda: SkipException(None),
    eproperty: eproperty,
}


def found(path: str, objects: dict[str, Any]) -> bool:
    """Tell whether a name leads to something, through modules, classes, and objects of those classes."""
    first, *steps = path.split(".")
    value = objects[first] if first in objects else importlib.import_module(first)
    try:
        for step in steps[:-1]:
            value = _attribute(value, step)
        # A property of envoys and tracers waits for a value: the class tells that it exists.
        return hasattr(type(value), steps[-1]) or _exists(value, steps[-1])
    except (AttributeError, ImportError):
        return False


def _exists(value: Any, name: str) -> bool:
    _attribute(value, name)
    return True


def _attribute(value: Any, name: str) -> Any:
    if isinstance(value, ModuleType):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            if hasattr(value, name):
                return getattr(value, name)
        return importlib.import_module(f"nnsight{value.__name__.removeprefix('nnsight_engine')}.{name}")
    if isinstance(value, type) and not hasattr(value, name):
        return (
            value.__annotations__[name] if name in value.__annotations__ else getattr(_instance(value), name)
        )
    return getattr(value, name)


def _instance(kind: type) -> Any:
    return INSTANCES[kind]() if kind in INSTANCES else kind


@pytest.mark.parametrize(("name", "is_here"), names())
def test_a_name_is_here_or_has_a_way_round(name: str, objects: dict[str, Any], *, is_here: bool) -> None:
    assert name in STARTED or found(name, objects) == is_here


def test_no_name_is_listed_twice() -> None:
    paths = [path for path, _ in names()]
    assert len(paths) == len(set(paths)) > 200
