"""Reassembly of a block's saved values from the deltas that are sent while it runs.

After each step, a worker sends a delta with the changes (``vllm_backend.traces.deltas`` defines its
contents). The consumer of a stream of outputs accumulates the deltas here, so that each output can carry
everything saved up to its tokens. ``output_data`` and ``OutputReader`` do the same over a connection: a
server forwards the worker's deltas without decoding them, and the client reassembles the values.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from nnsight_engine.remote_backend.values.outcomes import by_name
from nnsight_engine.serialization import DecodeError, decode, encode

logger = logging.getLogger(__name__)


def apply_delta(saves: dict[str, Any], data: bytes) -> None:
    """Update ``saves`` with one delta of a block; ignore a delta that cannot be decoded or applied."""
    try:
        message = decode(data)
        new = _values(message["whole"], object)
        for name, items in _values(message["grown"], list).items():
            # A new list each time: outputs that were already delivered keep theirs.
            new[name] = [*(new if name in new else saves).get(name, ()), *items]
    except (DecodeError, LookupError, TypeError):
        # From a hostile block. The result at the end of the trace has all values that can be decoded.
        logger.debug("a saved value cannot be read", exc_info=True)
        return
    saves.update(new)


def _values(values: Any, kind: type) -> dict[str, Any]:
    """Return a copy of values by name.

    Raises:
        DecodeError: They are no dict, have other keys than strings, or are not all of the type ``kind``.
    """
    if type(values) is not dict or not all(type(name) is str for name in values):
        raise DecodeError("its values have no names")
    if not all(isinstance(value, kind) for value in values.values()):
        raise DecodeError(f"a value is no {kind.__name__}")
    return dict(values)


class SavesSoFar:
    """The values that the blocks of one trace have saved so far, by block and choice."""

    def __init__(self) -> None:
        self._saves: dict[tuple[int, int], dict[str, Any]] = {}

    def add(self, index: int, choice: int, data: bytes) -> None:
        """Apply a delta of one choice of a block."""
        apply_delta(self._saves.setdefault((index, choice), {}), data)

    def of(self, index: int, num_choices: int) -> dict[str, Any]:
        """Return a block's saved values by name; with several choices, a list with one value per choice."""
        return by_name([self._saves.get((index, choice), {}) for choice in range(num_choices)])


@dataclasses.dataclass(frozen=True, slots=True)
class StreamedOutput:
    """One output of a request, as it arrives.

    Attributes:
        invoke: Index of the request's block.
        choices: ``index``, ``text``, ``token_ids`` and ``finish_reason`` of each choice in this output.
        finished: Whether the request has ended.
        saves: The values that the block has saved so far, by name.
    """

    invoke: int
    choices: list[dict[str, Any]]
    finished: bool
    saves: dict[str, Any]


def output_data(
    invoke: int,
    num_choices: int,
    choices: Sequence[dict[str, Any]],
    deltas: Sequence[tuple[int, bytes]],
    *,
    finished: bool,
) -> bytes:
    """Return an output as a message; ``deltas`` holds the deltas since the last one, with their choices."""
    return encode(
        {
            "invoke": invoke,
            "num_choices": num_choices,
            "choices": list(choices),
            "finished": finished,
            "news": [list(delta) for delta in deltas],
        }
    )


class OutputReader:
    """Decodes the messages of ``output_data`` of one trace, in the order in which they were written."""

    def __init__(self) -> None:
        self._saves = SavesSoFar()

    def read(self, data: bytes | bytearray | memoryview) -> StreamedOutput:
        """Decode the next message.

        Raises:
            DecodeError: The message is malformed.
        """
        message = decode(data)
        try:
            invoke = message["invoke"]
            for choice, delta in message["news"]:
                self._saves.add(invoke, choice, delta)
            saves = self._saves.of(invoke, message["num_choices"])
            return StreamedOutput(invoke, message["choices"], message["finished"], saves)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise DecodeError(f"the message holds no output of a trace: {error!r}") from error


__all__ = ["OutputReader", "SavesSoFar", "StreamedOutput", "apply_delta", "output_data"]
