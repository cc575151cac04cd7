"""Detectors for the fake model, whose layers are eight numbers wide: as JSON and as files, good and bad."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy

from nnsight_engine.core.detector import TENSORS, Form

WIDTH = 8
NUM_LAYERS = 4


def tensors_of(form: str, random: np.random.Generator, hidden: int = 3) -> dict[str, Any]:
    """Return random tensors of a part."""
    every: dict[str, dict[str, tuple[int, ...]]] = {
        "linear": {"weights": (WIDTH,)},
        "mlp": {"hidden_weights": (hidden, WIDTH), "hidden_bias": (hidden,), "weights": (hidden,)},
        "distance": {"mean": (WIDTH,), "scale": (WIDTH,)},
    }
    shapes = every[form]
    assert list(shapes) == list(TENSORS[Form(form)])
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def random_detector(seed: int, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the head of a detector with a part at each of some layers, and its tensors by full name."""
    random = np.random.default_rng(seed)
    layers = random.permutation(NUM_LAYERS)[: random.integers(1, NUM_LAYERS + 1)]
    forms = [str(random.choice(list(Form))) for _ in layers]
    head = {
        "parts": [
            {"at": f"layers.{layer}.output", "form": form} for layer, form in zip(layers, forms, strict=True)
        ],
        "bias": float(random.normal()),
        "link": str(random.choice(["identity", "sigmoid"])),
        "threshold": float(random.normal()),
        "calibration": [{"threshold": 0.5, "tpr": 0.75, "fpr": 0.25}],
        **fields,
    }
    tensors = {
        f"parts.{index}.{name}": tensor
        for index, form in enumerate(forms)
        for name, tensor in tensors_of(form, random).items()
    }
    return head, tensors


def as_file(head: Any, tensors: Mapping[str, Any]) -> bytes:
    metadata = {} if head is None else {"detector": head if isinstance(head, str) else json.dumps(head)}
    return safetensors.numpy.save(dict(tensors), metadata)


def as_body(head: Mapping[str, Any], tensors: Mapping[str, Any], name: str = "refusal") -> dict[str, Any]:
    """Return the same as JSON."""
    parts = [
        {
            **part,
            **{
                key.removeprefix(f"parts.{index}."): tensor.tolist()
                for key, tensor in tensors.items()
                if key.startswith(f"parts.{index}.")
            },
        }
        for index, part in enumerate(head["parts"])
    ]
    return {**head, "name": name, "parts": parts}


LINEAR = {"parts": [{"at": "layers.1.output", "form": "linear"}]}
ROW = np.arange(WIDTH, dtype=np.float32)


def _linear(**fields: Any) -> bytes:
    return as_file({**LINEAR, **fields}, {"parts.0.weights": ROW})


def _part(at: Any = "layers.1.output", form: str = "linear", **tensors: Any) -> bytes:
    found = {f"parts.0.{name}": tensor for name, tensor in (tensors or {"weights": ROW}).items()}
    return as_file({"parts": [{"at": at, "form": form}]}, found)


def bad_files() -> dict[str, tuple[bytes, int, str, str]]:
    """Return what is refused, by case: the file's content, status, code, part of the message."""
    broken = 400, "invalid_detector"
    shape = 422, "invalid_shape"
    two = {"parts": [{"at": at, "form": "linear"} for at in ("layers.1.output", "layers.-3.output")]}
    rows = {f"parts.{index}.weights": ROW for index in range(2)}
    hidden = np.ones((3, WIDTH), np.float32)
    nan, huge = ROW.copy(), ROW.astype(np.float64)
    nan[3], huge[3] = np.nan, 1e39
    deep = '{"parts": ' + "[" * 5000
    return {
        "a pickle": (b"\x80\x04\x95\x10\0\0\0\0\0", 415, "unsupported_vector_format", "runs its code"),
        "a zip file": (b"PK\x03\x04" + b"\0" * 40, 415, "unsupported_vector_format", "not safetensors"),
        "a .npy file": (b"\x93NUMPY" + b"\0" * 40, 415, "unsupported_vector_format", "not safetensors"),
        "nothing": (b"", 415, "unsupported_vector_format", "not safetensors"),
        "cut off": (_linear()[:-1], *broken, "broken"),
        "a header that claims everything": (b"\xff" * 7 + b"\x0f{}", *broken, "claims"),
        "no head": (as_file(None, rows), *broken, "needs its head"),
        "a head that is no JSON": (as_file("{]", rows), 400, "invalid_json", "head"),
        "a head that is a list": (as_file("[]", rows), *shape, "head"),
        "a deep head": (as_file(deep, rows), 400, "json_too_deep", "head"),
        "NaN in the head": (as_file('{"parts": [], "bias": NaN}', rows), 400, "not_finite", "NaN"),
        "a bias beyond float32": (_linear(bias=1e39), 400, "not_finite", "bias"),
        "a threshold beyond float32": (_linear(threshold=-1e39), 400, "not_finite", "threshold"),
        "an endless integer": (as_file('{"bias": ' + "9" * 5000 + "}", rows), 400, "invalid_json", ""),
        "no parts": (as_file({"parts": []}, rows), *shape, "parts"),
        "too many parts": (as_file({"parts": LINEAR["parts"] * 65}, rows), *shape, "parts"),
        "an unknown form": (_part(form="cubic"), *shape, "form"),
        "an unknown link": (_linear(link="step"), *shape, "link"),
        "an unknown field": (_linear(mood="x"), *shape, "mood"),
        "a rate above one": (_linear(calibration=[{"threshold": 0, "tpr": 2, "fpr": 0}]), *shape, "tpr"),
        "an endless calibration": (
            _linear(calibration=[{"threshold": 0, "tpr": 0, "fpr": 0}] * 300), *shape, "calibration",
        ),
        "a point that is none": (_part("layers.1.mood"), 400, "unknown_point", "layers.*.output"),
        "no point": (_part("mood"), 400, "unknown_point", "mood"),
        "a layer too many": (_part("layers.4.output"), 400, "unknown_layer", "-4 and 3"),
        "several points": (_part("layers.*.output"), *broken, "reads one point"),
        "sampled tokens": (_part("samples"), 400, "unknown_point", "samples"),
        "two parts at one point": (as_file(two, rows), *broken, "two read layers.1.output."),
        "another model's width": (_part(weights=ROW[:7]), 400, "wrong_width", "[8]"),
        "a matrix": (_part(weights=ROW[None]), 400, "wrong_width", "[1, 8]"),
        "hidden units of none": (
            _part(form="mlp", hidden_weights=hidden[:0], weights=ROW[:0]), 400, "wrong_width", "1 to 4096",
        ),
        "too many hidden units": (
            _part(form="mlp", hidden_weights=np.ones((4097, WIDTH), np.float32), weights=ROW),
            400, "wrong_width", "1 to 4096",
        ),
        "hidden units of another width": (
            _part(form="mlp", hidden_weights=hidden[:, :7], weights=ROW[:3]), 400, "wrong_width", "[3, 8]",
        ),
        "weights for other hidden units": (
            _part(form="mlp", hidden_weights=hidden, weights=ROW[:4]), 400, "wrong_width", "[3]",
        ),
        "a missing tensor": (_part(form="mlp", weights=ROW), *broken, "hidden_weights"),
        "a missing mean": (_part(form="distance", scale=ROW), *broken, "mean"),
        "an extra tensor": (_part(weights=ROW, mean=ROW), *broken, "'mean'"),
        "a part too many": (as_file(LINEAR, rows), *broken, "'parts.1.weights'"),
        "a name that is none": (as_file(LINEAR, {"w": ROW}), *broken, "'w'"),
        "a short name of two parts": (as_file(two, {"weights": ROW}), *broken, "'weights'"),
        "not a number": (_part(weights=nan), 400, "not_finite", "weights"),
        "more than float32 has": (_part(weights=huge), 400, "not_finite", "weights"),
        "integers": (_part(weights=ROW.astype(np.int64)), 400, "wrong_dtype", "I64"),
    }  # fmt: skip
