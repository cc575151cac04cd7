"""A clean process whose children run whatever Python they are sent: nothing holds it off but the process.

``ForkServer`` starts it. The code finds what attempts find, without a trace, and ``side``, its own end of
what is said to the engine; what it binds to ``got`` is the answer. Ordinary blocks are run by their names,
and what they save is the answer.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch

from nnsight_engine import NNsight
from nnsight_engine.core.saves import save
from nnsight_engine.envoys.tracers.interleaving import InterleavingTracer
from nnsight_engine.sandbox.block_checker import CHECKED, load_modules
from nnsight_engine.sandbox.channel import SandboxSide
from nnsight_engine.sandbox.confine import ProcessLimits
from nnsight_engine.sandbox.zygote import NUMBER, fork_children
from tests.security.host import Small
from tests.security.ordinary import saved_by

_SHARE = ProcessLimits(memory_bytes=2**30, cpu_s=20)


def _grow_up() -> Callable[[SandboxSide], None]:
    return _serve


def _serve(side: SandboxSide) -> None:
    while True:
        sent = json.loads(side.receive())
        try:
            said = saved_by(sent["block"], CHECKED) if "block" in sent else _got_by(side, sent)
        except BaseException as error:  # noqa: BLE001 - told
            said = f"raised {type(error).__name__}: {error}"
        side.send([said.encode("utf-8", "replace")[:100_000]])


def _got_by(side: SandboxSide, sent: dict[str, Any]) -> str:
    model = NNsight(Small())
    tracer = InterleavingTracer(model._run_module, model, torch.ones(1, 5))
    names = {"x": torch.arange(12.0).reshape(3, 4), "torch": torch, "side": side, **sent["names"]}
    names |= {"model": model, "tracer": tracer, "save": save}
    exec(compile(sent["code"], "<attempt>", "exec"), names)
    return f"got {names.get('got')!r}"


def main(orders: socket.socket, folder: str) -> None:
    """Fork children until there is nobody to order them."""
    (length,) = NUMBER.unpack(orders.recv(NUMBER.size))
    assert length == 0
    torch.set_num_threads(1)
    load_modules()
    saved_by("save", CHECKED)  # loads what is otherwise loaded at the first trace
    saved_by("gradients", CHECKED)
    repr(torch.ones(2))
    fork_children(orders, folder, _SHARE, _grow_up)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
