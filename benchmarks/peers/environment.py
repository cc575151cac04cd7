"""The peers' virtual environment: made once, with our lock and the peers on top, and not changed later."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Final

import platformdirs

_ROOT: Final = Path(__file__).parents[2]
_REQUIREMENTS: Final = (_ROOT / "requirements" / "cpu.txt", Path(__file__).parent / "requirements.txt")
_INSTALL: Final = _ROOT / "scripts" / "install.sh"
_TIME_LIMIT_S: Final = 1800
_SHOWN: Final = 300


class EnvironmentUnavailableError(Exception):
    """The peers could not be installed; the message is the installer's error."""


def default_environment() -> Path:
    """Return the folder of the environment."""
    return Path(platformdirs.user_cache_dir("nnsight-engine")) / "peers"


def ensure_environment(folder: Path) -> Path:
    """Return the environment's python, after installing what is missing; that needs 4 GB and some minutes.

    The mark inside carries a hash of the requirements, so that other versions are installed the next time.

    Raises:
        EnvironmentUnavailableError: There is no network, no room or no such version.
    """
    python = folder / "bin" / "python"
    content = b"".join(path.read_bytes() for path in _REQUIREMENTS)
    mark = folder / f".installed-{hashlib.sha256(content).hexdigest()[:16]}"
    if not mark.exists():
        if not python.exists():
            _run([sys.executable, "-m", "venv", str(folder)])
        _run(["bash", str(_INSTALL), str(folder), "--packages-only", *map(str, _REQUIREMENTS)])
        mark.touch()
    return python


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIME_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentUnavailableError(str(error)[:_SHOWN]) from error
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        raise EnvironmentUnavailableError((errors or lines or ["it printed nothing"])[-1].strip()[:_SHOWN])
