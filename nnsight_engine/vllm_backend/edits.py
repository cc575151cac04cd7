"""Edits on the client: kept blocks as messages, and which of them a request chooses.

An edit is written when its block is defined, with the values that its variables have then, and never again.
Named ones are kept by the engine's workers and on this side too, so that an engine that is started anew has
them again; a request names them with a digest of what it means. Copies of a model share the names.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from nnsight_engine.envoys.tracers.editing import EditingTracer
from nnsight_engine.serialization import SentBlock, encode_trace
from nnsight_engine.tracing.tracer import Backend
from nnsight_engine.vllm_backend.traces.edits import digest_of
from nnsight_engine.vllm_backend.traces.entry import EditEntry
from nnsight_engine.vllm_backend.traces.points import place_of

if TYPE_CHECKING:
    from nnsight_engine.vllm_backend.vllm import VLLM

_MAX_NAME: Final = 200


@dataclasses.dataclass(frozen=True, slots=True)
class EngineEdit:
    """A kept block.

    Attributes:
        name: What it is called.
        data: The block as a message.
        digest: Of the message.
        is_resident: Whether the engine keeps it, under its name.
    """

    name: str
    data: bytes
    digest: str
    is_resident: bool

    @property
    def entry(self) -> EditEntry:
        """What a request brings of it."""
        return EditEntry(self.name, self.digest, None if self.is_resident else self.data)


class EditBook:
    """The edits that an engine keeps, by name."""

    def __init__(self) -> None:
        """Start without any."""
        self._edits: dict[str, EngineEdit] = {}

    @property
    def names(self) -> list[str]:
        """Their names, in the order in which they came."""
        return list(self._edits)

    def __getitem__(self, name: str) -> EngineEdit:
        """Return an edit.

        Raises:
            ValueError: There is none of that name.
        """
        edit = self._edits.get(name)
        if edit is None:
            known = ", ".join(map(repr, self._edits)) or "no edits"
            raise ValueError(
                f"there is no edit {name!r}; the engine keeps {known}. Define it: "
                f"`with model.edit(name={name!r}):`"
            )
        return edit

    def add(self, model: VLLM, edit: EngineEdit) -> None:
        """Have the engine keep an edit; nothing happens if it keeps the very same.

        Raises:
            ValueError: It keeps another of that name.
        """
        known = self._edits.get(edit.name)
        if known is not None and known.digest == edit.digest:
            return
        if known is not None:
            raise ValueError(
                f"the engine keeps another edit {edit.name!r}, which requests may be waiting for: remove it "
                f"first, model.remove_edit({edit.name!r}), or choose another name"
            )
        self._edits[edit.name] = edit
        if not model.dispatched:  # it is sent along, or installed when an engine starts
            return
        try:
            model.ask_workers("keep_edit", edit.name, edit.data)
        except BaseException:
            del self._edits[edit.name]
            model.ask_workers("remove_edit", edit.name)
            raise

    def remove(self, model: VLLM, name: str) -> None:
        """Take an edit out of the engine; raises ValueError if there is none of that name."""
        _ = self[name]
        del self._edits[name]
        if model.dispatched:
            model.ask_workers("remove_edit", name)

    def install(self, model: VLLM) -> None:
        """Have an engine that has just started keep all of them."""
        for name, edit in self._edits.items():
            model.ask_workers("keep_edit", name, edit.data)


class Edits:
    """The edits of one model object.

    Attributes:
        always: Those that take part in all of its traces, in the order in which they have each value.
        book: Those that the engine keeps, which all copies of the model may choose.
    """

    def __init__(self, book: EditBook | None = None, always: Sequence[EngineEdit] = ()) -> None:
        """Start with these."""
        self.book = book if book is not None else EditBook()
        self.always = list(always)

    def copied(self) -> Edits:
        """Return those of a copy of the model."""
        return Edits(self.book, self.always)

    def chosen(self, names: Any) -> list[EngineEdit]:
        """Return the edits of a request, those of all traces first; each once.

        Raises:
            ValueError: There is none of one of the names.
            TypeError: The names are none.
        """
        given = [names] if isinstance(names, str) else list(names or ())
        if not all(isinstance(name, str) for name in given):
            raise TypeError(f"edits are chosen by name, edits=['calm'], got {names!r}")
        for edit in self.always:
            if edit.is_resident and self.book[edit.name].digest != edit.digest:
                raise ValueError(
                    f"another edit took the name {edit.name!r} of one that takes part in all traces of this "
                    "model; clear_edits() forgets the one that is gone"
                )
        edits = [*self.always, *(self.book[name] for name in given)]
        return list({edit.digest: edit for edit in edits}.values())

    def remove(self, model: VLLM, name: str) -> None:
        """Take an edit out of the engine, and out of the model's traces."""
        self.book.remove(model, name)
        self.always = [edit for edit in self.always if not (edit.is_resident and edit.name == name)]


class EngineEditingTracer(EditingTracer):
    """``with model.edit(name="calm") as edited:`` on ``VLLM``."""

    model: VLLM

    def __init__(
        self, model: VLLM, *, name: str | None = None, inplace: bool = False, backend: Backend | None = None
    ) -> None:
        """Edit a copy, or the model itself.

        Raises:
            ValueError: The name cannot be one.
        """
        if name is not None and not 0 < len(name) <= _MAX_NAME:
            raise ValueError(f"an edit's name is text of 1 to {_MAX_NAME} characters, got {name!r}")
        super().__init__(model, inplace=inplace, backend=backend)
        self._name = name

    def execute(self, function: Callable[[], Any]) -> None:  # noqa: ARG002 - it runs in the engine
        """Keep the block.

        Raises:
            EncodeError: It uses something that cannot travel.
        """
        data = encode_trace([SentBlock(self.info, self.info.variables)], reference=place_of)
        edits = self.model.own_edits
        name = self._name if self._name is not None else f"edit {uuid.uuid4().hex[:8]}"
        edit = EngineEdit(name, data, digest_of(data), is_resident=self._name is not None)
        if edit.is_resident:
            edits.book.add(self.model, edit)
        edits.always.append(edit)
