"""A task on all sides by turns, and the rows that come of it.

A ratio is made within a repetition, time by time: all sides have the same torch. What a side adds to the
reference in its own process is told beside it and no part of the ratio, since a library may slow down others'
code in its process too: nnsight's import makes each ``backward`` some microseconds longer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.peers.parent import SideError, SideProcess
from benchmarks.peers.tasks import Task, difference

OURS: Final = "ours"
Times = dict[str, list[float]]
"""Seconds of ``library`` and ``reference``, one for each repetition."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One task, ours beside a peer.

    Attributes:
        task: What is done.
        peer: Who else does it.
        ours: Our times.
        theirs: The peer's; None where there are none.
        agreement: How far what they read lies apart, or why there is nothing to compare.
    """

    task: Task
    peer: str
    ours: Times | None
    theirs: Times | None
    agreement: str

    @property
    def ratios(self) -> list[float] | None:
        """Our time by theirs in each repetition; None where nothing is compared."""
        if self.ours is None or self.theirs is None:
            return None
        ratios: list[float] = np.divide(self.ours["library"], self.theirs["library"]).tolist()
        return ratios


def compare(
    number: int, task: Task, sides: Sequence[SideProcess], folder: Path, *, reference: str, repeats: int
) -> list[Row]:
    """Run a task and return a row for the reference and one for each peer.

    Args:
        number: Which of the sides' tasks it is.
        task: The same.
        sides: Ours first.
        folder: Where sides leave what they read.
        reference: What each side measures beside its library, or the side that is everybody's.
        repeats: Repetitions.
    """
    faults: dict[str, str] = {}
    ready = []
    for side in sides:
        try:
            side.ask({"prepare": number, "file": side.name})
            ready.append(side)
        except SideError as error:
            faults[side.name] = str(error)
    times = _timed(ready, faults, repeats)
    _share_reference(times, faults, reference)
    ours = times.get(OURS)
    agreement = "nothing is read" if any(side.name == reference for side in sides) else "yes"
    rows = [Row(task, reference, ours, ours and _reference_of(ours), faults.get(OURS, agreement))]
    for side in sides[1:]:
        if side.name == reference:
            continue
        fault = faults.get(side.name) or faults.get(OURS)
        if fault is not None:
            rows.append(Row(task, side.name, ours, None, fault))
        else:
            agreement, is_same = _agreement(task, folder / OURS, folder / side.name)
            rows.append(Row(task, side.name, ours, times[side.name] if is_same else None, agreement))
    return rows


def _timed(sides: list[SideProcess], faults: dict[str, str], repeats: int) -> dict[str, Times]:
    """Return every side's times, of those that went through; the others' faults are noted."""
    times: dict[str, Times] = {side.name: {} for side in sides}
    order = list(sides)
    for _ in range(repeats):
        for side in order:
            if side.name in faults:
                continue
            try:
                sample: Mapping[str, float] = side.ask({"repeat": True})["seconds"]
            except SideError as error:
                faults[side.name] = str(error)
                continue
            for name, seconds in sample.items():
                times[side.name].setdefault(name, []).append(seconds)
        order.reverse()
    return {name: kept for name, kept in times.items() if name not in faults}


def _share_reference(times: dict[str, Times], faults: dict[str, str], reference: str) -> None:
    """Give every side the times of the side that is the reference, where one is."""
    if reference in faults:
        faults.update(dict.fromkeys(times, f"{reference}: {faults[reference]}"))
        times.clear()
    elif reference in times:
        shared = times.pop(reference)["library"]
        for kept in times.values():
            kept["reference"] = shared


def _agreement(task: Task, ours: Path, theirs: Path) -> tuple[str, bool]:
    values = _values(ours)
    if not values:
        return "nothing is read", True
    apart = difference(values, _values(theirs))
    if apart is None:
        return "differs in shape", False
    if apart > task.size.rounding:
        return f"differs, by {apart:.2g} of the largest value", False
    return ("bit for bit" if apart == 0 else f"within {apart:.1g} of the largest value"), True


def _values(file: Path) -> list[torch.Tensor]:
    named = load_file(file)
    return [named[str(index)] for index in range(len(named))]


def _reference_of(times: Times) -> Times:
    return {"library": times["reference"], "reference": times["reference"]}
