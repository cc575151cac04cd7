"""The real command's server over the fake engine, as a process, for tests that send it signals.

It listens on the port that is its argument, and ends as ``nnsight-engine serve`` does. The variable
``DIES_AFTER_S`` lets its engines live for so long; ``STALLS_UNTIL`` has the list of models stop the event
loop until there is such a file; ``ARGUMENTS`` has other arguments as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from rich.console import Console

from app.command_error import CommandError
from app.serve_command import _run
from app.settings import Settings
from app.storage.results import ResultStore
from tests.fakes.engine import FakeBehaviour, FakeEngineClient
from tests.waiting import wait_for

ARGUMENTS: Final[dict[str, Any]] = {
    "allow_credentials": False,
    "allowed_headers": ["*"],
    "allowed_methods": ["*"],
    "allowed_origins": [],
    "api_key": None,
    "disable_access_log_for_endpoints": None,
    "disable_fastapi_docs": False,
    "disable_uvicorn_access_log": False,
    "enable_request_id_headers": False,
    "enable_ssl_refresh": False,
    "h11_max_header_count": 256,
    "h11_max_incomplete_event_size": 4194304,
    "middleware": [],
    "root_path": "",
    "ssl_ca_certs": None,
    "ssl_cert_reqs": 0,
    "ssl_certfile": None,
    "ssl_ciphers": None,
    "ssl_keyfile": None,
    "uds": None,
    "uvicorn_log_level": "info",
}
"""What the command reads of vLLM's arguments, with vLLM's defaults."""


class _Engine(FakeEngineClient):
    def __init__(self, args: Any, settings: Settings, store: ResultStore) -> None:
        del args
        super().__init__(settings, store, FakeBehaviour(delay_s=0.05))
        self.started = asyncio.Event()  # of what the command prints then, there is nothing here

    async def models(self) -> dict[str, Any]:
        if "STALLS_UNTIL" in os.environ:
            wait_for(Path(os.environ["STALLS_UNTIL"]).exists, 600)
        return await super().models()

    async def died(self) -> None:
        life_s = float(os.environ.get("DIES_AFTER_S", "inf"))
        if life_s == float("inf"):
            await asyncio.Event().wait()
        await asyncio.sleep(life_s)
        self.behaviour.is_dead = True


def main() -> int:
    """Serve until stopped."""
    settings = Settings(port=int(sys.argv[1]))
    args = argparse.Namespace(**ARGUMENTS | json.loads(os.environ.get("ARGUMENTS", "{}")))
    modules = SimpleNamespace(VLLMEngineClient=_Engine)
    try:
        _run(args, settings, modules, Console(stderr=True))
    except CommandError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
