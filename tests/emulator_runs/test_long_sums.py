"""Long sums as a tensor core makes them (``fp8_sum_bits=13``): how far the kernel's accumulators are off at H = 7168."""

from __future__ import annotations

from tests.proving import describe, plan, run


def l1_error(promotion: str, bits: int) -> float:
    """Raw L1 sums over H = 7168 (224 K steps), worst row's relative L2 against float64."""
    (case,) = plan("emulator", ranks=1, phase="l1", shape="7168x128x1x1", tokens="24", repeat=1,
                   config=["block_m=64", "stages=2", f"promotion={promotion}"], options={"raw": True, "fp8_sum_bits": bits})  # fmt: skip
    (result,) = run([case])
    value = result.metrics["l1_raw"]["value"]
    assert result.passed == (value <= result.metrics["l1_raw"]["limit"] == 1e-3), describe(result)
    assert value > (1e-5 if bits else 0), "that truncation was on"
    return value


def test_long_sums_of_classic_promotion() -> None:
    """Each 128 of K is promoted to FP32: four steps lose, whatever H is."""
    assert 20 * l1_error("classic", 0) < l1_error("classic", 13) <= 3e-4


def test_long_sums_of_rescaling() -> None:
    """The sum stays in the tensor core until it is carried, every 8 K-blocks (every 16: 1.13e-3)."""
    assert l1_error("rescale", 13) <= 1e-3
