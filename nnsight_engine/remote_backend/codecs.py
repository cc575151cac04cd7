"""In what a trace's blocks are written: the wire format, or for servers that trust the key, cloudpickle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from nnsight_engine.wire import SentBlock, encode_trace
from nnsight_engine.wire.encoder import Reference

Codec = Literal["wire", "cloudpickle"]


def encode_blocks(
    codec: Codec, blocks: Sequence[SentBlock], *, shared: Mapping[str, Any], reference: Reference
) -> bytes:
    """Return blocks as a message in a codec; see ``wire.encode_trace``."""
    del codec
    return encode_trace(blocks, shared, reference=reference)
