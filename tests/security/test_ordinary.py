"""Ordinary blocks in a confined process: none is refused, and they save what they save elsewhere."""

from __future__ import annotations

import json
import time

import pytest

from nnsight_engine.sandbox.forkserver import ForkServer
from nnsight_engine.serialization import TRUSTED
from tests.security.ordinary import BLOCKS, saved_by
from tests.security.processes import taken


@pytest.mark.parametrize("name", BLOCKS)
def test_an_ordinary_block_does_the_same(name: str, bare: ForkServer) -> None:
    sandbox = taken(bare)
    deadline = time.monotonic() + 60
    try:
        sandbox.side.send([json.dumps({"block": name}).encode()])
        said = sandbox.side.receive(deadline, 2**20).decode()
    finally:
        sandbox.end()
    assert said == saved_by(name, TRUSTED)
