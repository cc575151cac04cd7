"""The routes of vLLM's own server that are served here by vLLM's handlers.

Not served: calls of arbitrary methods and exchanges of weights, which are for training loops.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from api_schemas.administration import Scope


class VLLMRoute(NamedTuple):
    """A route of vLLM's server; any key may use it if ``scope`` is None.

    ``has_many`` makes each text of a request a prompt of its own. Requests that have a body count against the
    limits on work; those that run the model have a part of the prefix cache.
    """

    method: str
    path: str
    summary: str
    scope: Scope | None = Scope.COMPLETIONS
    runs: bool = False
    intervenes: bool = False
    has_many: bool = False
    has_body: bool = False


RESPONSES: Final = "/v1/responses"
STORED_RESPONSE: Final = f"{RESPONSES}/{{response_id}}"
MESSAGES: Final = "/v1/messages"
LOAD_ADAPTER: Final = "/v1/load_lora_adapter"
UNLOAD_ADAPTER: Final = "/v1/unload_lora_adapter"
_API: Final = (
    VLLMRoute("POST", RESPONSES, "OpenAI's responses", runs=True, intervenes=True, has_body=True),
    VLLMRoute("GET", STORED_RESPONSE, "A stored response"),
    VLLMRoute("POST", f"{STORED_RESPONSE}/cancel", "Cancel a response in the background"),
    VLLMRoute("POST", MESSAGES, "Anthropic's messages", runs=True, intervenes=True, has_body=True),
    VLLMRoute("POST", "/v1/messages/count_tokens", "Count the tokens of a conversation", has_body=True),
    VLLMRoute("POST", "/tokenize", "Tokenize a text or a conversation", has_body=True),
    VLLMRoute("POST", "/detokenize", "The text of token ids", has_body=True),
    VLLMRoute(
        "GET", "/tokenizer_info", "The tokenizer's configuration, with --enable-tokenizer-info-endpoint"
    ),
)


def _pooling(path: str, summary: str, *, intervenes: bool = False) -> VLLMRoute:
    return VLLMRoute("POST", path, summary, runs=True, intervenes=intervenes, has_many=True, has_body=True)


_POOLING: Final = (
    _pooling("/v1/embeddings", "Embeddings of texts or of a conversation", intervenes=True),
    _pooling("/pooling", "Pooled hidden states, as the model's head returns them", intervenes=True),
    _pooling("/classify", "Classes of texts", intervenes=True),
    _pooling("/score", "Scores of pairs of texts"),
    _pooling("/v1/score", "Scores of pairs of texts"),
    _pooling("/rerank", "Documents by their relevance to a query"),
    _pooling("/v1/rerank", "Documents by their relevance to a query"),
    _pooling("/v2/rerank", "Documents by their relevance to a query"),
)
_OPERATING: Final = (
    VLLMRoute("GET", "/load", "Number of requests that the engine works on", Scope.METRICS),
    VLLMRoute("GET", "/version", "vLLM's version", None),
    VLLMRoute("GET", "/server_info", "vLLM's configuration and environment", Scope.ADMIN),
    VLLMRoute("POST", LOAD_ADAPTER, "Load a LoRA adapter from a folder", Scope.ADMIN, has_body=True),
    VLLMRoute("POST", UNLOAD_ADAPTER, "Unload a LoRA adapter", Scope.ADMIN, has_body=True),
    VLLMRoute("POST", "/reset_prefix_cache", "Empty the prefix cache", Scope.ADMIN),
    VLLMRoute("POST", "/reset_mm_cache", "Empty the cache of multi-modal inputs", Scope.ADMIN),
    VLLMRoute("POST", "/reset_encoder_cache", "Empty the cache of encoder outputs", Scope.ADMIN),
)
_PAUSING: Final = (
    VLLMRoute("POST", "/sleep", "Stop the engine's work, and free memory of a GPU", Scope.ADMIN),
    VLLMRoute("POST", "/wake_up", "Go on after /sleep", Scope.ADMIN),
    VLLMRoute("GET", "/is_sleeping", "Whether the engine sleeps or is paused", Scope.ADMIN),
    VLLMRoute("POST", "/pause", "Stop the engine's work", Scope.ADMIN),
    VLLMRoute("POST", "/resume", "Go on after /pause", Scope.ADMIN),
    VLLMRoute("GET", "/is_paused", "Whether the engine is paused", Scope.ADMIN),
)

VLLM_ROUTES: Final = (*_API, *_POOLING, *_OPERATING, *_PAUSING)
"""The table."""
EMBEDDINGS: Final = tuple(route.path for route in _POOLING if route.intervenes)
"""Paths that embed texts, each with its own results."""
WORKING: Final = frozenset(route.path for route in VLLM_ROUTES if route.has_body)
"""Paths whose requests count against the limits on work."""
OF_ONE_ENGINE: Final = frozenset(route.path for route in _PAUSING)
"""Paths that are of one engine, of which a front of replicas does not know which one is meant."""
OUTSIDE_V1: Final = frozenset(route.path for route in VLLM_ROUTES if not route.path.startswith("/v1/"))
"""Paths outside of the API's prefix."""
