"""The definition of a run: users, requests, phases. Created by the command, executed by the child process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

PLAIN: Final = "plain"
HOSTILE: Final = ("flood", "huge-body", "break-off", "endless-block")
"""The kinds of requests of the hostile tenant."""

_READING: Final = ("lens", "capture")
_CODE: Final = ("trace-operation", "trace-message")
_STEERED: Final = ("steered-same", "steered-different")

SCENARIOS: Final[Mapping[str, Sequence[str]]] = {
    "plain": (PLAIN,),
    "steered": (PLAIN, *_STEERED),
    "lens": (PLAIN, "lens"),
    "capture": (PLAIN, "capture"),
    "long-prompt": (PLAIN, "long-prompt"),
    "traces": (PLAIN, *_CODE),
    "jobs": (PLAIN, "jobs"),
    "mixed": (PLAIN, *_STEERED, *_READING, "long-prompt", *_CODE, "jobs", *HOSTILE),
}
"""The kinds of requests of each scenario. All include plain ones, which show the cost that others cause."""

_MANY: Final[Mapping[str, int]] = {PLAIN: 2, "flood": 16, "break-off": 2}


def counts_of(scenario: str, users: int = 1) -> dict[str, int]:
    """Return the number of users per kind in a scenario: one each, but more for some kinds.

    Args:
        scenario: One of ``SCENARIOS``.
        users: A factor for all numbers.
    """
    return {kind: users * _MANY.get(kind, 1) for kind in SCENARIOS[scenario]}


SHAPES: Final = ("steady", "spike", "soak")

_TENANTS: Final[Mapping[str, Sequence[str]]] = {
    "loadtest-plain": (PLAIN,),
    "loadtest-long": ("long-prompt",),
    "loadtest-steering": _STEERED,
    "loadtest-reading": _READING,
    "loadtest-sandboxed": ("trace-operation",),
    "loadtest-trusted": ("trace-message", "jobs"),
    "loadtest-hostile": HOSTILE,
}
TENANT_OF: Final[Mapping[str, str]] = {kind: tenant for tenant, kinds in _TENANTS.items() for kind in kinds}
"""The tenant that sends each kind of request."""


class LoadPhase(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a run.

    Attributes:
        name: Its name in tables.
        share: Its fraction of the run's time.
        load: A factor for the run's number of users.
        is_hostile: Whether the hostile tenant is active.
        is_counted: Whether it is in tables; the warm-up, which includes the cost of first requests, is not.
    """

    name: str
    share: float
    load: int = 1
    is_hostile: bool = False
    is_counted: bool = True


def phases_of(shape: str, *, has_hostile: bool) -> list[LoadPhase]:
    """Return the phases of a shape.

    Args:
        shape: One of ``SHAPES``.
        has_hostile: Whether the scenario includes the hostile tenant, which is active during a part of the
            time.
    """
    phases = [LoadPhase(name="steady", share=1.0)]
    if shape == "spike":
        phases = [
            LoadPhase(name="before", share=1 / 3),
            LoadPhase(name="spike", share=1 / 3, load=4, is_hostile=True),
            LoadPhase(name="after", share=1 / 3),
        ]
    elif shape == "soak":
        phases = [
            LoadPhase(name="early", share=1 / 6),
            LoadPhase(name="middle", share=2 / 3, is_hostile=True),
            LoadPhase(name="late", share=1 / 6),
        ]
    elif has_hostile:
        phases = [LoadPhase(name="calm", share=1 / 3), LoadPhase(name="flood", share=2 / 3, is_hostile=True)]
    # The first phase begins after a warm-up, in which sandboxes start and memory is touched first.
    first = msgspec.structs.replace(phases[0], share=phases[0].share - _WARM_UP.share)
    return [_WARM_UP, first, *phases[1:]]


_WARM_UP: Final = LoadPhase(name="warm-up", share=1 / 12, is_counted=False)
PHASES: Final = tuple(
    dict.fromkeys(
        phase.name
        for shape in SHAPES
        for has_hostile in (False, True)
        for phase in phases_of(shape, has_hostile=has_hostile)
        if phase.is_counted
    )
)
"""The names of all counted phases."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of the model that requests depend on.

    Attributes:
        name: The server's name of the model.
        num_layers: The number of layers.
        width: The width of the residual stream.
        vocab_size: The number of token ids.
        max_model_len: The maximum number of tokens of prompt and output together.
        max_body_bytes: The largest body that the server accepts.
    """

    name: str
    num_layers: int
    width: int
    vocab_size: int
    max_model_len: int
    max_body_bytes: int

    @property
    def layer(self) -> int:
        """The middle layer."""
        return self.num_layers // 2


class RunSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The definition of one run.

    Attributes:
        scenario: The name of the scenario.
        shape: The name of the shape, the load over time.
        url: The server's address.
        model: The server's model.
        counts: The number of users per kind, before a phase multiplies them.
        phases: The phases.
        seconds: The duration.
        keys: The keys by tenant; empty if the server requires none.
        messages: Encoded traces, in base64.
        has_pauses: Whether users pause between requests, as people do.
        finish_s: How long requests that run at the end may take to finish.
        silence_s: The longest time without data from the server during a request.
        seed: The seed of prompts, vectors and lengths.
    """

    scenario: str
    shape: str
    url: str
    model: Model
    counts: dict[str, int]
    phases: list[LoadPhase]
    seconds: float
    keys: dict[str, str] = {}
    messages: list[str] = []
    has_pauses: bool = True
    finish_s: float = 60.0
    silence_s: float = 300.0
    seed: int = 0

    def phase_at(self, elapsed_s: float) -> LoadPhase | None:
        """Return the phase at a time after the start, or None after the end."""
        end_s = 0.0
        for phase in self.phases:
            end_s += phase.share * self.seconds
            if elapsed_s < end_s:
                return phase
        return None


__all__ = [
    "HOSTILE",
    "PHASES",
    "PLAIN",
    "SCENARIOS",
    "SHAPES",
    "TENANT_OF",
    "LoadPhase",
    "Model",
    "RunSpec",
    "counts_of",
    "phases_of",
]
