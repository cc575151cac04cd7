"""Servers that the guide's tests run on a second time, and clients of them, which have no weights.

A client's modules know their counterparts with weights (``plain.with_weights``), so that a test may compare
with a plain forward pass wherever its traces ran.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nnsight_engine import LanguageModel, bundled_model_path
from tests.e2e.server import Server
from tests.hook_reference import TWIN

Load = Callable[..., LanguageModel]
"""Loads a checkpoint; its arguments are a folder, and options for ``LanguageModel``."""

_TRACE = re.compile(r"^\[\S+\] LOG +: ", re.MULTILINE)


def printed(text: str) -> str:
    """Return what blocks printed, without the names of traces that stand before what a server sent."""
    return _TRACE.sub("", text)


class Servers:
    """One server for each checkpoint, all started at once: each takes a while, and one core for most of it.

    Args:
        folders: The checkpoints.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self._pool = ThreadPoolExecutor()
        # The bundled model has a name of its own if none is given.
        models = {folder: None if folder == bundled_model_path() else str(folder) for folder in folders}
        self._servers = {
            folder: Server(model, arguments=["--local-engine", "--max-model-len", "256"])
            for folder, model in models.items()
        }
        self._started = {
            folder: self._pool.submit(server.__enter__) for folder, server in self._servers.items()
        }

    def url(self, folder: Path) -> str:
        """Return the address of the server of a checkpoint, once it serves."""
        return self._started[folder].result().base_url

    def close(self) -> None:
        """End them, all at once: that takes a while too; harmless when repeated."""
        self._pool.shutdown()
        servers, self._servers = self._servers, {}
        with ThreadPoolExecutor() as pool:
            list(pool.map(Server.stop, servers.values()))


def without_weights(folder: Path, target: Path) -> Path:
    """Write what a client needs of a checkpoint: everything but the weights."""
    target.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    return target


def client_of(folder: Path, url: str, plain: LanguageModel, **options: Any) -> LanguageModel:
    """Return a model without weights whose traces run on a server.

    Args:
        folder: The checkpoint, its weights left out.
        url: The server.
        plain: The same model, with its weights.
        **options: For ``LanguageModel``.
    """
    client = LanguageModel(folder, remote=url, **options)
    for name, module in client._module.named_modules():
        vars(module)[TWIN] = plain._module.get_submodule(name)
    return client
