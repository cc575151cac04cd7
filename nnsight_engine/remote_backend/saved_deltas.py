"""Reassembly of a block's saved values from the deltas that are sent while it runs.

A server forwards a worker's deltas (``vllm_backend.traces.reporting``) without decoding them.

Hazard: a delta may come from a block that runs untrusted code. A malformed one raises ``DecodeError`` and
changes nothing.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final

from nnsight_engine.remote_backend.values.outcomes import by_name
from nnsight_engine.serialization import DATA_ONLY, DecodeError, MessageLimits, Policy, decode, encode
from nnsight_engine.serialization.wire import DEFAULT_LIMITS

logger = logging.getLogger(__name__)

MALFORMED: Final = (
    DecodeError, LookupError, TypeError, ValueError, AttributeError, RecursionError, MemoryError,
)  # fmt: skip
"""Exceptions that reading a malformed message may raise."""


class DeltaReader:
    """Merges the deltas of one choice of a block.

    ``whole`` are values that are new or replaced since the last ``take``, ``grown`` items appended to lists
    since then of which earlier items were taken.
    """

    def __init__(self, policy: Policy = DATA_ONLY, limits: MessageLimits = DEFAULT_LIMITS) -> None:
        """Start without values; ``_known_names`` are those sent whole, whose lists can grow."""
        self._policy = policy
        self._limits = limits
        self._known_names: set[str] = set()
        self.whole: dict[str, Any] = {}
        self.grown: dict[str, list[Any]] = {}

    def read(self, data: bytes) -> None:
        """Merge a delta: ``whole`` values replace earlier ones, ``grown`` items extend their lists."""
        try:
            message = decode(data, policy=self._policy, limits=self._limits)
            whole = values_by_name(message["whole"])
            grown: dict[str, list[Any]] = {}
            for name, items in values_by_name(message["grown"]).items():
                new = checked_list(items)
                if name in whole:
                    whole[name] = [*checked_list(whole[name]), *new]
                elif name not in self._known_names:
                    continue  # the items before these were dropped: the list will be sent whole again
                elif name in self.whole:
                    # A new list: outputs that were already delivered keep theirs.
                    whole[name] = [*checked_list(self.whole[name]), *new]
                else:
                    grown[name] = [*self.grown.get(name, ()), *new]
        except MALFORMED as error:
            raise DecodeError(f"a delta of saved values is malformed: {error}") from error
        self._known_names |= whole.keys()
        self.whole |= whole
        self.grown = {name: items for name, items in (self.grown | grown).items() if name not in whole}

    def skip(self) -> None:
        """Record that deltas were dropped: lists cannot grow until they have been sent whole again."""
        self._known_names.clear()

    def forget(self, name: str) -> None:
        """Record that a value was dropped, see ``skip``."""
        self._known_names.discard(name)

    def take_changes(self) -> tuple[dict[str, Any], dict[str, list[Any]]]:
        taken = self.whole, self.grown
        self.whole, self.grown = {}, {}
        return taken


def values_by_name(values: Any) -> dict[str, Any]:
    if type(values) is not dict or not all(type(name) is str for name in values):
        raise DecodeError("its values have no names")
    return dict(values)


def checked_list(values: Any) -> list[Any]:
    """Return ``values`` if it is a list; the items of a range would take any amount of memory."""
    if type(values) is not list:
        raise DecodeError("its values are no list")
    return values


class SavesSoFar:
    def __init__(self) -> None:
        self._readers: dict[tuple[int, int], DeltaReader] = {}

    def add(self, index: int, choice: int, data: bytes) -> None:
        """Merge a delta of one choice; ignore a malformed one, as the result at the end has all values."""
        try:
            self._readers.setdefault((index, choice), DeltaReader()).read(data)
        except DecodeError:
            logger.debug("a saved value cannot be read", exc_info=True)

    def values_of_block(self, index: int, num_choices: int) -> dict[str, Any]:
        """Return a block's saved values by name; with several choices, a list with one value per choice."""
        readers = [self._readers.get((index, choice)) for choice in range(num_choices)]
        return by_name([{} if reader is None else reader.whole for reader in readers])


@dataclasses.dataclass(frozen=True, slots=True)
class RemoteStreamedOutput:
    """One output of a request as it arrives: the fields of vLLM's outputs, and the saved values of its block.

    Attributes:
        invoke: Index of the block in its trace.
        outputs: The choices in this output, with ``index``, ``text``, ``token_ids``, ``finish_reason``.
        finished: Whether the request has ended.
        saves: The values that the block has saved so far, by name.
    """

    invoke: int
    outputs: list[SimpleNamespace]
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

    def read(self, data: bytes | bytearray | memoryview) -> RemoteStreamedOutput:
        """Return an output with all that its block has saved so far, its own deltas included."""
        message = decode(data)
        try:
            invoke = message["invoke"]
            for choice, delta in message["news"]:
                self._saves.add(invoke, choice, delta)
            saves = self._saves.values_of_block(invoke, message["num_choices"])
            choices = [SimpleNamespace(**choice) for choice in message["choices"]]
            return RemoteStreamedOutput(invoke, choices, message["finished"], saves)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise DecodeError(f"the message holds no output of a trace: {error!r}") from error
