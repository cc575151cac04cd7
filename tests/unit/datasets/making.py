"""Datasets of made-up values, each a function of its prompt and position."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nnsight_engine.datasets.manifest import (
    EngineIdentity,
    Manifest,
    ModelIdentity,
    PlanSettings,
    Point,
    RowSettings,
    SourceIdentity,
)
from nnsight_engine.datasets.plan import Planner, RowSelection, Tokens, remaining_shards
from nnsight_engine.datasets.prompts import Prompt
from nnsight_engine.datasets.shards import PromptRows
from nnsight_engine.datasets.writer import DatasetWriter, Progress

POINTS = [Point("layers.0.output", 8), Point("layers.1.mlp.act", 3)]
PLAN = PlanSettings(pack_tokens=40, pack_prompts=4, shard_tokens=100)


def manifest(plan: PlanSettings = PLAN, **rows: Any) -> Manifest:
    return Manifest(
        model=ModelIdentity("tiny", "0123"),
        engine=EngineIdentity("made-up"),
        tokenizer="none",
        source=SourceIdentity("iterable"),
        rows=RowSettings(**{"points": POINTS, **rows}),
        plan=plan,
    )


def prompts(number: int, *, seed: int = 0, longest: int = 30) -> list[Prompt]:
    random = np.random.default_rng(seed)
    return [
        Prompt(token_ids=random.integers(0, 50, random.integers(1, longest)).tolist()) for _ in range(number)
    ]


def encode(prompt: Prompt) -> Tokens:
    return np.asarray(prompt.token_ids, np.int32)


def value(prompt: int, positions: Tokens, width: int) -> torch.Tensor:
    columns = np.arange(width, dtype=np.float32)
    rows = (1000.0 * prompt + positions.astype(np.float32))[:, None] + columns / 8
    return torch.from_numpy(rows.astype(np.float32))


def rows_of(number: int, tokens: Tokens, settings: RowSettings) -> PromptRows:
    selection = RowSelection(settings)
    positions = selection.positions(number, tokens)
    values = {point.name: value(number, positions, point.width) for point in settings.points}
    if selection.is_mean and len(positions):
        values = {name: rows.mean(0, keepdim=True) for name, rows in values.items()}
    scores = {name: positions.astype(np.float32) for name in settings.scores}
    return PromptRows(number, *selection.index(positions, tokens), values, scores)


def write(
    to: Path | str,
    given: Sequence[Prompt],
    made: Manifest,
    *,
    order: Callable[[list[PromptRows]], Sequence[PromptRows]] = list,
    pause_s: float = 0.0,
    **options: Any,
) -> Progress:
    """Write a dataset, or the rest of it, as a driver does."""
    with DatasetWriter(to, made, **options) as writer:
        if not writer.is_complete:
            planner = Planner(made.plan, made.rows)
            for shard in remaining_shards(given, planner, completed=writer.completed, encode=encode):
                writer.begin(shard)
                tokens = [one for pack in shard.packs for one in pack]
                rows = [rows_of(shard.first_prompt + one, own, made.rows) for one, own in enumerate(tokens)]
                for one in order(rows):
                    if writer.policy == "slow":
                        writer.wait_for_room()
                    writer.put(one)
                    time.sleep(pause_s)
    return writer.progress()


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def forked(run: Callable[[], object]) -> int:
    """Run in a child process and return its id; a new interpreter would take seconds to import torch."""
    child = os.fork()
    if child:
        return child
    try:
        run()
    except BaseException:  # noqa: BLE001 - whatever it is, the child must end here
        traceback.print_exc(file=sys.__stderr__)
        os._exit(1)
    os._exit(0)


def exit_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_after(seconds: float, run: Callable[[], object]) -> bool:
    """Run in a child process that is killed after some time; return whether it was still running."""
    child = forked(run)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return exit_of(child) == -signal.SIGKILL


def each_position(given: Sequence[Prompt]) -> Iterator[tuple[int, int, int]]:
    for number, prompt in enumerate(given):
        for position, token in enumerate(prompt.token_ids or ()):
            yield number, position, token
