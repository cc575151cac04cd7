"""Envoys and the properties that people add to them."""

from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.envoys.eproperty import eproperty
from nnsight_engine.envoys.operations import OperationEnvoy, SourceEnvoy

__all__ = ["Envoy", "OperationEnvoy", "SourceEnvoy", "eproperty"]
