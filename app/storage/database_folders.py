"""Each database has folders of its own: files of another would look like orphans, and be removed."""

from __future__ import annotations

import hashlib
from pathlib import Path

from app.settings import Settings
from app.storage.engines import location_of


def job_folder(settings: Settings) -> Path:
    if not settings.database_url:
        return settings.data_dir
    return settings.data_dir / _name_of(location_of(settings.database_url))


def dictionary_folder(settings: Settings) -> Path:
    if settings.dictionary_dir is None:
        return job_folder(settings) / "dictionaries"
    url = settings.database_url
    return settings.dictionary_dir / _name_of(location_of(url) if url else str(settings.data_dir.absolute()))


def _name_of(database: str) -> str:
    return f"database-{hashlib.sha256(database.encode()).hexdigest()[:16]}"


__all__ = ["dictionary_folder", "job_folder"]
