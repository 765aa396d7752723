"""Nothing hangs: a rank that dies at any moment leaves the others with a fault record within the device timeout, a
deadlock names every waiter, and limited residency ends the same way."""

from __future__ import annotations

import pytest

from megamoe_cli.supervisor import run_cases
from tests.proving import plan, run

SMALL = {"shape": "256x256x6x2", "tokens": "30", "config": ["block_m=64", "stages=2"]}


def skewed(phase: str, ranks: int, moments: list[str], **options: object) -> list:
    (case,) = plan("emulator", ranks=ranks, phase=phase, **SMALL)
    sent = [case.to_dict() | {"id": str(n), "seed": n, "options": {"skew": skew, "schedule": "random", "completion": "lazy", **options}}
            for n, skew in enumerate(moments)]  # fmt: skip
    return run_cases(sent, backend="emulator", ranks=ranks, timeout_s=100, jobs=2)


@pytest.mark.slow
def test_a_rank_that_dies_at_any_moment_leaves_the_others_with_a_fault_record() -> None:
    moments = [f"stop:{n % 3}@{1 + int(1.38 ** n)}" for n in range(26)]  # the first turn, ..., the third launch
    results = skewed("combine", 3, moments, wait_s=0.5)
    assert [r.message for r in results] == [""] * len(moments)
    noticed = [r for r in results if r.metrics.get("survivors_with_fault_record")]
    assert len(noticed) >= 16 and all(r.metrics["survivors_with_fault_record"] == 2 for r in noticed)
    for result in noticed:
        for record in result.fault["records"].values():
            assert record["epoch"] + 1 == record["expected"], "the launch that waited, also when its epoch has moved on"
            assert record["code"] == "wait_timeout" and 5e8 <= record["waited_ns"] <= 1.5e9, "twice the timeout at most"
    assert len({record["wait"] for r in noticed for record in r.fault["records"].values()}) >= 2, "in dispatch, and at the end"
    assert any(record["epoch"] > 0 for r in noticed for record in r.fault["records"].values()), "also in a later launch"


def test_late_and_slow_ranks_are_only_late_and_slow() -> None:
    results = skewed("combine", 3, ["late:0", "late:2@3000000", "slow:1", "slow:0@100", "late:any+slow:any", "late:0@500+late:1@90000"])
    assert [r.message for r in results] == [""] * 6


def test_a_deadlock_names_every_waiter_and_the_clock_ends_it() -> None:
    """One of two CTAs cannot start, as when another kernel holds an SM. Rows that never came are not stored: their
    metadata could point anywhere (poison, here)."""
    (case,) = plan("emulator", ranks=2, phase="combine", options={"resident_ctas": 1, "races": True}, **SMALL | {"shape": "256x256x4x2"})
    (result,) = run([case])
    assert result.status == "fault" and result.exit_code == 1
    assert [f["metric"] for f in result.findings] == ["emulator_deadlock"], "nothing else, such as a store out of bounds"
    deadlock = result.findings[0]["message"]
    for rank in range(2):
        assert f"rank {rank}: launch 0 (mega_moe), 1 CTAs live" in deadlock
        for warp in ("2 (tma 0)", "3 (tma 1)", "4 (math0 0)", "8 (math1 0)"):
            assert f"rank {rank} CTA 0 warp {warp}: " in deadlock, deadlock
    assert "polling" in deadlock and "kernels/comm/wait.cuh" in deadlock
    assert "waited" in result.message


def test_a_reserved_sm_lets_another_kernel_hold_one() -> None:
    """The same one SM that is not to be had: with ``--reserve-sms 1`` no CTA was counted on it, and the case passes."""
    held = {"resident_ctas": 1, "wait_s": 0.05}
    without, with_it = (plan("emulator", ranks=2, phase="combine", options=options, **SMALL | {"shape": "256x256x4x2"})[0]
                        for options in (held, {**held, "reserve_sms": 1}))  # fmt: skip
    (hung,), (passed,) = run([without]), run([with_it])
    assert hung.status == "fault" and "waited" in hung.message and hung.kernel["grid"] == 2
    assert passed.passed, passed.message
    assert passed.kernel["grid"] == 1 and passed.where == "emulator(2 ranks x 2 CTAs, 1 SM reserved)"
    assert "--reserve-sms 1" in with_it.repro()
