"""Random draws on two sides that take turns: neither sees nor disturbs the other's."""

from __future__ import annotations

import numpy as np
import torch

from nnsight_engine.interleaving.random_streams import RandomStreams


def drawn() -> tuple[float, float]:
    return float(torch.rand(1)), float(np.random.rand())


def test_a_blocks_random_numbers_disturb_no_others() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    expected = [drawn(), drawn()]
    torch.manual_seed(1)
    np.random.seed(1)
    streams = RandomStreams(5)
    found = [drawn()]
    streams.exchange()
    torch.manual_seed(99)
    np.random.seed(99)
    drawn()
    streams.exchange()
    found.append(drawn())
    assert found == expected


def test_equal_seeds_draw_alike_and_go_on_where_they_were() -> None:
    rows = []
    for between in (0, 3):
        streams = RandomStreams(5)
        mine = []
        for _ in range(2):
            streams.exchange()
            mine.append(drawn())
            streams.exchange()
            for _ in range(between):
                drawn()
        rows.append(mine)
    assert rows[0] == rows[1]
    assert rows[0][0] != rows[0][1]
