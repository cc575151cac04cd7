"""``llm``: a model of ``extra-openai-models.yaml``, and one that adds our field, as a plugin would."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

asked = json.loads(sys.argv[1])
folder = tempfile.mkdtemp()
os.environ["LLM_USER_PATH"] = folder
model_of_file = {"model_id": "ours", "model_name": asked["model"], "api_base": f"{asked['url']}/v1"}
Path(folder, "extra-openai-models.yaml").write_text(json.dumps([model_of_file]))  # JSON is YAML

import llm  # type: ignore[import-not-found] # noqa: E402 - reads the variable; in the clients' environment
from llm.default_plugins.openai_models import Chat  # type: ignore[import-not-found] # noqa: E402


class Steered(Chat):
    """A model whose requests carry interventions."""

    def build_kwargs(self, prompt: Any, stream: bool) -> dict[str, Any]:
        kwargs = super().build_kwargs(prompt, stream)
        return {**kwargs, "extra_body": {"interventions": asked["interventions"]}}


options = {"temperature": 0, "max_tokens": asked["max_tokens"]}
model = llm.get_model("ours")
prompt = asked["messages"][-1]["content"]
steering = Steered("steered", model_name=asked["model"], api_base=model.api_base)
answered = steering.prompt(prompt, stream=False, key="none", **options)
steered = answered.text()
json.dump(
    {
        "chat": model.prompt(prompt, stream=False, key="none", **options).text(),
        "stream": list(model.prompt(prompt, stream=True, key="none", **options)),
        "steered": steered,
        "results": answered.response_json["choices"][0]["interventions"]["results"],
    },
    sys.stdout,
)
