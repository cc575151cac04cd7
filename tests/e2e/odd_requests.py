"""Requests with one thing odd: a field of a good body replaced, left out or added, as a number decides.

What is documented is tried first, then what vLLM knows beside it, then any part of any body.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Iterator
from typing import Any, Final

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from tests.e2e.live import MODEL
from tests.narrow_model import WIDTH

Place = tuple[str | int, ...]

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
ODD: Final[list[Any]] = [
    None, True, False, 0, -1, 1, 2, 7.5, -0.5, 2**31, 2**63, -(2**63) - 1, 10**30, 1e30, 1e300, -1e300,
    5e-324, float("nan"), float("inf"), "", " ", "x", "0", "-1", "null", "{}", "\0", "\n", "\ud800",
    "a\udfff", "\U0001f600", "x" * 5000, "{{", "(", "[", "\\", [], [None], [True], [0], [-1], [2**63],
    [10**30], [0.5], [""], ["x"], ["\ud800"], [[]], [[0]], [{}], ["x", 1], {}, {"x": 1}, {"": None},
    {"x": {"y": []}}, {"\ud800": "x"}, {"x": "\ud800"},
    {"type": "x"}, {"type": "function"}, {"name": "x"}, {"type": "json_schema"}, {"type": "structural_tag"},
    {"regex": "("}, {"grammar": "?"}, {"json": "{"}, {"choice": []}, {"x": float("nan")}, {"x": 10**30},
]  # fmt: skip
"""Values that hardly any field takes."""

WHERE: Final = {
    "phase": "all",
    "positions": [0, -1],
    "range": [0, 9],
    "tokens": [28],
    "exclude": {"range": [5, None]},
}
POINT: Final = "layers.3.output"
NUMBERS: Final = [0.01] * WIDTH
TENSOR: Final = {"dtype": "float32", "shape": [1], "data": "AAAAAA==", "encoding": "base64"}
OPERATIONS: Final[list[dict[str, Any]]] = [
    {"op": "steer", "at": POINT, "vector": NUMBERS, "scale": 1.0, "mode": "add", "prompts": [0]},
    {"op": "ablate", "at": [POINT], "method": "zero", "units": [0], "where": {"range": [0, 4]}},
    {"op": "capture", "at": POINT, "reduce": "last", "dtype": "float32", "name": "c", "where": WHERE},
    {"op": "probe", "at": POINT, "weights": NUMBERS, "bias": 0.0},
    {"op": "logit_lens", "layers": [5], "top_k": 2, "targets": [28], "where": {"positions": [-1]}},
    {"op": "patch", "at": POINT, "values": [NUMBERS], "where": {"positions": [0]}},
    {"op": "probe", "at": POINT, "weights": TENSOR},
]  # fmt: skip

_TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_MESSAGES: Final = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
]
_DOCUMENTS: Final = [{"title": "x", "text": "y"}]
_SHORT: Final[dict[str, Any]] = {"model": MODEL, "max_tokens": 2, "temperature": 0}
_SWEEP: Final = {
    "prompts": [{"clean": "A bird", "corrupted": "A cat"}], "metric": {"type": "logprob", "token": 5},
}  # fmt: skip
_SIDES: Final = {"positive": ["good", "nice"], "negative": ["bad", "sad"]}
BODIES: Final[dict[str, list[dict[str, Any]]]] = {
    COMPLETIONS: [
        {**_SHORT, "prompt": "A bird sat", "logprobs": 1, "stop": ["."], "logit_bias": {"5": 1.0}},
        {**_SHORT, "prompt": ["A bird", "sat"], "structured_outputs": {"choice": ["yes", "no"]}},
    ],
    CHAT: [
        {**_SHORT, "messages": _MESSAGES, "logprobs": True, "top_logprobs": 1},
        {**_SHORT, "messages": _MESSAGES, "tools": [_TOOL], "tool_choice": "none", "documents": _DOCUMENTS},
        {**_SHORT, "messages": _MESSAGES[1:], "response_format": {"type": "json_object"}},
    ],
    "/v1/tokenize": [
        {"prompt": "A bird sat"},
        {"prompt": [1, 2, 3]},
        {"messages": _MESSAGES, "tools": [_TOOL], "documents": _DOCUMENTS, "chat_template_kwargs": {"x": 1}},
    ],
    "/v1/vectors": [
        {"name": "odd", "vectors": {"3": NUMBERS}},
        {"name": "odd", "at": POINT, "values": NUMBERS},
    ],
    "/v1/vectors/train": [{"name": "odd", **_SIDES, "layers": [3], "position": -1, "holdout": 0.5}],
    "/v1/detectors": [
        {"name": "odd", "parts": [{"at": POINT, "form": "linear", "weights": NUMBERS}], "bias": 0.5},
        {
            "name": "odd",
            "parts": [{"at": POINT, "form": "distance", "mean": NUMBERS, "scale": NUMBERS}],
            "calibration": [{"threshold": 0.5, "tpr": 1.0, "fpr": 0.0}],
        },
    ],
    "/v1/detectors/train": [{"name": "odd", **_SIDES, "layers": [3], "kind": "mlp", "hidden": 2}],
    "/v1/sweeps": [
        {"method": "patch", "layers": [3], "positions": [0], **_SWEEP, "points": ["layers.{layer}.output"]},
        {"method": "ablate", "layers": [3], "positions": "last", **_SWEEP, "ablation": "mean"},
        {"method": "steer", "layers": [3], **_SWEEP, "vector": NUMBERS, "strengths": [1.0], "control": True},
    ],
}  # fmt: skip
"""Bodies that are taken as they are, by route."""

_KNOWN: Final = {COMPLETIONS: CompletionRequest, CHAT: ChatCompletionRequest}
_ODD_TEXTS: Final = [
    "", "x", "-1", "0", "1e9", "9" * 30, "null", "nan", "%00", "%ff", "%f0%9f%98%80", "..%2f", "a" * 3000,
]  # fmt: skip
_LONG: Final = {"max_tokens", "max_completion_tokens"}
_KEPT: Final = {("interventions", index, "op") for index in range(len(OPERATIONS))}
_ABSENT: Final = object()


@dataclasses.dataclass(frozen=True, slots=True)
class OddRequest:
    """A request, and which place of its JSON body, if any, is odd."""

    method: str
    url: str
    body: Any = None
    place: Place = ()
    headers: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def content(self) -> bytes:
        """The body as it is sent: with NaN as Python writes it, and surrogates as escapes."""
        return b"" if self.body is None else json.dumps(self.body).encode("ascii")

    def __str__(self) -> str:
        where = "/".join(map(str, self.place))
        return f"{self.method} {self.url} at {where or 'the top'}: {json.dumps(self.body)[:1500]}"


def requests(document: Any, seed: int) -> Iterator[OddRequest]:
    """Yield requests of a server with this OpenAPI document for ever."""
    chance = random.Random(seed)
    fields = [(path, name) for path in BODIES for name in sorted(_fields(document, path))]
    for path, name in fields:  # each once, before any twice
        yield _with(path, (name,), chance)
    parameters = [*_parameters(document)]
    while True:
        for path, name in chance.sample(fields, len(fields) // 4):
            yield _with(path, (name,), chance)
        for path in BODIES:
            for _ in range(10):
                yield _with(path, None, chance)
        for method, path, parameter in chance.sample(parameters, len(parameters) // 4):
            yield _asked(method, path, parameter, chance)


def _with(path: str, place: Place | None, chance: random.Random) -> OddRequest:
    """Return a request of a route that is odd at a place, or at any."""
    body = copy.deepcopy(chance.choice(BODIES[path]))
    if path in _KNOWN:
        if chance.random() < 0.5:
            body["stream"] = True
        if chance.random() < 0.5:
            body["interventions"] = copy.deepcopy(chance.sample(OPERATIONS, 2))
    places = [one for one in _places(body) if one not in _KEPT]
    place = place or chance.choice(places)
    if chance.random() < 0.1 and isinstance(place[-1], str):
        place = (*place[:-1], "nobody's")
    value = _ABSENT if chance.random() < 0.05 else copy.deepcopy(chance.choice(ODD))
    if place[-1] in _LONG and value in (None, _ABSENT, True):
        value = 2
    return OddRequest("POST", path, _put(body, place, value), place)


def _asked(method: str, path: str, parameter: dict[str, Any], chance: random.Random) -> OddRequest:
    """Return a request that is odd in its path, its query or a header."""
    odd = chance.choice(_ODD_TEXTS)
    url, headers = path, {}
    if parameter["in"] == "path":
        url = path.replace(f"{{{parameter['name']}}}", odd)
    elif parameter["in"] == "query":
        url = f"{path}?{parameter['name']}={odd}"
    else:
        headers = {parameter["name"]: odd}
    for rest in ("{job_id}", "{key_id}", "{name}", "{tenant}", "{result_id}"):
        url = url.replace(rest, "x")
    return OddRequest(method, url, headers=headers)


def _fields(document: Any, path: str) -> set[str]:
    """Return the fields that a route's body may have at the top."""
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    named, waiting = set(_KNOWN[path].model_fields) if path in _KNOWN else set(), [schema]
    while waiting:
        one = waiting.pop()
        if "$ref" in one:
            waiting.append(document["components"]["schemas"][one["$ref"].rsplit("/", 1)[1]])
        waiting += [*one.get("anyOf", ()), *one.get("oneOf", ())]
        named |= set(one.get("properties", ()))
    return named


def _parameters(document: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            for parameter in operation.get("parameters", ()):
                yield method.upper(), path, parameter


def _places(value: Any, above: Place = ()) -> Iterator[Place]:
    """Yield where something stands in a body, though not each number of a long list."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if not (isinstance(key, int) and key > 1):
            yield (*above, key)
            yield from _places(item, (*above, key))


def _put(body: Any, place: Place, value: Any) -> Any:
    holder = body
    for part in place[:-1]:
        holder = holder[part]
    if value is not _ABSENT:
        holder[place[-1]] = value
    elif isinstance(holder, dict):
        holder.pop(place[-1], None)
    else:
        del holder[place[-1]]
    return body
