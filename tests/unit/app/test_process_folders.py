"""Folders of processes on the file system in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.storage import process_folders
from app.storage.process_folders import claim_memory_folder


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(process_folders, "_MEMORY", tmp_path)
    return tmp_path


def test_a_folder_is_this_users_alone_and_goes_in_the_end(memory: Path) -> None:
    folder = claim_memory_folder()
    assert folder is not None
    assert folder.path.is_relative_to(memory)
    assert folder.path.parent.stat().st_mode & 0o777 == folder.path.stat().st_mode & 0o777 == 0o700
    folder.release()
    assert not folder.path.exists()


def test_a_directory_that_others_may_enter_is_not_used(memory: Path) -> None:
    folder = claim_memory_folder()
    assert folder is not None
    folder.release()
    folder.path.parent.chmod(0o755)
    assert claim_memory_folder() is None


def test_a_link_in_its_place_is_not_followed(memory: Path) -> None:
    folder = claim_memory_folder()
    assert folder is not None
    folder.release()
    ours = folder.path.parent
    ours.rename(memory / "moved")
    ours.symlink_to(memory / "moved")
    assert claim_memory_folder() is None


def test_no_such_file_system_is_no_error(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_folders, "_MEMORY", memory / "none")
    assert claim_memory_folder() is None
