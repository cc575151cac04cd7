"""What a run consists of: who sends what, in which phases. The command says it, the child process does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

PLAIN: Final = "plain"
HOSTILE: Final = ("flood", "huge-body", "break-off", "endless-block")
"""What the hostile tenant does."""

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
"""The kinds of requests of each scenario. Plain ones are in all of them: what others cost is told by them."""

_MANY: Final[Mapping[str, int]] = {PLAIN: 2, "flood": 16, "break-off": 2}


def counts_of(scenario: str, users: int = 1) -> dict[str, int]:
    """Return how many users of each kind a scenario has: one, two of the plain ones, a flood of sixteen.

    Args:
        scenario: One of ``SCENARIOS``.
        users: Multiplies all of them.
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
"""Whose requests of each kind are."""


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a run.

    Attributes:
        name: Names the part in tables.
        share: The part of the run's time that it takes.
        load: How many times the run's users there are.
        is_hostile: Whether the hostile tenant does what it does.
        is_counted: Whether it is in tables; the start of a run, which pays for first requests, is not.
    """

    name: str
    share: float
    load: int = 1
    is_hostile: bool = False
    is_counted: bool = True


def phases_of(shape: str, *, has_hostile: bool) -> list[Phase]:
    """Return the phases of a shape.

    Args:
        shape: One of ``SHAPES``.
        has_hostile: Whether the hostile tenant is in the scenario, who comes for a part of the time.
    """
    phases = [Phase(name="steady", share=1.0)]
    if shape == "spike":
        phases = [
            Phase(name="before", share=1 / 3),
            Phase(name="spike", share=1 / 3, load=4, is_hostile=True),
            Phase(name="after", share=1 / 3),
        ]
    elif shape == "soak":
        phases = [
            Phase(name="early", share=1 / 6),
            Phase(name="middle", share=2 / 3, is_hostile=True),
            Phase(name="late", share=1 / 6),
        ]
    elif has_hostile:
        phases = [Phase(name="calm", share=1 / 3), Phase(name="flood", share=2 / 3, is_hostile=True)]
    # The first phase begins when requests have been through once: sandboxes start, memory is first used.
    first = msgspec.structs.replace(phases[0], share=phases[0].share - _WARM_UP.share)
    return [_WARM_UP, first, *phases[1:]]


_WARM_UP: Final = Phase(name="warm-up", share=1 / 12, is_counted=False)
PHASES: Final = tuple(
    dict.fromkeys(
        phase.name
        for shape in SHAPES
        for has_hostile in (False, True)
        for phase in phases_of(shape, has_hostile=has_hostile)
        if phase.is_counted
    )
)
"""The names of all phases that are in tables."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What requests have to know of the model.

    Attributes:
        name: What the server calls it.
        num_layers: Its layers.
        width: Numbers of one position of the residual stream.
        vocab_size: Token ids there are.
        max_model_len: Most tokens of prompt and answer together.
        max_body_bytes: The largest body that the server takes.
    """

    name: str
    num_layers: int
    width: int
    vocab_size: int
    max_model_len: int
    max_body_bytes: int

    @property
    def layer(self) -> int:
        """The layer in the middle."""
        return self.num_layers // 2


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        scenario: The name of what is sent.
        shape: How much of it when.
        url: The server.
        model: Its model.
        counts: How many users there are of each kind, where a phase does not multiply them.
        phases: Its parts in time.
        seconds: How long it takes.
        keys: Of the tenants; none where the server asks for none.
        messages: Traces to be sent as they are, in base64.
        has_pauses: Whether users pause between requests, as people do.
        finish_s: How long requests that run in the end have to finish.
        silence_s: The longest that a server may say nothing in the middle of a request.
        seed: Of prompts, vectors and lengths.
    """

    scenario: str
    shape: str
    url: str
    model: Model
    counts: dict[str, int]
    phases: list[Phase]
    seconds: float
    keys: dict[str, str] = {}
    messages: list[str] = []
    has_pauses: bool = True
    finish_s: float = 60.0
    silence_s: float = 300.0
    seed: int = 0

    def phase_at(self, elapsed_s: float) -> Phase | None:
        """Return what is on so many seconds after the start, or None when all is over."""
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
    "Asked",
    "Model",
    "Phase",
    "counts_of",
    "phases_of",
]
