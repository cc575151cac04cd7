"""The zygote: a clean process from which sandboxes are forked, with all modules loaded and no client's data.

``ForkServer`` starts it and orders forks from it. It ends with its engine, and its children end with it.
"""

from __future__ import annotations

import array
import gc
import os
import socket
import struct
import traceback
from collections.abc import Callable
from typing import Final, NoReturn

from nnsight_engine.sandbox.channel import Memory, SandboxSide
from nnsight_engine.sandbox.confine import ProcessLimits, confine, die_with_parent, isolate, keep_only

FORK: Final = b"F"
REAP: Final = b"R"
ORDER: Final = struct.Struct("<cQ")
"""The order, and a process id or a number of bytes of memory."""
NUMBER: Final = struct.Struct("<q")
READY: Final = b"ready"
"""The first message of a child that has started; any other first message is an error."""

Child = Callable[[SandboxSide], None]
"""Serves the engine until it is ended."""


def fork_children(
    orders: socket.socket, folder: str, share: ProcessLimits, prepare_child: Callable[[], Child]
) -> None:
    """Fork processes as ordered, until the engine closes the connection.

    ``prepare_child`` is called in each child before it is confined, and returns the function that the child
    then runs.
    """
    die_with_parent()
    lacks = isolate(folder)
    die_with_parent()  # the kernel clears the setting when a process changes its user
    gc.collect()
    gc.freeze()
    report = " ".join(lacks).encode()
    orders.sendall(NUMBER.pack(len(report)) + report)
    while True:
        data, descriptors = _order(orders)
        if not data:
            return
        kind, number = ORDER.unpack(data)
        if kind == REAP:
            _reap(number)
            continue
        connection, memory = descriptors
        child = os.fork()
        if child == 0:
            _run_child(connection, memory, number, share, prepare_child)
        os.close(connection)
        os.close(memory)
        orders.sendall(NUMBER.pack(child))


def _order(orders: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next order and its descriptors; no bytes once the engine has closed the connection."""
    descriptors = array.array("i")
    data, ancillary, _, _ = orders.recvmsg(ORDER.size, socket.CMSG_SPACE(2 * descriptors.itemsize))
    for _, _, content in ancillary:
        descriptors.frombytes(content)
    while data and len(data) < ORDER.size:
        more = orders.recv(ORDER.size - len(data))
        if not more:
            return b"", []
        data += more
    return data, list(descriptors)


def _reap(process: int) -> None:
    """Reap a child that the engine has killed; until then its process id is not reused."""
    try:
        os.waitpid(process, 0)
    except ChildProcessError:
        return


def _run_child(
    connection: int, descriptor: int, num_bytes: int, share: ProcessLimits, prepare_child: Callable[[], Child]
) -> NoReturn:
    """Run a child; it never returns into its parent's code, whatever happens."""
    try:
        die_with_parent()
        memory = Memory(descriptor, num_bytes)
        keep_only({connection})
        side = SandboxSide(connection, memory)
        try:
            serve = prepare_child()
            confine(share)
        except Exception:
            side.send([traceback.format_exc().encode()])
            raise
        side.send([READY])
        serve(side)
    except BaseException:  # noqa: BLE001 - a child must never return into its parent's code
        traceback.print_exc()
    finally:
        os._exit(1)
