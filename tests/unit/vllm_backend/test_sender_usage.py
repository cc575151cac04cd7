"""Who is light and who heavy, and how long short steps are."""

from __future__ import annotations

import pytest

from nnsight_engine.vllm_backend.fair_scheduler import SenderUsage, StepTimes


class Clock:
    """Tells what it was set to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sharing(clock: Clock) -> SenderUsage:
    return SenderUsage(5.0, 1.25, clock)


def run(sharing: SenderUsage, clock: Clock, seconds: float, tokens: dict[str, int]) -> None:
    """Let steps of 10 ms pass."""
    for _ in range(round(seconds / 0.01)):
        clock.now += 0.01
        sharing.charge(tokens, 0.01)


def test_a_busy_sender_is_heavy_and_light_again_after_a_pause(sharing: SenderUsage, clock: Clock) -> None:
    sharing.arrive("many")
    sharing.arrive("few")
    assert sharing.light_senders() == {"many", "few"}
    run(sharing, clock, 2.0, {"many": 7, "few": 1})
    assert sharing.light_senders() == {"few"}
    clock.now += 1.2
    assert sharing.light_senders() == {"few"}, "a moment is not enough"
    clock.now += 0.8
    assert sharing.light_senders() == {"many", "few"}


def test_a_sender_below_its_share_stays_light_indefinitely(sharing: SenderUsage, clock: Clock) -> None:
    sharing.arrive("a")
    sharing.arrive("b")
    for _ in range(1000):
        run(sharing, clock, 0.04, {"a": 1})
        run(sharing, clock, 0.04, {"b": 1})
        clock.now += 0.02
    assert sharing.light_senders() == {"a", "b"}


def test_a_flooding_newcomer_is_heavy_beside_the_other(sharing: SenderUsage, clock: Clock) -> None:
    sharing.arrive("first")
    for _ in range(300):
        clock.now += 0.01
        sharing.charge(sharing.all_to_one(), 0.01)
    sharing.arrive("second")
    assert sharing.light_senders() == {"second"}
    run(sharing, clock, 5.0, {"first": 1, "second": 9})
    assert sharing.light_senders() == {"first"}


def test_a_long_absent_sender_does_not_count(sharing: SenderUsage, clock: Clock) -> None:
    sharing.arrive("many")
    sharing.arrive("few")
    clock.now += 4.0
    sharing.keep({"many"})
    assert len(sharing) == 2
    clock.now += 4.0
    sharing.keep({"many"})
    assert len(sharing) == 1


@pytest.mark.parametrize(("sender", "window_s"), [("", 5.0), ("tenant", 0.0)])
def test_without_tenants_and_without_a_window_no_sender_is_counted(sender: str, window_s: float) -> None:
    sharing = SenderUsage(window_s, 1.25)
    sharing.arrive(sender)
    assert not sharing


@pytest.mark.parametrize(
    ("seconds_a_token", "least", "most"),
    [(0.0005, 4, 10), (0.0, 256, float("inf"))],  # where long steps are as quick, short ones may be long
)
def test_a_short_step_takes_little_longer_than_the_shortest(
    seconds_a_token: float, least: float, most: float
) -> None:
    times = StepTimes(1.25)
    for _ in range(50):
        for num_tokens in (1, 4, 16, 64, 256):
            times.add(num_tokens, 0.016 + seconds_a_token * num_tokens)
    assert least <= times.short <= most


def test_nothing_is_made_of_long_steps_alone_or_of_single_ones() -> None:
    times = StepTimes(1.25)
    times.add(1, 2.0)
    for _ in range(50):
        times.add(512, 0.2)
    assert times.short == 8
