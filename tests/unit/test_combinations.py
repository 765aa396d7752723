"""Every combination of compile-time choices has a verdict; what is legal is proven by plans that leave nothing out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations as pairs_of, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe_cli import combinations, policy_plan
from megamoe_cli.compile.driver import BuildRequest, prepare
from megamoe_cli.compile.entry import entry_text
from megamoe_cli.config import ALLOWED, LAUNCH_FIELDS, MAX_THREAD_REGISTERS, KernelConfig, check, grid_ctas, require, resolve
from megamoe_cli.errors import UsageError
from megamoe_cli.layout import SMEM_LIMIT, smem_bytes
from megamoe_cli.shapes import NAMED_SHAPES, Shape

FLASH = NAMED_SHAPES["flash"]
LEGAL = combinations.enumerate_all(shape=FLASH, ranks=8).legal
RULES = {"policy-tile", "policy-order", "accumulators", "shared-memory", "register-budget", "warpgroup-registers", "setmaxnreg", "compiler-spill"}
shapes = st.builds(Shape, hidden=st.integers(1, 64).map(lambda n: 128 * n), intermediate=st.integers(1, 32).map(lambda n: 128 * n),
                   experts=st.integers(1, 48).map(lambda n: 8 * n), topk=st.integers(1, 8))  # fmt: skip


def test_each_combination_is_legal_or_refused_by_a_rule():
    found = combinations.enumerate_all(shape=FLASH, ranks=8)
    assert found.total == 4 * 2 * 4 * 2 * 2 * 2 * 2 * 2 and sum(found.refused.values()) == found.total - len(found.legal)
    assert set(found.refused) <= RULES and len(set(found.legal)) == len(found.legal) > 200
    assert str(len(found.legal)) in found.sentence() and all(rule in found.sentence() for rule in found.refused)
    # A fixed axis and a policy narrow it down; the parts add up.
    parts = [combinations.enumerate_all(shape=FLASH, ranks=8, policies=[policy]) for policy in ALLOWED["policy"]]
    assert sorted(c.digest() for part in parts for c in part.legal) == sorted(c.digest() for c in found.legal)
    pairs = combinations.enumerate_all(KernelConfig(cluster=2), FLASH, 8, fixed=["cluster"])
    assert set(pairs.legal) == {c for c in found.legal if c.cluster == 2} and pairs.total == found.total // 2


def test_a_combination_is_written_in_one_way():
    for config in LEGAL:
        assert combinations.settled(config) == config
        assert combinations.settled(replace(config, split="m" if config.m_splits == 2 else "n")) == config


def test_no_two_combinations_have_the_same_source_text():
    texts = Counter(entry_text("combine", resolve(config, FLASH, 8)) for config in LEGAL)
    assert max(texts.values()) == 1


def test_a_covering_subset_covers():
    chosen = combinations.covering(LEGAL)

    def values(config):
        return {name: config.m_splits if name == "split" else getattr(config, name) for name in combinations.AXES}

    for first, second in pairs_of(combinations.AXES, 2):
        assert {(values(c)[first], values(c)[second]) for c in chosen} == {(values(c)[first], values(c)[second]) for c in LEGAL}
    assert len(chosen) <= 24 and chosen == combinations.covering(LEGAL)


def test_the_policy_plan_runs_every_combination_at_every_phase_and_rank_count():
    plan = policy_plan.plan("all")
    usual = {name: getattr(KernelConfig(), name) for name in LAUNCH_FIELDS}
    cells = Counter((combinations.settled(replace(c.config, **usual)), c.phase, c.ranks) for c in plan.cases)
    assert set(cells) == set(product(plan.chosen, policy_plan.PHASES, policy_plan.RANKS)) and max(cells.values()) == 1
    assert len({c.id for c in plan.cases}) == len(plan.cases)
    for case in plan.cases:
        require(case.config, case.problem.shape, case.ranks)
    per_rank = {case.problem.experts_per_rank for case in plan.cases}
    assert per_rank >= {1, 3, 7, 9, 48, 129}
    assert {case.config.lag for case in plan.cases} == {0, 1, 5, 1000} and len({case.config.unit_blocks for case in plan.cases}) >= 4
    assert {case.config.tile_order for case in plan.cases if case.config.policy == "fused"} == {"lag", "wave"}
    assert {case.config.tail for case in plan.cases} == {0, 1}
    assert any(case.problem.shape.hidden > 16 * 128 and case.config.promotion == "rescale" for case in plan.cases), "the periodic carry"
    assert any(case.problem.shape.hidden % case.config.block_n for case in plan.cases), "a tile that overhangs H"
    assert str(len(plan.found.legal)) in plan.sentence() and plan.to_dict()["cases"] == len(plan.cases)


@pytest.mark.parametrize("text, words", [("wde_n", "wide_n"), ("fused,all", "name policies"), (",", "name policies"), ("coverng", "covering")])
def test_policies_by_name(text, words):
    with pytest.raises(UsageError, match=words):
        policy_plan.selection(text)


def test_covering_and_named_policies():
    assert policy_plan.selection("all,covering") == (ALLOWED["policy"], True) and policy_plan.selection("covering")[1]
    assert policy_plan.selection("wide_n,fused") == (("fused", "wide_n"), False)
    few = policy_plan.plan("wide_n,covering", ranks=[2], phases=["combine"])
    assert {c.config.policy for c in few.cases} == {"wide_n"} and len(few.cases) == len(few.chosen) < len(few.found.legal)


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(LEGAL), shapes, st.sampled_from([1, 2, 4, 8]), st.integers(0, 8),
       st.sampled_from([0, 24, 40, 48, 64]), st.sampled_from([0, 200, 208, 216, 232, 240, 256]))  # fmt: skip
def test_what_the_predicate_accepts_resolves_and_fits(config, shape, ranks, stages, frontend_registers, math_registers):
    wanted = replace(config, stages=stages, regs_dispatch=frontend_registers, regs_tma=frontend_registers, regs_math=math_registers)
    verdict = check(wanted, shape, ranks)
    if not verdict:
        assert verdict.rule in RULES | {"stages"} and verdict.explanation and "\n" not in verdict.explanation
        with pytest.raises(UsageError):
            resolve(wanted, shape, ranks)
        return
    resolved = resolve(wanted, shape, ranks)
    assert check(resolved, shape, ranks) and resolve(resolved, shape, ranks) == resolved
    assert 2 <= resolved.stages <= 8 and smem_bytes(resolved, shape, ranks) <= SMEM_LIMIT
    roles = resolved.roles()
    assert sum(role.threads for role in roles) == resolved.threads
    assert sum(role.threads * role.registers for role in roles) <= resolved.threads * resolved.launch_registers <= 65536
    per_warp = [role.registers for role in roles for _ in range(*role.warps)]
    assert all(len(set(per_warp[n:n + 4])) == 1 for n in range(0, len(per_warp), 4))
    assert resolved.accumulators < min(roles[-1].registers, MAX_THREAD_REGISTERS)
    text = prepare(BuildRequest("combine", wanted, "emulator", shape, ranks)).text
    assert f"kStages = {resolved.stages}," in text and f"kRegsMath = {roles[-1].registers};" in text


@pytest.mark.parametrize("sms", range(1, 40))
def test_a_grid_that_is_odd_never_reaches_a_pair(sms):
    """Cluster 2 where the SMs of a rank are an odd number: the grid is rounded down, or the launch refused by rule."""
    for ranks in (1, 2, 3, 8):
        grid = grid_ctas(KernelConfig(cluster=2), ranks, sms)
        assert grid % 2 == 0 and grid <= sms // ranks
        verdict = check(KernelConfig(cluster=2), None, ranks, sms)
        assert verdict.rule == ("" if grid else "co-residency")
        assert check(KernelConfig(cluster=2), None, ranks, sms, grid + 1).rule == "cluster-grid"


def test_a_whole_tile_of_sums_and_a_scratch_never_compiles_quietly():
    """128x256 on one warpgroup, and classic promotion over 256 columns, cannot be kept in registers: refused, never spilled."""
    for block_m, policy, promotion in product((64, 128), ("serial_n", "wide_n", "fused"), ("classic", "rescale")):
        config = KernelConfig(block_m=block_m, math_threads=128, policy=policy, promotion=promotion)
        if config.accumulators + 24 > MAX_THREAD_REGISTERS or (policy == "wide_n" and promotion == "classic") or policy == "fused":
            assert check(config).rule in ("accumulators", "policy-tile"), config.name()
