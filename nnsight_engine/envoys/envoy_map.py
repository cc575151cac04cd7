"""``envoys=``: envoy classes by module class or, with precedence, by the longest matching end of path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from nnsight_engine.envoys.aliases import Aliases, ends_with

if TYPE_CHECKING:
    from nnsight_engine.envoys.envoy import Envoy

EnvoyMap: TypeAlias = "type[Envoy] | Mapping[type[torch.nn.Module] | str, type[Envoy]] | None"
"""Envoy classes of modules: one for all, or by the module's class or path; None means ``Envoy``."""


def envoy_class(
    envoys: EnvoyMap, module: torch.nn.Module, path: str, aliases: Aliases | None, default: type[Envoy]
) -> type[Envoy]:
    if envoys is None:
        return default
    if isinstance(envoys, type):
        return envoys
    ends = [key for key in envoys if isinstance(key, str) and ends_with(path, key, aliases)]
    if ends:
        return envoys[max(ends, key=_num_parts)]
    return next((envoys[base] for base in type(module).__mro__ if base in envoys), default)


def check_envoys(envoys: Any, base: type[Envoy]) -> None:
    """Raise TypeError unless it is a subclass of ``base``, or a mapping to such by class or end of path."""
    items = list(envoys.items()) if isinstance(envoys, Mapping) else [(object, envoys)]
    if envoys is None or all(_is_key(key) and _is_class(value, base) for key, value in items):
        return
    raise TypeError(
        "envoys= takes a subclass of Envoy, or a mapping from classes of modules or ends of paths to such "
        f"classes, {{Attention: MyEnvoy, 'mlp.up_proj': MyEnvoy}}; got {envoys!r}"
    )


def _is_key(key: Any) -> bool:
    return isinstance(key, type) or (isinstance(key, str) and all(key.removeprefix(".").split(".")))


def _is_class(value: Any, base: type) -> bool:
    return isinstance(value, type) and issubclass(value, base)


def _num_parts(path: str) -> int:
    return path.removeprefix(".").count(".")
