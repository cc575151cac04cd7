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


async def answer(**config: Any) -> Any:
    """Return the output for the messages."""
    chosen = GenerateConfig(temperature=0, max_tokens=asked["max_tokens"], **config)
    name = f"openai-api/ours/{asked['model']}"
    model = get_model(name, base_url=f"{asked['url']}/v1", api_key="none", config=chosen)
    return await model.generate([ChatMessageUser(content=one["content"]) for one in asked["messages"]])


async def main() -> None:
    """Ask, and print what was answered."""
    plain = await answer()
    steered = await answer(extra_body={"interventions": asked["interventions"]})
    print(json.dumps({"chat": plain.completion, "steered": steered.completion}))


asyncio.run(main())
