"""A library in its process beside hooks in the same one, on the small model and the language model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from benchmarks.peers.sides.hooks import HookWork
from benchmarks.peers.tasks import (
    LANGUAGE,
    LOCAL_TASKS,
    SMALL,
    NotOfferedError,
    Size,
    Subject,
    Work,
    difference,
    language_subject,
    small_subject,
)
from benchmarks.tracing.timing import CallsByTurns, Sampler

_REPETITION_S: Final = 0.3


class Models(NamedTuple):
    """What a library is given.

    Attributes:
        small: The small model.
        language: The language model.
        path: The language model's folder.
    """

    small: Subject
    language: Subject
    path: Path


class LocalSide:
    """A library's works on the two models.

    Args:
        models: The models.
        works: The library's methods for each model that it takes.
    """

    def __init__(self, models: Models, works: dict[Size, Any]) -> None:
        """Hook twins, which the library has not touched."""
        self._works = works
        self._hooks = {SMALL: HookWork(models.small.twin()), LANGUAGE: HookWork(models.language.twin())}

    def prepare(self, number: int) -> tuple[Sampler, list[torch.Tensor]]:
        """Return what times a task, and what the library read.

        Raises:
            NotOfferedError: The library has no way to do it.
            ValueError: It read something else than the hooks did.
        """
        task = LOCAL_TASKS[number]
        work = self._works.get(task.size)
        if work is None:
            raise NotOfferedError("takes language models only")
        library: Work = getattr(work, task.key)
        hooks: Work = getattr(self._hooks[task.size], task.key)
        values = library()
        apart = difference(values, hooks())
        if apart is None or apart > task.size.rounding:
            raise ValueError(
                f"what it read must be what hooks read, and lies {apart} of the largest value apart"
            )
        return CallsByTurns({"library": library, "reference": hooks}, _REPETITION_S), values


def models_in(path: Path) -> Models:
    """Return the small model, and the language model in a folder."""
    return Models(small_subject(), language_subject(path), path)
