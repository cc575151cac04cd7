"""Edits on the client, encoded once, with the values that their variables have when they are defined.

The client keeps named edits too, to install them again when the engine is restarted.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from nnsight_engine.envoys.tracers.interleaving import EditingTracer
from nnsight_engine.serialization import SentBlock, encode_trace
from nnsight_engine.tracing.tracer import Backend
from nnsight_engine.vllm_backend.traces.context import EditEntry
from nnsight_engine.vllm_backend.traces.edit_store import digest_of
from nnsight_engine.vllm_backend.traces.points import place_of

if TYPE_CHECKING:
    from nnsight_engine.vllm_backend.vllm import VLLM

_MAX_NAME: Final = 200


@dataclasses.dataclass(frozen=True, slots=True)
class EngineEdit:
    """A stored block; ``is_resident`` if the engine keeps it under its name."""

    name: str
    data: bytes
    digest: str
    is_resident: bool

    @property
    def entry(self) -> EditEntry:
        return EditEntry(self.name, self.digest, None if self.is_resident else self.data)


class EditBook:
    """The named edits that the engine keeps, shared by a model and its copies."""

    def __init__(self) -> None:
        self._edits: dict[str, EngineEdit] = {}

    @property
    def names(self) -> list[str]:
        return list(self._edits)

    def __getitem__(self, name: str) -> EngineEdit:
        edit = self._edits.get(name)
        if edit is None:
            known = ", ".join(map(repr, self._edits)) or "no edits"
            raise ValueError(
                f"there is no edit {name!r}; the engine keeps {known}. Define it: "
                f"`with model.edit(name={name!r}):`"
            )
        return edit

    def add(self, model: VLLM, edit: EngineEdit) -> None:
        """Make the engine keep an edit, once; raise ValueError if the name has another one."""
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
        """Remove an edit, in the engine too; raise ValueError if there is none of this name."""
        _ = self[name]
        del self._edits[name]
        if model.dispatched:
            model.call_workers("remove_edit", name)

    def install(self, model: VLLM) -> None:
        for name, edit in self._edits.items():
            model.call_workers("keep_edit", name, edit.data)


class Edits:
    """The edits of one model object; ``always`` are those of all its traces, copies share ``book``."""

    def __init__(self, book: EditBook | None = None, always: Sequence[EngineEdit] = ()) -> None:
        self.book = book if book is not None else EditBook()
        self.always = list(always)

    def copied(self) -> Edits:
        return Edits(self.book, self.always)

    def chosen(self, names: Any) -> list[EngineEdit]:
        """Return the edits of a request without duplicates; first those of all traces, then the named ones.

        Raises:
            ValueError: One of the names is unknown, or now belongs to a different edit.
            TypeError: The names are not strings.
        """
        names_given = [names] if isinstance(names, str) else list(names or ())
        if not all(isinstance(name, str) for name in names_given):
            raise TypeError(f"edits are chosen by name, edits=['calm'], got {names!r}")
        for edit in self.always:
            if edit.is_resident and self.book[edit.name].digest != edit.digest:
                raise ValueError(
                    f"the edit {edit.name!r}, which takes part in all traces of this model, was replaced by "
                    "another one of that name; call clear_edits() to drop it"
                )
        edits = [*self.always, *(self.book[name] for name in names_given)]
        return list({edit.digest: edit for edit in edits}.values())

    def remove(self, model: VLLM, name: str) -> None:
        self.book.remove(model, name)
        self.always = [edit for edit in self.always if not (edit.is_resident and edit.name == name)]


class EngineEditingTracer(EditingTracer):
    """``with model.edit(name="calm") as edited:`` on ``VLLM``."""

    model: VLLM

    def __init__(
        self, model: VLLM, *, name: str | None = None, inplace: bool = False, backend: Backend | None = None
    ) -> None:
        if name is not None and not 0 < len(name) <= _MAX_NAME:
            raise ValueError(f"an edit's name is text of 1 to {_MAX_NAME} characters, got {name!r}")
        super().__init__(model, inplace=inplace, backend=backend)
        self._name = name

    def execute(self, function: Callable[[], Any]) -> None:  # noqa: ARG002 - the block runs in the engine
        """Encode and store the block instead of running it; raise EncodeError."""
        data = encode_trace([SentBlock(self.info, self.info.variables)], reference=place_of)
        edits = self.model.own_edits
        name = self._name if self._name is not None else f"edit {uuid.uuid4().hex[:8]}"
        edit = EngineEdit(name, data, digest_of(data), is_resident=self._name is not None)
        if edit.is_resident:
            edits.book.add(self.model, edit)
        edits.always.append(edit)
