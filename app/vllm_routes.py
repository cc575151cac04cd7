"""The routes of vLLM's own server that are served here by vLLM's handlers, in one table.

``app.routes.vllm`` passes their requests on. Completions, chats, models and metrics have routes of their own.
Not served: calls of arbitrary methods and exchanges of weights, which are for training loops.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

from api_schemas.keys import Scope


class Body(enum.Enum):
    """The form of a request's body."""

    JSON = enum.auto()
    UPLOAD = enum.auto()
    NONE = enum.auto()


class VLLMRoute(NamedTuple):
    """A route of vLLM's server.

    Attributes:
        method: HTTP method.
        path: Its path.
        summary: Its purpose.
        scope: The scope that it needs; None for any key.
        works: Whether the engine computes for its requests, which then count against the limits on work.
        body: The form of a request's body.
    """

    method: str
    path: str
    summary: str
    scope: Scope | None = Scope.COMPLETIONS
    works: bool = True
    body: Body = Body.JSON


_GENERATING: Final = (
    VLLMRoute("POST", "/v1/responses", "OpenAI's responses"),
    VLLMRoute("GET", "/v1/responses/{response_id}", "A stored response", works=False, body=Body.NONE),
    VLLMRoute(
        "POST", "/v1/responses/{response_id}/cancel", "Cancel a response in the background",
        works=False, body=Body.NONE,
    ),
    VLLMRoute("POST", "/v1/messages", "Anthropic's messages"),
    VLLMRoute("POST", "/v1/messages/count_tokens", "Count the tokens of a conversation", works=False),
    VLLMRoute("POST", "/tokenize", "Tokenize a text or a conversation", works=False),
    VLLMRoute("POST", "/detokenize", "The text of token ids", works=False),
)  # fmt: skip
_POOLING: Final = (
    VLLMRoute("POST", "/v1/embeddings", "OpenAI's embeddings"),
    VLLMRoute("POST", "/pooling", "Pooled hidden states"),
    VLLMRoute("POST", "/classify", "Classify texts"),
    VLLMRoute("POST", "/score", "Score pairs of texts"),
    VLLMRoute("POST", "/v1/score", "Score pairs of texts"),
    VLLMRoute("POST", "/rerank", "Order documents by a query"),
    VLLMRoute("POST", "/v1/rerank", "Order documents by a query"),
    VLLMRoute("POST", "/v2/rerank", "Order documents by a query"),
)
_AUDIO: Final = (
    VLLMRoute("POST", "/v1/audio/transcriptions", "Transcribe speech", body=Body.UPLOAD),
    VLLMRoute("POST", "/v1/audio/translations", "Translate speech", body=Body.UPLOAD),
)


def _of_operators(method: str, path: str, summary: str) -> VLLMRoute:
    return VLLMRoute(method, path, summary, Scope.ADMIN, works=False, body=Body.NONE)


_OPERATING: Final = (
    VLLMRoute("GET", "/load", "Number of requests that the engine works on", Scope.METRICS, False, Body.NONE),  # noqa: FBT003 - a table
    VLLMRoute("GET", "/version", "vLLM's version", None, False, Body.NONE),  # noqa: FBT003 - a table
    _of_operators("GET", "/server_info", "vLLM's configuration and environment"),
    _of_operators("POST", "/reset_prefix_cache", "Empty the prefix cache"),
    _of_operators("POST", "/reset_mm_cache", "Empty the cache of multi-modal inputs"),
    _of_operators("POST", "/reset_encoder_cache", "Empty the cache of encoder outputs"),
    _of_operators("POST", "/sleep", "Release the memory of a GPU"),
    _of_operators("POST", "/wake_up", "Load what `/sleep` has released"),
    _of_operators("GET", "/is_sleeping", "Whether the engine sleeps"),
)

VLLM_ROUTES: Final = (*_GENERATING, *_POOLING, *_AUDIO, *_OPERATING)
"""The table."""
WORKING: Final = frozenset(route.path for route in VLLM_ROUTES if route.works)
"""Paths whose requests count against the limits on work."""
OUTSIDE_V1: Final = frozenset(route.path for route in VLLM_ROUTES if not route.path.startswith("/v1/"))
"""Paths outside of the API's prefix."""
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"

__all__ = ["MESSAGES", "OUTSIDE_V1", "RESPONSES", "VLLM_ROUTES", "WORKING", "Body", "VLLMRoute"]
