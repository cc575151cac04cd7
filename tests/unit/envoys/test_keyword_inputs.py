"""Inputs that are given by keywords only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nnsight_engine import NNsight, save

X, Y = torch.ones(1, 3), torch.full((1, 3), 2.0)


class Plain(torch.nn.Module):
    """Needs one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Identity()

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return torch.mul(self.inner(x), scale)


class Several(Plain):
    """Needs two, by keyword only."""

    def forward(self, *, x: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override] # another signature
        return self.inner(x) + y


class Optional(Plain):
    """Needs none."""

    def forward(self, x: torch.Tensor | None = None, scale: float = 3.0) -> torch.Tensor:
        return torch.mul(self.inner(X if x is None else x), scale)


@pytest.mark.parametrize(
    ("module", "given", "expected"),
    [
        (Plain(), {"x": Y}, 2.0),
        (Plain(), {"x": Y, "scale": 2.0}, 4.0),
        (Plain(), {"scale": 2.0, "x": Y}, 4.0),
        (Several(), {"y": Y, "x": X}, 3.0),
        (Optional(), {"x": Y}, 6.0),
    ],
)
def test_what_a_module_needs_by_name_is_an_input(
    module: torch.nn.Module, given: dict[str, Any], expected: float
) -> None:
    model = NNsight(module)
    with model.trace(**given):
        inner = save(model.inner.output)
        output = save(model.output)
    assert torch.equal(inner, given["x"])
    assert torch.equal(output, torch.full((1, 3), expected))
    with model.trace() as tracer, tracer.invoke(**given):
        again = save(model.output)
    assert torch.equal(again, output)
    with model.scan(**given):
        shape = save(model.output.shape)
    assert shape == (1, 3)


def test_other_names_are_for_all_invokes() -> None:
    model = NNsight(Plain())
    with model.trace(scale=5.0) as tracer, tracer.invoke(X):
        output = save(model.output)
    assert torch.equal(output, 5 * X)
    with pytest.raises(ValueError, match=r"there is no input.* scale alone"), model.trace(scale=5.0):
        pass
