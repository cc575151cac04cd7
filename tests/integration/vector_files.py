"""Files of vectors, good and bad, for the fake model: four layers, eight numbers wide."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
import safetensors.torch
import torch

WIDTH = 8
ROWS = {layer: np.arange(WIDTH, dtype=np.float32) + layer for layer in (1, 2)}


def as_safetensors(name: str = "layers.{}.output", dtype: Any = np.float32) -> bytes:
    return safetensors.numpy.save({name.format(layer): row.astype(dtype) for layer, row in ROWS.items()})


def as_npz(save: Callable[..., None] = np.savez, dtype: Any = np.float32, more: Any = None) -> bytes:
    file = io.BytesIO()
    save(file, **{f"layers.{layer}": row.astype(dtype) for layer, row in ROWS.items()}, **(more or {}))
    return file.getvalue()


def as_gguf(folder: Path, dtype: Any = np.float32, architecture: str = "controlvector") -> bytes:
    path = folder / f"{architecture}-{np.dtype(dtype).name}.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_string(f"{architecture}.model_hint", "fake")
    writer.add_uint32(f"{architecture}.layer_count", len(ROWS))
    writer.add_array("notes", ["a", "b"])
    for layer, row in ROWS.items():
        writer.add_tensor(f"direction.{layer}", row.astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def as_json(**rows: Any) -> bytes:
    return json.dumps(rows or {str(layer): row.tolist() for layer, row in ROWS.items()}).encode()


def good_files(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Return files by name: what they are, and their content; each has ``ROWS``."""
    halves = {f"layer_{layer}": torch.from_numpy(row).to(torch.bfloat16) for layer, row in ROWS.items()}
    return {
        "joy.safetensors": ("safetensors", as_safetensors()),
        "double.safetensors": ("safetensors", as_safetensors("{}", np.float64)),
        "half.safetensors": ("safetensors", as_safetensors("layers.{}", np.float16)),
        "brain.safetensors": ("safetensors", safetensors.torch.save(halves)),
        "joy.npz": ("npz", as_npz()),
        "small.npz": ("npz", as_npz(np.savez_compressed, ">f8")),
        "joy.gguf": ("gguf", as_gguf(folder)),
        "half.gguf": ("gguf", as_gguf(folder, np.float16)),
        "joy.json": ("json", as_json()),
        "nested.json": ("json", b'\xef\xbb\xbf {"vectors": ' + as_json() + b"}"),
        "no ending": ("npz", as_npz()),
    }


def zipped(*entries: tuple[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return file.getvalue()


def npy(header: str, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    text = header.encode().ljust(118) + b"\n"
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text + data


def safetensors_of(header: str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def gguf_of(
    *tensors: tuple[str, tuple[int, ...], int, int],
    fields: bytes = b"",
    num_fields: int = 0,
    num_tensors: int | None = None,
    data: bytes = b"\0" * 512,
    version: int = 3,
) -> bytes:
    """Return a control vector's file; ``tensors`` are name, dimensions, type, offset."""
    architecture = string("general.architecture") + struct.pack("<I", 8) + string("controlvector")
    head = b"GGUF" + struct.pack(
        "<IQQ", version, len(tensors) if num_tensors is None else num_tensors, 1 + num_fields
    )
    body = head + architecture + fields
    for name, shape, kind, offset in tensors:
        body += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    return body + b"\0" * (-len(body) % 32) + data


def pickled_zip() -> bytes:
    file = io.BytesIO()
    torch.save({"layers.1": torch.zeros(WIDTH)}, file)  # noqa: TID251 - the point of the test
    return file.getvalue()


def elsewhere(content: bytes, offset: int) -> bytes:
    """Return a zip file whose first entry is said to lie at an offset of 64 bits."""
    start, end = content.index(b"PK\x01\x02"), content.rindex(b"PK\x05\x06")
    entry, extra = bytearray(content[start:end]), struct.pack("<HHQ", 1, 8, offset)
    name_bytes, extra_bytes = struct.unpack_from("<HH", entry, 28)
    entry[42:46] = b"\xff" * 4
    entry[30:32] = struct.pack("<H", len(extra) + extra_bytes)
    entry[46 + name_bytes : 46 + name_bytes] = extra
    tail = bytearray(content[end:])
    tail[12:16] = struct.pack("<I", len(entry))
    return content[:start] + bytes(entry) + bytes(tail)


def one_tensor(dtype: str, shape: list[int], num_claimed: int, num_bytes: int | None = None) -> bytes:
    """Return a safetensors file of a tensor that claims so many bytes, and has as many or others."""
    header = {"layers.1": {"dtype": dtype, "shape": shape, "data_offsets": [0, num_claimed]}}
    return safetensors_of(json.dumps(header), b"\0" * (num_claimed if num_bytes is None else num_bytes))


def one_array(content: bytes, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    return zipped(("1.npy", content), method=method)


def two(first: str, second: str) -> bytes:
    """Return a safetensors file of two tensors by these names."""
    return safetensors.numpy.save({first: ROWS[1], second: ROWS[2]})


def of_numbers(*numbers: Any) -> bytes:
    return safetensors.numpy.save({"1": np.array(numbers)})


Bad = tuple[str, bytes, int, str, str]
"""A file's name and content; the status, the code and a part of the message that it is refused with."""


def bad_files(folder: Path) -> dict[str, Bad]:
    """Return what is refused, by case."""
    other = 415, "unsupported_vector_format"
    pickle = *other, "runs its code"
    broken = 400, "invalid_vector_file"
    kind = 400, "wrong_dtype"
    good, zip_, control = as_safetensors(), as_npz(), as_gguf(folder)
    f32, row = "{'descr': '<f4', 'fortran_order': False, 'shape': (8,), }", b"\0" * 32
    objects = io.BytesIO()
    np.savez(objects, **{"layers.1": np.array([{}, []] * 4, object)})  # type: ignore[arg-type]
    nested = string("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 2**60)
    endless = string("a") + struct.pack("<I", 9) + struct.pack("<IQ", 8, 2**60)
    return {
        "a .pt file": ("joy.pt", good, *pickle),
        "a .pth file": ("joy.PTH", good, *pickle),
        "a .bin file": ("pytorch_model.bin", good, *pickle),
        "a .pkl file": ("joy.pkl", b"x", *pickle),
        "a pickle by another name": ("joy.safetensors", b"\x80\x04\x95\x10\0\0\0", *pickle),
        "what torch.save writes": ("joy.npz", pickled_zip(), *other, "torch.save writes"),
        "an array of objects": ("joy.npz", objects.getvalue(), *other, "Python objects"),
        "a .npy file": ("joy.npy", npy(f32, row), *other, "numpy.savez"),
        "nothing": ("joy", b"", *other, "none of safetensors"),
        "a picture": ("joy.png", b"\x89PNG\r\n\x1a\n", *other, "none of safetensors"),
        "a language model": ("m.gguf", as_gguf(folder, architecture="llama"), *other, "'llama'"),
        "safetensors cut off": ("j", good[:-1], *broken, "broken"),
        "safetensors cut off in its header": ("j", good[:40], *broken, "claims"),
        "a header that claims everything": ("j", safetensors_of("{}", length=2**62), *broken, "claims"),
        "a header of a megabyte": ("j", safetensors_of(b"{" + b" " * 2**19), *broken, "claims"),
        "a header that is no JSON": ("j", safetensors_of("{]"), *broken, "broken"),
        "a header deeper than a stack": ("j", safetensors_of("{" + '"a":{' * 50000), *broken, "broken"),
        "offsets beyond the end": ("j", one_tensor("F32", [8], 32, 16), *broken, "broken"),
        "a shape that overflows": ("j", one_tensor("F32", [2**62, 8], 32), *broken, "broken"),
        "65 dimensions": ("j", one_tensor("F32", [1] * 64 + [8], 32), *broken, "broken"),
        "65 dimensions of bfloat16": ("j", one_tensor("BF16", [1] * 64 + [8], 16), *broken, "broken"),
        "2**62 of nothing": ("j", one_tensor("F32", [0, 2**62], 0), *broken, "broken"),
        "2**63 of nothing": ("j", one_tensor("F32", [0, 2**63], 0), *broken, "broken"),
        "no tensor at all": ("j", safetensors_of("{}"), *broken, "at least one tensor"),
        "integers": ("j", one_tensor("I64", [8], 64), *kind, "I64"),
        "names without layers": ("j", as_safetensors("joy{}x"), *broken, "must say its layer"),
        "two tensors of one layer": ("j", two("1", "layers.1"), *broken, "two tensors are of"),
        "two kinds of points": (
            "j", two("layers.1.output", "layers.2.input"), 400, "vector_mismatch", "layers.*.input",
        ),
        "a point that is none": (
            "j", two("layers.1.mood", "layers.2.mood"), 400, "unknown_point", "layers.*.output",
        ),
        "a layer too many": ("j", as_npz(more={"layers.4": ROWS[1]}), 400, "unknown_layer", "-4 and 3"),
        "another model's width": ("j", of_numbers(*[0.0] * 9), 400, "wrong_width", "must have 8 numbers"),
        "a scalar": ("j", one_tensor("F32", [], 4), 400, "wrong_width", "[]"),
        "no number": ("j", of_numbers(*[np.nan] * WIDTH), 400, "not_finite", "layers.1.output"),
        "more than float32 has": ("j", of_numbers(*[1e39] * WIDTH), 400, "not_finite", "layers.1.output"),
        "a zip file cut off": ("j.npz", zip_[:-30], *broken, ""),
        "a zip file without its end": ("j.npz", zip_[: len(zip_) // 2], *broken, "end is missing"),
        "an entry far behind the end": ("j.npz", elsewhere(zip_, 2**63), *broken, "broken"),
        "a zip bomb": ("j.npz", one_array(b"\0" * (65 * 2**20)), 400, "tensor_too_large", "claim"),
        "a zip file that lies": (
            "j.npz", zip_.replace(struct.pack("<I", 160), struct.pack("<I", 90)), *broken, "",
        ),
        "other files in it": ("j.npz", zipped(("readme.txt", b"hello")), *broken, "readme.txt"),
        "a method that unpacks without end": (
            "j.npz", one_array(npy(f32, row), zipfile.ZIP_BZIP2), *broken, "savez",
        ),
        "one name twice": ("j.npz", twice(npy(f32, row)), *broken, "different names"),
        "more arrays than a vector has": (
            "j.npz", zipped(*((f"{n}.npy", b"") for n in range(9000)), method=0), *broken, "at most",
        ),
        "an array that is none": ("j.npz", one_array(b"hello, world"), *broken, "broken"),
        "an array larger than its data": (
            "j.npz", one_array(npy(f32.replace("8,", f"{2**61},"), row)), *broken, "claims",
        ),
        "an array of negative size": (
            "j.npz", one_array(npy(f32.replace("8,", "-8, -1,"), row)), *broken, "claims",
        ),
        "an array whose header computes": (
            "j.npz", one_array(npy("__import__('os').abort()")), *broken, "broken",
        ),
        "an array of integers": ("j.npz", as_npz(dtype=np.int32), *kind, "int32"),
        "an array of records": (
            "j.npz", one_array(npy(f32.replace("'<f4'", "[('a', '<f4')]"), row)), *kind, "",
        ),
        "a control vector cut off": ("j.gguf", control[:-1], *broken, "beyond the file's end"),
        "a control vector cut off early": ("j.gguf", control[:60], *broken, "cut off"),
        "a version to come": ("j.gguf", gguf_of(version=9), *broken, "version 9"),
        "big-endian": ("j.gguf", gguf_of(version=0x03000000), *broken, "little-endian"),
        "fields without end": ("j.gguf", gguf_of(num_fields=2**40), *broken, "at most"),
        "tensors without end": ("j.gguf", gguf_of(num_tensors=2**63), *broken, "at most"),
        "arrays of arrays": ("j.gguf", gguf_of(fields=nested, num_fields=1), *broken, "arrays of arrays"),
        "an array without end": ("j.gguf", gguf_of(fields=endless, num_fields=1), *broken, "cut off"),
        "a direction without end": ("j.gguf", gguf_of(("direction.1", (2**60,), 0, 0)), *broken, "claim"),
        "directions on one another": (
            "j.gguf", gguf_of(*((f"direction.{n}", (8,), 0, 0) for n in range(1, 200))), *broken, "claim",
        ),
        "a direction twice": (
            "j.gguf", gguf_of(*(("direction.1", (8,), 0, place) for place in (0, 32))), *broken, "different",
        ),
        "a direction elsewhere": ("j.gguf", gguf_of(("direction.1", (8,), 0, 2**62)), *broken, "beyond"),
        "layer zero": ("j.gguf", gguf_of(("direction.0", (8,), 0, 0)), *broken, "direction.1"),
        "a quantized direction": ("j.gguf", gguf_of(("direction.1", (8,), 2, 0)), *kind, "type 2"),
        "broken JSON": ("j.json", b'{"1": [0.5', *broken, "no JSON"),
        "JSON of words": ("j.json", as_json(**{"1": ["0.5"] * 8}), *broken, "lists of numbers"),
        "JSON without numbers": ("j.json", b'{"1": [NaN, 0, 0, 0, 0, 0, 0, 0]}', 400, "not_finite", ""),
        "JSON that is a list": ("j.json", b'{"vectors": [[0.5]]}', *broken, ""),
        "JSON deeper than a stack": ("j.json", b'{"1":' + b"[" * 100000, 400, "json_too_deep", ""),
        "more digits than numbers have": ("j.json", b'{"1": [' + b"9" * 5000 + b"]}", *broken, ""),
        "more than a model has": ("j", b"\0" * (2**20 + 4096), 413, "body_too_large", ""),
    }  # fmt: skip


def twice(content: bytes) -> bytes:
    data = zipped(("1.npy", content), ("2.npy", content), method=zipfile.ZIP_STORED)
    return data.replace(b"2.npy", b"1.npy")
