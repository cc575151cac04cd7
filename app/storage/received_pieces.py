from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import BinaryIO, Final

_PIECE_BYTES: Final = 1024 * 1024


async def in_pieces(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the same bytes in pieces of about 1 MiB, since each piece costs a dispatch to a thread."""
    waiting: list[bytes] = []
    num_bytes = 0
    async for chunk in chunks:
        waiting.append(chunk)
        num_bytes += len(chunk)
        if num_bytes >= _PIECE_BYTES:
            yield b"".join(waiting)
            waiting, num_bytes = [], 0
    yield b"".join(waiting)


def append(file: BinaryIO, piece: bytes | memoryview, digest: hashlib._Hash) -> None:
    digest.update(piece)
    rest = memoryview(piece)
    while rest:
        rest = rest[file.write(rest) :]


__all__ = ["append", "in_pieces"]
