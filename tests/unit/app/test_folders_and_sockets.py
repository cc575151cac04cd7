"""Folders of this process alone, the socket that the server listens on, and who its clients are."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from pathlib import Path

import pytest
import uvicorn

from app.server.sockets import as_x_forwarded, listening_socket
from app.storage import open_files
from app.storage.open_files import claim_memory_folder, claim_socket_folder


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(open_files, "_MEMORY", tmp_path)
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
    monkeypatch.setattr(open_files, "_MEMORY", memory / "none")
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


async def test_what_is_sent_leaves_at_once() -> None:
    """On asyncio's own loop too, which leaves sockets as they are that name no protocol."""
    sock = listening_socket(uvicorn.Config("none", port=0))
    accepted: asyncio.Queue[socket.socket] = asyncio.Queue()
    server = await asyncio.start_server(
        lambda _, writer: accepted.put_nowait(writer.get_extra_info("socket")), sock=sock
    )
    async with server:
        _, writer = await asyncio.open_connection(*sock.getsockname())
        connection = await accepted.get()
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("for=203.0.113.9", {"x-forwarded-for": "203.0.113.9"}),
        (
            "For=203.0.113.9;proto=https;by=10.0.0.1",
            {"x-forwarded-for": "203.0.113.9", "x-forwarded-proto": "https"},
        ),
        (
            'for="[2001:db8::1]:4711";proto=http, for="10.0.0.2:80";proto=HTTPS',
            {"x-forwarded-for": "2001:db8::1, 10.0.0.2", "x-forwarded-proto": "https"},
        ),
        ('for="a, b=\\"c\\";d", for=10.0.0.2', {"x-forwarded-for": 'a, b="c";d, 10.0.0.2'}),
        ("for=unknown", {"x-forwarded-for": "unknown"}),
        ("proto=https", {"x-forwarded-for": "unknown", "x-forwarded-proto": "https"}),
        ("for=10.0.0.2;proto=gopher", {"x-forwarded-for": "10.0.0.2"}),
        ('for="10.0.0.2', {}),
        ("", {}),
        (",,;", {}),
        ("=", {}),
    ],
)
def test_each_hop_is_said_in_the_older_way(text: str, expected: dict[str, str]) -> None:
    headers = [
        (b"host", b"a"),
        (b"x-forwarded-for", b"6.6.6.6"),
        (b"forwarded", text.encode()),
        (b"x-forwarded-proto", b"https"),
    ]
    said = {name.decode(): value.decode() for name, value in as_x_forwarded(headers)}
    assert said == {"host": "a", **expected}


def test_several_lines_are_one_list() -> None:
    headers = [(b"forwarded", b"for=10.0.0.1"), (b"forwarded", b"for=10.0.0.2")]
    assert as_x_forwarded(headers) == [(b"x-forwarded-for", b"10.0.0.1, 10.0.0.2")]


@pytest.mark.timeout(60)  # against minutes if characters are read again and again
def test_no_header_is_read_again_and_again() -> None:
    assert as_x_forwarded([(b"forwarded", b"for=192.0.2.1," + b" " * 500_000 + b"x")]) == []
