"""``dumps`` and ``loads``: values as bytes, without pickle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nnsight_engine.compat.dumps import dumps, loads
from nnsight_engine.serialization import DecodeError, EncodeError


def test_values_come_back(tmp_path: Path) -> None:
    value: dict[str, Any] = {"direction": torch.arange(3.0), "layers": [1, (2, "three")]}
    data = dumps(value)
    assert isinstance(data, bytes)
    dumps(value, tmp_path / "value")
    for back in (loads(data), loads(tmp_path / "value"), loads(str(tmp_path / "value"))):
        assert torch.equal(back["direction"], value["direction"])
        assert back["layers"] == value["layers"]


def test_code_comes_back_where_it_is_trusted() -> None:
    offset = 2

    def add(number: int) -> int:
        return number + offset

    data = dumps(add)
    assert isinstance(data, bytes)
    with pytest.raises(DecodeError, match="holds code"):
        loads(data)
    restored: Any = loads(data, trusted=True)
    assert restored(40) == 42


def test_what_cannot_travel_is_named(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log, pytest.raises(EncodeError, match=r"\['log'\].*TextIOWrapper"):
        dumps({"log": log})
