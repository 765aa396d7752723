"""The one predicate: each rule by name, and what a legal configuration promises."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megamoe_cli import config as config_module
from megamoe_cli.config import ALLOWED, KernelConfig, check, grid_ctas, largest_stages, require, resolve
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
    ("policy=mma_sync,block_m=64", "policy-tile"),
    ("regs_math=228", "setmaxnreg"),
    ("regs_math=264", "setmaxnreg"),
    ("regs_dispatch=16,regs_tma=16", "setmaxnreg"),
    ("regs_dispatch=48", "warpgroup-registers"),  # compact: TMA keeps 56 in the same warpgroup
    ("regs_math=256", "register-budget"),
    ("regs_dispatch=48,regs_tma=48,regs_math=232", "register-budget"),  # 1,024 more than 384 threads own
    ("regs_math=208", "accumulators"),
    ("block_m=64,math_threads=128", "accumulators"),  # classic at 256 columns per warpgroup
    ("frontend=standard", "accumulators"),
    ("stages=5", "shared-memory"),
    ("cluster=2", "not-implemented"),
    ("block_n=128", "not-implemented"),
    ("block_m=64,math_threads=128,promotion=rescale", "not-implemented"),
    ("block_m=64,policy=serial_n", "not-implemented"),
    ("order=wave", "not-implemented"),
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
    wanted = KernelConfig(block_m=64, frontend="standard", math_threads=128, policy="serial_n", regs_math=256)
    assert check(wanted).rule == "not-implemented"


def test_not_implemented_is_the_only_thing_between_a_legal_choice_and_yes(monkeypatch):
    monkeypatch.setattr(config_module, "NOT_IMPLEMENTED", frozenset())
    for text in ("cluster=2", "block_n=128", "order=wave", "block_m=64,math_threads=128,promotion=rescale",
                 "block_m=64,math_threads=128,policy=wide_n,promotion=rescale", "block_m=32,policy=mma_sync"):
        assert check(KernelConfig.parse(text), FLASH, 8), text


def test_without_a_shape_only_what_every_shape_needs_is_tested():
    assert check(KernelConfig(stages=4))
    assert check(KernelConfig(stages=8)).rule == "shared-memory"
    assert check(KernelConfig(block_m=64, stages=5))


@pytest.mark.parametrize("ranks, cluster, sms, grid, rule", [
    (8, 1, 132, None, ""), (8, 1, 132, 16, ""), (8, 1, 132, 17, "co-residency"), (32, 1, 20, None, "co-residency"),
    (1, 1, 132, 132, ""), (1, 1, 132, 133, "co-residency"), (1, 1, 132, 0, "cluster-grid"),
    (8, 2, 132, 16, ""), (8, 2, 132, 15, "cluster-grid"), (8, 2, 15, None, "co-residency"),
])
def test_co_residency_and_clusters(monkeypatch, ranks, cluster, sms, grid, rule):
    monkeypatch.setattr(config_module, "NOT_IMPLEMENTED", frozenset())
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


@given(st.builds(KernelConfig, block_m=st.sampled_from(ALLOWED["block_m"]), block_n=st.sampled_from(ALLOWED["block_n"]),
                 frontend=st.sampled_from(ALLOWED["frontend"]), math_threads=st.sampled_from(ALLOWED["math_threads"]),
                 promotion=st.sampled_from(ALLOWED["promotion"]), policy=st.sampled_from(ALLOWED["policy"]), stages=st.integers(0, 8),
                 regs_dispatch=st.sampled_from([0, 24, 40, 48]), regs_math=st.sampled_from([0, 200, 208, 216, 232, 240])),
       shapes, st.sampled_from([1, 2, 4, 8]))
def test_what_a_legal_configuration_promises(config, shape, ranks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_module, "NOT_IMPLEMENTED", frozenset())  # so that all policies are tried
        assume(check(config, shape, ranks))
        resolved = resolve(config, shape, ranks)
    roles = resolved.roles()
    assert sum(role.threads for role in roles) == resolved.threads
    assert sum(role.threads * role.registers for role in roles) <= resolved.threads * resolved.launch_registers <= 65536
    per_warp = [role.registers for role in roles for _ in range(*role.warps)]
    groups = [set(per_warp[n:n + 4]) for n in range(0, len(per_warp), 4)]
    assert all(len(group) == 1 for group in groups)
    assert resolved.accumulators < roles[-1].registers <= 255
    assert 2 <= resolved.stages <= 8
    assert smem_bytes(resolved, shape, ranks) <= SMEM_LIMIT


@given(st.sampled_from(ALLOWED["block_m"]), st.sampled_from(ALLOWED["block_n"]), shapes, st.sampled_from([1, 2, 8]))
def test_largest_stages_is_the_largest(block_m, block_n, shape, ranks):
    config = KernelConfig(block_m=block_m, block_n=block_n)
    most = largest_stages(config, shape, ranks)
    assert most == 0 or 2 <= most <= 8
    if most:
        assert smem_bytes(replace(config, stages=most), shape, ranks) <= SMEM_LIMIT
    if most < 8:
        assert smem_bytes(replace(config, stages=max(most, 1) + 1), shape, ranks) > SMEM_LIMIT
