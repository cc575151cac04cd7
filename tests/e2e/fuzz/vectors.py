"""Random vectors as a case writes them: a seed instead of numbers, so that a case can be read and kept.

``{"normal": 7, "shape": [2, 128], "norm": 3.0, "as": "bfloat16"}`` stands for rows of normal numbers from
seed 7, each of norm 3, sent as a tensor object of bfloat16; ``as`` may also be ``numbers``, lists of them.
"""

from __future__ import annotations

import base64
from typing import Any, Final

import torch

FIELDS: Final = ("vector", "values", "weights")
_DTYPES: Final = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def numbers(drawn: dict[str, Any]) -> torch.Tensor:
    """Return the numbers that a request sends, float32, after rounding to the dtype in which they travel."""
    generator = torch.Generator().manual_seed(drawn["normal"])
    rows = torch.randn(drawn["shape"], generator=generator)
    rows *= drawn["norm"] / rows.norm(dim=-1, keepdim=True)
    return rows.to(_DTYPES.get(drawn["as"], torch.float32)).float()


def sent(operation: dict[str, Any]) -> dict[str, Any]:
    found = {name: _sent(value) if name in FIELDS else value for name, value in operation.items()}
    if "vectors" in found:
        found["vectors"] = [sent(one) for one in found["vectors"]]
    return found


def _sent(drawn: dict[str, Any]) -> Any:
    rows = numbers(drawn)
    if drawn["as"] == "numbers":
        return rows.tolist()
    stored = rows.to(_DTYPES[drawn["as"]]).contiguous()
    data = base64.b64encode(stored.view(torch.uint8).numpy().tobytes()).decode()
    return {"dtype": drawn["as"], "shape": list(rows.shape), "data": data, "encoding": "base64"}
