"""The one predicate: each rule by name, and what a legal configuration promises."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamoe_cli import config as config_module
from megamoe_cli.config import ALLOWED, KernelConfig, check, grid_ctas, largest_stages, require
from megamoe_cli.errors import ExitCode, UsageError
from megamoe_cli.layout import SMEM_LIMIT, smem_bytes
from megamoe_cli.shapes import NAMED_SHAPES, Shape

FLASH = NAMED_SHAPES["flash"]


@pytest.mark.parametrize("text, rule", [
    ("block_m=48", "allowed-values"),
    ("block_n=512", "allowed-values"),
    ("block_k=64", "allowed-values"),
    ("cluster=4", "allowed-values"),
    ("math_threads=384", "allowed-values"),
    ("policy=split", "allowed-values"),
    ("promotion=none", "allowed-values"),
    ("frontend=wide", "allowed-values"),
    ("order=random", "allowed-values"),
    ("unit_blocks=0", "allowed-values"),
    ("lag=-1", "allowed-values"),
    ("stages=1", "stages"),
    ("stages=9", "stages"),
    ("stages=-2", "stages"),
    ("policy=wide_n", "policy-tile"),  # needs one warpgroup and rescale
    ("policy=wide_n,math_threads=128,block_m=64", "policy-tile"),  # classic
    ("policy=wide_n,math_threads=128,block_m=64,block_n=128,promotion=rescale", "policy-tile"),
    ("policy=mma_sync,block_m=64", "policy-tile"),
    ("block_m=64,math_threads=128", "policy-tile"),  # fused with 256 columns to one warpgroup would be an alias
    ("block_m=64,math_threads=128,promotion=rescale", "policy-tile"),
    ("block_m=64,split=m", "policy-tile"),
    ("math_threads=128,block_n=128,promotion=rescale,split=m", "policy-tile"),
    ("block_m=32,policy=mma_sync,split=m", "policy-tile"),
    ("split=rows", "allowed-values"),
    ("policy=serial_n,order=lag", "policy-order"),
    ("regs_math=228", "setmaxnreg"),
    ("regs_math=264", "setmaxnreg"),
    ("regs_dispatch=16,regs_tma=16", "setmaxnreg"),
    ("regs_dispatch=48", "warpgroup-registers"),  # compact: TMA keeps 56 in the same warpgroup
    ("regs_math=256", "register-budget"),
    ("regs_dispatch=48,regs_tma=48,regs_math=232", "register-budget"),  # 1,024 more than 384 threads own
    ("regs_math=208", "accumulators"),
    ("math_threads=128,policy=serial_n", "accumulators"),  # classic: 128 rows x 256 columns on one warpgroup
    ("math_threads=128,policy=wide_n,promotion=rescale", "accumulators"),
    ("math_threads=128,block_n=128", "accumulators"),
    ("frontend=standard", "accumulators"),
    ("stages=5", "shared-memory"),
    ("promotion=rescale,block_n=128,split=n,frontend=standard,cluster=2", "compiler-spill"),
    ("stages=4,promotion=rescale", "shared-memory"),  # the carry needs a stage's worth
])
def test_each_rule_by_name(text, rule):
    verdict = check(KernelConfig.parse(text), FLASH, 8)
    assert (bool(verdict), verdict.rule) == (False, rule), verdict.explanation
    assert verdict.explanation and "\n" not in verdict.explanation


@pytest.mark.parametrize("shape, ranks, rule", [
    (Shape(200, 256, 8, 2), 2, "hidden-multiple"),
    (Shape(256, 96, 8, 2), 2, "intermediate-multiple"),
    (Shape(256, 256, 10, 2), 4, "experts-divisible"),
    (Shape(256, 256, 66, 2), 33, "ranks-limit"),
])
def test_rules_of_the_shape_keep_their_names(shape, ranks, rule):
    assert check(KernelConfig(), shape, ranks).rule == rule


def test_256_registers_on_256_math_threads_leave_nothing():
    for frontend in ("compact", "standard"):
        wanted = KernelConfig(block_m=64, cluster=2, policy="serial_n", frontend=frontend, regs_math=256)
        assert check(wanted).rule == "register-budget"


def test_256_registers_on_128_math_threads_are_within_the_budget():
    wanted = KernelConfig(block_m=64, frontend="standard", math_threads=128, policy="serial_n", regs_dispatch=48, regs_tma=40, regs_math=256)
    assert check(wanted, FLASH, 8) and sum(role.threads * role.registers for role in wanted.roles()) == 44032


@pytest.mark.parametrize("text", [
    "cluster=2", "block_n=128", "order=wave", "policy=serial_n", "policy=serial_n,order=wave", "block_m=64,math_threads=128,policy=serial_n",
    "block_m=64,math_threads=128,policy=wide_n,promotion=rescale", "block_m=64,math_threads=128,block_n=128", "split=m", "split=n",
    "block_m=32,policy=mma_sync", "policy=serial_n,block_n=128,cluster=2,promotion=rescale,frontend=standard",
])  # fmt: skip
def test_legal_choices(text):
    assert check(KernelConfig.parse(text), FLASH, 8)


def test_what_is_not_implemented_is_refused_last(monkeypatch):
    monkeypatch.setattr(config_module, "NOT_IMPLEMENTED", frozenset({("cluster", 2)}))
    assert check(KernelConfig(cluster=2), FLASH, 8).rule == "not-implemented"
    assert check(KernelConfig(cluster=2, regs_math=256), FLASH, 8).rule == "register-budget"


def test_without_a_shape_only_what_every_shape_needs_is_tested():
    assert check(KernelConfig(stages=4))
    assert check(KernelConfig(stages=8)).rule == "shared-memory"
    assert check(KernelConfig(block_m=64, stages=5))


@pytest.mark.parametrize("ranks, cluster, sms, grid, rule", [
    (8, 1, 132, None, ""), (8, 1, 132, 16, ""), (8, 1, 132, 17, "co-residency"), (32, 1, 20, None, "co-residency"),
    (1, 1, 132, 132, ""), (1, 1, 132, 133, "co-residency"), (1, 1, 132, 0, "cluster-grid"),
    (8, 2, 132, 16, ""), (8, 2, 132, 15, "cluster-grid"), (8, 2, 15, None, "co-residency"),
])
def test_co_residency_and_clusters(ranks, cluster, sms, grid, rule):
    assert check(KernelConfig(cluster=cluster), None, ranks, sms, grid).rule == rule


def test_grids_of_virtual_ranks():
    assert grid_ctas(KernelConfig(), 8, 132) == 16
    assert grid_ctas(KernelConfig(cluster=2), 8, 132) == 16
    assert grid_ctas(KernelConfig(cluster=2), 7, 132) == 18
    assert grid_ctas(KernelConfig(), 8, 7) == 0


def test_require_is_a_usage_error_with_the_rule():
    with pytest.raises(UsageError, match="register-budget") as caught:
        require(KernelConfig(regs_math=256))
    assert caught.value.rule == "register-budget" and caught.value.exit_code == ExitCode.USAGE


anything = st.builds(
    KernelConfig, **{key: st.sampled_from([*values, 7]) if isinstance(values[0], int) else st.sampled_from([*values, "?"])
                     for key, values in ALLOWED.items()},
    stages=st.integers(-1, 10), lag=st.integers(-1, 70000), unit_blocks=st.integers(-1, 70000),
    regs_dispatch=st.integers(0, 300), regs_tma=st.integers(0, 300), regs_math=st.integers(0, 300))
shapes = st.builds(Shape, hidden=st.integers(1, 64).map(lambda n: 128 * n), intermediate=st.integers(1, 32).map(lambda n: 128 * n),
                   experts=st.integers(1, 48).map(lambda n: 8 * n), topk=st.integers(1, 8))


@given(anything, st.none() | shapes, st.sampled_from([None, 1, 2, 8, 40]), st.sampled_from([None, 1, 20, 132]))
def test_any_configuration_gets_a_verdict_and_an_illegal_one_a_reason(config, shape, ranks, sms):
    verdict = check(config, shape, ranks, sms)
    assert verdict.ok == (verdict.rule == "") == (verdict.explanation == "")


@given(st.sampled_from(ALLOWED["block_m"]), st.sampled_from(ALLOWED["block_n"]), shapes, st.sampled_from([1, 2, 8]))
def test_largest_stages_is_the_largest(block_m, block_n, shape, ranks):
    config = KernelConfig(block_m=block_m, block_n=block_n)
    most = largest_stages(config, shape, ranks)
    assert most == 0 or 2 <= most <= 8
    if most:
        assert smem_bytes(replace(config, stages=most), shape, ranks) <= SMEM_LIMIT
    if most < 8:
        assert smem_bytes(replace(config, stages=max(most, 1) + 1), shape, ranks) > SMEM_LIMIT
