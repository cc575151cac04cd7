"""Edits on the client: stored blocks in encoded form, and the selection of edits for a request.

An edit is encoded once, when its block is defined, with the values that its variables have then. Named edits
are kept by the engine's workers and on the client too, so that they can be installed again when the engine is
restarted. A request refers to a named edit by name and digest. Copies of a model share the named edits.
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
    """A stored block.

    Attributes:
        name: The edit's name.
        data: The encoded block.
        digest: Digest of ``data``.
        is_resident: Whether the engine keeps it, under its name.
    """

    name: str
    data: bytes
    digest: str
    is_resident: bool

    @property
    def entry(self) -> EditEntry:
        """The entry of the edit in a request."""
        return EditEntry(self.name, self.digest, None if self.is_resident else self.data)


class EditBook:
    """The edits that an engine keeps, by name."""

    def __init__(self) -> None:
        self._edits: dict[str, EngineEdit] = {}

    @property
    def names(self) -> list[str]:
        """The names, in the order in which the edits were added."""
        return list(self._edits)

    def __getitem__(self, name: str) -> EngineEdit:
        """Return an edit.

        Raises:
            ValueError: There is no edit of that name.
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
        """Make the engine keep an edit; does nothing if it already keeps an edit of the same name and digest.

        Raises:
            ValueError: The engine keeps a different edit of that name.
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
        if not model.dispatched:  # sent with each remote request, or installed on engine start
            return
        try:
            model.call_workers("keep_edit", edit.name, edit.data)
        except BaseException:
            del self._edits[edit.name]
            model.call_workers("remove_edit", edit.name)
            raise

    def remove(self, model: VLLM, name: str) -> None:
        """Remove an edit from the engine; raises ValueError if there is none of that name."""
        _ = self[name]
        del self._edits[name]
        if model.dispatched:
            model.call_workers("remove_edit", name)

    def install(self, model: VLLM) -> None:
        """Send all edits to an engine that has just started."""
        for name, edit in self._edits.items():
            model.call_workers("keep_edit", name, edit.data)


class Edits:
    """The edits of one model object.

    Attributes:
        always: Edits that take part in all of the model's traces, in the order in which they receive each
            value.
        book: Edits that the engine keeps; all copies of the model may select them.
    """

    def __init__(self, book: EditBook | None = None, always: Sequence[EngineEdit] = ()) -> None:
        self.book = book if book is not None else EditBook()
        self.always = list(always)

    def copied(self) -> Edits:
        """Return the edits for a copy of the model."""
        return Edits(self.book, self.always)

    def chosen(self, names: Any) -> list[EngineEdit]:
        """Return the edits of a request without duplicates; first those of all traces, then the named ones.

        Raises:
            ValueError: One of the names is unknown, or now belongs to a different edit.
            TypeError: The names are not strings.
        """
        given = [names] if isinstance(names, str) else list(names or ())
        if not all(isinstance(name, str) for name in given):
            raise TypeError(f"edits are chosen by name, edits=['calm'], got {names!r}")
        for edit in self.always:
            if edit.is_resident and self.book[edit.name].digest != edit.digest:
                raise ValueError(
                    f"the edit {edit.name!r}, which takes part in all traces of this model, was replaced by "
                    "another one of that name; call clear_edits() to drop it"
                )
        edits = [*self.always, *(self.book[name] for name in given)]
        return list({edit.digest: edit for edit in edits}.values())

    def remove(self, model: VLLM, name: str) -> None:
        """Remove an edit from the engine, and from the model's traces."""
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
            ValueError: The name is empty or too long.
        """
        if name is not None and not 0 < len(name) <= _MAX_NAME:
            raise ValueError(f"an edit's name is text of 1 to {_MAX_NAME} characters, got {name!r}")
        super().__init__(model, inplace=inplace, backend=backend)
        self._name = name

    def execute(self, function: Callable[[], Any]) -> None:  # noqa: ARG002 - the block runs in the engine
        """Encode and store the block instead of running it.

        Raises:
            EncodeError: It uses a value that cannot be encoded.
        """
        data = encode_trace([SentBlock(self.info, self.info.variables)], reference=place_of)
        edits = self.model.own_edits
        name = self._name if self._name is not None else f"edit {uuid.uuid4().hex[:8]}"
        edit = EngineEdit(name, data, digest_of(data), is_resident=self._name is not None)
        if edit.is_resident:
            edits.book.add(self.model, edit)
        edits.always.append(edit)
