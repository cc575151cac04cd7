"""Files of weights: good ones load as they were saved, and no broken one passes or does harm."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import safetensors.torch
import torch

from api_schemas.errors import ApiError
from nnsight_engine.core.dtypes import LARGEST_WEIGHT
from nnsight_engine.features import weights_file
from nnsight_engine.features.config import Architecture, DictionaryConfig
from nnsight_engine.features.dictionary import Dictionary
from nnsight_engine.features.weights_file import check_weights, load_dictionary, refuse_pickle
from tests.unit.features.reference import some_config, some_tensors

CONFIG: Final = DictionaryConfig(Architecture.JUMPRELU, 8, 16, 8)


def saved(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path = folder / "sae_weights.safetensors"
    safetensors.torch.save_file({name: one.contiguous() for name, one in tensors.items()}, path)
    return path


def good(**changed: torch.Tensor | None) -> dict[str, torch.Tensor]:
    tensors: dict[str, Any] = {**some_tensors(np.random.default_rng(0), CONFIG), **changed}
    return {name: one for name, one in tensors.items() if one is not None}


def test_every_architecture_and_dtype_loads(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    for architecture in Architecture:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            config = some_config(chance, architecture)
            tensors = some_tensors(chance, config, dtype)
            path = saved(tmp_path, tensors)
            assert f"torch.{check_weights(path, config)}" == str(dtype)
            loaded = load_dictionary(path, config)
            assert {name: one.dtype for name, one in loaded.tensors.items()} == dict.fromkeys(tensors, dtype)
            for name, one in tensors.items():
                torch.testing.assert_close(loaded.tensors[name], one, rtol=0, atol=0)
            assert load_dictionary(path, config, dtype=torch.float32).tensors["W_enc"].dtype == torch.float32


def test_factors_of_one_are_ignored(tmp_path: Path) -> None:
    path = saved(tmp_path, good(scaling_factor=torch.ones(16)))
    check_weights(path, CONFIG)
    assert "scaling_factor" not in load_dictionary(path, CONFIG).tensors
    with pytest.raises(ApiError, match="multiply the rows of W_dec"):
        check_weights(saved(tmp_path, good(scaling_factor=torch.full((16,), 2.0))), CONFIG)


@pytest.mark.parametrize(
    ("changed", "code", "message"),
    [
        ({"threshold": None}, "invalid_dictionary", "tensors threshold are missing"),
        ({"b_gate": torch.zeros(16)}, "invalid_dictionary", "b_gate do not belong"),
        ({"W_enc": torch.zeros(16, 8)}, "invalid_dictionary", "W_enc must have the shape [8, 16]"),
        ({"W_dec": torch.zeros(16, 9)}, "invalid_dictionary", "W_dec must have the shape [16, 8]"),
        ({"b_enc": torch.zeros(1, 16)}, "invalid_dictionary", "b_enc must have the shape [16]"),
        ({"b_enc": torch.zeros(16, dtype=torch.float16)}, "wrong_dtype", "one dtype"),
        ({"scaling_factor": torch.ones(3)}, "invalid_dictionary", "scaling_factor must have the shape [16]"),
        ({"b_dec": torch.full((8,), float("nan"))}, "not_finite", "b_dec must be finite"),
        ({"W_dec": torch.full((16, 8), float("-inf"))}, "not_finite", "W_dec must be finite"),
        ({"W_enc": torch.full((8, 16), -3e38)}, "not_finite", "W_enc must be finite, and at most 1e+16"),
    ],
)
def test_tensors_that_do_not_fit(
    tmp_path: Path, changed: dict[str, torch.Tensor | None], code: str, message: str
) -> None:
    with pytest.raises(ApiError) as caught:
        check_weights(saved(tmp_path, good(**changed)), CONFIG)
    assert (caught.value.code, caught.value.param) == (code, "weights")
    assert message in caught.value.message


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn, torch.bool])
def test_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: one.to(dtype) for name, one in good().items()}
    with pytest.raises(ApiError) as caught:
        check_weights(saved(tmp_path, tensors), CONFIG)
    assert caught.value.code == "wrong_dtype"


def test_the_largest_weights_that_are_accepted_give_finite_activations(tmp_path: Path) -> None:
    chance = np.random.default_rng(3)
    for architecture in Architecture:
        config = some_config(chance, architecture)
        values = torch.from_numpy(chance.normal(size=(5, config.input_width)) * 1e4)
        tensors = some_tensors(chance, config)
        for name, one in tensors.items():
            most = math.log(LARGEST_WEIGHT) if name == "r_mag" else LARGEST_WEIGHT
            tensors[name] = one.sign() * (most * (1 - 1e-6))
        check_weights(saved(tmp_path, tensors), config)
        found = Dictionary(config, tensors).encode(values)
        assert found.isfinite().all()
        for name in tensors:
            larger = tensors | {name: tensors[name] * 1.1}
            with pytest.raises(ApiError, match=name):
                check_weights(saved(tmp_path, larger), config)


def test_one_bad_number_anywhere_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_file, "_PART_BYTES", 64)
    chance = np.random.default_rng(1)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for _ in range(10):
            tensors = {name: one.to(dtype) for name, one in good().items()}
            flat = tensors[str(chance.choice(list(tensors)))].view(-1)
            flat[int(chance.integers(len(flat)))] = float(chance.choice([np.nan, np.inf, -np.inf]))
            with pytest.raises(ApiError) as caught:
                check_weights(saved(tmp_path, tensors), CONFIG)
            assert caught.value.code == "not_finite"


def test_headers_that_lie(tmp_path: Path) -> None:
    whole = saved(tmp_path, good()).read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]

    def rewritten(**changed: Any) -> bytes:
        text = json.dumps({**header, **changed}).encode()
        return len(text).to_bytes(8, "little") + text + data

    def entry(shape: list[int], start: int, stop: int, dtype: str = "F32") -> dict[str, Any]:
        return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}

    bad = {
        "empty": b"",
        "short": whole[:7],
        "no header": (0).to_bytes(8, "little") + data,
        "a huge header": (2**62).to_bytes(8, "little") + whole[8:],
        "a header beyond the file": (len(whole)).to_bytes(8, "little") + whole[8:],
        "no JSON": whole[:8] + b"x" * length + data,
        "a list": (2).to_bytes(8, "little") + b"[]",
        "nested": (2 * 10**5).to_bytes(8, "little") + b"[" * 10**5 + b"]" * 10**5,
        "cut": whole[:-4],
        "longer": whole + b"0000",
        "huge shapes": rewritten(W_enc=entry([2**40, 2**40], 0, 512)),
        "beyond the end": rewritten(W_enc=entry([8, 16], 2**40, 2**40 + 512)),
        "overlap": rewritten(W_enc=header["W_dec"]),
        "negative": rewritten(W_enc=entry([-8, 16], 0, 512)),
        "no dtype": rewritten(W_enc=entry([8, 16], 0, 512, "F31")),
    }
    path = tmp_path / "bad.safetensors"
    for case, content in bad.items():
        path.write_bytes(content)
        with pytest.raises(ApiError) as caught:
            check_weights(path, CONFIG)
        assert caught.value.code == "invalid_dictionary", case


def test_random_damage_is_refused_or_harmless(tmp_path: Path) -> None:
    whole = saved(tmp_path, good()).read_bytes()
    chance = np.random.default_rng(2)
    path = tmp_path / "bad.safetensors"
    for _ in range(300):
        content = bytearray(whole)
        match int(chance.integers(3)):
            case 0:
                for _ in range(int(chance.integers(1, 8))):
                    content[int(chance.integers(len(content)))] = int(chance.integers(256))
            case 1:
                content = content[: int(chance.integers(len(content)))]
            case 2:
                at = int(chance.integers(len(content)))
                content[at:at] = chance.bytes(int(chance.integers(1, 64)))
        path.write_bytes(content)
        try:
            check_weights(path, CONFIG)
        except ApiError as error:
            assert error.code in {"invalid_dictionary", "wrong_dtype", "not_finite"}  # noqa: PT017
        else:
            assert len(content) == len(whole)
            loaded = load_dictionary(path, CONFIG)
            assert all(torch.isfinite(one).all() for one in loaded.tensors.values())


def test_pickles_are_refused_by_their_name_and_their_first_bytes() -> None:
    for name, beginning in (
        ("sae.pt", b""), ("SAE.PKL", b""), ("x.bin", b""), ("sae.npz", b""),
        ("sae.safetensors", b"PK\x03\x04\x00\x00"),
        ("sae.safetensors", b"\x80\x04\x95\x05"), ("", b"\x93NUMPY\x01\x00"),
    ):  # fmt: skip
        with pytest.raises(ApiError) as caught:
            refuse_pickle(name, beginning)
        assert caught.value.code == "unsupported_dictionary"
    for length in (512, 0x0480):  # the latter's first bytes are those of a pickle, too
        refuse_pickle("sae_weights.safetensors", length.to_bytes(8, "little") + b"{")
