"""Copies of vLLM's sources in which something is changed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tests.unit.vllm_backend.vllm_sources import VLLMSources


def installed_folder() -> Path:
    """Return the folder that contains the installed package."""
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parents[1]


def changed_copy(folder: Path, *changes: tuple[str, str, str]) -> VLLMSources:
    """Return the installed sources with changes; files without any are links.

    Args:
        folder: An empty folder.
        changes: For each change the file's path, a text that occurs in it once, and its replacement.
    """
    for path, old, new in changes:
        place = folder / path
        for above in [*reversed(place.relative_to(folder).parents)][1:]:
            _make_real(folder / above, installed_folder() / above)
        text = place.read_text(encoding="utf-8")
        assert text.count(old) == 1, (path, old)
        place.unlink()
        place.write_text(text.replace(old, new), encoding="utf-8")
    return VLLMSources(folder)


def _make_real(folder: Path, original: Path) -> None:
    """Turn a link to a folder into a folder of links."""
    if folder.is_dir() and not folder.is_symlink():
        return
    folder.unlink(missing_ok=True)
    folder.mkdir()
    for entry in original.iterdir():
        (folder / entry.name).symlink_to(entry)
