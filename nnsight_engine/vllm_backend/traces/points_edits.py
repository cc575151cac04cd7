"""In-place edits of tensors that were computed for a block only and replace the model's value only if edited.

A tensor that was only read must change and store nothing, so its version counter is checked first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from nnsight_engine.interleaving.mediator import Mediator
from nnsight_engine.interleaving.threads import ThreadMediator, Threads
from nnsight_engine.vllm_backend.traces.errors import ChunkedPromptError

if TYPE_CHECKING:
    from nnsight_engine.vllm_backend.traces.request import TracedRequest


class PointEdit:
    """The replacement of the model's value, used if the block has edited the tensor it was given."""

    def __init__(
        self, name: str, mediator: Mediator, given: torch.Tensor, replacement: Callable[[], Any]
    ) -> None:
        assert mediator.interleaver is not None  # noqa: S101 - it runs
        self._name = name
        self._mediator = mediator
        self._batcher = mediator.interleaver.batcher
        self._loans = self._batcher.loans
        self._given = given
        self._version = given._version  # noqa: SLF001 - has no public name
        self._replacement = replacement

    @property
    def is_over(self) -> bool:
        return self._batcher.loans is not self._loans

    @property
    def is_made(self) -> bool:
        """Whether the block has edited the tensor since the edit was last applied."""
        return self._given._version != self._version  # noqa: SLF001

    @property
    def error(self) -> ChunkedPromptError | None:
        """Why the edit cannot be applied: it includes rows of earlier chunks of the prompt. Else None."""
        group = self._mediator.batch_group
        if group is None or len(self._given) == group[1]:
            return None
        return ChunkedPromptError.writing(self._name, -(-len(self._given) // group[1]))

    def __call__(self) -> Any:
        self._version = self._given._version  # noqa: SLF001
        return self._replacement()


class EditMediator(ThreadMediator):
    """A block's mediator that applies edits once they have been made; ``label`` names the block in errors.

    That may be later than its next hand-over: it may wait for another block at a barrier first.
    """

    __slots__ = ("_edit", "label")

    def __init__(
        self,
        intervention: Callable[[], Any],
        info: Any,
        threads: Threads,
        *,
        seed: int,
        label: str | None = None,
    ) -> None:
        super().__init__(intervention, info, threads, seed=seed)
        self._edit: PointEdit | None = None
        self.label = label

    def _run_block(self, how: Callable[[Any, Any], Any], payload: Any) -> Any:
        request = cast("TracedRequest", self.interleaver)
        request.last_label = self.label

        def then_look(worker: Any, given: Any) -> Any:
            event = how(worker, given)
            self._see_edit()
            return event

        return super()._run_block(then_look, payload)

    def _see_edit(self) -> None:
        request = self.interleaver
        assert request is not None  # noqa: S101 - the block has run
        if isinstance(self.transform, PointEdit):
            self._edit, self.transform = self.transform, None
        edit = self._edit
        if edit is not None and edit.is_over:
            self._edit = None
        elif edit is not None and edit.is_made:
            error = edit.error
            if error is None:
                self.transform = edit
            else:
                request.failed(error)
