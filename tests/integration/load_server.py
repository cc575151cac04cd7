"""A server over the fake engine as a process of its own, for load tests: ``python -m … FOLDER``.

It prints its port when it listens. Its model has layers, so that a client can write a block for it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import uvicorn

from app.engine.client import DescribedModel
from app.main import create_app, new_store
from app.settings import Settings
from nnsight_engine.core.model_spec import LeafSpec, ModelSpec
from nnsight_engine.families.dense import LLAMA
from nnsight_engine.vllm_backend.model_layout import BlockPoints, ModelLayout
from tests.fakes.engine import FakeBehaviour, FakeEngineClient
from tests.fakes.results import CAPABILITIES, MODEL

SIZES = CAPABILITIES.sizes
LEAVES = tuple(LeafSpec(name, (SIZES.hidden_size,), "tap", ()) for name in ("input", "output"))
SPEC = ModelSpec(
    MODEL, "LlamaForCausalLM", SIZES.num_layers, SIZES.hidden_size, SIZES.vocab_size, "float32",
    SIZES.max_model_len, SIZES.max_model_len, LEAVES, 1,
    layout=ModelLayout(LLAMA, (BlockPoints({}, LLAMA.kernel),) * SIZES.num_layers).to_plain(),
)  # fmt: skip


class Engine(FakeEngineClient):
    """Describes a model of a known architecture."""

    async def describe_model(self) -> DescribedModel:
        layers = [(f"model.layers.{layer}", "LlamaDecoderLayer", "", "") for layer in range(SIZES.num_layers)]
        modules = [
            ("", "LlamaForCausalLM", "", ""), ("model", "LlamaModel", "", ""),
            ("model.layers", "ModuleList", "", ""), *layers,
        ]  # fmt: skip
        return DescribedModel(modules, SPEC.to_plain())


def main() -> None:
    folder = Path(sys.argv[1])
    settings = Settings(result_dir=folder / "results", data_dir=folder / "data", drain_timeout_s=1)
    store = new_store(settings)
    engine = Engine(settings, store, FakeBehaviour(delay_s=0.005))
    config = uvicorn.Config(create_app(settings, engine, store), port=0, log_level="warning")
    sock = config.bind_socket()
    print(sock.getsockname()[1], flush=True)  # noqa: T201 - the test reads it
    uvicorn.Server(config).run(sockets=[sock])


if __name__ == "__main__":
    main()
