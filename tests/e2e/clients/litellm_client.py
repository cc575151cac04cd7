"""LiteLLM as a library, with a server of OpenAI's API: our field in ``extra_body``."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm  # type: ignore[import-not-found] # only there in the clients' environment

asked = json.loads(sys.argv[1])
chat: dict[str, Any] = {
    "model": f"openai/{asked['model']}",
    "api_base": f"{asked['url']}/v1",
    "api_key": "none",
    "messages": asked["messages"],
    "max_tokens": asked["max_tokens"],
    "temperature": 0,
}
plain = litellm.completion(**chat)
streamed = litellm.completion(**chat, stream=True)
steered = litellm.completion(**chat, extra_body={"interventions": asked["interventions"]})
choice = steered.choices[0]
json.dump(
    {
        "chat": plain.choices[0].message.content,
        "stream": [event.choices[0].delta.content for event in streamed],
        "steered": choice.message.content,
        "results": choice.provider_specific_fields["interventions"]["results"],
    },
    sys.stdout,
)
