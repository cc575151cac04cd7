"""One request's interventions as the worker receives them; only ``plans.compile`` builds plans.

The worker trusts their structure. Tensors are named by the hash of their content, to be shared by requests.
Conditions are causal: the state at a position depends on the scores of earlier positions and its own.

Marker tokens divide an answer into its content, its reasoning and its tool calls. A position belongs to the
part of the token that is sampled from it: the answer's first position is the prompt's last, and a marker's
own position is the first of the part it begins. The last marker decides.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from api_schemas.points import ENCODER_BLOCK, point_name
from nnsight_engine.core.detector import Form, Link
from nnsight_engine.core.dtypes import ITEM_BYTES
from nnsight_engine.core.model_spec import PATTERN, STATE, ModelSpec
from nnsight_engine.core.operator_choices import tap_of
from nnsight_engine.features.config import DictionaryConfig


class PlannedSite(msgspec.Struct, frozen=True, array_like=True):
    """One place in the model: a leaf name of ``ModelSpec`` and its layer, -1 if it has none."""

    leaf: str
    layer: int = -1

    def __str__(self) -> str:
        return point_name(self.leaf, self.layer)

    @property
    def is_in_encoder(self) -> bool:
        """Whether it is in the vision encoder, which runs before the step and not in it."""
        return self.leaf == ENCODER_BLOCK


LOGITS: Final = PlannedSite("logits")
SAMPLES: Final = PlannedSite("samples")


def forward_order(site: PlannedSite, spec: ModelSpec) -> tuple[int, int]:
    """Return a key that is smaller for a site that the forward pass reaches earlier."""
    tap = tap_of(site.leaf, site.layer)
    # Taps, between the layers, have even numbers; the leaves inside of layers have odd ones.
    if tap is not None:
        return 2 * tap, 0
    leaves = [leaf.name for leaf in spec.leaves]
    layer = site.layer if site.layer >= 0 else spec.num_layers
    return 2 * layer + 1, leaves.index(site.leaf)


class PlannedDictionary(msgspec.Struct, frozen=True, array_like=True):
    """``sha256`` is that of the file of its weights, hexadecimal; ``dtype`` is torch's name."""

    sha256: str
    config: DictionaryConfig
    dtype: str

    @property
    def num_bytes(self) -> int:
        return self.config.num_values * ITEM_BYTES[self.dtype]


class PlannedFeatures(msgspec.Struct, frozen=True, omit_defaults=True):
    """The features that an operation or a test reads or changes; no ``ids`` for the ``top_k`` most active.

    A write makes ``gain * a + offset`` of ``a``; ``source`` is the site that its dictionary reads, if that is
    another.
    """

    dictionary: PlannedDictionary
    ids: tuple[int, ...] = ()
    top_k: int = 0
    gains: tuple[float, ...] = ()
    offsets: tuple[float, ...] = ()
    source: PlannedSite | None = None


AND: Final = "and"
OR: Final = "or"
NOT: Final = "not"


class ScorePart(msgspec.Struct, frozen=True, array_like=True):
    """``form`` is of ``core.detector``, with its tensors; None for the activation of a feature."""

    site: PlannedSite
    form: Form | None
    tensors: tuple[tuple[str, str], ...] = ()
    features: PlannedFeatures | None = None


class PlannedScore(msgspec.Struct, frozen=True, omit_defaults=True):
    """A number per position: of a detector, an inline probe or a feature; ``core.detector`` defines the sum.

    Its parts are in the order of the forward pass.
    """

    parts: tuple[ScorePart, ...]
    bias: float = 0.0
    link: Link = Link.IDENTITY

    @property
    def sites(self) -> tuple[PlannedSite, ...]:
        return tuple(part.site for part in self.parts)


class PlannedTest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A test of scores.

    It begins to hold where the reduced score, times ``sign``, is above ``threshold`` (also times ``sign``).
    It holds on while that is above ``threshold - hysteresis``, or for good if it latches. ``over`` says which
    scores are reduced: of the ``position``, of the ``prompt`` up to it, or of a ``window`` of ``length``
    positions that ends with it. ``is_next``: it decides for the position after the one that it reads.
    """

    score: PlannedScore
    threshold: float
    sign: int = 1
    over: str = "position"
    length: int = 1
    reduce: str = "max"
    latches: bool = False
    hysteresis: float = 0.0
    is_next: bool = False

    @property
    def has_history(self) -> bool:
        return self.over != "position" or self.latches or self.hysteresis > 0

    @property
    def has_slot(self) -> bool:
        return self.has_history or self.is_next


class PlannedCondition(msgspec.Struct, frozen=True):
    """Tests, joined by ``program``: numbers of tests, ``and``, ``or`` and ``not`` in postfix order."""

    tests: tuple[PlannedTest, ...]
    program: tuple[int | str, ...]

    @property
    def has_history(self) -> bool:
        return any(test.has_history for test in self.tests)

    def last_site(self, spec: ModelSpec) -> PlannedSite:
        """Return the site that the forward pass reaches last of those that its tests read."""
        return max((test.score.sites[-1] for test in self.tests), key=lambda site: forward_order(site, spec))

    @property
    def has_slots(self) -> bool:
        return any(test.has_slot for test in self.tests)


Parts = npt.NDArray[np.int8]


class Part(enum.IntEnum):
    NONE = 0
    CONTENT = 1
    REASONING = 2
    TOOL_CALLS = 3


class PlannedAnswer(msgspec.Struct, frozen=True):
    """``first`` is the part of the prompt's last position; ``begun_by`` is keyed by the marker's token id."""

    first: int
    begun_by: dict[int, int]

    def scan(self, token_ids: npt.NDArray[np.integer], before: int) -> Parts:
        """Return the part of each token's position, ``[n]``; ``before`` is that of the one before them."""
        parts = np.zeros(len(token_ids) + 1, np.int8)
        parts[0] = before
        for marker, part in self.begun_by.items():
            parts[1:][token_ids == marker] = part
        last: npt.NDArray[np.int64] = np.maximum.accumulate(np.where(parts, np.arange(len(parts)), 0))
        return parts[last[1:]]

    def parts(self, token_ids: npt.NDArray[np.integer], prompt_len: int) -> Parts:
        """Return the part of each position, ``[n]``: none before the prompt's last."""
        parts = np.zeros(len(token_ids), np.int8)
        parts[prompt_len - 1 : prompt_len] = self.first
        parts[prompt_len:] = self.scan(token_ids[prompt_len:], self.first)
        return parts


class AnswerMarkers(msgspec.Struct, frozen=True):
    """The markers of a served model's answers; those before one of ``turn_ends`` do not count.

    An answer begins with ``first`` if its prompt has no marker; ``missing`` says why a part cannot be told
    apart.
    """

    begun_by: dict[int, int] = {}
    first: int = Part.CONTENT
    turn_ends: frozenset[int] = frozenset()
    missing: Mapping[str, str] = {}

    @property
    def scopes(self) -> list[str]:
        return [name for part in Part if part and (name := part.name.lower()) not in self.missing]

    def plan(self, prompt_ids: npt.NDArray[np.integer]) -> PlannedAnswer:
        """Return the parts of the answer to a prompt: its last turn's markers decide which comes first."""
        ends = np.flatnonzero(np.isin(prompt_ids, list(self.turn_ends)))
        turn = prompt_ids[ends[-1] + 1 :] if len(ends) else prompt_ids
        planned = PlannedAnswer(self.first, self.begun_by)
        first = planned.scan(turn, self.first)[-1] if len(turn) else self.first
        return PlannedAnswer(int(first), self.begun_by)


_START: Final = "start the server with --reasoning-parser or --tool-call-parser"
NO_MARKERS: Final = AnswerMarkers(
    missing={"content": _START, "reasoning": "start the server with --reasoning-parser",
             "tool_calls": "start the server with --tool-call-parser"}
)  # fmt: skip
"""Of a model whose answers have one part."""


PLAN_KEY: Final = "nnsight_engine"
"""Key of the engine's entry in vLLM's ``SamplingParams.extra_args``."""


class OperationKind(enum.StrEnum):
    """The first nine write, the others read; STOP and FLAG read whether their condition holds."""

    ADD = "add"
    NORM_MATCH = "norm_match"
    PROJECT = "project"
    SUBSPACE = "subspace"
    REPLACE = "replace"
    ZERO = "zero"
    MEAN = "mean"
    PATCH = "patch"
    FEATURE = "feature"
    CAPTURE = "capture"
    PROBE = "probe"
    LENS = "logit_lens"
    DETECT = "detect"
    FEATURES = "features"
    STOP = "stop"
    FLAG = "flag"


MARKS: Final = frozenset({OperationKind.STOP, OperationKind.FLAG})
"""Operations that only tell where their condition holds."""

READS: Final = MARKS | {
    OperationKind.CAPTURE,
    OperationKind.PROBE,
    OperationKind.LENS,
    OperationKind.DETECT,
    OperationKind.FEATURES,
}


class WhereRule(msgspec.Struct, frozen=True, omit_defaults=True):
    """The absolute positions that an operation matches; all conditions must hold, and not ``exclude``.

    Attributes:
        phase: ``all``, ``prompt`` (below the prompt's length) or ``generated``.
        positions: Sorted, or None for any; in a vision encoder numbers of rows.
        part: Part of the answer, see ``Part``; 0 for any or none.
    """

    phase: str = "all"
    positions: tuple[int, ...] | None = None
    start: int = 0
    stop: int | None = None
    tokens: tuple[int, ...] | None = None
    part: int = 0
    exclude: WhereRule | None = None

    @property
    def names_part(self) -> bool:
        return bool(self.part) or (self.exclude is not None and self.exclude.names_part)


class TensorData(msgspec.Struct, frozen=True):
    """A tensor's bytes, little-endian and contiguous; ``dtype`` is the torch name (``float32``)."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def key(self) -> str:
        """Return the hash of the content, the tensor's name in plans (64 hex digits)."""
        head = f"{self.dtype}:{','.join(map(str, self.shape))}:".encode()
        return hashlib.sha256(head + self.data).hexdigest()


class PlannedOp(msgspec.Struct, frozen=True, omit_defaults=True):
    """One operation, at one or more sites.

    Attributes:
        sites: In the order of the request's ``at``, no site twice.
        name: Key of the operation's result; empty for writes.
        scale: ADD, NORM_MATCH, REPLACE: factor on the vector; PROJECT, SUBSPACE: the part that is removed of
            the value's component along the vector, or in the span of the vectors.
        tensor: Key of its tensor, see ``TensorData.key``. Steer vectors, probe weights and ablation values:
            ``[width]`` for all sites or ``[sites, width]``; PATCH: ``[positions, width]`` or
            ``[sites, positions, width]`` in the order of ``where.positions``; SUBSPACE: an orthonormal basis,
            ``[k, width]`` or ``[sites, k, width]``, whose last rows may be zeros.
        offset: PROJECT: added to the component, which is then clamped to ``low`` and ``high``.
        units: Selected units of the flattened width for ZERO, MEAN, REPLACE; None for all.
        bias: PROBE: added to each dot product.
        targets: LENS: token ids whose log-probability and rank are reported.
        when: The condition under which it acts at a position; None for always. STOP and FLAG have one, and as
            site the last that it reads.
    """

    kind: OperationKind
    sites: tuple[PlannedSite, ...]
    where: WhereRule = WhereRule()
    name: str = ""
    scale: float = 1.0
    tensor: str = ""
    offset: float = 0.0
    low: float | None = None
    high: float | None = None
    units: tuple[int, ...] | None = None
    reduce: str = "none"
    dtype: str = ""
    bias: float = 0.0
    top_k: int = 0
    targets: tuple[int, ...] = ()
    score: PlannedScore | None = None
    features: PlannedFeatures | None = None
    when: PlannedCondition | None = None

    @property
    def reads(self) -> bool:
        return self.kind in READS

    @property
    def is_in_encoder(self) -> bool:
        """Whether it acts in the vision encoder, and so nowhere else; its positions are rows of images."""
        return self.sites[0].is_in_encoder

    @property
    def averages_prompt(self) -> bool:
        """Whether the operation needs all positions of the prompt in one step, over which it takes a mean."""
        return self.kind is OperationKind.MEAN and not self.is_in_encoder

    @property
    def captures_patterns(self) -> bool:
        return self.sites[0].leaf == PATTERN

    @property
    def captures_states(self) -> bool:
        return self.sites[0].leaf == STATE


class PlannedImage(msgspec.Struct, frozen=True, array_like=True):
    """An image's positions, and the number of its rows in the vision encoder, which count over all images."""

    spans: tuple[tuple[int, int], ...]
    num_rows: int


class RequestPlan(msgspec.Struct, frozen=True):
    """All operations of a request on one prompt.

    Attributes:
        fingerprint: Hash over the writes (hex), the base of the cache salt; empty without writes.
        answer: None if no operation names a part of the answer.
        images: Empty if no operation acts in the vision encoder.
        works: The work of operations, by index, if together they have much, see ``plans.work``.
    """

    prompt_len: int
    ops: tuple[PlannedOp, ...]
    stream: bool = False
    fingerprint: str = ""
    answer: PlannedAnswer | None = None
    images: tuple[PlannedImage, ...] = ()
    num_positions: int = 0
    dictionaries: dict[str, str] = {}
    works: dict[int, float] = {}
    weights: float = 0.0

    @property
    def num_points(self) -> int:
        """Number of points at which its operations and their tests act or read; at least one."""
        tests = (test for op in self.ops if op.when is not None for test in op.when.tests)
        return max(1, sum(len(op.sites) for op in self.ops) + sum(len(test.score.parts) for test in tests))

    @property
    def needs_whole_prompt(self) -> bool:
        return any(op.averages_prompt for op in self.ops)

    def encode(self) -> bytes:
        """Return the plan as msgpack, without its tensors."""
        return _ENCODER.encode(self)

    @staticmethod
    def decode(data: bytes) -> RequestPlan:
        """Decode the output of ``encode``; raise msgspec.ValidationError on anything else."""
        return _DECODER.decode(data)


class CompiledRequest(msgspec.Struct, frozen=True):
    """A plan and its tensors by key; ``reads_prompt`` forbids that the prefix cache is read."""

    plan: RequestPlan
    tensors: dict[str, TensorData]
    reads_prompt: bool


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(RequestPlan)


Spans = tuple[tuple[int, int], ...]
"""Half-open ranges of positions, ascending."""


class PromptMedia(msgspec.Struct, frozen=True):
    """The positions of each image in the prompt; marks between an image's parts are none of them.

    ``digest`` is a hash of everything that is no text, also of audio and videos; empty if there is nothing.
    """

    images: tuple[Spans, ...] = ()
    digest: str = ""


NO_MEDIA = PromptMedia()
