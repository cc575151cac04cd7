"""A server over the fake engine as a process of its own, for load tests: ``python -m … FOLDER``.

It prints its port when it listens. Its model has layers, so that a client can write a block for it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import uvicorn

from app.main import create_app, new_store
from app.settings import Settings
from tests.fakes.engine import FakeBehaviour, FakeEngineClient


def main() -> None:
    folder = Path(sys.argv[1])
    settings = Settings(result_dir=folder / "results", data_dir=folder / "data", drain_timeout_s=1)
    store = new_store(settings)
    engine = FakeEngineClient(settings, store, FakeBehaviour(delay_s=0.005))
    config = uvicorn.Config(create_app(settings, engine, store), port=0, log_level="warning")
    sock = config.bind_socket()
    print(sock.getsockname()[1], flush=True)  # noqa: T201 - the test reads it
    uvicorn.Server(config).run(sockets=[sock])


if __name__ == "__main__":
    main()
