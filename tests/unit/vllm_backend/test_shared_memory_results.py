"""Large results as files in memory, from a worker to the server."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from nnsight_engine.vllm_backend.rpc_results import LARGE_BYTES, SharedMemoryResults, write_shared

KEY = "trace-7f"
PIECES: list[bytes | memoryview] = [b"head", memoryview(b"\x01\x02" * LARGE_BYTES), b"", b"tail"]


def test_what_was_left_is_taken_once_and_is_the_readers_own_to_write(tmp_path: Path) -> None:
    handover = SharedMemoryResults(tmp_path)
    assert write_shared(PIECES, handover.path(KEY))
    os.link(handover.path(KEY), tmp_path / "other")
    assert not write_shared([b"x" * LARGE_BYTES], handover.path(KEY)), (
        "a file that is there already is left alone"
    )
    taken = handover.take_file(KEY)
    assert bytes(taken) == b"".join(PIECES)
    taken[:4] = b"HEAD"
    assert (tmp_path / "other").read_bytes()[:4] == b"head"
    assert [one.name for one in tmp_path.iterdir()] == ["other"]
    with pytest.raises(FileNotFoundError):
        handover.take_file(KEY)


def test_small_results_and_those_for_another_machine_leave_nothing(tmp_path: Path) -> None:
    assert not write_shared([b"small"], SharedMemoryResults(tmp_path).path(KEY))
    assert not write_shared(PIECES, SharedMemoryResults(tmp_path / "elsewhere").path(KEY))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "code", [errno.EEXIST, errno.EACCES, errno.ENOSPC, errno.EMFILE], ids=errno.errorcode.get
)
@pytest.mark.parametrize("where", ["open", "posix_fallocate", "unlink"])
def test_whatever_fails_the_bytes_go_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int, where: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, where, fail)
    if where == "unlink":
        monkeypatch.setattr(os, "posix_fallocate", fail)
    assert not write_shared(PIECES, SharedMemoryResults(tmp_path).path(KEY))
    assert os.strerror(code) in caplog.text


def test_a_full_file_system_leaves_nothing(tmp_path: Path) -> None:
    limit = os.pathconf(tmp_path, "PC_FILESIZEBITS")

    class Huge(bytes):
        def __len__(self) -> int:
            return int(2 ** (limit - 1) - 1)

    assert not write_shared([Huge()], SharedMemoryResults(tmp_path).path(KEY))
    assert not list(tmp_path.iterdir())


def test_uncollected_results_are_removed(tmp_path: Path) -> None:
    handover = SharedMemoryResults(tmp_path)
    write_shared(PIECES, handover.path(KEY))
    handover.forget(KEY)
    handover.forget(KEY)
    assert not list(tmp_path.iterdir())


def test_a_trace_of_any_name_stays_in_the_folder(tmp_path: Path) -> None:
    assert Path(SharedMemoryResults(tmp_path).path("../../etc/passwd")).parent == tmp_path
