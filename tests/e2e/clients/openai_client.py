"""The official client of OpenAI: chats, streams, responses, and our field in ``extra_body``."""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import OpenAI

asked = json.loads(sys.argv[1])
client = OpenAI(base_url=f"{asked['url']}/v1", api_key="none")
chat: dict[str, Any] = {
    "model": asked["model"],
    "messages": asked["messages"],
    "max_tokens": asked["max_tokens"],
    "temperature": 0,
}
plain = client.chat.completions.create(**chat)
streamed = client.chat.completions.create(**chat, stream=True)
steered = client.chat.completions.create(**chat, extra_body={"interventions": asked["interventions"]})
events = client.chat.completions.create(
    **chat, stream=True, extra_body={"interventions": asked["interventions"]}
)
response: dict[str, Any] = {
    "model": asked["model"],
    "input": asked["messages"],
    "max_output_tokens": asked["max_tokens"],
    "temperature": 0,
}
plain_response = client.responses.create(**response)
steered_response = client.responses.create(**response, extra_body={"interventions": asked["interventions"]})
choices = [event.choices[0] for event in events if event.choices]
json.dump(
    {
        "chat": plain.choices[0].message.content,
        "stream": [event.choices[0].delta.content for event in streamed if event.choices],
        "response": plain_response.output_text,
        "steered_response": steered_response.output_text,
        "steered": steered.choices[0].message.content,
        "steered_stream": [choice.delta.content for choice in choices],
        "results": getattr(steered.choices[0], "interventions")["results"],  # noqa: B009 - not of its types
        "streamed_results": [name for choice in choices for name in (choice.model_extra or {})],
    },
    sys.stdout,
)
