"""Long sums as a tensor core makes them (``fp8_sum_bits=13``): how far the kernel's accumulators are off at H = 7168."""

from __future__ import annotations

from megamoe_cli.oracle.compare import LIMITS
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


def test_a_row_that_hangs_on_few_activations() -> None:
    """One code that rounds the other way moves such a row by more than a typical row's limit, on this GPU and here alike."""
    (case,) = plan("emulator", ranks=2, phase="combine", shape="128x1024x4x2", tokens_per_rank="90,120", routing="powerlaw:1.2", repeat=3,
                   config=["block_m=128", "stages=2"], options={"fp8_sum_bits": 13})  # fmt: skip
    (result,) = run([case])
    assert result.passed, describe(result)
    assert LIMITS["e2e_rel"].value < result.metrics["e2e"]["value"] <= LIMITS["e2e_rel_medium"].value, describe(result)


def test_codes_of_rescaled_sums() -> None:
    """More of them round the other way than with classic promotion, within a limit of their own."""
    (case,) = plan("emulator", ranks=2, phase="combine", shape="4224x256x2x1", tokens_per_rank="7,5", repeat=3, options={"fp8_sum_bits": 13},
                   config=["block_m=16", "math_threads=128", "policy=wide_n", "promotion=rescale", "stages=2"])  # fmt: skip
    (result,) = run([case])
    assert result.passed, describe(result)
    share = result.metrics["l2_acts_share"]
    assert LIMITS["code_share"].value < share["value"] <= LIMITS["code_share_rescaled"].value < share["limit"] < 0.1


FEW = "384x128x72x2"


def test_few_codes_average_out_less() -> None:
    """19 of a rank's 896 codes round the other way, as on an H200."""
    (case,) = plan("emulator", ranks=8, phase="l2", shape=FEW, tokens_per_rank="21,0,1,3,17,12,25,0", routing="masked:0.3", repeat=2,
                   config=["block_m=128", "split=m", "stages=2", "lag=5", "unit_blocks=2"], options={"fp8_sum_bits": 13})  # fmt: skip
    (result,) = run([case])
    assert result.passed, describe(result)
    share = result.metrics["l2_acts_share"]
    assert LIMITS["code_share"].value < share["value"] <= share["limit"] < 0.04


def test_few_rows_of_rescaled_sums() -> None:
    """Eleven rows of I = 128: more codes differ than with classic promotion, and so does what they add up to."""
    (case,) = plan("emulator", ranks=8, phase="combine", shape=FEW, tokens_per_rank="1,12,11,0,6,0,0,25", routing="masked:0.3", repeat=3,
                   options={"fp8_sum_bits": 13},
                   config=["block_m=32", "block_n=128", "cluster=2", "promotion=rescale", "frontend=standard", "stages=2", "lag=1000", "tail=1"])  # fmt: skip
    (result,) = run([case])
    assert result.passed, describe(result)
    together = result.metrics["e2e_rank"]
    assert LIMITS["e2e_rank_small"].value < together["value"] <= together["limit"] < 0.05
