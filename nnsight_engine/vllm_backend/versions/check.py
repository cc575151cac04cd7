"""The check of vLLM's version at start, before vLLM is imported."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, get_args

from nnsight_engine.core.errors import UnsupportedOptionError
from nnsight_engine.vllm_backend.steps.vllm_names import USED_NAMES
from nnsight_engine.vllm_backend.versions.differences import Difference, differences
from nnsight_engine.vllm_backend.versions.sources import VLLMSources

logger = logging.getLogger(__name__)

TESTED_VERSION: Final = "0.32"
"""The version that the tests run."""

COMPARED_VERSIONS: Final = ("0.33",)
"""Versions that no test runs; all their names are as ``vllm_names`` says, which tests compare."""

KNOWN_VERSIONS: Final = (TESTED_VERSION, *COMPARED_VERSIONS)

VersionCheck = Literal["auto", "strict", "warn", "off"]
"""What happens with another version.

``auto``: it is refused if an overridden name has changed, otherwise used with a warning. ``strict``: it is
refused if any name has changed. ``warn``: it is used with a warning. ``off``: it is used.
"""

VARIABLE: Final = "NNSIGHT_ENGINE_VLLM_VERSION_CHECK"
_RELEASE: Final = re.compile(r"(\d+\.\d+)\.\d+(\.post\d+)?")
_MAX_SHOWN: Final = 10


def check_version(choice: VersionCheck, sources: VLLMSources | None = None) -> None:
    """Compare a version of vLLM that is not known, see ``VersionCheck``.

    Raises:
        UnsupportedOptionError: The version is refused.
    """
    sources = sources or _installed()
    if choice == "off" or sources is None:
        return
    known = _known(sources.version)
    if known is not None:
        if known != TESTED_VERSION:
            logger.warning(
                "vLLM %s has all names of vLLM that this engine uses, but its tests run on %s only",
                sources.version,
                TESTED_VERSION,
            )
        return
    changed = differences(sources, USED_NAMES)
    message = _message(sources.version, changed)
    if (choice == "strict" and changed) or (choice == "auto" and any(one.is_overridden for one in changed)):
        raise UnsupportedOptionError(
            f"{message}. Install another version, or set {VARIABLE}=warn to try this one"
        )
    logger.warning("%s", message)


def is_tested_version() -> bool:
    sources = _installed()
    return sources is not None and _known(sources.version) == TESTED_VERSION


def check_from_environment() -> None:
    """Compare vLLM's version as the environment says; raise UnsupportedOptionError, also for other values."""
    value = os.environ.get(VARIABLE, "auto")
    for choice in get_args(VersionCheck):
        if value == choice:
            check_version(choice)
            return
    raise UnsupportedOptionError(f"{VARIABLE} is one of {', '.join(get_args(VersionCheck))}, got {value!r}")


def _installed() -> VLLMSources | None:
    found = importlib.util.find_spec("vllm")
    return None if found is None or found.origin is None else VLLMSources(Path(found.origin).parents[1])


def _known(version: str) -> str | None:
    release = _RELEASE.fullmatch(version)
    return release[1] if release is not None and release[1] in KNOWN_VERSIONS else None


def _message(version: str, changed: Sequence[Difference]) -> str:
    begin = (
        f"vLLM {version or 'of unknown version'} is not a version that this engine knows "
        f"({', '.join(KNOWN_VERSIONS)})"
    )
    if not changed:
        return f"{begin}; all names of vLLM that it uses are there"
    shown = [str(one) for one in sorted(changed, key=lambda one: not one.is_overridden)[:_MAX_SHOWN]]
    more = f"; and {len(changed) - len(shown)} more" if len(changed) > len(shown) else ""
    return f"{begin}, and names of vLLM that it uses have changed: {'; '.join(shown)}{more}"


__all__ = [
    "COMPARED_VERSIONS",
    "KNOWN_VERSIONS",
    "VARIABLE",
    "VersionCheck",
    "check_from_environment",
    "check_version",
    "is_tested_version",
]
