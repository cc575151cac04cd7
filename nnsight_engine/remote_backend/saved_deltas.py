"""What blocks have saved up to now, put together from what is told of them while they run.

A worker tells after each step what is new (``vllm_backend.traces.news`` says what that is); whoever shows a
stream of outputs keeps it here, so that each output can carry everything saved up to its tokens. With
``output_data`` and ``OutputReader`` the same goes over a wire: a server passes on what the worker wrote,
without reading it, and the client puts it together.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from nnsight_engine.remote_backend.outcomes import by_name
from nnsight_engine.serialization import DecodeError, decode, encode

logger = logging.getLogger(__name__)


def apply_news(saves: dict[str, Any], data: bytes) -> None:
    """Bring ``saves`` up to date with what was told of one block."""
    try:
        message = decode(data)
        whole, grown = message["whole"], message["grown"]
    except (DecodeError, LookupError, TypeError):  # of a hostile block; everything is collected in the end
        logger.debug("something saved cannot be read", exc_info=True)
        return
    saves.update(whole)
    for name, items in grown.items():
        # A list of its own each time: outputs that have left keep theirs.
        saves[name] = [*saves.get(name, ()), *items]


class SavesSoFar:
    """Everything that the blocks of one trace have saved, by block and choice."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._saves: dict[tuple[int, int], dict[str, Any]] = {}

    def add(self, index: int, choice: int, data: bytes) -> None:
        """Take in what was told of one choice of a block."""
        apply_news(self._saves.setdefault((index, choice), {}), data)

    def of(self, index: int, num_choices: int) -> dict[str, Any]:
        """Return what a block has saved, by name; with several choices, each name has a list of theirs."""
        return by_name([self._saves.get((index, choice), {}) for choice in range(num_choices)])


@dataclasses.dataclass(frozen=True, slots=True)
class StreamedOutput:
    """One output of a request, as it comes.

    Attributes:
        invoke: The request's block.
        choices: ``index``, ``text``, ``token_ids`` and ``finish_reason`` of each choice that it tells of.
        finished: Whether the request has ended.
        saves: What the block has saved up to here, by name.
    """

    invoke: int
    choices: list[dict[str, Any]]
    finished: bool
    saves: dict[str, Any]


def output_data(
    invoke: int,
    num_choices: int,
    choices: Sequence[dict[str, Any]],
    news: Sequence[tuple[int, bytes]],
    *,
    finished: bool,
) -> bytes:
    """Return an output as a message; ``news`` is what was told since the last one, by choice."""
    return encode(
        {
            "invoke": invoke,
            "num_choices": num_choices,
            "choices": list(choices),
            "finished": finished,
            "news": [list(told) for told in news],
        }
    )


class OutputReader:
    """Reads the messages of ``output_data``, those of one trace, in the order in which they were written."""

    def __init__(self) -> None:
        """Start before the first."""
        self._saves = SavesSoFar()

    def read(self, data: bytes | bytearray | memoryview) -> StreamedOutput:
        """Read the next one.

        Raises:
            DecodeError: It is none.
        """
        message = decode(data)
        try:
            invoke = message["invoke"]
            for choice, told in message["news"]:
                self._saves.add(invoke, choice, told)
            saves = self._saves.of(invoke, message["num_choices"])
            return StreamedOutput(invoke, message["choices"], message["finished"], saves)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise DecodeError(f"the message holds no output of a trace: {error!r}") from error


__all__ = ["OutputReader", "SavesSoFar", "StreamedOutput", "apply_news", "output_data"]
