"""What one tenant's requests may hold, of all that the server does."""

from __future__ import annotations

import contextlib

import pytest

from api_schemas.errors import ApiError
from app.allowance import Allowance
from app.received_bytes import ReceivedBytes


def test_one_tenant_has_a_share_and_all_together_the_rest():
    receiving = ReceivedBytes(Allowance.of("bytes", 100, 0.5))
    first, second, third = [receiving.intake(name) for name in ("acme", "acme", "rival")]
    first.add(30)
    with pytest.raises(ApiError, match=r"tenant 'acme' .* 50 bytes"):
        second.add(21)
    second.add(20)
    third.add(40)
    nobody = receiving.intake("")
    with pytest.raises(ApiError, match="100 bytes"):
        nobody.add(11)
    first.close()
    first.close()
    nobody.add(40)
    assert receiving.num_bytes == 100
    for one in (second, third, nobody):
        one.close()
    assert receiving.num_bytes == 0


def test_one_tenant_has_so_many_sockets():
    receiving = ReceivedBytes(Allowance.of("bytes", 100))
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(receiving.socket("acme"))
        with pytest.raises(ApiError) as caught, receiving.socket("acme"):
            pass
        assert caught.value.status == 429
        with receiving.socket("rival"):
            pass
    with receiving.socket("acme"):
        pass
