"""LoRA adapters on servers of two ranks, two stages and two engines, in sandboxes, and over a restart."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e.adapted import (
    ADAPTED,
    BASE,
    FIRST,
    NAMES,
    SECOND,
    Adapted,
    adapted,
    expected,
    head_adapter,
)
from tests.e2e.family_check import PROMPT_IDS, Expected
from tests.e2e.faults import engine_processes, kill
from tests.e2e.keyed import Tenant, beside_vllm, serving_several
from tests.e2e.server import Server
from tests.e2e.test_data_parallel import ENGINES
from tests.waiting import wait_for

__all__ = ["adapted", "expected"]  # fixtures

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

POINT: Final = "layers.1.output"
KINDS: Final = {"two ranks": "--tensor-parallel-size", "two stages": "--pipeline-parallel-size"}
TWO_ENGINES: Final = "two engines"
CODE: Final = """
x = model.layers[1].mlp.input
same = (model.layers[1].mlp(x) - model.layers[1].mlp.output).abs().max().item().save()
top = int(model.logits.output.argmax()).save()
"""


@dataclasses.dataclass(frozen=True)
class Served:
    """A server, its models' names, an operator and a stranger, whose code is sandboxed."""

    server: Server
    models: dict[str, str]
    operator: Tenant
    stranger: Tenant

    def choice(self, name: str, *operations: dict[str, Any], by: Tenant | None = None, **body: Any) -> Any:
        asked = {"model": self.models[name], "prompt": PROMPT_IDS, "max_tokens": 6, "ignore_eos": True}
        (choice,) = (by or self.operator).choices(*operations, **asked, return_token_ids=True, **body)
        return choice

    def load(self, name: str, folder: Path) -> int:
        body = {"lora_name": name, "lora_path": str(folder)}
        return self.operator.post("/v1/load_lora_adapter", json=body).status_code


@pytest.fixture(scope="module", params=[*KINDS, TWO_ENGINES])
def kind(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def served(
    kind: str,
    adapted: Adapted,
    expected: dict[str, Expected],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """Serve the model with the first adapter, and load the second one, after one that cannot be loaded."""
    data = tmp_path_factory.mktemp("data")
    arguments = [KINDS.get(kind, "--data-parallel-size"), "2", "--max-model-len", "128", *ADAPTED]
    arguments += ["--lora-modules", f"first={adapted.adapters[FIRST]}"]
    # Several sandboxes and workers on a small machine wait for each other.
    patience = {"NNSIGHT_ENGINE_TRACE_STEP_S": "30", "NNSIGHT_ENGINE_SANDBOX_STEP_S": "30"}
    variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} | patience
    with serving_several(adapted.base, data, arguments, **variables) as (server, keys):
        models = {BASE: str(adapted.base), FIRST: FIRST, SECOND: SECOND}
        served = Served(server, models, *(Tenant(server, keys[name]) for name in ("operator", "untrusted")))
        bad = head_adapter(tmp_path_factory.mktemp("head"))
        assert [served.load("bad", bad), served.load(SECOND, adapted.adapters[SECOND])] == [400, 200]
        yield served


def test_each_name_gives_what_its_merged_weights_give(
    served: Served, kind: str, expected: dict[str, Expected]
) -> None:
    """Plain and steered at once, on each engine, with and without the prefix cache."""
    steer = {"op": "steer", "at": POINT, "vector": expected["base"].vectors[POINT].tolist(), "scale": 1.5}
    engines: list[dict[str, str]] = [{"engine": one} for one in ENGINES] if kind == TWO_ENGINES else [{}]
    asked = [(name, steered, one) for name in NAMES for steered in (False, True) for one in engines]
    for _ in range(2):
        with ThreadPoolExecutor(len(asked)) as pool:
            choices = list(
                pool.map(lambda one: served.choice(one[0], *([steer] if one[1] else []), **one[2]), asked)
            )
        for (name, steered, _), choice in zip(asked, choices, strict=True):
            if not steered:
                assert choice["token_ids"] == expected[name].plain.token_ids
    texts = {
        tuple(choice["token_ids"]) for (_, steered, _), choice in zip(asked, choices, strict=True) if steered
    }
    assert len(texts) == len(NAMES)


@pytest.mark.parametrize("caller", ["operator", "stranger"])
def test_a_module_that_code_calls_has_the_adapter_of_its_request(
    served: Served, expected: dict[str, Expected], caller: str
) -> None:
    """Also for code in a sandbox process, several at once."""
    code = {"op": "trace", "code": CODE, "name": "t"}
    asked = [*NAMES, *NAMES]
    by = getattr(served, caller)

    def saves(name: str) -> Any:
        return served.choice(name, code, by=by)["interventions"]["results"]["t"]["saves"]

    with ThreadPoolExecutor(len(asked)) as pool:
        for name, found in zip(asked, pool.map(saves, asked), strict=True):
            assert found["top"] == expected[name].plain.token_ids[0]
            assert found["same"] < 1e-4


@pytest.mark.parametrize("kind", [TWO_ENGINES], indirect=True)
def test_engines_that_are_started_again_have_the_adapters_that_they_had_at_last(
    served: Served, adapted: Adapted, expected: dict[str, Expected]
) -> None:
    """The last test of a server."""
    assert served.load("third", adapted.adapters[FIRST]) == 200
    operator = served.operator
    assert operator.post("/v1/unload_lora_adapter", json={"lora_name": "third"}).status_code == 200
    assert operator.complete(model="third", prompt="a").status_code == 404

    def is_ready() -> bool:
        return operator.get("/health/ready").is_success

    kill(next(one for one in engine_processes(served.server.process.pid) if "EngineCore" in one.name()))
    wait_for(lambda: not is_ready())
    wait_for(is_ready, 400)
    for name in NAMES:
        for engine in ENGINES:
            assert served.choice(name, engine=engine)["token_ids"] == expected[name].plain.token_ids
    assert operator.complete(model="third", prompt="a").status_code == 404


def test_adapters_are_loaded_and_unloaded_as_by_vllms_server(adapted: Adapted, tmp_path: Path) -> None:
    options = ["--max-model-len", "128", "--dtype", "float32", "--enforce-eager", *ADAPTED]
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    first = {"lora_name": FIRST, "lora_path": str(adapted.adapters[FIRST])}
    requests: list[tuple[str, dict[str, Any]]] = [
        *((load, first), (load, first)),
        *((unload, {"lora_name": FIRST}), (unload, {"lora_name": FIRST}), (load, first)),
    ]
    with beside_vllm(adapted.base, options, tmp_path, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1") as both:
        for path, body in requests:
            mine, theirs = (client.post(path, json=body) for client in both)
            assert mine.status_code == theirs.status_code, (path, body)
            if mine.is_success:
                assert mine.content == theirs.content
