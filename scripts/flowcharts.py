"""Flowcharts in Mermaid's text as SVG, from top to bottom, in the colours of the site's theme.

The theme would fetch Mermaid from another host. Only what our pages use is understood: boxes, ``-->``,
``<-->`` and ``&``. The layout is that of layered graphs (Sugiyama et al., 1981): a row for each box by its
longest path, places for arrows in the rows that they cross, then rows sorted and moved by their neighbours.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

_ARROW: Final = re.compile(r"\s*(<?-->)\s*")
_BOX: Final = re.compile(r"(?P<id>\w+)(?:\[(?P<round>\()?(?P<label>.+?)\)?\])?$")
_LETTER: Final = 7.0
_LINE: Final = 18
_GAP: Final = 28
_ROW_GAP: Final = 38
_SWEEPS: Final = 24
_INK: Final = "var(--md-default-fg-color--light)"


@dataclasses.dataclass(eq=False)
class Box:
    """A box, or without lines the place of an arrow that crosses a row."""

    lines: Sequence[str] = ()
    is_round: bool = False
    row: int = 0
    x: float = 0.0
    y: float = 0.0

    @property
    def width(self) -> float:
        """In pixels."""
        return max(map(len, self.lines), default=0) * _LETTER + 24 if self.lines else 8

    @property
    def height(self) -> float:
        """In pixels."""
        return len(self.lines) * _LINE + 14


@dataclasses.dataclass(eq=False)
class Arrow:
    """An arrow, whose first box is above its last one."""

    path: list[Box]
    is_down: bool = True
    is_up: bool = False


def svg(text: str) -> str:
    """Return a drawing of a flowchart.

    Raises:
        ValueError: A line is not understood.
    """
    boxes, arrows = parsed(text)
    rows = _sorted(_rows(boxes, arrows), arrows)
    _place(rows, arrows)
    return _drawn([box for row in rows for box in row], arrows)


def parsed(text: str) -> tuple[list[Box], list[Arrow]]:
    """Return the boxes and arrows of a flowchart, those that would close a circle upside down."""
    boxes: dict[str, Box] = {}
    pairs: dict[tuple[str, str], Arrow] = {}
    first, *lines = text.strip().splitlines()
    if first.strip() != "flowchart TD":
        raise ValueError(f"a flowchart must begin with `flowchart TD`, got {first!r}")
    below: dict[str, set[str]] = {}
    for line in lines:
        groups, signs = _ARROW.split(line.strip())[::2], _ARROW.split(line.strip())[1::2]
        ids = [[_box(one.strip(), boxes) for one in group.split("&")] for group in groups]
        for sign, (sources, targets) in zip(signs, itertools.pairwise(ids), strict=True):
            for source, target in itertools.product(sources, targets):
                is_circle = source in _reached(target, below)
                pair = (target, source) if is_circle else (source, target)
                arrow = pairs.setdefault(pair, Arrow([boxes[one] for one in pair], is_down=not is_circle))
                arrow.is_down |= not is_circle or sign == "<-->"
                arrow.is_up |= is_circle or sign == "<-->"
                below.setdefault(pair[0], set()).add(pair[1])
    return list(boxes.values()), list(pairs.values())


def _box(text: str, boxes: dict[str, Box]) -> str:
    found = _BOX.match(text)
    if found is None:
        raise ValueError(f"a box must be `id` or `id[label]`, got {text!r}")
    box = boxes.setdefault(found["id"], Box([found["id"].replace("_", " ")]))
    if found["label"]:
        box.lines, box.is_round = (
            textwrap.wrap(found["label"], 20, break_long_words=False),
            found["round"] is not None,
        )
    return found["id"]


def _reached(source: str, below: dict[str, set[str]]) -> set[str]:
    found, waiting = {source}, [source]
    while waiting:
        new = below.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def _rows(boxes: Sequence[Box], arrows: Sequence[Arrow]) -> list[list[Box]]:
    """Give each box its row, and each arrow a place in every row that it crosses."""
    for _ in boxes:
        for arrow in arrows:
            above, below = arrow.path
            below.row = max(below.row, above.row + 1)
    for box in boxes:  # what nothing leads to stands right above what it leads to
        if all(arrow.path[1] is not box for arrow in arrows):
            box.row = min(arrow.path[1].row for arrow in arrows if arrow.path[0] is box) - 1
    rows: list[list[Box]] = [[] for _ in range(max(box.row for box in boxes) + 1)]
    for box in boxes:
        rows[box.row].append(box)
    for arrow in arrows:
        above, below = arrow.path
        crossed = [Box(row=row) for row in range(above.row + 1, below.row)]
        for place in crossed:
            rows[place.row].append(place)
        arrow.path = [above, *crossed, below]
    return rows


def _sorted(rows: list[list[Box]], arrows: Sequence[Arrow]) -> list[list[Box]]:
    """Return the rows in the order with the fewest crossings that was met while sorting by neighbours."""
    best, fewest = [list(row) for row in rows], _crossings(rows, arrows)
    for sweep in range(_SWEEPS):
        for row in rows if sweep % 2 else rows[::-1]:
            places = {box: index for other in rows for index, box in enumerate(other)}
            keys = {
                box: [places[one] for one in _neighbours(box, arrows, below=not sweep % 2)] or [places[box]]
                for box in row
            }
            row.sort(key=lambda box: sum(keys[box]) / len(keys[box]))
        if (crossings := _crossings(rows, arrows)) < fewest:
            best, fewest = [list(row) for row in rows], crossings
    return best


def _neighbours(box: Box, arrows: Sequence[Arrow], *, below: bool) -> list[Box]:
    pairs = _pairs(arrows)
    return [after for before, after in pairs if before is box] if below else [
        before for before, after in pairs if after is box
    ]  # fmt: skip


def _pairs(arrows: Sequence[Arrow]) -> Iterator[tuple[Box, Box]]:
    return itertools.chain.from_iterable(itertools.pairwise(arrow.path) for arrow in arrows)


def _crossings(rows: Sequence[Sequence[Box]], arrows: Sequence[Arrow]) -> int:
    places = {box: index for row in rows for index, box in enumerate(row)}
    return sum(
        (places[one[0]] - places[other[0]]) * (places[one[1]] - places[other[1]]) < 0
        for one, other in itertools.combinations(_pairs(arrows), 2)
        if one[0].row == other[0].row
    )


def _place(rows: Sequence[Sequence[Box]], arrows: Sequence[Arrow]) -> None:
    """Set the centre of each box."""
    y = 0.0
    for row in rows:
        height = max(box.height for box in row)
        for index, box in enumerate(row):
            box.x, box.y = index * 100.0, y + height / 2
        y += height + _ROW_GAP
    for sweep in range(_SWEEPS):
        for row in rows if sweep % 2 else rows[::-1]:
            wanted = []
            for box in row:
                near = [one.x for below in (True, False) for one in _neighbours(box, arrows, below=below)]
                wanted.append(sum(near) / len(near))
            # Both keep the distances, and so does their mean.
            from_left, from_right = (
                _apart(row, wanted),
                [-x for x in _apart(row[::-1], [-x for x in wanted[::-1]])],
            )
            for box, left, right in zip(row, from_left, from_right[::-1], strict=True):
                box.x = (left + right) / 2


def _apart(row: Sequence[Box], wanted: Sequence[float]) -> list[float]:
    """Return places from the left on, each at least a gap behind the one before."""
    found: list[float] = []
    for box, before, x in zip(row, [None, *row], wanted, strict=False):
        least = found[-1] + (before.width + box.width) / 2 + _GAP if before is not None else x
        found.append(max(x, least))
    return found


def _drawn(boxes: Sequence[Box], arrows: Sequence[Arrow]) -> str:
    left = min(box.x - box.width / 2 for box in boxes) - 2
    width = max(box.x + box.width / 2 for box in boxes) + 2 - left
    height = max(box.y + box.height / 2 for box in boxes) + 2
    style = f"width:{width:.0f}px;max-width:100%;height:auto;display:block;margin:1em auto"
    parts = [
        f'<svg class="flowchart" role="img" viewBox="{left:.0f} -2 {width:.0f} {height + 2:.0f}" ',
        f'style="{style}" font-size="13" text-anchor="middle">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" ',
        f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" style="fill:{_INK}"/></marker></defs>',
    ]
    for arrow in arrows:
        ends = ' marker-end="url(#tip)"' * arrow.is_down + ' marker-start="url(#tip)"' * arrow.is_up
        parts.append(
            f'<path d="{_curve(arrow.path)}" style="fill:none;stroke:{_INK};stroke-width:1.3"{ends}/>'
        )
    for box in boxes:
        if box.lines:
            parts += _box_parts(box)
    return "".join([*parts, "</svg>"])


def _curve(path: Sequence[Box]) -> str:
    x, y = path[0].x, path[0].y + path[0].height / 2
    parts = [f"M{x:.0f} {y:.0f}"]
    for box in path[1:]:
        top = box.y - box.height / 2
        middle = (y + top) / 2
        parts.append(f"C{x:.0f} {middle:.0f} {box.x:.0f} {middle:.0f} {box.x:.0f} {top:.0f}")
        x, y = box.x, box.y + box.height / 2
        if not box.lines:
            parts.append(f"V{y:.0f}")
    return "".join(parts)


def _box_parts(box: Box) -> Iterator[str]:
    left, top = box.x - box.width / 2, box.y - box.height / 2
    yield (
        f'<rect x="{left:.0f}" y="{top:.0f}" width="{box.width:.0f}" height="{box.height:.0f}" '
        f'rx="{14 if box.is_round else 3}" style="fill:var(--md-code-bg-color);stroke:{_INK}"/>'
    )
    for index, line in enumerate(box.lines):
        y = top + 7 + _LINE * (index + 0.72)
        ink = "fill:var(--md-default-fg-color)"
        yield f'<text x="{box.x:.0f}" y="{y:.0f}" style="{ink}">{html.escape(line)}</text>'
