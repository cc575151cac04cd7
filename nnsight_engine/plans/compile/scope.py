"""The inputs of one request's compilation, and what its operations name: sites and positions.

Arrays over the prompt are created on first use. ``at`` becomes sites of this model, no site twice, under any
name: an operation acts once at a site, and results are keyed by site. ``where`` becomes a rule with absolute
positions and token ids. A clause that cannot match any position is rejected: it would silently do nothing,
and an unsteered completion would be taken for a steered one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from api_schemas.errors import ApiError, ErrorCode, excerpt
from api_schemas.operations import Where, WhereClause
from api_schemas.points import (
    ENCODER_BLOCK,
    MODEL_POINTS,
    LayerSelection,
    Point,
    PointPattern,
    point_name,
    resolve_layer,
)
from nnsight_engine.core.model_spec import LeafSpec, ModelSpec
from nnsight_engine.core.token_texts import NoSuchTokenError
from nnsight_engine.plans.request_plan import (
    NO_MARKERS,
    NO_MEDIA,
    AnswerMarkers,
    Part,
    Parts,
    PlannedAnswer,
    PlannedImage,
    PlannedSite,
    PromptMedia,
    WhereRule,
)
from nnsight_engine.plans.where import Positions, evaluate, may_generate

TokenOf = Callable[[str], int]
"""Maps a text to the id of its single token, see ``core.token_texts``; raises NoSuchTokenError."""

MAX_TOKEN_STRINGS: Final = 1024
"""Limit on the different token strings of one request, which bounds the time spent tokenizing them."""


class CompileScope:
    """One prompt and its model: resolves the positions, tokens, images and parts that operations name."""

    def __init__(
        self,
        spec: ModelSpec,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        token_of: TokenOf,
        markers: AnswerMarkers = NO_MARKERS,
        media: PromptMedia = NO_MEDIA,
    ) -> None:
        self.spec = spec
        self.media = media
        self.prompt_len = len(prompt_token_ids)
        # The last generated token is never fed back, so it has no position.
        self.num_positions = self.prompt_len + max(max_tokens, 1) - 1
        self._prompt_token_ids = prompt_token_ids
        self._token_of = token_of
        self._markers = markers
        self._ids_by_text: dict[str, int] = {}

    @functools.cached_property
    def prompt_ids(self) -> npt.NDArray[np.int64]:
        return np.asarray(self._prompt_token_ids, np.int64)

    @functools.cached_property
    def prompt_positions(self) -> npt.NDArray[np.int64]:
        return np.arange(self.prompt_len, dtype=np.int64)

    @functools.cached_property
    def answer(self) -> PlannedAnswer:
        return self._markers.plan(self.prompt_ids)

    @functools.cached_property
    def prompt_parts(self) -> Parts:
        return self.answer.parts(self.prompt_ids, self.prompt_len)

    def part(self, name: str, param: str) -> Part:
        """Return a part of the answer; raise ``unsupported_combination`` if it cannot be told apart."""
        reason = self._markers.missing.get(name)
        if reason is not None:
            raise ApiError(
                ErrorCode.UNSUPPORTED_COMBINATION, f"`scope` {name} is not available: {reason}.", param
            )
        return Part[name.upper()]

    def image_positions(self, indexes: Sequence[int], param: str) -> list[int]:
        """Return the positions of images, in the order given, each once; raise ``position_out_of_range``."""
        images = self.media.images
        image_numbers = self._image_numbers(indexes, param)
        return [position for index in image_numbers for span in images[index] for position in range(*span)]

    def images_in_encoder(self) -> tuple[PlannedImage, ...]:
        """Return the prompt's images, with the number of rows that each has in the vision encoder."""
        leaf = self.spec.leaf(ENCODER_BLOCK)
        num_patches = 1 if leaf is None else leaf.num_patches
        return tuple(
            PlannedImage(spans, num_patches * sum(stop - start for start, stop in spans))
            for spans in self.media.images
        )

    def encoder_rows(self, indexes: Sequence[int], param: str) -> list[int]:
        """Return the rows of images in the vision encoder, numbered over all of the prompt's images."""
        images = self.images_in_encoder()
        stops = list(itertools.accumulate(image.num_rows for image in images))
        image_numbers = self._image_numbers(indexes, param)
        return [
            row
            for index in image_numbers
            for row in range(stops[index] - images[index].num_rows, stops[index])
        ]

    def _image_numbers(self, indexes: Sequence[int], param: str) -> list[int]:
        """Return images' numbers from 0, each once; negative ``indexes`` count from the last image."""
        images = self.media.images
        image_numbers: dict[int, None] = {}
        for number, index in enumerate(indexes):
            if not -len(images) <= index < len(images):
                known = f"{len(images)} image{'s' if len(images) > 1 else ''}" if images else "no images"
                raise ApiError(
                    ErrorCode.POSITION_OUT_OF_RANGE,
                    f"Images count from 0 and this prompt has {known}, got {excerpt(index)}.",
                    f"{param}.{number}",
                )
            image_numbers[index % len(images)] = None
        return list(image_numbers)

    def token_id(self, token: str | int, param: str) -> int:
        """Return a token's id; raise ``unknown_token``, or ``invalid_value`` for too many strings."""
        if isinstance(token, str):
            known = self._ids_by_text.get(token)
            token = self._id_of_text(token, param) if known is None else known
        if not 0 <= token < self.spec.vocab_size:
            raise ApiError(
                ErrorCode.UNKNOWN_TOKEN,
                f"A token id must lie between 0 and {self.spec.vocab_size - 1}, got {excerpt(token)}.",
                param,
            )
        return token

    def _id_of_text(self, text: str, param: str) -> int:
        if len(self._ids_by_text) >= MAX_TOKEN_STRINGS:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"A request may name {MAX_TOKEN_STRINGS} different tokens as strings; give the others as "
                "ids.",
                param,
            )
        try:
            token_id = self._token_of(text)
        except NoSuchTokenError as error:
            raise ApiError(
                ErrorCode.UNKNOWN_TOKEN,
                f"A token's string must be exactly one token, as /v1/tokenize tells it; {excerpt(text)} "
                f"{error}. A leading space counts: ' Paris' and 'Paris' are different tokens.",
                param,
            ) from error
        self._ids_by_text[text] = token_id
        return token_id


_EVERYWHERE = WhereRule()


@dataclasses.dataclass(frozen=True, slots=True)
class MatchedPositions:
    """A where rule, the exact number of prompt positions that it matches, and the last of them or -1."""

    rule: WhereRule
    num_prompt: int
    last_prompt: int


def compile_where(where: Where, scope: CompileScope, param: str) -> MatchedPositions:
    """Resolve the clause.

    Raises ``empty_where``, ``contradictory_where``, ``position_out_of_range``, ``unknown_token``,
    ``unsupported_combination`` or ``invalid_value``.
    """
    rule = _where_rule(where, scope, param)
    if where.exclude is not None:
        exclude = _where_rule(where.exclude, scope, f"{param}.exclude")
        rule = msgspec.structs.replace(rule, exclude=exclude)
    if rule == _EVERYWHERE:
        return MatchedPositions(rule, scope.prompt_len, scope.prompt_len - 1)
    positions = _matched_prompt(rule, scope)
    if not len(positions) and not may_generate(rule, scope.prompt_len, scope.num_positions):
        raise ApiError(ErrorCode.CONTRADICTORY_WHERE, _contradiction(rule, scope), param)
    return MatchedPositions(rule, len(positions), int(positions[-1]) if len(positions) else -1)


def compile_encoder_rows(where: Where, scope: CompileScope, param: str) -> MatchedPositions:
    """Resolve the clause of an operation in the vision encoder, which may name nothing but images.

    Its rule has the numbers of the rows (patches) as positions, and no row of an answer.
    """
    unusable = (where.positions, where.range, where.tokens, where.scope, where.exclude)
    if any(clause is not None for clause in unusable):
        raise ApiError(
            ErrorCode.UNSUPPORTED_COMBINATION,
            "In the vision encoder rows are patches of an image, which have no position and no token; "
            "name whole images with `images`.",
            param,
        )
    if where.phase == "generated":
        raise ApiError(
            ErrorCode.CONTRADICTORY_WHERE, "No image is generated; leave out `phase`.", f"{param}.phase"
        )
    if where.images is not None:
        _refuse_empty(where.images, f"{param}.images")
    images = where.images if where.images is not None else [*range(len(scope.media.images))]
    rows = scope.encoder_rows(images, f"{param}.images")
    rule = WhereRule(phase="prompt", positions=tuple(sorted(rows)))
    return MatchedPositions(rule, len(rows), last_prompt=-1)


def resolve_positions(positions: list[int], phase: str, scope: CompileScope, param: str) -> list[int]:
    """Return absolute positions, in the order given; raise ``position_out_of_range``."""
    resolved = []
    for index, position in enumerate(positions):
        absolute = position + scope.prompt_len if position < 0 else position
        if absolute < 0 or absolute >= scope.num_positions:
            raise _out_of_range(position, scope, f"{param}.{index}")
        if phase == "prompt" and absolute >= scope.prompt_len:
            raise ApiError(
                ErrorCode.POSITION_OUT_OF_RANGE,
                f"With `phase` prompt a position must be below the prompt's {scope.prompt_len} tokens, "
                f"got {position}.",
                f"{param}.{index}",
            )
        resolved.append(absolute)
    return resolved


def _where_rule(clause: WhereClause, scope: CompileScope, param: str) -> WhereRule:
    """Resolve the conditions of a ``where``, without its ``exclude``, or those of the ``exclude``."""
    positions = tokens = None
    if clause.positions is not None:
        _refuse_empty(clause.positions, f"{param}.positions")
        resolved = resolve_positions(clause.positions, clause.phase, scope, f"{param}.positions")
        positions = tuple(sorted(set(resolved)))
    if clause.images is not None:
        _refuse_empty(clause.images, f"{param}.images")
        seen = set(scope.image_positions(clause.images, f"{param}.images"))
        positions = tuple(sorted(seen if positions is None else seen & set(positions)))
    start, stop = (0, None) if clause.range is None else _range(clause.range, scope, f"{param}.range")
    if clause.tokens is not None:
        _refuse_empty(clause.tokens, f"{param}.tokens")
        ids = {scope.token_id(token, f"{param}.tokens.{index}") for index, token in enumerate(clause.tokens)}
        tokens = tuple(sorted(ids))
    part = 0 if clause.scope is None else scope.part(clause.scope, f"{param}.scope")
    return WhereRule(clause.phase, positions, start, stop, tokens, part)


def _refuse_empty(items: list[int] | list[str | int], param: str) -> None:
    if not items:
        raise ApiError(
            ErrorCode.EMPTY_WHERE,
            "An empty list names no position; leave the field out to name every position.",
            param,
        )


def _range(bounds: tuple[int, int | None], scope: CompileScope, param: str) -> tuple[int, int | None]:
    """Return the bounds as absolute positions; the stop is None for an open end."""
    start, stop = bounds
    first = _bound(start, scope, f"{param}.0")
    if first >= scope.num_positions:
        raise _out_of_range(start, scope, f"{param}.0")
    if stop is None:
        return first, None
    end = _bound(stop, scope, f"{param}.1")
    if first >= end:
        raise ApiError(
            ErrorCode.EMPTY_WHERE,
            f"A range [start, stop] ends before its stop and must name a position; [{start}, "
            f"{excerpt(stop)}] is {first} up to and without {excerpt(end)}, the prompt has "
            f"{scope.prompt_len} tokens.",
            param,
        )
    # No position lies beyond the model's length; an open end can be decided once for all steps.
    return first, None if end >= scope.spec.max_model_len else end


def _bound(bound: int, scope: CompileScope, param: str) -> int:
    resolved = bound + scope.prompt_len if bound < 0 else bound
    if resolved < 0:
        raise _out_of_range(bound, scope, param)
    return resolved


def _out_of_range(position: int, scope: CompileScope, param: str) -> ApiError:
    return ApiError(
        ErrorCode.POSITION_OUT_OF_RANGE,
        f"Positions of this request run from 0 (or {-scope.prompt_len}, counted from the prompt's end) to "
        f"{scope.num_positions - 1}, got {excerpt(position)}: {scope.prompt_len} prompt tokens and those "
        "generated by `max_tokens`, but for the last, which is never fed back to the model.",
        param,
    )


def _matched_prompt(rule: WhereRule, scope: CompileScope) -> Positions:
    """Return the prompt positions that a rule matches."""
    if rule.phase == "generated":
        return np.empty(0, np.int64)
    positions = scope.prompt_positions
    uses_tokens = rule.tokens is not None or (rule.exclude is not None and rule.exclude.tokens is not None)
    # A rule without tokens looks at no id: any array of the right length will do.
    token_ids = scope.prompt_ids if uses_tokens else positions
    parts = scope.prompt_parts if rule.names_part else None
    return positions[evaluate(rule, positions, token_ids, scope.prompt_len, parts)]


def _contradiction(rule: WhereRule, scope: CompileScope) -> str:
    """Return the error's message for a rule that matches no position of the request."""
    num_generated = scope.num_positions - scope.prompt_len
    if rule.phase == "generated" and num_generated == 0:
        return (
            "With `max_tokens` 1, and where texts are embedded, no generated position is ever computed, so "
            "`phase` generated names nothing; raise `max_tokens`, or name the prompt's last position, -1, "
            "which the first token comes from."
        )
    without_tokens = msgspec.structs.replace(rule, tokens=None)
    if rule.tokens is not None and len(_matched_prompt(without_tokens, scope)):
        return (
            "None of these tokens stands at the prompt positions that the other conditions name; "
            "check the tokens against the prompt's (spaces count), or widen the conditions."
        )
    return (
        f"All conditions must hold together, and none of the request's {scope.prompt_len} prompt and "
        f"{num_generated} generated positions meets these; drop or widen one of phase, positions, range, "
        "tokens, images, scope, exclude."
    )


_ALL_LAYERS: Final = "all"


def resolve_sites(
    at: str | list[str], operation: str, spec: ModelSpec, param: str
) -> tuple[PlannedSite, ...]:
    """Return the sites in order; raise ``unknown_point``, ``unknown_layer`` or ``unsupported_at_point``."""
    sites: list[PlannedSite] = []
    seen: dict[PlannedSite, PlannedSite] = {}
    texts = [(at, param)] if isinstance(at, str) else [(text, f"{param}.{i}") for i, text in enumerate(at)]
    for text, path in texts:
        pattern = PointPattern.parse(text, path)
        _check_leaf(pattern, text, operation, spec, path)
        for point in _in_layers(pattern, text, spec, path):
            site = PlannedSite(point.leaf, point.layer)
            _refuse_second(site, seen, path)
            sites.append(site)
    return tuple(sites)


def resolve_lens_sites(layers: str | list[int], spec: ModelSpec, param: str) -> tuple[PlannedSite, ...]:
    """Return the sites that a lens reads: the outputs of layers, by number or as text such as ``4:20``."""
    leaf = spec.leaf("output")
    if leaf is None or "logit_lens" not in leaf.operations:
        raise ApiError(
            ErrorCode.UNSUPPORTED_AT_POINT,
            f"`logit_lens` needs the residual stream and the unembedding, which {spec.name} does not offer; "
            "GET /v1/capabilities lists the operations of each point.",
            param,
        )
    if isinstance(layers, str):
        numbers = (
            range(spec.num_layers)
            if layers == _ALL_LAYERS
            else LayerSelection.parse(layers, param).resolve(spec.num_layers, param)
        )
        return tuple(PlannedSite("output", layer) for layer in numbers)
    seen: dict[PlannedSite, PlannedSite] = {}
    for index, layer in enumerate(layers):
        path = f"{param}.{index}"
        _refuse_second(PlannedSite("output", resolve_layer(layer, spec.num_layers, path)), seen, path)
    return tuple(seen.values())


def leaf_of(site: PlannedSite, spec: ModelSpec) -> LeafSpec:
    leaf = spec.leaf(site.leaf, site.layer)
    if leaf is None:
        raise ApiError(ErrorCode.UNKNOWN_POINT, f"{spec.name} has no point {site}.")
    return leaf


def _in_layers(pattern: PointPattern, text: str, spec: ModelSpec, param: str) -> list[Point]:
    """Return the points of a pattern, in those of its layers that have the leaf; raises if none has."""
    points = pattern.resolve(spec.num_layers_of(pattern.leaf), param)
    existing = [point for point in points if spec.leaf(point.leaf, point.layer) is not None]
    if not existing:
        having = ", ".join(str(layer) for layer in spec.layers_of(pattern.leaf))
        raise ApiError(
            ErrorCode.UNKNOWN_POINT,
            f"{spec.name} has no point {excerpt(text)}: its blocks differ, and {pattern.leaf} is in layers "
            f"{having}.",
            param,
        )
    return existing


def _check_leaf(pattern: PointPattern, text: str, operation: str, spec: ModelSpec, param: str) -> None:
    leaf = spec.leaf(pattern.leaf)
    if leaf is None or (pattern.layers is None) != (pattern.leaf in MODEL_POINTS):
        raise ApiError(
            ErrorCode.UNKNOWN_POINT,
            f"{spec.name} has no point {excerpt(text)}; it has "
            f"{', '.join(dict.fromkeys(_form(known) for known in spec.leaves))}.",
            param,
        )
    if operation not in leaf.operations:
        raise ApiError(
            ErrorCode.UNSUPPORTED_AT_POINT,
            f"`{operation}` is not possible at {excerpt(text)}, which takes "
            f"{', '.join(leaf.operations) or 'no operation'}; GET /v1/capabilities lists what each point "
            "takes.",
            param,
        )


def _refuse_second(site: PlannedSite, seen: dict[PlannedSite, PlannedSite], param: str) -> None:
    """Refuse a place that was named before, by any name; ``seen`` has the first site of each place."""
    canonical = canonical_site(site)
    first = seen.setdefault(canonical, site)
    if first is not site:
        same = "named twice" if first == site else f"the same place as {first}"
        raise ApiError(
            ErrorCode.INVALID_VALUE,
            f"One operation may name a place once; {site} is {same}. Use a second operation to act twice.",
            param,
        )


def canonical_site(site: PlannedSite) -> PlannedSite:
    """Return one canonical site for places with two names: a layer's input is the output before it."""
    if site.leaf != "input":
        return site
    return PlannedSite("embed.output") if site.layer == 0 else PlannedSite("output", site.layer - 1)


def _form(leaf: LeafSpec) -> str:
    return point_name(leaf.name)
