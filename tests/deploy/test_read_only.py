"""The server as its image runs it: an ordinary user, a root that cannot be written, its variables."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from nnsight_engine.modeling.bundled import bundled_model_path
from tests.deploy.dockerfile import PROJECT, stages
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

_SYSTEM: Final = ("/usr", "/etc", "/bin", "/sbin", "/lib", "/lib64")
_STOP_S: Final = 60.0


class Container:
    """A process in a root of its own, seen from outside."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process = process
        self.pid = process.pid
        self._output = output

    def output(self) -> str:
        return self._output.read_text("utf-8", "replace")

    def stop(self) -> int:
        """End it as an orchestrator does, by force where it does not end; return its exit status."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return self.process.wait()

    def files(self) -> set[Path]:
        """Return what lies in `/data`, two levels deep, seen through the process while it lives."""
        data = Path(f"/proc/{self.pid}/root/data")
        return {path.relative_to(data) for pattern in ("*", "*/*") for path in data.glob(pattern)}


@contextlib.contextmanager
def contained(root: Path, script: str) -> Iterator[Container]:
    output = root.parent / f"{root.name}.log"
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script]
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    found = Container(process, output)
    try:
        yield found
    finally:
        found.stop()


def _script(
    root: Path,
    commands: Sequence[Sequence[str]],
    environment: Mapping[str, str],
    user: str,
    shown: Mapping[str, Path],
) -> str:
    """Return what mounts a root and runs commands in it, of which the last is the process.

    Args:
        root: An empty folder, where the root is mounted, invisible to other processes.
        commands: One after the other; the last is the process.
        environment: All of its variables but `PYTHONPATH`.
        user: Like `10001:10001`.
        shown: More folders and files that may be read, by their places in there.
    """
    venv, base = Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()
    read = {str(path): path for path in (venv, base, PROJECT)} | dict(shown)
    # Where the system's folders are links into /usr, what they lead to is shown.
    read |= {path: Path(path).resolve() for path in _SYSTEM if Path(path).exists()}
    uid, gid = user.split(":")
    inside = [
        "env", "-i", *[f"{name}={value}" for name, value in environment.items()], f"PYTHONPATH={PROJECT}",
        "setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--no-new-privs",
        "--bounding-set=-all", "--inh-caps=-all",
    ]  # fmt: skip
    at = shlex.quote(str(root))
    lines = [
        f"mount -t tmpfs -o mode=755 root {at}",
        f"mkdir -p {at}/data {at}/tmp {at}/dev {at}/proc {at}/sys",
        f"mount -t tmpfs -o mode=700,uid={uid},gid={gid} data {at}/data",
        f"mount -t tmpfs -o mode=1777 tmp {at}/tmp",
        f"mount --rbind /dev {at}/dev",
        f"mount -t tmpfs -o mode=1777 shm {at}/dev/shm",
        f"mount --rbind /proc {at}/proc",
        f"mount --rbind /sys {at}/sys",
    ]
    for place, path in sorted(read.items()):
        there = f"{at}{shlex.quote(place)}"
        make = (
            f"mkdir -p {there}"
            if path.is_dir()
            else f"mkdir -p {at}{shlex.quote(str(Path(place).parent))}; : > {there}"
        )
        lines.append(
            f"{make}; mount --bind {shlex.quote(str(path))} {there}; mount -o remount,bind,ro {there}"
        )
    lines.append(f"mount -o remount,ro {at}")
    *before, last = [shlex.join(["chroot", str(root), *inside, *command]) for command in commands]
    return "\n".join([*lines, *before, f"exec {last}"])


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
        contained(root, _script(root, commands, environment, user, shown)) as container,
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
        assert container.process.poll() is None, container.output()
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
