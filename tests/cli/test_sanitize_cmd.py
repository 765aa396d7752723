"""``megamoe test --sanitize`` and its options against a fake supervisor: what is asked for, what is refused, what a failure
is made into."""

from __future__ import annotations

import pytest

from megamoe_cli import sanitize, shrink

RUN = ("test", "--results-dir", "out")


def test_sanitize_has_defaults_of_its_own_and_uses_the_emulator(megamoe, fake) -> None:
    answer = megamoe(*RUN, "--sanitize", "--phase", "combine")
    assert answer.code == 0 and {call["backend"] for call in fake.calls} == {"emulator"}
    assert len(fake.cases) == 8 and {tuple(case["shape"]) for case in fake.cases} == {(256, 256, 4, 2)}
    assert {case["ranks"] for case in fake.cases} == {2} and [case["seed"] for case in fake.cases] == list(range(8))
    for case in fake.cases:
        schedule, completion = sanitize.TURNS[case["seed"] % 4]
        assert case["options"] == {**sanitize.CHECKS, "schedule": schedule, "completion": completion}


def test_what_is_given_wins(megamoe, fake) -> None:
    megamoe(*RUN, "--sanitize", "--phase", "l1", "--ranks", "1", "--tokens-per-rank", "5", "--seeds", "2", "--shape", "tiny", "--schedule", "pct",
            "--completion", "eager", "--option", "preempt=false")  # fmt: skip
    assert [(case["ranks"], case["tokens"], case["shape"]) for case in fake.cases] == [(1, [5], [256, 256, 16, 2])] * 2
    assert all(case["options"] == {"races": True, "preempt": False, "uninit": True, "schedule": "pct", "completion": "eager"} for case in fake.cases)


def test_emulator_options_have_flags_and_choose_the_backend(megamoe, fake) -> None:
    answer = megamoe(*RUN, "--phase", "combine", "--ranks", "2", "--tokens", "4", "--skew", "late:1", "--skew", "slow:0@8", "--resident-ctas", "1",
                     "--vary-tokens", "--mix", "block_m=64,frontend=standard", "--mix", "block_m=32", "--replay", "3")  # fmt: skip
    assert answer.code == 0
    (case,) = fake.cases
    assert case["options"] == {"skew": "late:1+slow:0@8", "resident_ctas": 1, "vary_tokens": True, "replay": 3,
                               "mix": "block_m=64+frontend=standard;block_m=32"}  # fmt: skip
    again = case["repro"].partition(" test ")[2].split()
    megamoe("test", *again, "--results-dir", "out")
    assert fake.cases[1]["options"] == case["options"] and fake.cases[1]["tokens"] == case["tokens"]


@pytest.mark.parametrize(("words", "message"), [
    (("--sanitize", "--backend", "virtual"), "--sanitize is for the emulator, not for virtual"),
    (("--skew", "late:1", "--backend", "nvlink"), "--skew is for the emulator"),
    (("--skew", "lat:1"), "nearest kind: late"), (("--skew", "late:9", "--ranks", "2"), "there are only 2 ranks"),
    (("--skew", "stop:0", "--ranks", "1"), "nobody is left"), (("--schedule", "fast"), "'fast' is not one of"),
    (("--campaign", "200"), "--campaign is a part of --sanitize"),
    (("--sanitize", "--campaign", "200", "--ranks", "2"), "leave out --ranks"), (("--sanitize", "--campaign", "3"), "need 8 seeds each"),
    (("--mix", "block_m=48"), "block_m=48"), (("--replay", "0"), "0 is not in the range"),
])
def test_refusals_come_before_anything_starts(megamoe, fake, words: tuple[str, ...], message: str) -> None:
    answer = megamoe(*RUN, *words)
    assert answer.code == 2 and message in answer.err and not fake.cases


def test_reserved_sms_are_an_option_of_every_case(megamoe, fake, monkeypatch) -> None:
    answer = megamoe(*RUN, "--backend", "emulator", "--phase", "stub", "--tokens", "0,8", "--reserve-sms", "1")
    assert answer.code == 0 and [case["options"] for case in fake.cases] == [{"reserve_sms": 1}] * len(fake.cases) != []
    again = fake.cases[0]["repro"].partition(" test ")[2].split()
    assert again[again.index("--reserve-sms") + 1] == "1"
    fake.cases.clear()
    monkeypatch.setenv("MEGAMOE_RESERVE_SMS", "1")
    megamoe(*RUN, "--backend", "emulator", "--phase", "stub", "--tokens", "8")
    assert fake.cases[0]["options"] == {"reserve_sms": 1}
    fake.cases.clear()
    megamoe(*RUN, "--backend", "emulator", "--phase", "stub", "--tokens", "8", "--reserve-sms", "0")
    assert fake.cases[0]["options"] == {}, "the flag wins over the environment"


@pytest.mark.parametrize(("words", "message"), [
    (("--reserve-sms", "2"), "reserve_sms=2 leaves no SM for the kernel: the device has 2, so at most 1"),
    (("--reserve-sms", "-1"), "-1 is not in the range"), (("--reserve-sms", "x"), "'x' is not a valid integer"),
    (("--reserve-sms", "1", "--config", "cluster=2"), "less than a cluster of 2"),
    (("--option", "reserve_sms=-1"), "outside 0.."), (("--option", "fp8_sum_bits=24"), "fp8_sum_bits=24 is outside 0..23"),
    (("--option", "fp8_sum_bits=half"), "must be a whole number"),
])
def test_reserves_that_leave_nothing_are_refused(megamoe, fake, words: tuple[str, ...], message: str) -> None:
    answer = megamoe(*RUN, "--backend", "emulator", "--tokens", "8", *words)
    assert answer.code == 2 and message in answer.err and not fake.cases and answer.err.startswith("error: ")


def test_the_campaign_replaces_sizes(megamoe, fake) -> None:
    answer = megamoe(*RUN, "--sanitize", "--campaign", "64", "--phase", "l1,combine")
    assert answer.code == 0 and len(fake.cases) == 64 and {case["phase"] for case in fake.cases} == {"l1", "combine"}
    assert all(case["options"]["races"] for case in fake.cases) and len({case["seed"] for case in fake.cases}) == 64


def failing(case: dict) -> dict:
    bad = case["seed"] >= 6
    finding = {"metric": "emulator_race", "place": "kernels/roles/x.cuh:7", "message": "race: kernels/roles/x.cuh:7: both accesses (seed 6)"}
    return {"status": "fail", "findings": [finding], "message": "emulator: race"} if bad else {}


def test_a_failure_is_made_small_once_for_each_kind(megamoe, fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.verdict = failing
    asked = []

    def shrunk(case, result, run, budget_s):
        asked.append(case)
        return shrink.Shrunk(case, result, 3, True)

    monkeypatch.setattr(shrink, "shrink", shrunk)
    answer = megamoe(*RUN, "--sanitize", "--phase", "combine")
    assert answer.code == 1 and [case.seed for case in asked] == [6]
    assert answer.out.count("  smallest: ") == 1 and "kernels/roles/x.cuh:7: both accesses (seed 6)" in answer.out
    asked.clear()
    assert megamoe(*RUN, "--sanitize", "--phase", "combine", "--no-shrink").code == 1 and not asked
