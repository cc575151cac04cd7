from __future__ import annotations

import functools
import hashlib
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from vllm.multimodal.cache import LruKeyReplicatedSenderCache

from nnsight_engine.plans.prompt_media import NO_MEDIA, PromptMedia, Spans


def media_of(prompt: Any) -> PromptMedia:
    if not isinstance(prompt, dict) or prompt.get("type") != "multimodal":
        return NO_MEDIA
    hashes = sorted(prompt["mm_hashes"].items())
    placeholders = sorted(prompt["mm_placeholders"].get("image", ()), key=lambda one: one.offset)
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
    entries = cache._cache  # noqa: SLF001 - listed in ``steps.vllm_names``
    known: WeakValueDictionary[str, object] = WeakValueDictionary()
    sent: WeakSet[object] = WeakSet()
    update, add = cache.get_and_update_item, engine.output_processor.add_request

    def is_cached_item(mm_hash: str) -> bool:
        return known.get(mm_hash) in sent  # an entry is in neither once vLLM has evicted it

    @functools.wraps(update)
    def get_and_update_item(mm_item: Any, mm_hash: str) -> Any:
        if not is_cached_item(mm_hash):
            entries.pop(mm_hash, None)
        updated = update(mm_item, mm_hash)
        if mm_hash in entries:  # it is not if it is larger than the cache
            known[mm_hash] = entries.__getitem__(mm_hash, update_info=False)
        return updated

    @functools.wraps(add)
    def add_request(request: Any, *args: Any, **kwargs: Any) -> None:
        add(request, *args, **kwargs)
        for feature in request.mm_features or ():
            entry = known.get(feature.mm_hash or feature.identifier)
            if entry is not None:
                sent.add(entry)

    cache.is_cached_item = is_cached_item
    cache.get_and_update_item = get_and_update_item
    engine.output_processor.add_request = add_request


__all__ = ["cache_media_once_sent", "media_of"]
