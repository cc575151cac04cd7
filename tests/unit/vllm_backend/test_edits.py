"""Kept edits without an engine: names on the client, and what a new engine is told."""

from __future__ import annotations

from typing import Any

import pytest

from nnsight_engine.vllm_backend.edits import EditBook, Edits, EngineEdit
from nnsight_engine.vllm_backend.traces.edits import digest_of
from nnsight_engine.vllm_backend.traces.errors import EditLimitError


class FakeWorkers:
    """Stands for the model's side that asks the workers."""

    dispatched = True

    def __init__(self, *, full: bool = False) -> None:
        """Take edits, or none."""
        self.full = full
        self.kept: dict[str, bytes] = {}

    def call_workers(self, method: str, name: str, *args: Any) -> None:
        """Do what workers do."""
        if method == "remove_edit":
            self.kept.pop(name, None)
        elif self.full:
            raise EditLimitError.over(name, 1, 0, 1, 0)
        else:
            (self.kept[name],) = args


def edit(name: str, data: bytes = b"block", *, is_resident: bool = True) -> EngineEdit:
    """Return an edit."""
    return EngineEdit(name, data, digest_of(data), is_resident=is_resident)


def test_what_the_workers_refuse_is_not_in_the_book() -> None:
    book, workers = EditBook(), FakeWorkers(full=True)
    with pytest.raises(EditLimitError):
        book.add(workers, edit("calm"))  # type: ignore[arg-type] # a fake
    assert book.names == []
    assert workers.kept == {}


def test_an_engine_that_is_started_anew_has_them_again() -> None:
    book, first, second = EditBook(), FakeWorkers(), FakeWorkers()
    book.add(first, edit("calm"))  # type: ignore[arg-type] # a fake
    book.add(first, edit("wild", b"other"))  # type: ignore[arg-type] # the same
    book.install(second)  # type: ignore[arg-type] # the same
    assert second.kept == first.kept == {"calm": b"block", "wild": b"other"}


def test_a_request_has_each_edit_once_and_brings_those_without_a_name() -> None:
    book, workers = EditBook(), FakeWorkers()
    book.add(workers, edit("calm"))  # type: ignore[arg-type] # a fake
    mine = Edits(book, [edit("edit 1", b"mine", is_resident=False), edit("calm")])
    found = [edit.entry for edit in mine.chosen("calm")]
    assert [(one.name, one.data) for one in found] == [("edit 1", b"mine"), ("calm", None)]
    with pytest.raises(ValueError, match="no edit 'wild'; the engine keeps 'calm'"):
        mine.chosen(["wild"])
    with pytest.raises(TypeError, match="by name"):
        mine.chosen([7])


def test_a_name_that_means_another_block_now_is_not_taken_for_the_first() -> None:
    book, workers = EditBook(), FakeWorkers()
    book.add(workers, edit("calm"))  # type: ignore[arg-type] # a fake
    mine, copied = Edits(book, [edit("calm")]), Edits(book, [edit("calm")])
    mine.remove(workers, "calm")  # type: ignore[arg-type] # the same
    assert mine.chosen(None) == []
    with pytest.raises(ValueError, match="no edits"):
        copied.chosen(None)
    book.add(workers, edit("calm", b"another"))  # type: ignore[arg-type] # the same
    with pytest.raises(ValueError, match="was replaced by another one of that name"):
        copied.chosen(None)
