"""Bodies that would block an event loop for seconds: requests, routes and expected responses."""

from __future__ import annotations

import json
from typing import Any, Final

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
_MESSAGES: Final = [{"role": "user", "content": "Say something."}]
_TOOL: Final = {"type": "function", "function": {"name": "a", "parameters": {}}}


def large_bodies() -> dict[str, tuple[str, bytes, int]]:
    """Return each by its name: the route, the body, and the status; 38 MB at most."""
    bodies: dict[str, tuple[str, dict[str, Any], int]] = {
        "tools": (CHAT, {"messages": _MESSAGES, "tools": [_TOOL] * 120_000}, 400),
        "tool_schema": (
            CHAT,
            {
                "messages": _MESSAGES,
                "tools": [{**_TOOL, "function": {"name": "a", "parameters": {"a": [{}] * 2_000_000}}}],
            },
            400,
        ),
        "messages": (CHAT, {"messages": [{"role": "user", "content": "a"}] * 250_000}, 400),
        "parts": (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 250_000}]},
            400,
        ),
        "ids": (COMPLETIONS, {"prompt": [123] * 7_500_000}, 400),
        "prompts": (COMPLETIONS, {"prompt": [[123] * 10_000] * 750}, 400),
        "texts": (COMPLETIONS, {"prompt": ["a"] * 900_000}, 400),
        "wrong_ids": (COMPLETIONS, {"prompt": [1, "a"] * 400_000}, 400),
        "bias": (
            COMPLETIONS,
            {"prompt": "a", "logit_bias": {str(index): 1.0 for index in range(1_000_000)}},
            400,
        ),
        "unknown_field": (COMPLETIONS, {"prompt": "a", "what": [[]] * 3_000_000}, 400),
        "operations": (COMPLETIONS, {"prompt": "a", "interventions": [{}] * 3_000_000}, 400),
    }
    return {
        name: (path, json.dumps(body, separators=(",", ":")).encode(), status)
        for name, (path, body, status) in bodies.items()
    }


__all__ = ["CHAT", "COMPLETIONS", "large_bodies"]
