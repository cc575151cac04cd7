"""Everything that is checked of a model family, in a process of its own.

Engines would pile up in one process, and vLLM's Transformers backend (GPT-NeoX) changes
transformers' classes for the whole process: what transformers and ``LanguageModel`` compute is computed here
before the first engine starts. ``test_families`` runs this module and reads its report. Each certificate is
left in the folder, as ``tests.families.certify`` reads them.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import torch
from vllm.distributed import get_pp_group
from vllm.lora.request import LoRARequest

from api_schemas.errors import ApiError, ErrorCode
from api_schemas.points import MODEL_POINTS
from nnsight_engine.certificate.certificate import PLAIN, SKIP, VALUES, WRITES, Certificate, Finding, Status
from nnsight_engine.certificate.certify import compare
from nnsight_engine.certificate.measurements import CheckRequest
from nnsight_engine.certificate.reference_process import compute
from nnsight_engine.core.model_spec import STATE
from nnsight_engine.plans.collect.results import CollectedCapture, CollectedLens, CollectedToken
from nnsight_engine.vllm_backend.structure import ModelRuns, found_family
from tests.e2e.engine_kinds import options_of_process
from tests.e2e.harness import Ask, Engine, Reply
from tests.e2e.point_blocks import (
    BESIDE_CERTIFICATE,
    REFUSED,
    AdaptedVLLM,
    compared,
    expected_values,
    force_experts,
)
from tests.families.adapters import RANK, write_adapter, write_merged
from tests.families.checkpoints import NUM_LAYERS, build_tokenizer, write_checkpoint
from tests.families.edits import Change, Continuation, add, continued, place, set_to, zero
from tests.families.experts import UNFORCED
from tests.families.quantised import FORMATS, rounded_inputs, write_quantised
from tests.families.reference import load_reference_model, reference_activations
from tests.families.trees import tree_of

PROMPT_IDS: Final = [45, 257, 80, 301, 77, 78, 260, 90, 91, 120, 33, 44]
NUM_TOKENS: Final = 6
UNITS: Final = list(range(0, 192, 3))
LENS_TARGETS: Final = [7, 45, 301]
EXPERTS: Final = [3, 0]
COMPILED_FAMILIES: Final = ("llama", "gpt2", "exaone4", "qwen3_moe", "smollm3", "llama_in_int8", "gemma4")
_COMPILED: Final[dict[str, Any]] = {"enforce_eager": False, "compilation_config": {"backend": "eager"}}

_WRITES: Final[dict[str, dict[str, Any]]] = {
    "layers.1.output": {"op": "steer", "scale": 1.5},
    "embed.output": {"op": "steer", "scale": 0.5},
    "layers.1.mlp.act": {"op": "ablate", "units": UNITS},
    "layers.1.attn.q": {"op": "steer", "scale": 2.0},
    "layers.0.mixer.output": {"op": "steer", "scale": 2.0},
    "layers.2.mlp.output": {"op": "steer", "scale": 2.0},
    "layers.1.moe.router": {"op": "steer", "scale": 2.0},
    "layers.1.moe.experts": {"op": "ablate", "method": "vector", "vector": EXPERTS},
    "layers.1.moe.weights": {"op": "steer", "scale": 2.0},
    "layers.1.moe.output": {"op": "steer", "scale": 2.0},
    "layers.1.moe.shared.output": {"op": "steer", "scale": 2.0},
}
"""The writes that are compared, by the point at which each acts."""

_TOLERANCES: Final = {"bloom": 1e-3, "zamba2": 1e-3}
"""Differences, relative to the largest value, where vLLM and transformers compute differently:
``docs/differences.md`` has the cause for Bloom, ``docs/points.md`` that for Zamba2.
"""
LAST: Final[dict[str, Any]] = {"positions": [-1]}
_LOGITS: Final[dict[str, Any]] = {"op": "capture", "at": "logits", "name": "logits"}


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """What transformers computes.

    Attributes:
        activations: Value at every point, as ``reference_activations`` returns it, and the
            attention patterns, ``[tokens, heads, tokens]``.
        generated: Tokens that transformers' own ``generate`` appends.
        plain: The prompt's greedy continuation.
        written: Greedy continuations under the writes, by point.
        vectors: Steering vectors, by point, flat.
        tolerance: Largest difference from these, relative to the largest value, beyond float32's rounding.
    """

    activations: dict[str, torch.Tensor]
    generated: list[int]
    plain: Continuation
    written: dict[str, Continuation]
    vectors: dict[str, torch.Tensor]
    tolerance: float = 0.0


def expect(checkpoint: Path) -> Expected:
    activations = reference_activations(checkpoint, PROMPT_IDS)
    generator = torch.Generator().manual_seed(7)
    vectors = {
        point: torch.randn(activations[point][0].numel(), generator=generator)
        for point, write in _WRITES.items()
        if write["op"] == "steer" and point in activations
    }
    model: Any = load_reference_model(checkpoint)
    if tree_of(model.config).has_pattern:
        heads = [name for name in activations if name.endswith("attn.heads")]
        patterns = _patterns(model, heads)
        # A layer that uses another's keys has no pattern.
        keyed = {name.replace("attn.k", "attn.pattern") for name in activations if name.endswith("attn.k")}
        activations |= {name: value for name, value in patterns.items() if name in keyed}
    written = {}
    writes = _writes(activations)
    if model.config.model_type in UNFORCED:
        del writes["layers.1.moe.experts"]
    for point, write in writes.items():
        handle = place(model, point, _change(write, vectors.get(point)))
        written[point] = continued(model, PROMPT_IDS, NUM_TOKENS)
        handle.remove()
    # The engine runs past the end of text, so transformers has to as well.
    model.generation_config.eos_token_id = None
    prompt = torch.tensor([PROMPT_IDS])
    generated = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NUM_TOKENS
    )
    return Expected(
        activations,
        generated[0, len(PROMPT_IDS) :].tolist(),
        continued(model, PROMPT_IDS, NUM_TOKENS),
        written,
        vectors,
    )


def _writes(activations: dict[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Return the writes, with as many experts as the model chooses."""
    writes = {point: write for point, write in _WRITES.items() if point in activations}
    if "layers.1.moe.experts" in writes:
        num_chosen = activations["layers.1.moe.experts"].shape[-1]
        writes["layers.1.moe.experts"] = {**writes["layers.1.moe.experts"], "vector": EXPERTS[:num_chosen]}
    return writes


def _change(write: dict[str, Any], vector: torch.Tensor | None) -> Change:
    """Return what a write does, as a change of rows."""
    if vector is not None:
        return add(write["scale"] * vector)
    return set_to(write["vector"]) if "vector" in write else zero(write["units"])


def _patterns(model: Any, heads: list[str]) -> dict[str, torch.Tensor]:
    """Return the patterns of the layers that have these points."""
    if not heads:
        return {}
    with torch.no_grad():
        output = model(torch.tensor([PROMPT_IDS]), use_cache=False, output_attentions=True)
    patterns = [pattern for pattern in output.attentions if pattern is not None]
    return {
        name.replace("attn.heads", "attn.pattern"): pattern[0].transpose(0, 1)
        for name, pattern in zip(heads, patterns, strict=True)
    }


def check_captures(engine: Engine, expected: Expected) -> None:
    """Every point offered has transformers' value at every prompt position, in the shape it says."""
    names = list(dict.fromkeys(leaf.name for leaf in engine.spec.leaves if leaf.name != "samples"))
    reply = engine.ask(
        PROMPT_IDS,
        [_capture(_pattern(name), name, LAST if name == STATE else {"phase": "prompt"}) for name in names]
        + [_capture("samples", "samples", {})],
        max_tokens=3,
    )
    checked = set()
    for name in names:
        result = _capture_result(reply, name)
        positions = range(len(PROMPT_IDS))[-1:] if name == STATE else range(len(PROMPT_IDS))
        assert result.positions == [*positions], f"{name}: {result.positions}"
        for point in result.points:
            value = reply.tensor(name, point)
            leaf = engine.spec.leaf(name, -1 if name in MODEL_POINTS else int(point.split(".")[1]))
            assert leaf is not None, point
            # The axis that grows with the position reaches the last position captured.
            shape = tuple(len(PROMPT_IDS) if size < 0 else size for size in leaf.shape)
            assert value.shape == (len(positions), *shape), f"{point}: {value.shape}, {leaf.shape}"
            wanted = expected.activations[point]
            _assert_close(value, wanted[None] if name == STATE else wanted, point, expected.tolerance)
            checked.add(point)
    assert checked == set(expected.activations), checked ^ set(expected.activations)
    samples = reply.tensor("samples", "samples")
    assert samples.tolist() == reply.token_ids, samples


def check_aliases(engine: Engine, expected: Expected) -> None:
    """A layer's input is the output before it, bit for bit, under both names; several streams have none."""
    names = ["layers.*.input", "layers.*.output", "embed.output"]
    if not engine.spec.layers_of("output"):
        for name in names:
            assert _refusal(engine, _capture(name, "stream", {})) is ErrorCode.UNKNOWN_POINT, name
        return
    reply = engine.ask(PROMPT_IDS, [_capture(name, name, {}) for name in names], max_tokens=3)
    before = [reply.tensor("embed.output", "embed.output")]
    before += [reply.tensor("layers.*.output", f"layers.{i}.output") for i in range(NUM_LAYERS - 1)]
    for layer, value in enumerate(before):
        own = reply.tensor("layers.*.input", f"layers.{layer}.input")
        assert torch.equal(own, value), f"layers.{layer}.input"


def check_lens(engine: Engine, expected: Expected) -> None:
    """The lens after the last layer is the model's own distribution, ranks included."""
    lens = {"op": "logit_lens", "layers": [-1], "top_k": 5, "targets": LENS_TARGETS, "name": "lens"}
    if not engine.spec.layers_of("output"):
        assert _refusal(engine, lens) is ErrorCode.UNSUPPORTED_AT_POINT
        return
    reply = engine.ask(PROMPT_IDS, [lens, _LOGITS], max_tokens=NUM_TOKENS)
    result = reply.result("lens")
    assert isinstance(result, CollectedLens)
    assert result.positions == list(range(len(PROMPT_IDS) + NUM_TOKENS - 1)), result.positions
    logprobs = reply.tensor("logits", "logits").log_softmax(dim=-1)
    rows = list(result.layers[NUM_LAYERS - 1].rows())
    top = logprobs.topk(5, dim=-1)
    _assert_close(_logprobs([tokens for tokens, _ in rows]), top.values, "top", expected.tolerance)
    targets = [tokens for _, tokens in rows]
    assert all([token.id for token in tokens] == LENS_TARGETS for tokens in targets)
    of_targets = logprobs[:, LENS_TARGETS]
    _assert_close(_logprobs(targets), of_targets, "targets", expected.tolerance)
    # Rounded to 16 bits, tokens that are nearly equal may change places.
    if engine.core.vllm_config.model_config.dtype == torch.float32:
        assert [[token.id for token in tokens] for tokens, _ in rows] == top.indices.tolist()
        ranks = (logprobs.unsqueeze(1) > of_targets.unsqueeze(2)).sum(dim=-1) + 1
        assert [[token.rank for token in tokens] for tokens in targets] == ranks.tolist()
    # The lens as transformers would give it, wherever its logits are known.
    own = expected.activations["logits"].log_softmax(dim=-1)[:, LENS_TARGETS]
    _assert_close(
        _logprobs(targets[: len(PROMPT_IDS)]), own, "targets against transformers", expected.tolerance
    )


def check_writes(engine: Engine, expected: Expected) -> None:
    """Writes act as hooks in transformers do, on prompt and generated positions, all in one batch."""
    writes = [[_write(point, expected), _LOGITS] for point in expected.written]
    asks = [Ask(PROMPT_IDS, operations, max_tokens=NUM_TOKENS) for operations in writes]
    asks.insert(2, Ask(PROMPT_IDS, [], max_tokens=NUM_TOKENS))
    replies = [choices[0] for choices in engine.run(asks)]
    neighbour = replies.pop(2)
    assert neighbour.token_ids == expected.plain.token_ids, neighbour.token_ids
    for point, reply in zip(expected.written, replies, strict=True):
        _assert_continuation(reply, expected, point)
        assert reply.collected is not None
        applied = reply.collected.applied[0]
        assert applied.at == [point], applied
        assert applied.positions == list(range(len(PROMPT_IDS) + NUM_TOKENS - 1)), applied


def check_greedy(engine: Engine, expected: Expected) -> None:
    """A plain request has the tokens of transformers' ``generate``."""
    reply = engine.ask(PROMPT_IDS, max_tokens=NUM_TOKENS)
    assert reply.token_ids == expected.generated, (reply.token_ids, expected.generated)
    assert reply.token_ids == expected.plain.token_ids, reply.token_ids


def check_structure(engine: Engine, expected: Expected) -> None:
    """Without the table, the model's structure shows the same residual stream."""
    del expected
    for differences in engine.llm.collective_rpc(_structure_differences):
        assert not differences, differences


def _structure_differences(worker: Any) -> list[str]:
    runner = worker.model_runner
    found = found_family(ModelRuns(runner.get_model(), worker.vllm_config, worker.device))
    points = runner.handler.interventions.points
    if not points.has_stream:
        return [f"layers: {found}"] if found.family.layers else []
    names = ("layers", "hidden_index", "returns_residual", "has_unused_residual", "is_batched")
    wanted = {name: getattr(points.family, name) for name in names}
    has_norm = points.final_norm is not None and get_pp_group().is_last_rank
    wanted["final_norm"] = points.family.final_norm if has_norm else ""
    return [
        f"{name}, wanted {value!r}: {found}"
        for name, value in wanted.items()
        if getattr(found.family, name) != value
    ]


def check_compiled_taps(engine: Engine, expected: Expected) -> None:
    """Writes and reads at taps happen inside the compiled step."""
    assert not engine.core.vllm_config.model_config.enforce_eager
    points = ["embed.output", "layers.*.output", "norm.output", "logits"]
    reply = engine.ask(PROMPT_IDS, [_capture(points, "taps", {"phase": "prompt"})], max_tokens=NUM_TOKENS)
    assert _tier(reply) == "tap"
    result = _capture_result(reply, "taps")
    for point in result.points:
        _assert_close(reply.tensor("taps", point), expected.activations[point], point)
    for point in ("embed.output", "layers.1.output"):
        reply = engine.ask(PROMPT_IDS, [_write(point, expected), _LOGITS], max_tokens=NUM_TOKENS)
        assert _tier(reply) == "tap", point
        _assert_continuation(reply, expected, point)


def check_compiled_hooks(engine: Engine, expected: Expected) -> None:
    """Any other point makes its steps eager, and has its value."""
    reply = engine.ask(PROMPT_IDS, [_capture("layers.*.attn.output", "hooks", {"phase": "prompt"})])
    assert _tier(reply) == "eager"
    for point in _capture_result(reply, "hooks").points:
        _assert_close(reply.tensor("hooks", point), expected.activations[point], point)


def _refusal(engine: Engine, operation: dict[str, Any]) -> ErrorCode | None:
    try:
        engine.ask(PROMPT_IDS, [operation])
    except ApiError as error:
        return error.code
    return None


def _pattern(leaf: str) -> str:
    return leaf if leaf in MODEL_POINTS else f"layers.*.{leaf}"


def _capture(at: str | list[str], name: str, where: dict[str, Any]) -> dict[str, Any]:
    return {"op": "capture", "at": at, "name": name, "where": where}


def _write(point: str, expected: Expected) -> dict[str, Any]:
    write = {"at": point, **_writes(expected.activations)[point]}
    return write | ({"vector": expected.vectors[point].tolist()} if point in expected.vectors else {})


def _capture_result(reply: Reply, name: str) -> CollectedCapture:
    result = reply.result(name)
    assert isinstance(result, CollectedCapture), result
    return result


def _logprobs(rows: list[list[CollectedToken]]) -> torch.Tensor:
    return torch.tensor([[token.logprob for token in tokens] for tokens in rows])


def _tier(reply: Reply) -> str:
    assert reply.collected is not None, reply.failure
    return reply.collected.tier


def _assert_continuation(reply: Reply, expected: Expected, point: str) -> None:
    written, plain = expected.written[point], expected.plain
    assert (written.logits[0] - plain.logits[0]).abs().max() > 0.1, f"{point}: the write changes too little"
    assert reply.collected is not None, f"{point}: {reply.failure}"
    assert reply.token_ids == written.token_ids, f"{point}: {reply.token_ids}, {written.token_ids}"
    _assert_close(
        reply.tensor("logits", "logits")[len(PROMPT_IDS) - 1 :], written.logits, point, expected.tolerance
    )


def _assert_close(actual: torch.Tensor, wanted: torch.Tensor, what: str, tolerance: float = 0.0) -> None:
    # The absolute bound is for values near zero, which carry the rounding of the larger ones.
    atol = (1e-5 + tolerance) * max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=atol, msg=lambda text: f"{what}: {text}")


Check = Callable[[Engine, Expected], None]

CHECKS: Final[dict[str, Check]] = {
    "captures": check_captures,
    "aliases": check_aliases,
    "lens": check_lens,
    "writes": check_writes,
    "greedy": check_greedy,
    "structure": check_structure,
}
COMPILED_CHECKS: Final[dict[str, Check]] = {
    "compiled_taps": check_compiled_taps,
    "compiled_hooks": check_compiled_hooks,
    "compiled_writes": check_writes,
    # Last: the hooks of the steps before have left no trace.
    "compiled_greedy": check_greedy,
}


CERTIFICATE: Final = (PLAIN, *VALUES, *WRITES, SKIP)

_KEYS_NEEDED: Final = "transformers: KeyError"
_STREAMS: Final = "vLLM: SeveralStreamsError"
UNSKIPPABLE: Final[dict[str, dict[str, str]]] = {
    "gemma4": dict.fromkeys(("layers.0", "layers.1"), _KEYS_NEEDED),
    "gemma3n": {
        **dict.fromkeys(("layers.0", "layers.1"), _KEYS_NEEDED),
        **dict.fromkeys(("layers.2", "layers.3"), _STREAMS),
    },
}
"""Layers that cannot be skipped, by family, with how the reason begins: later layers use their keys and
values, or they pass on several streams.
"""

ADAPTED: Final = "_adapted"
"""Suffix of a family whose engine runs everything with a LoRA adapter."""
QUANTISED: Final = "_in_"
"""Between a family and the format of its weights."""


def check(family: str, folder: Path) -> dict[str, str | None]:
    """Run a family's checks, blocks and comparisons on one engine; by name what went wrong, or None."""
    base, _, form_name = family.removesuffix(ADAPTED).partition(QUANTISED)
    adapter, form = None, FORMATS.get(form_name)
    checkpoint = wanted = write_checkpoint(base, folder / family, seed=0 if form is None else form.seed)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 8}
    options["num_gpu_blocks_override"] = 128  # in place of all that fit into a gigabyte
    options |= options_of_process(checkpoint)
    if family.endswith(ADAPTED):
        adapter = LoRARequest("adapter", 1, str(write_adapter(checkpoint, folder / "adapter")))
        wanted = write_merged(checkpoint, Path(adapter.lora_path), folder / f"{family}_merged")
        options |= {"enable_lora": True, "max_lora_rank": RANK}
    if form is not None:
        checkpoint, wanted = write_quantised(checkpoint, folder / f"{family}_files", form)
        options["dtype"] = form.dtype
    tolerance = _TOLERANCES.get(base, 0.0) if form is None else form.tolerance
    request = CheckRequest(str(wanted), tolerance=tolerance or None)
    with nullcontext() if form is None else rounded_inputs(form, len(build_tokenizer())):
        expected, values = expect(wanted), expected_values(wanted, BESIDE_CERTIFICATE)
        reference = compute(request, lambda *_: None)
    expected = dataclasses.replace(expected, tolerance=tolerance)
    model = AdaptedVLLM(str(checkpoint), dispatch=True, enforce_eager=True, **options)
    model.__dict__["adapter"] = adapter
    engine = Engine.around(model.engine)
    engine.adapter = adapter
    report = {name: _outcome(check, engine, expected) for name, check in CHECKS.items()}
    report |= compared(model, values, tolerance)
    if (REFUSED in values[force_experts.__name__]) != (base in UNFORCED):
        report[force_experts.__name__] = f"{base} can be forced, or cannot, against expectation"
    certificate = compare(model, request, reference, adapter=adapter)
    (folder / f"{family}.json").write_bytes(certificate.to_json())
    report |= _findings(certificate, UNSKIPPABLE.get(base, {}))
    model.shutdown()
    if family in COMPILED_FAMILIES:
        with Engine(checkpoint, **options, **_COMPILED) as engine:
            report |= {name: _outcome(check, engine, expected) for name, check in COMPILED_CHECKS.items()}
    return report


def _outcome(check: Check, engine: Engine, expected: Expected) -> str | None:
    try:
        check(engine, expected)
    except Exception:  # noqa: BLE001 - whatever it is, the report says it and the next check runs
        return traceback.format_exc()
    return None


def _findings(certificate: Certificate, unskippable: Mapping[str, str]) -> dict[str, str | None]:
    """Return what a certificate finds of each kind of comparison."""

    def is_expected(one: Finding) -> bool:
        if one.what == SKIP and one.subject in unskippable:
            return one.verdict.reason.startswith(unskippable[one.subject])
        return one.verdict.status is Status.OK

    return {
        what: "\n".join(
            f"{one.subject}: {one.verdict}"
            for one in certificate.findings
            if one.what == what and not is_expected(one)
        )
        or None
        for what in CERTIFICATE
    }
