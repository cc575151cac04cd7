"""Resolution of the names in conditions, of detectors and of vectors, before a request is compiled.

After that the request equals one that contained the numbers itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from api_schemas.conditions import InlineProbe, NamedDetector, Test, inner_tests, with_tests
from api_schemas.detectors import DetectorName
from api_schemas.errors import ApiError, ErrorCode
from api_schemas.interventions import FIELD, Intervention, condition_tests
from api_schemas.operations import Ablate, Detect, Flag, Patch, Probe, Steer, Stop
from api_schemas.tensors import VectorName
from app.detectors.service import DetectorService
from app.vectors.service import VectorService

_MAX_BYTES: Final = 256 * 2**20


def has_tests(op: Intervention) -> bool:
    """Return whether an operation reads a detector, or has a condition."""
    return isinstance(op, Detect) or bool(condition_tests(op))


class ConditionNames:
    """Replaces the names in the conditions of one request by what they stand for.

    Args:
        vectors: The stored vectors.
        detectors: The stored detectors.
        tenant: The tenant that sent the request.
    """

    def __init__(self, vectors: VectorService, detectors: DetectorService, tenant: str) -> None:
        self._resolver = vectors.resolver(tenant)
        self._detectors = detectors
        self._tenant = tenant
        self._sizes: dict[str, int] = {}

    async def resolved(self, operations: Sequence[Intervention]) -> tuple[Intervention, ...]:
        """Return a request's operations without names in their conditions.

        Raises:
            ApiError: ``unknown_detector``, ``detector_mismatch``, ``unknown_vector``, ``vector_mismatch`` or
                ``tensor_too_large``.
        """
        return tuple([await self._operation(op, f"{FIELD}.{index}") for index, op in enumerate(operations)])

    async def _operation(self, op: Intervention, param: str) -> Intervention:
        if isinstance(op, Detect):
            return op.model_copy(update={"detector": await self._detector(op.detector, f"{param}.detector")})
        if not isinstance(op, Steer | Ablate | Patch | Stop | Flag) or op.when is None:
            return op
        tests = [await self._test(test, f"{param}.{path}") for path, test in inner_tests(op.when).items()]
        return op.model_copy(update={"when": with_tests(op.when, iter(tests))})

    async def _test(self, test: Test, param: str) -> Test:
        if test.detector is not None:
            detector = await self._detector(test.detector, f"{param}.detector")
            return test.model_copy(update={"detector": detector})
        if test.probe is not None and isinstance(test.probe.weights, VectorName):
            return test.model_copy(update={"probe": await self._probe(test.probe, f"{param}.probe")})
        return test

    async def _probe(self, probe: InlineProbe, param: str) -> InlineProbe:
        """Return a probe whose weights are a vector's row of its own layer."""
        as_operation = Probe(at=probe.at, weights=probe.weights)
        found = await self._resolver.resolved(as_operation, param)
        return probe.model_copy(update={"weights": found.weights}) if isinstance(found, Probe) else probe

    async def _detector(self, name: DetectorName, param: str) -> NamedDetector:
        used, detector = await self._detectors.resolved(name, self._tenant, param)
        self._sizes[used.id] = sum(
            tensor.nbytes for part in detector.parts for tensor in part.tensors.values()
        )
        if sum(self._sizes.values()) > _MAX_BYTES:
            raise ApiError(
                ErrorCode.TENSOR_TOO_LARGE,
                f"The detectors that a request names may have {_MAX_BYTES} bytes together.",
                param,
            )
        return NamedDetector.of(used, detector)
