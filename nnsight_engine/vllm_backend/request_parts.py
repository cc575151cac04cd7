"""Parts of requests beside their text: LoRA adapters, and images and other media of a prompt.

Deduplication of tensors of several requests in the engine's process, while they wait and run.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet, WeakValueDictionary

from vllm.lora.request import LoRARequest
from vllm.multimodal.cache import LruKeyReplicatedSenderCache

from api_schemas.errors import ApiError, ErrorCode
from nnsight_engine.plans.request_plan import NO_MEDIA, PromptMedia, Spans

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

    def hold(self, number: int) -> bool:
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
    """Raise ApiError if a worker has answered why it could not load the adapter; None if it could."""
    reason = next((answer for answer in answers if answer is not None), None)
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


def media_of(prompt: Any) -> PromptMedia:
    """Return where a prompt's images are among its tokens, and a digest of all its media."""
    if not isinstance(prompt, dict) or prompt.get("type") != "multimodal":
        return NO_MEDIA
    hashes = sorted(prompt["mm_hashes"].items())
    placeholders = sorted(
        prompt["mm_placeholders"].get("image", ()), key=lambda placeholder: placeholder.offset
    )
    return PromptMedia(
        images=tuple(map(_spans, placeholders)),
        digest=hashlib.sha256(repr(hashes).encode()).hexdigest(),
    )


def _spans(placeholder: Any) -> Spans:
    return tuple((first, last + 1) for first, last in placeholder.extract_embeds_range())


def cache_media_once_sent(engine: Any) -> None:
    """Count media as cached once a request has brought them to the engine; call it before the first request.

    vLLM counts them from processing on, so after a refused or cancelled request the engine would lack them.
    """
    cache = engine.renderer.mm_processor_cache
    if not isinstance(cache, LruKeyReplicatedSenderCache):
        return  # there is none, or one that keeps the media themselves
    entries = cache._cache  # noqa: SLF001 - has no public name
    known: WeakValueDictionary[str, object] = WeakValueDictionary()
    sent: WeakSet[object] = WeakSet()
    update, add = cache.get_and_update_item, engine.output_processor.add_request

    def is_cached_item(mm_hash: str) -> bool:
        return known.get(mm_hash) in sent  # an entry is in neither once vLLM has evicted it

    @functools.wraps(update)
    def get_and_update_item(mm_item: Any, mm_hash: str) -> Any:
        """Process media anew if no request has brought them to the engine."""
        if not is_cached_item(mm_hash):
            entries.pop(mm_hash, None)
        updated = update(mm_item, mm_hash)
        if mm_hash in entries:  # it is not if it is larger than the cache
            known[mm_hash] = entries.__getitem__(mm_hash, update_info=False)
        return updated

    @functools.wraps(add)
    def add_request(request: Any, *args: Any, **kwargs: Any) -> None:
        """Note the media that a request brings to the engine."""
        add(request, *args, **kwargs)
        for feature in request.mm_features or ():
            entry = known.get(feature.mm_hash or feature.identifier)
            if entry is not None:
                sent.add(entry)

    cache.is_cached_item = is_cached_item
    cache.get_and_update_item = get_and_update_item
    engine.output_processor.add_request = add_request


TensorEntries = dict[str, Any]
"""Content hash to ``(dtype, shape, bytes)``."""


class TensorTable:
    """Tensors by content hash, each kept once while at least one request uses it."""

    def __init__(self) -> None:
        self._contents: dict[str, Any] = {}
        self._num_users: dict[str, int] = {}
        self._keys: dict[str, list[str]] = {}

    def __len__(self) -> int:
        return len(self._contents)

    def acquire(self, request_id: str, entries: TensorEntries) -> TensorEntries:
        """Register a request's tensors; return them with equal ones of other requests in their place."""
        if request_id in self._keys:
            return entries
        self._keys[request_id] = list(entries)
        for key, content in entries.items():
            self._contents.setdefault(key, content)
            self._num_users[key] = self._num_users.get(key, 0) + 1
        return {key: self._contents[key] for key in entries}

    def release(self, request_id: str) -> None:
        """Forget a request, and the tensors that no other request uses."""
        for key in self._keys.pop(request_id, ()):
            self._num_users[key] -= 1
            if not self._num_users[key]:
                del self._num_users[key], self._contents[key]
