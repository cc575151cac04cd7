from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from vllm.lora.request import LoRARequest

from api_schemas.errors import ApiError, ErrorCode

_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


def is_adapter_folder(path: str) -> bool:
    try:
        has_weights = any(Path(path, name).is_file() for name in _WEIGHTS)
        return has_weights and Path(path, "adapter_config.json").is_file()
    except OSError:  # it may not be read, or is too long for a path
        return False


class AdapterHolds:
    """Which adapters the workers have in memory, and how many requests (and a list of models) hold each.

    A held adapter stays there, so that a step never reads its files. Others make room, the longest unused
    first.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._holders: dict[int, int] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._holders

    def take(self, number: int) -> bool:
        """Add a holder; return False if the workers lack the adapter."""
        if number not in self._holders:
            return False
        self._holders[number] = self._holders.pop(number) + 1  # and move it to the end
        return True

    def release(self, number: int) -> None:
        self._holders[number] -= 1

    def pop_unused(self) -> list[int]:
        """Return the adapters that the workers must remove before they load another one."""
        unused = [number for number, count in self._holders.items() if not count]
        unused = unused[: max(0, len(self._holders) + 1 - self._capacity)]
        for number in unused:
            del self._holders[number]
        return unused

    def add(self, number: int) -> None:
        self._holders[number] = 0


def check_loaded(adapter: LoRARequest, answers: Sequence[str | None]) -> None:
    reason = next((one for one in answers if one is not None), None)
    if reason is not None:
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"The adapter {adapter.lora_name!r} cannot be loaded: {reason.rstrip('. ')}.",
            "lora_path",
        )


def salt_of_adapter(adapter: LoRARequest, salt: str | None, secret: str) -> str:
    """Return the prefix cache salt of a request with an adapter.

    vLLM keeps apart adapters of different names or paths only. The same may be loaded again with other
    weights, and has another id then.
    """
    parts = [secret, f"adapter {adapter.lora_int_id}", salt or ""]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


__all__ = ["AdapterHolds", "check_loaded", "is_adapter_folder", "salt_of_adapter"]
