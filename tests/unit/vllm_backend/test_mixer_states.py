"""Which mixers have a state that can be read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from torch import nn

from nnsight_engine.vllm_backend.mixer_states import mixer_state_shape


def test_a_mixer_whose_kernel_postpones_updates_has_no_state() -> None:
    sizes = {"num_heads": 2, "head_dim": 3, "ssm_state_size": 4}
    for replays, shape in ((False, (2, 3, 4)), (True, ())):
        mixer = SimpleNamespace(**sizes, use_replayssm=replays)
        assert mixer_state_shape(cast("nn.Module", mixer)) == shape
