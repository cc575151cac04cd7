from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from vllm import SamplingParams

from nnsight_engine.vllm_backend.prompts import Request

_NAMES: Final = tuple(name for name in SamplingParams.__struct_fields__ if not name.startswith("_"))


def sampling_params(request: Request, shared: Mapping[str, Any]) -> SamplingParams:
    """Return a request's sampling parameters as a new object; raise TypeError or VLLMValidationError."""
    params, named = request.sampling_over(shared)
    _refuse_unknown(named)
    if params is None:
        return SamplingParams(**named)
    if not isinstance(params, SamplingParams):
        raise TypeError(
            f"sampling_params= takes vLLM's SamplingParams, got {type(params).__name__}; give parameters by "
            "name instead, `temperature=0.0, max_tokens=8`"
        )
    # Replacing fields validates the object again, and recomputes the fields derived from them.
    return msgspec.structs.replace(params.clone(), **named)


def _refuse_unknown(names: Iterable[str]) -> None:
    for name in names:
        if name not in _NAMES:
            near = difflib.get_close_matches(name, _NAMES, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(_NAMES)}"
            raise TypeError(f"vLLM has no sampling parameter {name}; {hint}")
