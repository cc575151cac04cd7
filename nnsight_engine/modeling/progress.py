from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from nnsight_engine.modeling.cached_folder import ProgressCallback


@contextlib.contextmanager
def console_progress(title: str) -> Iterator[ProgressCallback]:
    """Draw one bar on standard error for each stage reported to the yielded callback.

    Nothing is drawn before the first report, so a cached result leaves the terminal unchanged.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with contextlib.ExitStack() as stack:
        bars = Progress(*columns, console=Console(stderr=True))
        tasks: dict[str, TaskID] = {}

        def report(stage: str, fraction: float) -> None:
            if not tasks:
                stack.enter_context(bars)
            if stage not in tasks:
                tasks[stage] = bars.add_task(f"{title}: {stage}", total=1.0)
            bars.update(tasks[stage], completed=fraction)

        yield report
