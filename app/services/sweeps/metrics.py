"""The metric of a cell: the operation that reads it, and the number in its result."""

from __future__ import annotations

import base64
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from api_schemas.interventions import Operation
from api_schemas.operations import Capture, Detect, Features, LogitLens, Probe, Where
from api_schemas.sweeps import (
    DetectorMetric,
    FeatureMetric,
    KlMetric,
    LogitDifferenceMetric,
    LogprobMetric,
    Metric,
    PerplexityMetric,
    ProbeMetric,
)
from app.engine.client import JsonObject
from app.formats.json_text import Rows

Floats = npt.NDArray[np.float64]

METRIC: Final = "metric"
"""The name of the metric's operation."""
_LAST: Final = Where(positions=[-1])


def metric_operation(metric: Metric) -> Operation | None:
    """Return the operation that reads the metric; None for perplexity, which vLLM returns."""
    read: Any = functools.partial(dict, where=_LAST, name=METRIC)
    operation: Operation | None = None
    match metric:
        case LogprobMetric():
            operation = LogitLens(layers=[-1], top_k=0, targets=[metric.token], **read())
        case LogitDifferenceMetric():
            operation = LogitLens(layers=[-1], top_k=0, targets=[metric.token, metric.other], **read())
        case KlMetric():
            operation = Capture(at="logits", dtype="float32", **read())
        case ProbeMetric():
            operation = Probe(at=metric.at, weights=metric.weights, bias=metric.bias, **read())
        case DetectorMetric():
            operation = Detect(detector=metric.detector, **read())
        case FeatureMetric():
            operation = Features(dictionary=metric.dictionary, features=[metric.feature], **read())
        case PerplexityMetric():
            pass
    return operation


def reading_of(result: JsonObject) -> Floats:
    """Return what a metric's operation read at the last position: a number, or log-probabilities for KL."""
    match result["type"]:
        case "logit_lens":
            (rows,) = result["layers"].values()
            logprobs = [target["logprob"] for target in _last(rows)["targets"]]
            numbers = [math.nan if logprob is None else logprob for logprob in logprobs]
            return np.asarray(numbers[0] - sum(numbers[1:]), np.float64)
        case "capture":
            (tensor,) = result["points"].values()
            logits = array_of(tensor)[-1].astype(np.float64)
            with np.errstate(invalid="ignore"):
                shifted = logits - logits.max()
            log_probabilities: Floats = shifted - np.log(np.exp(shifted).sum())
            return log_probabilities
        case "probe":
            (rows,) = result["points"].values()
            return _number(_last(rows))
        case "detect":
            return _number(_last(result["scores"]))
        case _:
            (feature,) = _last(result["features"])
            return _number(feature["activation"])


def _number(number: float | None) -> Floats:
    return np.asarray(math.nan if number is None else number, np.float64)


def _last(rows: Rows | list[Any]) -> Any:
    """Return the row of the last position, the only one that a metric reads."""
    if isinstance(rows, Rows):
        rows = list(itertools.chain.from_iterable(piece for piece, _ in rows.pieces()))
    return rows[-1]


def array_of(tensor: JsonObject) -> npt.NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(tensor["data"]), "<f4").reshape(tensor["shape"])


def divergence(unsteered: Floats, reading: Floats) -> float:
    """Return the KL divergence, in nats, of the distribution without interventions from another."""
    probabilities = np.exp(unsteered)
    # A token without a chance adds nothing, also where its logarithm is minus infinity.
    differences = np.subtract(unsteered, reading, out=np.zeros_like(unsteered), where=probabilities != 0)
    return float(probabilities @ differences)


def perplexity(
    prompt_logprobs: Sequence[Mapping[int, Any] | None], ids: Sequence[int], prompt_len: int
) -> Floats:
    """Return the perplexity of the tokens behind the prompt, from vLLM's `prompt_logprobs`."""
    chosen = [
        (prompt_logprobs[prompt_len + index] or {})[token]["logprob"] for index, token in enumerate(ids)
    ]
    with np.errstate(over="ignore"):
        return np.asarray(np.exp(-np.mean(np.asarray(chosen, np.float64))))
