"""The transformers side of a certificate, on tiny checkpoints."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from nnsight_engine.certificate.measurements import CertificateError, CheckRequest, Reference
from nnsight_engine.certificate.reference_process import compute, compute_apart
from tests.families.checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> CheckRequest:
    return CheckRequest(str(write_checkpoint("llama", tmp_path_factory.mktemp("llama"))), num_tokens=2)


def computed(request: CheckRequest) -> Reference:
    return compute(request, lambda *_: None)


def test_the_first_the_middle_and_the_last_layer_of_each_kind_are_compared(
    llama: CheckRequest, tmp_path: Path
) -> None:
    assert computed(llama).facts.layers == [0, 2, 3]
    types = ["sliding_attention", "full_attention"] * 3
    checkpoint = write_checkpoint("gemma3", tmp_path, num_hidden_layers=6, layer_types=types)
    gemma = CheckRequest(str(checkpoint), num_tokens=1)
    assert computed(gemma).facts.layers == [0, 1, 2, 3, 4, 5]
    assert computed(msgspec.structs.replace(gemma, layers="-1,1:3")).facts.layers == [1, 2, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": "4"}, "4"),
        ({"layers": "first"}, "first"),
        ({"prompt": "a"}, "4 to 256 tokens, got 1"),
        ({"prompt": "x" * 1000}, "4 to 256 tokens, got 1000"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(
    llama: CheckRequest, changes: dict[str, str], message: str
) -> None:
    with pytest.raises(CertificateError, match=message):
        computed(msgspec.structs.replace(llama, **changes))


def test_every_change_moves_the_logits_clearly(llama: CheckRequest) -> None:
    reference = computed(llama)
    plain = reference.tensors["plain"][0]
    writes = [key for key in reference.tensors if key.startswith("write ")]
    assert len(writes) == len(reference.facts.points) - len(reference.facts.layers)  # all but the patterns
    for key in writes:
        assert (reference.tensors[key] - plain).abs().max() > 0.05 * plain.abs().max(), key


def test_another_process_computes_the_same_and_reports_progress(llama: CheckRequest) -> None:
    steps: list[tuple[str, int, int]] = []
    apart, here = compute_apart(llama, lambda *step: steps.append(step)), computed(llama)
    assert apart.facts == here.facts
    assert apart.tensors.keys() == here.tensors.keys()
    for key, value in apart.tensors.items():
        torch.testing.assert_close(value, here.tensors[key], msg=key)
    assert ("transformers: layers.3 skipped", steps[-1][2] - 1, steps[-1][2]) == steps[-1]
