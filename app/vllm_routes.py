"""The routes of vLLM's own server that are served here by vLLM's handlers, in one table.

``app.routes.vllm`` passes their requests on. Completions, chats, models and metrics have routes of their own.
Not served: calls of arbitrary methods and exchanges of weights, which are for training loops, and routes of
models that do not generate.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from api_schemas.keys import Scope


class VLLMRoute(NamedTuple):
    """A route of vLLM's server.

    Attributes:
        method: HTTP method.
        path: Its path.
        summary: Its purpose.
        scope: The scope that it needs; None for any key.
        generates: Whether the engine generates for its requests, which then have a part of the prefix cache.
        has_body: Whether a request has a JSON body. Such requests count against the limits on work.
    """

    method: str
    path: str
    summary: str
    scope: Scope | None = Scope.COMPLETIONS
    generates: bool = False
    has_body: bool = False


RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
_API: Final = (
    VLLMRoute("POST", RESPONSES, "OpenAI's responses", generates=True, has_body=True),
    VLLMRoute("GET", "/v1/responses/{response_id}", "A stored response"),
    VLLMRoute("POST", MESSAGES, "Anthropic's messages", generates=True, has_body=True),
    VLLMRoute("POST", "/v1/messages/count_tokens", "Count the tokens of a conversation", has_body=True),
    VLLMRoute("POST", "/tokenize", "Tokenize a text or a conversation", has_body=True),
    VLLMRoute("POST", "/detokenize", "The text of token ids", has_body=True),
)
_OPERATING: Final = (
    VLLMRoute("GET", "/load", "Number of requests that the engine works on", Scope.METRICS),
    VLLMRoute("GET", "/version", "vLLM's version", None),
    VLLMRoute("GET", "/server_info", "vLLM's configuration and environment", Scope.ADMIN),
    VLLMRoute("POST", "/reset_prefix_cache", "Empty the prefix cache", Scope.ADMIN),
    VLLMRoute("POST", "/reset_mm_cache", "Empty the cache of multi-modal inputs", Scope.ADMIN),
    VLLMRoute("POST", "/reset_encoder_cache", "Empty the cache of encoder outputs", Scope.ADMIN),
)

VLLM_ROUTES: Final = (*_API, *_OPERATING)
"""The table."""
WORKING: Final = frozenset(route.path for route in VLLM_ROUTES if route.has_body)
"""Paths whose requests count against the limits on work."""
OUTSIDE_V1: Final = frozenset(route.path for route in VLLM_ROUTES if not route.path.startswith("/v1/"))
"""Paths outside of the API's prefix."""

__all__ = ["MESSAGES", "OUTSIDE_V1", "RESPONSES", "VLLM_ROUTES", "WORKING", "VLLMRoute"]
