"""A dictionary's weights as a safetensors file, read as untrusted input: the header is checked first.

The file is mapped and read in parts, so that checking gigabytes needs megabytes. Runs in a thread.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, Final

import safetensors
import torch

from api_schemas.errors import ApiError, ErrorCode, clip
from nnsight_engine.core.dtypes import LARGEST_WEIGHT
from nnsight_engine.features.config import DictionaryConfig
from nnsight_engine.features.dictionary import Dictionary

PARAM: Final = "weights"
HEADER_BYTES: Final = 256 * 1024
"""The largest header of a file: a dictionary has few tensors."""
_LENGTH_BYTES: Final = 8
_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ITEM_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}
_PART_BYTES: Final = 16 * 1024 * 1024
_LARGEST: Final = {"r_mag": math.log(LARGEST_WEIGHT)}
"""The largest numbers of tensors of which the exponential is a weight."""
_FACTORS: Final = "scaling_factor"
"""A tensor of older files, which is ignored if all of it is one."""
_PICKLE: Final = re.compile(rb"\x80[\x00-\x05]")
_ZIP: Final = b"PK\x03\x04"
_PICKLED_NAMES: Final = frozenset({"pt", "pth", "bin", "pkl", "pickle", "ckpt", "joblib"})
_ADVICE: Final = (
    "Save the tensors with safetensors.torch.save_file, as SAELens does (sae_weights.safetensors)."
)


def refuse_pickle(name: str, beginning: bytes) -> None:
    """Raise ApiError ``unsupported_dictionary`` by name or first bytes, before the rest is received."""
    ending = name.rpartition(".")[2].lower() if "." in name else ""
    # A safetensors file may begin with the same bytes: they are the length of its header.
    is_safetensors = beginning[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{"
    if ending in _PICKLED_NAMES or (_PICKLE.match(beginning) and not is_safetensors):
        raise ApiError(
            ErrorCode.UNSUPPORTED_DICTIONARY,
            f"The weights are a pickle, or may be one, and reading a pickle runs its code. {_ADVICE}",
            PARAM,
        )
    if ending in {"npz", "npy"} or beginning.startswith((_ZIP, b"\x93NUMPY")):
        raise ApiError(
            ErrorCode.UNSUPPORTED_DICTIONARY,
            f"The weights are numpy's arrays, or an archive that torch.save writes. {_ADVICE}",
            PARAM,
        )


def check_weights(path: Path, config: DictionaryConfig) -> str:
    """Return the dtype; raise ApiError ``invalid_dictionary``, ``wrong_dtype`` or ``not_finite``."""
    _check_length(path)
    try:
        with safetensors.safe_open(path, "pt") as file:
            dtype = _check_header(file, config)
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                _check_numbers(file, name, dtype)
    except safetensors.SafetensorError as error:
        raise _invalid(f"The file is broken: {clip(str(error))}.") from error
    return _DTYPES[dtype]


def load_dictionary(
    path: Path, config: DictionaryConfig, *, device: str = "cpu", dtype: torch.dtype | None = None
) -> Dictionary:
    """Return the dictionary of a checked file, in the file's dtype unless another is given."""
    with safetensors.safe_open(path, "pt") as file:
        tensors = {
            name: file.get_tensor(name).to(device=device, dtype=dtype) for name in config.tensor_shapes
        }
    return Dictionary(config, tensors)


def _check_length(path: Path) -> None:
    """Refuse a header that is too long or no JSON object, before safetensors parses it."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        maximum = min(HEADER_BYTES, num_bytes - _LENGTH_BYTES)
        if not 0 < length <= maximum:
            raise _invalid(
                f"The file has {num_bytes} bytes and is no safetensors file of a dictionary: its header "
                f"claims {length} bytes, and may have {max(0, maximum)}. {_ADVICE}"
            )
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise _invalid(f"The file is no safetensors file: its header is no JSON. {_ADVICE}") from error
    if not isinstance(header, dict):
        raise _invalid(f"The file is no safetensors file: its header is no object. {_ADVICE}")


def _check_header(file: Any, config: DictionaryConfig) -> str:
    """Check names, shapes and dtype of all tensors; return the dtype in safetensors' words."""
    shapes, dtypes = {}, set()
    for name in file.keys():  # noqa: SIM118 - it is no mapping
        part = file.get_slice(name)
        shapes[name] = tuple(part.get_shape())
        dtypes.add(str(part.get_dtype()))
    expected = dict(config.tensor_shapes)
    if _FACTORS in shapes:
        expected[_FACTORS] = (config.num_features,)
    what = f"architecture {config.architecture}"
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise _invalid(
            f"The tensors {', '.join(missing)} are missing ({what}); the file has {_listed(shapes)}."
        )
    extra = [name for name in shapes if name not in expected]
    if extra:
        raise _invalid(f"The tensors {_listed(extra)} do not belong to a dictionary ({what}).")
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise _invalid(
                f"{name} must have the shape {list(shape)} by the cfg, got {list(shapes[name])[:8]}."
            )
    if len(dtypes) != 1 or not dtypes <= _DTYPES.keys():
        raise ApiError(
            ErrorCode.WRONG_DTYPE,
            f"A dictionary's tensors have one dtype, of {', '.join(_DTYPES)}; got {_listed(sorted(dtypes))}.",
            PARAM,
        )
    return dtypes.pop()


def _check_numbers(file: Any, name: str, dtype: str) -> None:
    """Check the numbers of a tensor, a part of its rows at a time, so that memory stays small."""
    part = file.get_slice(name)
    num_rows, *rest = part.get_shape()
    step = max(1, _PART_BYTES // (_ITEM_BYTES[dtype] * (rest[0] if rest else 1)))
    largest = _LARGEST.get(name, LARGEST_WEIGHT)
    for start in range(0, num_rows, step):
        numbers = part[start : start + step]
        # An infinite number is larger, and NaN is not smaller.
        if not (numbers.float().abs() <= largest).all():
            raise ApiError(
                ErrorCode.NOT_FINITE,
                f"Every number of {name} must be finite, and at most {largest:.3g} in size, so that "
                "activations are finite in float32; it has others.",
                PARAM,
            )
        if name == _FACTORS and not (numbers == 1).all():
            raise _invalid(
                f"{_FACTORS} is not supported: multiply the rows of W_dec by it, and leave it out."
            )


def _listed(names: Any) -> str:
    return ", ".join(clip(name) for name in list(names)[:8]) or "none"


def _invalid(message: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_DICTIONARY, message, PARAM)
