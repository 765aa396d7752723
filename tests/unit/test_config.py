"""KernelConfig: text forms, derived values, the register plan table."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamoe_cli.config import ALLOWED, NOT_IMPLEMENTED, KernelConfig, check, planned_registers, resolve
from megamoe_cli.errors import UsageError
from megamoe_cli.shapes import NAMED_SHAPES

configs = st.builds(
    KernelConfig, **{key: st.sampled_from(values) for key, values in ALLOWED.items()},
    stages=st.integers(0, 8), lag=st.integers(0, 64), unit_blocks=st.integers(1, 64),
    regs_dispatch=st.sampled_from([0, 24, 40, 48]), regs_tma=st.sampled_from([0, 24, 40, 48]), regs_math=st.sampled_from([0, 208, 232, 256]),
)


def test_defaults_and_derived_values():
    config = KernelConfig()
    assert (config.threads, config.dispatch_warps, config.tma_warps, config.math_warpgroups) == (384, 2, 2, 2)
    assert config.launch_registers == 168
    assert [(r.name, r.warps, r.registers) for r in config.roles()] == [
        ("dispatch", (0, 2), 56), ("tma", (2, 4), 56), ("math0", (4, 8), 224), ("math1", (8, 12), 224)]
    assert KernelConfig(frontend="standard").threads == 512
    assert KernelConfig(frontend="standard").launch_registers == 128
    assert KernelConfig(frontend="standard", math_threads=128).threads == 384


@pytest.mark.parametrize("text, plan, total", [
    ("", (56, 56, 224), 64512),
    ("regs_dispatch=40,regs_tma=40,regs_math=232", (40, 40, 232), 64512),
    ("block_m=64", (64, 64, 208), 61440),
    ("block_m=64,cluster=2", (64, 64, 208), 61440),
    ("block_m=64,regs_dispatch=48,regs_tma=48,regs_math=208", (48, 48, 208), 59392),
    ("frontend=standard,block_m=64", (56, 64, 192), 64512),
    ("frontend=standard,block_m=64,regs_dispatch=48,regs_tma=40,regs_math=208", (48, 40, 208), 64512),
    ("frontend=standard,math_threads=128,block_m=64,policy=serial_n,regs_dispatch=48,regs_tma=40,regs_math=256", (48, 40, 256), 44032),
    ("frontend=standard,math_threads=128,block_m=64,policy=serial_n", (80, 56, 248), 49152),
    ("math_threads=128,block_m=64,policy=serial_n", (80, 80, 248), 41984),
    ("math_threads=128,block_n=128,promotion=rescale", (80, 80, 256), 43008),
    ("block_n=128,promotion=rescale,split=n", (72, 72, 216), 64512),
])
def test_register_plans(text, plan, total):
    config = KernelConfig.parse(text)
    assert check(config)
    assert config.register_plan() == plan
    assert sum(role.threads * role.registers for role in config.roles()) == total


@pytest.mark.parametrize("text, columns, accumulators", [
    ("", 128, 192),  # two M64N128 over one scratch
    ("block_m=64", 128, 128),
    ("block_m=16", 128, 128),  # padded to 64 rows
    ("split=m", 256, 192),  # each warpgroup 64 rows in two column units, over one scratch
    ("block_n=128", 128, 160),  # cut along M; a third part: the activations of the first pass
    ("block_n=128,split=n", 64, 128),  # two M64N64 over a scratch of 32; 32 held
    ("block_n=128,block_m=64", 64, 80),
    ("block_m=64,math_threads=128,policy=wide_n", 256, 256),  # illegal: classic does not fit
    ("block_m=64,math_threads=128,policy=wide_n,promotion=rescale", 256, 128),
    ("block_m=32,policy=mma_sync", 128, 48),  # 32 columns a warp: 32 sums, a scratch of 16
    ("block_m=16,block_n=128,math_threads=128,policy=mma_sync,promotion=rescale", 128, 24),
    ("block_m=64,math_threads=128,policy=serial_n", 256, 192),  # two column blocks, one scratch
])
def test_accumulators(text, columns, accumulators):
    config = KernelConfig.parse(text)
    assert (config.columns_per_warpgroup, config.accumulators) == (columns, accumulators)


def test_parse_on_top_of_a_base():
    base = KernelConfig(lag=3)
    assert KernelConfig.parse(" block_m=64 , stages=4,", base) == replace(base, block_m=64, stages=4)
    assert KernelConfig.parse("") == KernelConfig()


@pytest.mark.parametrize("text, words", [
    ("blok_m=64", ["blok_m", "block_m"]),
    ("block_m", ["KEY=VALUE"]),
    ("block_m=", ["KEY=VALUE"]),
    ("=64", ["KEY=VALUE"]),
    ("block_m=64,block_m=32", ["twice"]),
    ("block_m=wide", ["block_m", "integer", "wide"]),
    ("block_m=1.5", ["integer"]),
    ("policy=3", ["policy", "word"]),
    ("name=x", ["name", "known"]),
])
def test_bad_text_is_one_clear_line(text, words):
    with pytest.raises(UsageError) as caught:
        KernelConfig.parse(text)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words)


def test_from_dict_takes_no_bool_for_a_number():
    with pytest.raises(UsageError, match="integer"):
        KernelConfig.from_dict({"cluster": True})


@given(configs)
def test_text_forms_round_trip(config):
    assert KernelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert KernelConfig.parse(",".join(f"{k}={v}" for k, v in config.to_dict().items())) == config


@given(configs, configs)
def test_digest_and_name_tell_configurations_apart(a, b):
    assert (a.digest() == b.digest()) == (a == b)
    # The name shows the plan, not which of its numbers were spelled out.
    shown = [replace(c, regs_dispatch=0, regs_tma=0, regs_math=0) for c in (a, b)]
    assert (a.name() == b.name()) == (shown[0] == shown[1] and a.register_plan() == b.register_plan())


def test_digest_is_the_same_in_every_process():
    code = "from megamoe_cli.config import KernelConfig; print(KernelConfig(lag=5).digest())"
    seen = {subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, check=True,
                           capture_output=True, text=True).stdout.strip() for seed in ("1", "2")}
    assert seen == {KernelConfig(lag=5).digest()}


def test_names():
    assert KernelConfig(stages=4).name() == "m128n256s4c1-fused-classic-compact"
    assert KernelConfig().name() == "m128n256sautoc1-fused-classic-compact"
    assert KernelConfig(stages=4, lag=2, regs_math=208).name() == "m128n256s4c1-fused-classic-compact-lag2-r56/56/208"


@pytest.mark.parametrize("shape", NAMED_SHAPES.values(), ids=str)
@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
def test_resolve_fills_everything_in_and_settles(shape, block_m):
    resolved = resolve(KernelConfig(block_m=block_m), shape, 8)
    assert resolved.stages >= 2
    assert (resolved.regs_dispatch, resolved.regs_tma, resolved.regs_math) == planned_registers(resolved)
    assert resolve(resolved, shape, 8) == resolved
    assert check(resolved, shape, 8, sms=132)


def test_not_implemented_lists_allowed_values_only():
    for key, value in NOT_IMPLEMENTED:
        assert value in ALLOWED[key]
        assert getattr(KernelConfig(), key) != value, "the default must be implemented"
