"""Skewed ranks: spelling, what the emulator is told, and when a death was noticed too late."""

from __future__ import annotations

import pytest

from megamoe_cli import skew
from megamoe_cli.abi import FaultCode, FaultRecord
from megamoe_cli.errors import UsageError


def test_a_skew_becomes_one_number_for_each_rank() -> None:
    assert skew.backend_options("late:1@5000", 3, 0) == {"start_delay": [0, 5000, 0]}
    assert skew.backend_options("slow:0@9+stop:2@77", 3, 0) == {"slow": [9, 0, 0], "stop_after": [0, 0, 77]}
    assert skew.backend_options("late:0@7+late:1@8", 2, 0) == {"start_delay": [7, 8]}
    assert skew.dead_ranks({"stop_after": [0, 0, 77]}) == [2] and skew.dead_ranks({}) == []


def test_what_is_not_said_is_drawn_from_the_seed() -> None:
    drawn = [skew.backend_options("stop:any", 4, seed) for seed in range(40)]
    assert drawn == [skew.backend_options("stop:any", 4, seed) for seed in range(40)]
    victims = {skew.dead_ranks(options)[0] for options in drawn}
    moments = {max(options["stop_after"]) for options in drawn}
    _, least, low, high = skew.KINDS["stop"]
    assert victims == {0, 1, 2, 3} and len(moments) > 20 and all(low <= moment <= high for moment in moments)
    assert min(moments) < 50 < 1000 < max(moments), "small and large moments alike"


def test_spelling_survives_a_round_trip() -> None:
    for text in ("late:any", "slow:2@16", "stop:0@1"):
        assert [str(item) for item in skew.parse_skew(text)] == [text]
    assert "+".join(map(str, skew.parse_skew("late:1 + slow:0"))) == "late:1+slow:0"


@pytest.mark.parametrize(("text", "ranks", "message"), [
    ("lat:1", 2, "nearest kind: late"), ("late", 2, "is not KIND:RANK"), ("late:x", 2, "is not KIND:RANK"), ("slow:0@1", 2, "at least 2"),
    ("late:2", 2, "there are only 2 ranks"), ("stop:0", 1, "nobody is left"), ("stop:0+stop:1", 3, "one rank can be told to die"),
])
def test_refusals_name_the_rule(text: str, ranks: int, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        skew.backend_options(text, ranks, 0)
    assert caught.value.rule == "skew"


def test_a_wait_far_beyond_the_device_timeout_is_too_late() -> None:
    record = FaultRecord(code=FaultCode.WAIT_TIMEOUT, wait=2, rank=1, waited_ns=6_000_000_000)
    assert skew.too_late({1: record}, 5_000_000_000) == ""
    record.waited_ns = 90_000_000_000
    assert "outlasted the device timeout of 5 s: rank 1" in skew.too_late({1: record}, 5_000_000_000)


def test_what_follows_from_a_deadlock_is_not_reported_as_well() -> None:
    kinds = ["race", "deadlock", "race", "uninit", "bounds", "race"]
    assert [item["kind"] for item in skew.causes([{"kind": kind} for kind in kinds])] == ["race", "deadlock", "bounds"]
    assert [item["kind"] for item in skew.causes([{"kind": "race"}, {"kind": "uninit"}])] == ["race", "uninit"]
