"""The official client of Anthropic: messages, streams, counts of tokens, and our field in ``extra_body``."""

from __future__ import annotations

import json
import sys
from typing import Any

from anthropic import Anthropic

asked = json.loads(sys.argv[1])
client = Anthropic(base_url=asked["url"], api_key="none")
message: dict[str, Any] = {
    "model": asked["model"],
    "messages": asked["messages"],
    "max_tokens": asked["max_tokens"],
}
greedy = {"temperature": 0}  # which newer versions of the client do not know
plain = client.messages.create(**message, extra_body=greedy)
with client.messages.stream(**message, extra_body=greedy) as stream:
    pieces = list(stream.text_stream)
count = client.messages.count_tokens(model=asked["model"], messages=asked["messages"])
steering = {**greedy, "interventions": asked["interventions"]}
steered = client.messages.create(**message, extra_body=steering)
with client.messages.stream(**message, extra_body=steering) as stream:
    steered_pieces = list(stream.text_stream)
json.dump(
    {
        "chat": "".join(part.text for part in plain.content if part.type == "text"),
        "stream": pieces,
        "count": count.input_tokens,
        "used": plain.usage.input_tokens,
        "steered": "".join(part.text for part in steered.content if part.type == "text"),
        "steered_stream": steered_pieces,
        "results": (steered.model_extra or {})["interventions"]["results"],
    },
    sys.stdout,
)
