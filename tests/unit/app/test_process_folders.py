"""Folders of processes on the file system in memory."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest

from app.storage import process_folders
from app.storage.process_folders import claim_memory_folder, claim_socket_folder


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


def test_sockets_have_a_folder_where_their_paths_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "far" / "away"))
    assert claim_socket_folder() is None
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="n-") as near:
        monkeypatch.setattr("tempfile.tempdir", near)
        folder = claim_socket_folder()
        assert folder is not None
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder.path / ("0" * 36)))
        folder.release()
        assert not folder.path.exists()
