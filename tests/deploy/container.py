"""A root like a container's, for tests where there are none: what is in it is read, nothing else is there.

A mount namespace of the test's own has a new root with this machine's programs, the project and its
environment, all of it read-only; `/data` and `/tmp` are in memory. The process in it has the image's user and
variables and no rights. Making such a root takes root's rights, which the process then has no more.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tests.deploy.dockerfile import PROJECT

_SYSTEM: Final = ("/usr", "/etc", "/bin", "/sbin", "/lib", "/lib64")
_STOP_S: Final = 60.0


class Container:
    """A process in a root of its own, for the length of a ``with`` block.

    Args:
        root: An empty folder, where the root is mounted, invisible to other processes.
        commands: One after the other; the last is the process.
        environment: All of its variables but `PYTHONPATH`.
        user: Like `10001:10001`.
        shown: More folders and files that may be read, by their places in there.
    """

    def __init__(
        self,
        root: Path,
        commands: Sequence[Sequence[str]],
        environment: Mapping[str, str],
        user: str,
        shown: Mapping[str, Path],
    ) -> None:
        """Write down what is to be done; nothing runs yet."""
        self._output = root.parent / f"{root.name}.log"
        self._script = _script(root, commands, environment, user, shown)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process, as this machine numbers it."""
        assert self._process is not None
        return self._process.pid

    def output(self) -> str:
        return self._output.read_text("utf-8", "replace")

    def __enter__(self) -> Self:
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "--propagation", "private", "sh", "-ec", self._script],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def has_ended(self) -> bool:
        assert self._process is not None
        return self._process.poll() is not None

    def stop(self) -> int:
        """End the process as an orchestrator does, by force where it does not end; return its exit status."""
        process = self._process
        assert process is not None
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait()

    def files(self) -> set[Path]:
        """Return what lies in `/data`, two levels deep, seen through the process while it lives."""
        data = Path(f"/proc/{self.pid}/root/data")
        return {path.relative_to(data) for pattern in ("*", "*/*") for path in data.glob(pattern)}


def _script(
    root: Path,
    commands: Sequence[Sequence[str]],
    environment: Mapping[str, str],
    user: str,
    shown: Mapping[str, Path],
) -> str:
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


__all__ = ["Container"]
