"""Inspect: a model of a server with OpenAI's API, with our field in the configuration's ``extra_body``."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from inspect_ai.model import (  # type: ignore[import-not-found] # only in the clients' environment
    ChatMessageUser,
    GenerateConfig,
    get_model,
)

asked = json.loads(sys.argv[1])


async def main() -> None:
    name = f"openai-api/ours/{asked['model']}"
    model = get_model(name, base_url=f"{asked['url']}/v1", api_key="none")
    messages = [ChatMessageUser(content=one["content"]) for one in asked["messages"]]
    options: dict[str, Any] = {"temperature": 0, "max_tokens": asked["max_tokens"]}
    steering = GenerateConfig(**options, extra_body={"interventions": asked["interventions"]})
    plain = await model.generate(messages, config=GenerateConfig(**options))
    # The provider's call, which Inspect's logs have too, contains the whole answer.
    steered, call = await model.api.generate(messages, [], "none", steering)
    results = call.response["choices"][0]["interventions"]["results"]
    answer = {"chat": plain.completion, "steered": steered.completion, "results": results}
    json.dump(answer, sys.stdout)


asyncio.run(main())
