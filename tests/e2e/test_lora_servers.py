"""LoRA adapters on servers of two ranks, two stages and two engines, in sandboxes, and over a restart."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.e2e.family_check import PROMPT_IDS, Expected, expect
from tests.e2e.faults import engine_processes, kill
from tests.e2e.keyed import SCOPES, made, serving_several
from tests.e2e.server import Server
from tests.e2e.test_data_parallel import ENGINES, HEADER
from tests.e2e.test_lora import head_adapter
from tests.families.adapters import RANK, write_adapter, write_merged
from tests.families.checkpoints import write_checkpoint
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

NAMES: Final = ("base", "first", "second")
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
    """A server, its models' names, and keys of an operator and of a stranger, whose code is sandboxed."""

    server: Server
    models: dict[str, str]
    operator: str
    stranger: str

    def post(self, path: str, key: str = "", **body: Any) -> httpx.Response:
        """Send a request; ``engine=`` chooses the engine."""
        headers = {"authorization": f"Bearer {key or self.operator}"}
        if "engine" in body:
            headers[HEADER] = body.pop("engine")
        return httpx.post(f"{self.server.base_url}{path}", json=body, headers=headers, timeout=180)

    def choice(self, name: str, *operations: dict[str, Any], **body: Any) -> Any:
        """Continue the prompt, and return the only choice."""
        body = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True} | body
        body |= {"interventions": list(operations)} if operations else {}
        answer = self.post("/v1/completions", model=self.models[name], prompt=PROMPT_IDS, **body)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        return choice

    def load(self, name: str, folder: Path) -> int:
        """Load an adapter; return the status of the answer."""
        return self.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(folder)).status_code


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = write_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    adapters = {
        name: write_adapter(base, tmp_path_factory.mktemp(name), seed=seed)
        for seed, name in enumerate(NAMES[1:], 1)
    }
    return {"base": base, **adapters}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Expected]:
    base = folders["base"]
    merged = {
        name: write_merged(base, folders[name], tmp_path_factory.mktemp(f"merged_{name}"))
        for name in NAMES[1:]
    }
    return {name: expect(folder) for name, folder in {"base": base, **merged}.items()}


@pytest.fixture(scope="module", params=[*KINDS, TWO_ENGINES])
def kind(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def served(
    kind: str,
    folders: dict[str, Path],
    expected: dict[str, Expected],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    """Serve the model with the first adapter, and load the second one, after one that cannot be loaded."""
    data = tmp_path_factory.mktemp("data")
    arguments = [KINDS.get(kind, "--data-parallel-size"), "2", "--max-model-len", "128", "--enable-lora"]
    arguments += ["--max-loras", "2", "--max-lora-rank", str(RANK), "--lora-modules"]
    arguments += [f"first={folders['first']}"]
    # Several sandboxes and workers on a small machine wait for each other.
    patience = {"NNSIGHT_ENGINE_TRACE_STEP_S": "30", "NNSIGHT_ENGINE_SANDBOX_STEP_S": "30"}
    variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} | patience
    with serving_several(folders["base"], data, arguments, **variables) as (server, keys):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NNSIGHT_ENGINE_DATA_DIR", str(data))
            operator = made(patch, "admin", "--scopes", ",".join(("admin", *SCOPES)))
        models = {"base": str(folders["base"]), "first": "first", "second": "second"}
        served = Served(server, models, operator, keys["untrusted"])
        bad = head_adapter(tmp_path_factory.mktemp("head"))
        assert [served.load("bad", bad), served.load("second", folders["second"])] == [500, 200]
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
    key = getattr(served, caller)

    def saves(name: str) -> Any:
        return served.choice(name, code, key=key)["interventions"]["results"]["t"]["saves"]

    with ThreadPoolExecutor(len(asked)) as pool:
        for name, found in zip(asked, pool.map(saves, asked), strict=True):
            assert found["top"] == expected[name].plain.token_ids[0]
            assert found["same"] < 1e-4


@pytest.mark.parametrize("kind", [TWO_ENGINES], indirect=True)
def test_engines_that_are_started_again_have_the_adapters_that_they_had_at_last(
    served: Served, folders: dict[str, Path], expected: dict[str, Expected]
) -> None:
    """The last test of a server."""
    assert served.load("third", folders["first"]) == 200
    assert served.post("/v1/unload_lora_adapter", lora_name="third").status_code == 200
    assert served.post("/v1/completions", model="third", prompt="a").status_code == 404

    def is_ready() -> bool:
        return httpx.get(f"{served.server.base_url}/health/ready", timeout=60).is_success

    kill(next(one for one in engine_processes(served.server.process.pid) if "EngineCore" in one.name()))
    wait_for(lambda: not is_ready())
    wait_for(is_ready, 180)
    for name in NAMES:
        for engine in ENGINES:
            assert served.choice(name, engine=engine)["token_ids"] == expected[name].plain.token_ids
    assert served.post("/v1/completions", model="third", prompt="a").status_code == 404


def test_adapters_are_loaded_and_unloaded_as_by_vllms_server(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    options = ["--max-model-len", "128", "--dtype", "float32", "--enforce-eager", "--enable-lora"]
    options += ["--max-lora-rank", str(RANK)]
    variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
    vllm = Server(
        command=["-m", "vllm.entrypoints.openai.api_server"],
        ready_path="/health",
        arguments=["--model", str(folders["base"]), *options],
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **variables},
    )
    data = {"NNSIGHT_ENGINE_DATA_DIR": str(tmp_path)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*next(iter(data.items())))
        key = made(patch, "admin", "--scopes", ",".join(("admin", *SCOPES)))
    ours = Server(str(folders["base"]), arguments=options, environment=variables | data)
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    first = {"lora_name": "first", "lora_path": str(folders["first"])}
    requests: list[tuple[str, dict[str, Any]]] = [
        *((load, first), (load, first)),
        *((unload, {"lora_name": "first"}), (unload, {"lora_name": "first"}), (load, first)),
    ]
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        both = list(pool.map(stack.enter_context, [ours, vllm]))
        for path, body in requests:
            headers = {"authorization": f"Bearer {key}"}
            mine, theirs = (
                httpx.post(f"{one.base_url}{path}", json=body, headers=headers, timeout=60) for one in both
            )
            assert (mine.status_code, mine.content) == (theirs.status_code, theirs.content), (path, body)
