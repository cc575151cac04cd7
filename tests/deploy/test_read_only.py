"""The server as its image runs it: an ordinary user, a root that cannot be written, the image's variables."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nnsight_engine.modeling.bundled import bundled_model_path
from tests.deploy.container import Container
from tests.deploy.dockerfile import stages
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

ADMIN_KEY = f"nns_0123456789abcdef_{'k' * 43}"
BUNDLED = "/bundled"
_READY_S = 180.0
_SCOPES = ["completions", "interventions", "code"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Container, httpx.Client]]:
    if os.geteuid() != 0:
        pytest.skip("a root of its own takes root's rights, or those to make a mount namespace")
    folder = tmp_path_factory.mktemp("container")
    model = bundled_model_path()
    # As it lies in the image, where everybody may read it.
    shutil.copytree(model, folder / "bundled" / "models" / model.name)
    for path in (folder, folder / "bundled", *(folder / "bundled").rglob("*")):
        path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o444))
    key = folder / "admin.key"
    key.write_text(ADMIN_KEY, encoding="utf-8")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    image = stages()["cpu"]
    environment = {
        **image.environment(),
        "PATH": "/usr/bin:/bin",
        "HF_HUB_OFFLINE": "1",
        "NNSIGHT_ENGINE_HOST": "127.0.0.1",  # tests listen to this machine alone
        "NNSIGHT_ENGINE_PORT": str(port),
        "NNSIGHT_ENGINE_INLINE_TENSOR_BYTES": "0",
        "NNSIGHT_ENGINE_BUNDLED_MODEL_DIR": BUNDLED,
    }
    program = [str(Path(sys.prefix).resolve() / "bin" / "python"), "-m", "app"]
    adopt = ["keys", "adopt", "/run/keys/admin.key", "--tenant", "operators", "--scopes", "admin"]
    commands = [[*program, *adopt], [*program, *image.command()[3:], "--max-model-len", "512"]]
    (user,) = image.values("USER")
    shown = {BUNDLED: folder / "bundled", "/run/keys/admin.key": key}
    root = folder / "root"
    root.mkdir()
    with (
        Container(root, commands, environment, user, shown) as container,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client,
    ):
        _wait_ready(container, client)
        made = client.post(
            "/v1/admin/keys",
            json={"tenant": "acme", "scopes": _SCOPES},
            headers={"authorization": f"Bearer {ADMIN_KEY}"},
        ).json()
        client.headers["authorization"] = f"Bearer {made['key']}"
        yield container, client
    shutil.rmtree(folder)


def _wait_ready(container: Container, client: httpx.Client) -> None:
    def is_ready() -> bool:
        assert not container.has_ended(), container.output()
        with contextlib.suppress(httpx.TransportError):
            return client.get("/health/ready").is_success
        return False

    wait_for(is_ready, _READY_S)


def completed(client: httpx.Client, *interventions: dict[str, Any]) -> dict[str, Any]:
    body = {"prompt": "The Eiffel Tower is in the city of", "max_tokens": 1, "temperature": 0}
    answer = client.post("/v1/completions", json={**body, "interventions": list(interventions)})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def test_it_has_neither_rights_nor_anything_to_write_on(served: tuple[Container, httpx.Client]) -> None:
    container, _ = served
    status = Path(f"/proc/{container.pid}/status").read_text(encoding="utf-8")
    facts = dict(line.split(":\t", 1) for line in status.splitlines())
    assert facts["Uid"].split() == ["10001"] * 4
    assert (int(facts["CapEff"], 16), int(facts["CapBnd"], 16), facts["NoNewPrivs"]) == (0, 0, "1")
    mounts = Path(f"/proc/{container.pid}/mounts").read_text(encoding="utf-8").splitlines()
    (root,) = [line.split() for line in mounts if line.split()[1] == "/"]
    assert root[3].split(",")[0] == "ro"


def test_the_bundled_model_answers(served: tuple[Container, httpx.Client]) -> None:
    _, client = served
    assert completed(client)["text"] == " Paris"


def test_large_results_are_kept(served: tuple[Container, httpx.Client]) -> None:
    _, client = served
    results = completed(client, {"op": "capture", "at": "layers.5.output", "name": "c"})["interventions"]
    kept = results["results"]["c"]["points"]["layers.5.output"]
    assert len(client.get(kept["url"]).content) > kept["shape"][0] * kept["shape"][1]


def test_strangers_code_has_its_sandbox(served: tuple[Container, httpx.Client]) -> None:
    _, client = served
    code = "kept = save(model.layers[5].output[-1].shape[-1])"
    saves = completed(client, {"op": "trace", "name": "t", "code": code})["interventions"]["results"]["t"]
    assert saves["saves"] == {"kept": 576}


def test_files_are_written_only_to_the_folders_of_the_server(served: tuple[Container, httpx.Client]) -> None:
    container, client = served
    completed(client)
    assert {path.parts[0] for path in container.files()} <= {
        "server",
        "results",
        "cache",
        "models",
        ".config",
    }
    assert Path("server/server.db") in container.files()


def test_it_ends_on_sigterm(served: tuple[Container, httpx.Client]) -> None:
    container, _ = served
    assert container.stop() in {0, -signal.SIGTERM}, container.output()
