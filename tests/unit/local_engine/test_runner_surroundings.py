"""What surrounds a block on its client, modules, modes and classes, holds there too or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_engine.core.config import CONFIG
from nnsight_engine.core.saves import save
from nnsight_engine.envoys.envoy import Envoy
from nnsight_engine.modeling.language import LanguageModel
from nnsight_engine.remote_backend.client.backend import RemoteBackend
from nnsight_engine.remote_backend.messages import TraceRequest
from nnsight_engine.serialization import DecodeError, EncodeError, encode_trace
from tests.transports import InProcess
from tests.unit.local_engine.bench import TEXT, Bench


class Probe(torch.nn.Module):
    """A module of the user's own, which the engine does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 128))
        self.scale = torch.nn.Linear(1, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.scale((hidden @ self.weight).unsqueeze(-1))
        return result


def test_modules_that_were_added_come_along(bench: Bench) -> None:
    client, here = LanguageModel(bench.path), LanguageModel(bench.path, dispatch=True)
    probe = Probe()
    found = []
    ways: list[tuple[LanguageModel, dict[str, Any]]] = [(here, {}), (client, {"backend": bench.elsewhere()})]
    for model, how in ways:
        model.probe = probe
        model.model.layers[1].mlp.lens = probe.scale  # a part of the other, under a name of its own
        with model.trace(**how) as tracer:
            with tracer.invoke(TEXT):
                model.probe(model.model.layers[0].output, hook=True)
                model.model.layers[1].mlp.lens(torch.ones(1, 1))
            with tracer.invoke():
                inner = model.probe.scale.input.save()
                scores = model.probe.output.save()
                part = save(model.probe.scale._module)
        found.append((scores, inner))
        assert part is probe.scale
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    engine = bench.engine
    assert "probe" not in dir(engine)
    assert [path for path, _ in engine.named_modules()] == [path for path, _ in bench.local.named_modules()]
    plain = bench.client
    with pytest.raises(AttributeError, match="probe"):
        with plain.trace(TEXT, backend=bench.elsewhere()):
            plain.probe(plain.model.layers[0].output)


def test_a_module_that_takes_anothers_place_gives_it_back(bench: Bench) -> None:
    client = LanguageModel(bench.path)
    client.lm_head = torch.nn.Identity()
    for _ in range(2):
        with client.session(backend=bench.elsewhere()):
            with client.trace(TEXT):
                same = client.lm_head(client.model.norm.output).shape[-1]
                same = save(int(same))
        assert same == 128
    engine = bench.engine
    assert engine.lm_head._module is engine._module.get_submodule("lm_head")
    plain = bench.client
    with plain.trace(TEXT, backend=bench.elsewhere()):
        logits = plain.lm_head.output.save()
    assert logits.shape[-1] == plain.config.vocab_size


@pytest.mark.parametrize(
    "added",
    [
        None,
        [("model", "probe")],
        [("model", "probe", 3)],
        [("model.nowhere", "probe", torch.nn.Identity())],
        [("model", "path", torch.nn.Identity())],
    ],
    ids=repr,
)
def test_modules_that_have_no_place_are_refused(bench: Bench, added: Any) -> None:
    def send(request: TraceRequest) -> bytes:
        part = encode_trace([], {"added": added})
        return bench.runner.run(TraceRequest(request.head, [*request.parts, part]))

    model = bench.client
    with pytest.raises(DecodeError):
        with model.trace(TEXT, backend=RemoteBackend(transport=InProcess(send))):
            model.lm_head.output.save()
    with model.trace(TEXT, backend=bench.elsewhere()):
        model.lm_head.output.save()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_surrounding_grad_mode_holds_there(bench: Bench, mode: Any) -> None:
    model = bench.client
    with mode(), model.trace(TEXT, backend=bench.elsewhere()):
        seen = save((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        logits = model.lm_head.output.save()
    with mode(), model.session(backend=bench.elsewhere()):
        with model.trace(TEXT):
            again = model.lm_head.output.requires_grad
            again = save(bool(again))
    assert seen == (mode is torch.enable_grad, mode is torch.inference_mode)
    assert logits.requires_grad == again == (mode is torch.enable_grad)
    assert not bench.runner.needs_replacement
    with model.trace(TEXT, backend=bench.elsewhere()):
        logits = model.lm_head.output.save()
    assert logits.requires_grad


def test_what_surrounds_a_trace_and_does_not_reach_it_is_refused(bench: Bench) -> None:
    model = bench.client
    with pytest.raises(EncodeError, match="autocast"), torch.autocast("cpu"):
        with model.trace(TEXT, backend=bench.elsewhere()):
            model.lm_head.output.save()
    with model.trace(TEXT, backend=bench.elsewhere()), torch.autocast("cpu"):
        product = save(torch.ones(2, 2) @ torch.ones(2, 2))
    assert product.dtype is torch.bfloat16


def test_custom_classes_are_refused(bench: Bench) -> None:
    class Twice(LanguageModel):
        pass

    class Doubled(Envoy):
        pass

    block = type(bench.client.model.layers[0]._module)
    for model in (Twice(bench.path), LanguageModel(bench.path, envoys={block: Doubled})):
        with pytest.raises(ValueError, match=r"this model has (Twice|Doubled)"):
            with model.trace(TEXT, backend=bench.elsewhere()):
                model.lm_head.output.save()


def test_invokes_can_be_kept_apart(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CONFIG.APP, "CROSS_INVOKER", False)
    model, factor = bench.client, 2.0
    with pytest.raises(NameError, match="hidden"):
        with model.trace(backend=bench.elsewhere()) as tracer:
            with tracer.invoke(TEXT):
                hidden = model.model.layers[0].output
            with tracer.invoke(TEXT):
                model.model.layers[2].output = hidden
    with model.trace(backend=bench.elsewhere()) as tracer:
        with tracer.invoke(TEXT):
            first = (model.model.layers[0].output * factor).save()
        with tracer.invoke(TEXT):
            second = (model.model.layers[0].output * factor).save()
    torch.testing.assert_close(first, second)


def test_kinds_and_parts_of_values_come_home(bench: Bench) -> None:
    model = bench.client
    with model.trace(TEXT, backend=bench.elsewhere()):
        kind = save(type(model.model.layers[0].output))
        module = save(model.model.layers[0]._module)
    assert kind is torch.Tensor
    assert module is model.model.layers[0]._module
