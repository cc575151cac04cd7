from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, Final

SUPPORTED: Final = types.MappingProxyType({"cp_size": 1, "use_fp64": False, "watermark": False})
"""Arguments of which functions here have one value alone; the options that set another are refused."""

_GRID: Final = "grid"
_POINTER: Final = "_ptr"


class CpuKernel:
    """Replaces a kernel by a function of some of its arguments, by name; raise ValueError for others."""

    def __init__(self, name: str, kernel: Callable[..., Any], function: Callable[..., None]) -> None:
        parameters = inspect.signature(getattr(kernel, "fn", kernel)).parameters
        self._names: Final = {one: one.removesuffix(_POINTER).lower() for one in parameters}
        self._wanted: Final = frozenset(inspect.signature(function).parameters)
        self._name: Final = name
        self._function: Final = function
        unknown = self._wanted - set(self._names.values()) - {_GRID}
        if unknown:
            raise ValueError(
                f"vLLM's kernel {name} has the parameters {', '.join(self._names.values())}, but its "
                f"function for CPUs takes {', '.join(sorted(unknown))}; use the version of vLLM in "
                "requirements/cpu.txt"
            )

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *positional: object, **named: object) -> None:
        # Triton's own options, such as `num_warps`, are not among the names.
        given = dict(zip(self._names.values(), positional, strict=False))
        given |= {self._names[name]: value for name, value in named.items() if name in self._names}
        for name, value in SUPPORTED.items():
            if given.get(name, value) != value:
                raise NotImplementedError(
                    f"vLLM's kernel {self._name} has no function for CPUs with {name} {given[name]}"
                )
        given[_GRID] = grid
        self._function(**{name: value for name, value in given.items() if name in self._wanted})
