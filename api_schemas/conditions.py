"""Conditions of operations: tests on scores of positions, joined by ``all``, ``any`` and ``not``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, PrivateAttr, Tag, model_validator
from pydantic_core import PydanticCustomError

from api_schemas.detectors import DetectorName, DetectorUsed
from api_schemas.dictionaries import DictionaryName, FeatureName, NamedDictionary
from api_schemas.errors import ErrorCode
from api_schemas.fields import Integer, Items, Number, PointText, Strict, field_error
from api_schemas.tensors import TensorInput

MAX_TESTS: Final = 16
"""Maximum number of tests of a condition."""
MAX_WINDOW: Final = 64
"""Maximum number of positions of a window."""
_MAX_DEPTH: Final = 8

_JOINS: Final = ("all", "any", "not")


class NamedDetector(DetectorName):
    """A stored detector that a name resolved to; made by the server only."""

    _used: DetectorUsed | None = PrivateAttr(default=None)
    _content: Any = PrivateAttr(default=None)

    @classmethod
    def of(cls, used: DetectorUsed, content: object) -> NamedDetector:
        """Wrap a ``core.detector.Detector``, without checks."""
        detector = cls.model_construct(name=used.name, id=used.id)
        detector._used, detector._content = used, content  # noqa: SLF001 - our own
        return detector

    @property
    def used(self) -> DetectorUsed | None:
        return self._used

    @property
    def content(self) -> Any:
        """The ``core.detector.Detector``."""
        return self._content


class InlineProbe(Strict):
    """A score given as numbers: the value's dot product with the weights, plus a bias."""

    at: PointText = Field(description="A point such as layers.3.output.")
    weights: TensorInput = Field(description="[width].")
    bias: Number = 0.0


class Test(Strict):
    """A test of the scores of a detector or a probe, or of a feature's activations, called scores here.

    It begins to hold where the reduced score is above ``above`` (or below ``below``), and holds until it no
    longer is, by a margin of ``hysteresis``.
    """

    __test__ = False

    detector: DetectorName | NamedDetector | None = Field(
        default=None, description="A stored detector's name, such as refusal@2."
    )
    probe: InlineProbe | None = Field(default=None, description="Instead of a detector: weights and a bias.")
    dictionary: DictionaryName | NamedDictionary | None = Field(
        default=None, description="Instead of a detector: a stored dictionary's name, such as layer12@2."
    )
    feature: FeatureName | None = Field(
        default=None, description="Of the dictionary: the feature, by its id or its exact label."
    )
    above: Number | None = Field(
        default=None,
        description="It holds for scores above it; by default the detector's threshold, and 0 for a feature.",
    )
    below: Number | None = Field(
        default=None, description="Instead of `above`: it holds for scores below it."
    )
    over: Literal["position", "prompt", "window"] = Field(
        default="position",
        description="The scores that are reduced: of the position, of the prompt up to it, of the last ones.",
    )
    of: Annotated[Integer, Field(ge=1, le=MAX_WINDOW)] | None = Field(
        default=None, description="Number of positions of a window."
    )
    reduce: Literal["max", "mean"] = Field(
        default="max", description="With `below`, `max` is the smallest score."
    )
    until: Literal["clears", "end"] = Field(
        default="clears", description="Whether it may cease to hold, or holds to the end."
    )
    hysteresis: Annotated[Number, Field(ge=0)] = Field(
        default=0.0, description="How far the score must come back for the test to cease."
    )

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if [self.detector, self.probe, self.dictionary].count(None) != 2:
            raise _invalid("a test has one of `detector`, `probe` and `dictionary`", "detector")
        if (self.dictionary is None) != (self.feature is None):
            missing = "feature" if self.feature is None else "dictionary"
            raise _invalid("`dictionary` and `feature` belong together", missing)
        if self.above is not None and self.below is not None:
            raise _invalid("a test has either `above` or `below`", "above")
        if self.probe is not None and self.above is None and self.below is None:
            raise _invalid("a test of a `probe` needs `above` or `below`", "above")
        if (self.over == "window") != (self.of is not None):
            raise _invalid("`of`, a number of positions, belongs to `over` window", "of")
        if self.until == "end" and self.hysteresis:
            raise _invalid("`hysteresis` has no effect with `until` end", "hysteresis")
        return self


class AllOf(Strict):
    """Holds where all conditions hold."""

    all: Items[When] = Field(min_length=1, max_length=MAX_TESTS)


class AnyOf(Strict):
    """Holds where at least one condition holds."""

    any: Items[When] = Field(min_length=1, max_length=MAX_TESTS)


class Not(Strict):
    """Holds where the condition does not."""

    not_: When = Field(alias="not")


def _form_of_condition(value: Any) -> str:
    """Return pydantic's tag of a condition: the name of the class that it is parsed as."""
    for join, kind in (("all", AllOf), ("any", AnyOf), ("not", Not)):
        if isinstance(value, kind) or (isinstance(value, dict) and join in value):
            return kind.__name__
    return Test.__name__


# Tags stand in the locations of pydantic's errors, so none may be a field's name.
When = Annotated[
    Annotated[Test, Tag(Test.__name__)]
    | Annotated[AllOf, Tag(AllOf.__name__)]
    | Annotated[AnyOf, Tag(AnyOf.__name__)]
    | Annotated[Not, Tag(Not.__name__)],
    Discriminator(_form_of_condition),
]
"""A condition."""


def _check_size(value: Any) -> Any:
    """Reject a condition that is nested too deep or has too many tests, before it is parsed."""
    level, num_tests, depth = [value], 0, 0
    while level:
        depth += 1
        inner: list[Any] = []
        for condition in level:
            fields = condition if isinstance(condition, dict) else {}
            join = next((name for name in _JOINS if name in fields), None)
            num_tests += join is None
            contents = fields.get(join) if join is not None else None
            if isinstance(contents, list):
                inner += contents
            elif join == "not":
                inner.append(contents)
            if num_tests + len(inner) > MAX_TESTS * _MAX_DEPTH:
                break
        level = inner
        if depth > _MAX_DEPTH or num_tests > MAX_TESTS:
            raise _invalid(
                f"a condition has at most {MAX_TESTS} tests and is nested at most {_MAX_DEPTH} deep", ""
            )
    return value


Condition = Annotated[When, BeforeValidator(_check_size)]
"""A condition as a field of an operation."""

for _model in (AllOf, AnyOf, Not):
    _model.model_rebuild()


def inner_tests(when: When, path: str = "when") -> dict[str, Test]:
    """Return the tests by their paths, such as ``when.all.1``, from left to right."""
    match when:
        case AllOf():
            inner = {f"{path}.all.{index}": condition for index, condition in enumerate(when.all)}
        case AnyOf():
            inner = {f"{path}.any.{index}": condition for index, condition in enumerate(when.any)}
        case Not():
            inner = {f"{path}.not": when.not_}
        case _:
            return {path: when}
    return {
        test_path: test
        for below, condition in inner.items()
        for test_path, test in inner_tests(condition, below).items()
    }


def with_tests(when: When, tests: Iterator[Test]) -> When:
    """Return a condition with other tests in the place of its own, from left to right."""
    match when:
        case AllOf():
            return when.model_copy(update={"all": [with_tests(condition, tests) for condition in when.all]})
        case AnyOf():
            return when.model_copy(update={"any": [with_tests(condition, tests) for condition in when.any]})
        case Not():
            return when.model_copy(update={"not_": with_tests(when.not_, tests)})
    return next(tests)


def points_of(name: DetectorName | DictionaryName | None) -> list[str]:
    """Return the points that a detector or a dictionary reads, once its name is resolved."""
    match name:
        case NamedDetector():
            return [part.point for part in name.content.parts]
        case NamedDictionary():
            return [name.content.at]
    return []


def _invalid(message: str, field: str) -> PydanticCustomError:
    return field_error(ErrorCode.INVALID_VALUE, message, field)
