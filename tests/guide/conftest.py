"""The models of the guide's examples: tiny random ones of the documented architectures, and the bundled one.

Every test of one that a server can have runs twice: ``[local]`` with weights here, and ``[remote]`` with one
without, whose traces run on a live server of the checkpoint. Tests that have no meaning there, as of weights,
of passes of this process's modules or of a terminal, take ``local_gpt2``.

A model is loaded once for all tests, so a test that changes one changes it for all: edit copies with
``edit()``, and wrap a module of its own where the model itself must change. Weights are float32, attention is
torch's own and dropout is off, so that a plain forward pass computes the very same numbers.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from nnsight_engine import LanguageModel, NNsight, bundled_model_path
from tests.families.checkpoints import write_checkpoint
from tests.guide.modules import TinyMLP
from tests.guide.served import Load, Servers, client_of, without_weights
from tests.sharing import bring_together, fixtures_of, is_last

LOCAL: Final = "local"
REMOTE: Final = "remote"
SERVERS: Final = pytest.StashKey[Servers]()
SERVED: Final = ("gpt2_folder", "llama_folder", "smollm_folder")
"""Checkpoints that a server can have."""


@pytest.hookimpl(trylast=True)  # so that this parameter is the last of a test's name
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test of a model that a server can have a second time, with its traces on that server."""
    if "where" in metafunc.fixturenames:
        remote = pytest.param(REMOTE, marks=[pytest.mark.e2e, pytest.mark.heavy])
        metafunc.parametrize("where", [LOCAL, remote], indirect=True, scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the servers live for no longer than they must."""
    bring_together(items, is_remote)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """End the servers with the last test that uses them: others may come that want the memory."""
    servers = item.session.stash.get(SERVERS, None)
    if servers is not None and is_last(item, is_remote):
        servers.close()


def is_remote(item: pytest.Item) -> bool:
    """Tell whether a test needs a server: its traces run there, or it asks for the servers themselves."""
    callspec = getattr(item, "callspec", None)  # of those with parameters
    traces = callspec is not None and callspec.params.get("where") == REMOTE
    return traces or "guide_servers" in fixtures_of(item)


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 on disk: 4 blocks of width 128."""
    return write_checkpoint("gpt2", tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama on disk: 4 layers of width 128, grouped heads."""
    return write_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def guide_servers(request: pytest.FixtureRequest) -> Iterator[Servers]:
    """The servers of the checkpoints that tests ask for, started with the first trace of any."""
    asked = {name for item in request.session.items if is_remote(item) for name in fixtures_of(item)}
    folders = [request.getfixturevalue(name) for name in SERVED if name in asked]
    servers = request.session.stash[SERVERS] = Servers(folders)
    yield servers
    servers.close()


@pytest.fixture(scope="session")
def where(request: pytest.FixtureRequest) -> str:
    """Where the traces of models run, ``local`` or ``remote``."""
    return str(getattr(request, "param", LOCAL))


@pytest.fixture(scope="session")
def plain() -> Load:
    """Load a checkpoint with its weights, each once."""

    @functools.cache
    def load(folder: Path) -> LanguageModel:
        return LanguageModel(folder, dtype=torch.float32, dispatch=True)

    return load


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Copy a checkpoint without its weights, each once."""
    return functools.cache(lambda folder: without_weights(folder, tmp_path_factory.mktemp("shell")))


@pytest.fixture(scope="session")
def load(where: str, plain: Load, shell: Callable[[Path], Path], request: pytest.FixtureRequest) -> Load:
    """Load a checkpoint; ``load(folder, rename=...)`` runs its traces here or on a server."""

    def load(folder: Path, **options: Any) -> LanguageModel:
        if where == LOCAL:
            return LanguageModel(folder, dtype=torch.float32, dispatch=True, **options)
        servers: Servers = request.getfixturevalue("guide_servers")
        return client_of(shell(folder), servers.url(folder), plain(folder), **options)

    return load


@pytest.fixture(scope="session")
def gpt2(gpt2_folder: Path, load: Load) -> LanguageModel:
    """The tiny GPT-2."""
    return load(gpt2_folder)


@pytest.fixture(scope="session")
def local_gpt2(gpt2_folder: Path, plain: Load) -> LanguageModel:
    """It, with its weights here."""
    return plain(gpt2_folder)


@pytest.fixture(scope="session")
def llama(llama_folder: Path, load: Load) -> LanguageModel:
    """The tiny Llama."""
    return load(llama_folder)


@pytest.fixture(scope="session")
def smollm_folder() -> Path:
    """The bundled SmolLM2 on disk."""
    return bundled_model_path()


@pytest.fixture(scope="session")
def smollm(smollm_folder: Path, load: Load) -> LanguageModel:
    """It, for what only real text shows; its tests are marked ``e2e``."""
    return load(smollm_folder)


@pytest.fixture
def tiny() -> NNsight:
    """The documents' ``Sequential`` of two layers, 5 -> 10 -> 2, fresh for each test."""
    return NNsight(TinyMLP())


@pytest.fixture
def features() -> torch.Tensor:
    """One row of input for ``tiny``."""
    return torch.linspace(-1.0, 1.0, 5).reshape(1, 5)
