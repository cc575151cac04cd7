"""The interleaver, its blocks, what they ask for, and how waiting ends."""

from nnsight_engine.envoys.eproperty import IEnvoy, eproperty
from nnsight_engine.interleaving.events import (
    Cancelation,
    EarlyStopException,
    Events,
    MissedProviderError,
    OutOfOrderError,
    SkipException,
)
from nnsight_engine.interleaving.interleaver import Interleaver
from nnsight_engine.interleaving.mediator import Mediator

__all__ = [
    "Cancelation",
    "EarlyStopException",
    "Events",
    "IEnvoy",
    "Interleaver",
    "Mediator",
    "MissedProviderError",
    "OutOfOrderError",
    "SkipException",
    "eproperty",
]
