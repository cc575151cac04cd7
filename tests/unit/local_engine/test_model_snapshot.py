"""Whatever a block does to the model, the next one finds it as it was."""

from __future__ import annotations

import textwrap
from typing import Any, Final

import pytest
import torch

from nnsight_engine.local_engine.model_snapshot import ModelSnapshot, TensorChecksums
from nnsight_engine.local_engine.runner import TraceRunner
from nnsight_engine.modeling.language import LanguageModel
from tests.unit.local_engine.bench import TEXT, Bench

CHANGES: Final = {
    "attribute": "model.layers[0].self_attn._module.scaling = 3.0",
    "envoy attribute": "model.layers[0].self_attn.scaling = 3.0",
    "new attribute": """
        module.model.layers[0].mine = 1
        model.layers[0].mine = 1
    """,
    "added module": """
        model.layers[0].mlp.probe = torch.nn.Linear(2, 2)
        module.model.layers[0].mlp.probe = torch.nn.Linear(2, 2)
    """,
    "replaced module": "module.model.layers[0].mlp = torch.nn.Identity()",
    "fewer modules": "del module.model.layers[-1]",
    "replaced weight": "module.lm_head.weight = torch.nn.Parameter(torch.zeros_like(module.lm_head.weight))",
    "weight elsewhere": "module.lm_head.weight.data = torch.zeros_like(module.lm_head.weight)",
    "buffer": "module.model.rotary_emb.inv_freq.mul_(2)",
    "buffer behind torch's back": "module.model.rotary_emb.inv_freq.data.zero_()",
    "modes": """
        module.train()
        module.requires_grad_(requires_grad=False)
    """,
    "hooks": """
        module.model.layers[0].register_forward_hook(lambda *_: None)
        module.model.layers[0].mlp.register_forward_pre_hook(lambda *_: (torch.zeros(()),))
        module.lm_head.weight.register_hook(lambda grad: grad * 2)
        module.lm_head.weight.register_post_accumulate_grad_hook(lambda one: one.grad.zero_())
        torch.nn.modules.module.register_module_forward_hook(lambda *_: torch.zeros(()))
    """,
    "configuration": """
        module.config.num_hidden_layers = 1
        module.generation_config.max_new_tokens = 1
        module.model.config._attn_implementation = "eager"
    """,
    "tokens": """
        model.tokenizer.padding_side = "right"
        model.tokenizer.model_max_length = 1
    """,
    "methods": """
        mlp = type(module.model.layers[0].mlp)
        mlp.forward = mlp.__call__ = lambda self, x: x
        torch.nn.functional.silu = torch.nn.functional.relu
    """,
    "kind": "module.model.layers[0].mlp.__class__ = torch.nn.Identity",
}
"""What a block does to the model, an envoy, or to its module."""


@pytest.fixture(scope="module")
def model(bench: Bench) -> LanguageModel:
    return LanguageModel(bench.path, dispatch=True)


@pytest.fixture(scope="module")
def snapshot(model: LanguageModel) -> ModelSnapshot:
    return ModelSnapshot(model)


def state(model: LanguageModel) -> Any:
    module: Any = model._module
    values = [*module.state_dict(keep_vars=True).items(), *module.named_buffers()]
    return (
        [name for name, _ in values],
        torch.cat([value.detach().reshape(-1).clone() for _, value in values]),
        [(name, len(vars(one)), one.training, type(one).forward) for name, one in module.named_modules()],
        [one.requires_grad for one in module.parameters()],
        module.config.to_dict(),
        module.config._attn_implementation,
        module.generation_config.to_dict(),
        module.model.layers[0].self_attn.scaling,
        [(str(one.path), sorted(set(vars(one)) - {"_probes"}), type(one)) for one in model.modules()],
        model.tokenizer.padding_side,
    )


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def logits(model: LanguageModel) -> tuple[torch.Tensor, torch.Tensor]:
    with model.trace(TEXT):
        out = model.lm_head.output.save()
        out.sum().backward()
        grad = model.lm_head.weight.grad.clone().save()
    return out, grad


@pytest.mark.parametrize("change", CHANGES)
def test_what_can_be_undone_is(
    bench: Bench, model: LanguageModel, snapshot: ModelSnapshot, change: str
) -> None:
    assert snapshot.restore()
    before, expected = state(model), logits(bench.local)
    bench.local.lm_head.weight.grad = None
    with torch.no_grad():
        exec(
            textwrap.dedent(CHANGES[change]),
            {"model": model, "module": model._module, "torch": torch},
        )
    assert snapshot.restore()
    assert all(map(same, before, state(model)))
    assert all(map(torch.equal, logits(model), expected))


@pytest.mark.parametrize("way", ["counted", "data", "numpy", "swapped rows"])
def test_weights_that_were_written_to_are_noticed(bench: Bench, way: str) -> None:
    model = LanguageModel(bench.path, dispatch=True)
    snapshot = ModelSnapshot(model)
    module: Any = model._module
    weight = module.model.layers[1].mlp.down_proj.weight
    assert not snapshot.is_suspect
    assert snapshot.restore()
    with torch.no_grad():
        if way == "counted":
            weight[0, 0] += 1
        elif way == "data":
            weight.data[-1, -1] += 1
        elif way == "numpy":
            weight.detach().numpy()[3, 4] += 1
        else:
            weight.data[[0, 1]] = weight.data[[1, 0]]
    assert snapshot.is_suspect is (way == "counted")
    assert not snapshot.restore()


def test_weights_that_a_block_put_back_are_what_they_were(bench: Bench) -> None:
    model = bench.client
    with model.trace(TEXT, backend=bench.elsewhere()):
        with torch.no_grad():
            before = model.lm_head.weight.clone()
            model.lm_head.weight.zero_()
            zeros = model.lm_head.output.abs().sum().save()
            model.lm_head.weight.copy_(before)
    assert zeros == 0
    assert bench.runner.settle()


def test_what_cannot_be_undone_wears_the_model_out(bench: Bench) -> None:
    model = LanguageModel(bench.path, dispatch=True)
    runner = TraceRunner(model)
    module: Any = model._module
    weight = module.lm_head.weight.requires_grad_(requires_grad=False)
    weight.mul_(torch.ones((), requires_grad=True))  # no leaf any more: its flag cannot be set
    runner.recover()
    assert not runner.settle()


@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (1000, 1000)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64])
def test_any_byte_counts(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.full(shape, float("nan")).to(dtype), requires_grad=False)
    contents = TensorChecksums([weight, torch.nn.Parameter(weight.data, requires_grad=False)])
    assert contents.restore()
    weight.data.reshape(-1)[-1] = 0
    assert not contents.restore()
