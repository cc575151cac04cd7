"""LangChain's model for OpenAI's API: our field in ``extra_body``."""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain_openai import ChatOpenAI  # type: ignore[import-not-found] # only in the clients' environment

asked = json.loads(sys.argv[1])
options: dict[str, Any] = {
    "model": asked["model"],
    "base_url": f"{asked['url']}/v1",
    "api_key": "none",
    "max_tokens": asked["max_tokens"],
    "temperature": 0,
}
model = ChatOpenAI(**options)
messages = [(one["role"], one["content"]) for one in asked["messages"]]
steering = ChatOpenAI(**options, extra_body={"interventions": asked["interventions"]})
json.dump(
    {
        "chat": model.invoke(messages).content,
        "stream": [piece.content for piece in model.stream(messages)],
        "steered": steering.invoke(messages).content,
        "steered_stream": [piece.content for piece in steering.stream(messages)],
    },
    sys.stdout,
)
