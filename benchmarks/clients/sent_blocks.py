"""Blocks that are sent, as people write them, from one line to a closure of functions."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from nnsight_engine.serialization import SentBlock
from nnsight_engine.tracing.tracer import Info, Tracer

_WIDTH: Final = 576
SCALE: Final = 1.5


class _BlockRecorder(Tracer):
    """Keeps its block and does not run it."""

    kept: SentBlock

    def execute(self, function: Callable[[], Any]) -> None:
        del function
        own = dict(self.info.variables)
        self.kept = SentBlock(Info(self.info.block, own, None, self.info.globals_), own)


class _Module:
    """Replaces a module of the model: is sent as a reference, and accepts any access."""

    def __getattr__(self, _name: str) -> Any:
        return self

    def __getitem__(self, _key: Any) -> Any:
        return self

    def __setitem__(self, _key: Any, _value: Any) -> None:
        """Accept it."""


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedBlock:
    """One block: as it is sent, and compiled, as the function that a pickle would send."""

    name: str
    block: SentBlock
    function: Callable[[], Any]


def sent_blocks() -> Iterator[EncodedBlock]:
    """Yield the blocks that are measured."""
    for name, make in (("one line", _one_line), ("20 lines", _twenty_lines), ("closure", _closure)):
        sender = make()
        yield EncodedBlock(name, sender.kept, Tracer().compile_on(sender.kept.info))


def reference(value: Any) -> tuple[str, ...] | None:
    """Name the model and the tracer, which are sent as references."""
    return ("known", "1") if isinstance(value, _Module | Tracer) else None


def _one_line() -> _BlockRecorder:
    model = _Module()
    sender = _BlockRecorder()
    with sender:
        hidden = model.layers[5].output.save()  # noqa: F841 - it is the block that counts
    return sender


def _scaled(value: torch.Tensor, *, by: float = SCALE) -> torch.Tensor:
    """Return the value scaled to a length."""
    length = value.norm(dim=-1, keepdim=True)
    scaled: torch.Tensor = value * by / length
    return scaled


def _twenty_lines() -> _BlockRecorder:
    model, strength, tokens = _Module(), 4.0, [1, 2, 3]
    direction = torch.randn(_WIDTH)
    sender = _BlockRecorder()
    with sender as tracer:
        kept: list[Any] = []
        norms: list[float] = []
        for step in tracer.iter[:]:
            hidden = model.layers[10].output
            before = hidden.norm(dim=-1)
            hidden[:] = hidden + _scaled(direction, by=strength)
            after = model.layers[10].output.norm(dim=-1)
            if step in tokens:
                kept.append((step, before, after))
            top = model.logits.output.topk(5)
            for rank, token in enumerate(top.indices[0].tolist()):
                if token in tokens:
                    kept.append((step, rank, token))
            with contextlib.suppress(IndexError):
                norms.append(float(after[-1]))
            ratios = [second / first for first, second in itertools.pairwise(norms)]
            if ratios and max(ratios) > SCALE:
                tracer.stop()
        answer = tracer.result.save()  # noqa: F841 - as above
    return sender


def _closure() -> _BlockRecorder:
    model = _Module()
    centre = torch.zeros(_WIDTH)
    count = 0

    def centred(value: torch.Tensor) -> torch.Tensor:
        return value - centre

    def measured(value: torch.Tensor) -> float:
        nonlocal count
        count += 1
        return float(centred(value).norm())

    def among(values: list[torch.Tensor]) -> float:
        return max(measured(value) for value in values)

    sender = _BlockRecorder()
    with sender:
        largest = among([model.layers[layer].output for layer in range(3)])  # noqa: F841 - as above
        seen = count  # noqa: F841 - as above
    return sender
