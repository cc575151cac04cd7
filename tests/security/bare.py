"""A clean process whose children run whatever Python they are sent: nothing holds it off but the process.

``ForkServer`` starts it. The code finds ``x``, ``canary`` and ``port``, as attempts do, and ``side``, its own
end of what is said to the engine; what it binds to ``got`` is the answer.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable

import torch

from nnsight_engine.sandbox.channel import SandboxSide
from nnsight_engine.sandbox.confine import ProcessLimits
from nnsight_engine.sandbox.zygote import NUMBER, raise_children

_SHARE = ProcessLimits(memory_bytes=2**30, cpu_s=20)


def _grow_up() -> Callable[[SandboxSide], None]:
    return _serve


def _serve(side: SandboxSide) -> None:
    while True:
        sent = json.loads(side.receive())
        names = {"x": torch.arange(12.0).reshape(3, 4), "torch": torch, "side": side, **sent["names"]}
        try:
            exec(compile(sent["code"], "<attempt>", "exec"), names)
            said = f"got {names.get('got')!r}"
        except BaseException as error:  # noqa: BLE001 - told
            said = f"raised {type(error).__name__}: {error}"
        side.send([said.encode("utf-8", "replace")[:100_000]])


def main(orders: socket.socket, folder: str) -> None:
    """Fork children until there is nobody to order them."""
    (length,) = NUMBER.unpack(orders.recv(NUMBER.size))
    assert length == 0
    torch.set_num_threads(1)
    repr(torch.ones(2))  # loads what is otherwise loaded when a tensor is first shown
    raise_children(orders, folder, _SHARE, _grow_up)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
