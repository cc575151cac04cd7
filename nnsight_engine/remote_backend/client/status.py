from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import rich.box
from rich.console import Console
from rich.table import Table

from nnsight_engine.remote_backend.client.http import HttpTransport
from nnsight_engine.remote_backend.errors import RemoteConnectionError, RemoteError
from nnsight_engine.remote_backend.messages import fingerprint_of_folder, name_of


@dataclasses.dataclass(frozen=True)
class ModelStatus:
    """Status of a model on a server.

    Attributes:
        name: The server's name for it.
        names: All names that traces may use for it.
        fingerprint: Fingerprint of its shape, which identifies it for traces that name a folder.
        running: Whether the server accepts requests to it.
        engines: Engines that run its traces: ``vllm``, ``local``.
    """

    name: str
    names: Sequence[str]
    running: bool
    engines: Sequence[str]
    fingerprint: str = ""

    def is_called(self, name: str) -> bool:
        """Return whether this is the model of traces with this model name or local folder."""
        if self.fingerprint and Path(name).expanduser().is_dir():
            return fingerprint_of_folder(name) == self.fingerprint
        return name_of(name.rstrip("/") or name) in {self.name, *self.names}


@dataclasses.dataclass(frozen=True)
class ServerStatus:
    """Status of a server; prints as a table.

    Attributes:
        url: Its address.
        phase: ``starting``, ``ready``, ``draining`` or ``dead``.
        version: Version of this package on the server.
        python: The server's version of Python.
        in_flight: Number of requests being processed.
        queued: Number of waiting traces and jobs.
        models: Its models.
    """

    url: str
    phase: str
    version: str
    python: str
    in_flight: int
    queued: int
    models: Sequence[ModelStatus]

    def _table(self) -> Table:
        title = (
            f"{self.url}  {self.phase}  nnsight-engine {self.version}, Python {self.python}\n"
            f"{self.in_flight} in flight, {self.queued} queued"
        )
        table = Table(title=title, title_justify="left", box=rich.box.SIMPLE)
        for column in ("model", "also called", "running", "traces run on"):
            table.add_column(column)
        for model in self.models:
            other_names = ", ".join(name for name in model.names if name != model.name)
            table.add_row(model.name, other_names, "yes" if model.running else "no", ", ".join(model.engines))
        return table

    def __str__(self) -> str:
        """Return the status as a table."""
        console = Console(file=io.StringIO(), width=110, force_terminal=False)
        with console.capture() as captured:
            console.print(self._table())
        return captured.get().rstrip()

    __repr__ = __str__


def status(host: str | None = None, *, key: str | None = None) -> ServerStatus:
    """Return the status of a server and its models.

    Args:
        host: The server's address; ``CONFIG.API.HOST`` by default.
        key: The API key; ``CONFIG.API.KEY`` by default.

    Raises:
        RemoteConnectionError: The server cannot be reached.
        RemoteError: The server refuses the request, or its response is malformed.
    """
    transport = HttpTransport(host, key)
    plain = transport.get_json("/v1/status")
    try:
        return msgspec.convert({**plain, "url": transport.url}, ServerStatus)
    except msgspec.ValidationError as error:
        raise RemoteError(
            f"{transport.url} returned a status that this version cannot read: {error}"
        ) from error


def ndif_status(host: str | None = None, *, key: str | None = None) -> ServerStatus:
    """Return the result of ``status``; the name exists for compatibility with scripts for nnsight."""
    return status(host, key=key)


def is_model_running(
    name: str | os.PathLike[str], host: str | None = None, *, key: str | None = None
) -> bool:
    """Return whether a server accepts requests to a model; False if the server cannot be reached.

    Args:
        name: The model as a trace would name it: any of its names, or a local folder with the same model.
        host: The server's address; ``CONFIG.API.HOST`` by default.
        key: The API key; ``CONFIG.API.KEY`` by default.

    Raises:
        RemoteError: The server refuses the request.
    """
    try:
        models = status(host, key=key).models
    except RemoteConnectionError:
        return False
    return any(model.running and model.is_called(os.fspath(name)) for model in models)
