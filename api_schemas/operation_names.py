"""What operations name: points, tensors, conditions, and the stored things that names stand for.

Names are resolved by the server, before a request is compiled; until then they stand for nothing. Paths are
those of fields in an operation, such as ``vectors.1.vector`` or ``when.all.0.detector``.
"""

from __future__ import annotations

from collections.abc import Mapping

from api_schemas.conditions import NamedDetector, Test, When, inner_tests, points_of
from api_schemas.detectors import DetectorName, DetectorUsed
from api_schemas.dictionaries import DictionaryName, DictionaryUsed, NamedDictionary
from api_schemas.interventions import Intervention
from api_schemas.operations import Ablate, Detect, Feature, Features, Flag, Patch, Probe, Steer, Stop, Write
from api_schemas.tensors import NamedTensor, TensorInput, VectorUsed


def points_of_names(op: Detect | Features | Feature | Stop | Flag) -> list[str]:
    """Return the points of an operation without `at`: those of its names, once they are resolved."""
    match op:
        case Detect():
            return points_of(op.detector)
        case Features():
            return points_of(op.dictionary)
        case Feature():
            content = op.dictionary.content if isinstance(op.dictionary, NamedDictionary) else None
            return [] if content is None else list(dict.fromkeys((content.at, content.output_at)))
    return [
        point
        for test in inner_tests(op.when).values()
        for point in (
            [test.probe.at] if test.probe is not None else points_of(test.detector or test.dictionary)
        )
    ]


def tensors_of(op: Intervention) -> dict[str, TensorInput]:
    """Return an operation's tensors, as numbers or as names, by their paths."""
    match op:
        case Steer(vectors=[*weighted_vectors]):
            return {
                f"vectors.{index}.vector": weighted.vector for index, weighted in enumerate(weighted_vectors)
            }
        case Steer(vector=vector) | Ablate(vector=vector):
            return {} if vector is None else {"vector": vector}
        case Probe():
            return {"weights": op.weights}
        case Patch():
            return {"values": op.values}
        case _:
            return {}


def with_tensors(op: Intervention, tensors: Mapping[str, TensorInput]) -> Intervention:
    """Return an operation with other tensors at some of the paths that ``tensors_of`` returns."""
    if not isinstance(op, Steer) or op.vectors is None:
        return op.model_copy(update=dict(tensors))
    vectors = [
        weighted.model_copy(update={"vector": tensors.get(f"vectors.{index}.vector", weighted.vector)})
        for index, weighted in enumerate(op.vectors)
    ]
    return op.model_copy(update={"vectors": vectors})


def vectors_used(op: Intervention) -> dict[str, VectorUsed]:
    """Return the stored vectors that an operation's names were resolved to, by path."""
    tensors = tensors_of(op)
    for path, test in condition_tests(op).items():
        if test.probe is not None:
            tensors[f"{path}.probe.weights"] = test.probe.weights
    return {
        path: tensor.used
        for path, tensor in tensors.items()
        if isinstance(tensor, NamedTensor) and tensor.used is not None
    }


def condition_of(op: Intervention) -> When | None:
    return op.when if isinstance(op, Write | Stop | Flag) else None


def condition_tests(op: Intervention) -> dict[str, Test]:
    when = condition_of(op)
    return {} if when is None else inner_tests(when)


def detectors_used(op: Intervention) -> dict[str, DetectorUsed]:
    """Return the stored detectors that an operation's names were resolved to, by path."""
    names: dict[str, DetectorName | None] = {
        f"{path}.detector": test.detector for path, test in condition_tests(op).items()
    }
    if isinstance(op, Detect):
        names["detector"] = op.detector
    return {
        path: name.used
        for path, name in names.items()
        if isinstance(name, NamedDetector) and name.used is not None
    }


def dictionaries_used(op: Intervention) -> dict[str, DictionaryUsed]:
    """Return the stored dictionaries that an operation's names were resolved to, by path."""
    names: dict[str, DictionaryName | None] = {
        f"{path}.dictionary": test.dictionary for path, test in condition_tests(op).items()
    }
    if isinstance(op, Features | Feature):
        names["dictionary"] = op.dictionary
    return {
        path: name.used
        for path, name in names.items()
        if isinstance(name, NamedDictionary) and name.used is not None
    }


def features_named(op: Intervention) -> dict[str, int | str]:
    """Return the features that an operation names, by path; ids once names are resolved."""
    features = {
        f"{path}.feature": test.feature
        for path, test in condition_tests(op).items()
        if test.feature is not None
    }
    match op:
        case Features(features=[*listed]):
            features |= {f"features.{index}": feature for index, feature in enumerate(listed)}
        case Feature():
            features |= {
                f"changes.{index}.feature": change.feature for index, change in enumerate(op.changes)
            }
    return features
