"""The official client of Anthropic: messages, streams and counts of tokens."""

from __future__ import annotations

import json
import sys
from typing import Any

from anthropic import Anthropic, BadRequestError

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
try:
    client.messages.create(**message, extra_body={"interventions": asked["interventions"]})
    refusal = ""
except BadRequestError as error:
    refusal = str(error)
json.dump(
    {
        "chat": "".join(part.text for part in plain.content if part.type == "text"),
        "stream": pieces,
        "count": count.input_tokens,
        "used": plain.usage.input_tokens,
        "refusal": refusal,
    },
    sys.stdout,
)
