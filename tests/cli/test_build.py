"""``megamoe build`` through the real entry point."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PHASES = ["stub", "dispatch", "l1", "l2", "combine"]


def megamoe(*arguments, cache, **env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MEGAMOE_")}
    return subprocess.run([sys.executable, "-m", "megamoe_cli", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=150,
                          env={**clean, "MEGAMOE_CACHE_DIR": str(cache), "MEGAMOE_TABLE": "none", "NO_COLOR": "1", **env})


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """All five phases, cold: (cache, seconds, result)."""
    cache = tmp_path_factory.mktemp("cache")
    start = time.monotonic()
    result = megamoe("build", "--json", cache=cache)
    return cache, time.monotonic() - start, result


def test_cold_build_of_all_phases(built):
    cache, seconds, result = built
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["schema"] == "megamoe.build-report/1" and document["ok"] is True
    assert [k["phase"] for k in document["kernels"]] == PHASES
    for kernel in document["kernels"]:
        assert not kernel["cache_hit"] and kernel["ok"] and kernel["target"] == "sm_90a"
        assert kernel["resources"]["spill_stores"] == kernel["resources"]["spill_loads"] == 0
        assert 0 < kernel["resources"]["registers"] <= 168 and 0 < kernel["smem_bytes"] <= 232448
        assert [r["registers"] for r in kernel["roles"]] == [56, 56, 224, 224]
        assert Path(kernel["path"]).read_bytes()[:4] == b"\x7fELF" and Path(kernel["path"]).is_relative_to(cache)
    assert seconds < 60
    assert result.stderr.count("sm_90a") == 5  # progress, one line for each


def test_warm_build_takes_under_a_second_and_hits(built):
    """Processor time, not wall time: other tests may be running. On an idle machine the two are about the same."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = megamoe("build", "--json", cache=built[0])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert result.returncode == 0, result.stderr
    assert all(k["cache_hit"] for k in json.loads(result.stdout)["kernels"])
    assert not [line for line in result.stderr.splitlines() if not line.startswith("compiling")], result.stderr
    assert 0 < min(times) < 1.0


def test_warm_build_imports_neither_torch_nor_cupy(built):
    code = ("import sys; from megamoe_cli.cli.main import main; code = main(['build', '-q'])\n"
            "print('LOADED', [m for m in ('torch', 'cupy', 'numpy') if m in sys.modules], code)")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60,
                            env={**os.environ, "MEGAMOE_CACHE_DIR": str(built[0])})
    assert result.stdout.splitlines()[-1] == "LOADED [] 0"


def test_table(built):
    result = megamoe("build", "stub", "dispatch", cache=built[0])
    assert result.returncode == 0
    for word in ("phase", "registers", "spills", "planned registers", "stack", "shared", "seconds", "cache", "dispatch 56 tma 56 math 224", "hit", "ok"):
        assert word in result.stdout, word
    assert "l1" not in result.stdout and "2 of 2 built" in result.stderr


def test_force_compiles_again(built):
    result = megamoe("build", "stub", "--force", "--json", cache=built[0])
    assert [k["cache_hit"] for k in json.loads(result.stdout)["kernels"]] == [False]


def test_explain(tmp_path):
    result = megamoe("build", "--explain", "--json", "--config", "block_m=64", cache=tmp_path)
    document = json.loads(result.stdout)
    assert document["schema"] == "megamoe.explain/1"
    assert [(w["warp"], w["warpgroup"], w["role"], w["registers"]) for w in document["warps"]][::3] == [
        (0, 0, "dispatch", 64), (3, 0, "tma", 64), (6, 1, "math0", 208), (9, 2, "math1", 208)]
    assert document["totals"]["planned"] == 61440 and document["totals"]["owned"] == 64512
    tight = megamoe("build", "--explain", "--json", "--config", "block_m=64,regs_dispatch=48,regs_tma=48,regs_math=208", cache=tmp_path)
    assert json.loads(tight.stdout)["totals"]["planned"] == 59392
    wide = megamoe("build", "--explain", "--json", "--config", "frontend=standard,block_m=64,regs_dispatch=48,regs_tma=40,regs_math=208", cache=tmp_path)
    document = json.loads(wide.stdout)
    assert (document["totals"]["planned"], document["totals"]["owned"], document["totals"]["threads"]) == (64512, 65536, 512)
    assert [(w["warpgroup"], w["role"], w["registers"]) for w in document["warps"]][::4] == [
        (0, "dispatch", 48), (1, "tma", 40), (2, "math0", 208), (3, "math1", 208)]
    text = megamoe("build", "--explain", cache=tmp_path).stdout
    assert "math1" in text and "64512" in text
    assert not (tmp_path / "builds").exists()


def test_matrix_counts_what_is_legal_and_what_each_rule_refuses(tmp_path):
    result = megamoe("build", "--matrix", "-n", "--json", cache=tmp_path)
    assert result.returncode == 0 and not (tmp_path / "builds").exists()
    document = json.loads(result.stdout)
    found = document["combinations"]
    assert document["schema"] == "megamoe.matrix/1" and len(document["kernels"]) == found["legal"] == len(set(document["kernels"]))
    assert found["legal"] + sum(found["refused"].values()) == found["total"] and {"policy-tile", "accumulators"} <= set(found["refused"])
    some = megamoe("build", "--matrix", "-n", "l1", "combine", "--config", "policy=wide_n,cluster=2", cache=tmp_path)
    assert some.stdout.count("would build sm_90a l1: ") == some.stdout.count("would build sm_90a combine: ") > 1
    assert all("c2-wide_n" in line for line in some.stdout.splitlines()) and "combinations are legal; refused: " in some.stderr


ONE = "block_m=16,block_n=256,policy=fused,promotion=rescale,math_threads=256,split=n,frontend=compact,cluster=1"


def test_matrix_compiles_and_a_spill_is_an_error(tmp_path):
    result = megamoe("build", "stub", "--matrix", "--config", ONE, cache=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "1 of 1 combinations are legal" in result.stdout and "1 kernels: 1 compiled; 0 spill" in result.stdout
    again = megamoe("build", "stub", "--matrix", "--config", ONE, "--json", cache=tmp_path)
    assert [k["cache_hit"] for k in json.loads(again.stdout)["kernels"]] == [True]
    spilled = megamoe("build", "l1", "--matrix", "--json", "--config", f"{ONE},regs_dispatch=32,regs_tma=32,regs_math=208", cache=tmp_path)
    assert spilled.returncode == 4 and "spill stores" in spilled.stderr and "role: " in spilled.stderr
    assert json.loads(spilled.stdout)["ok"] is False


def test_dry_run_compiles_nothing(tmp_path):
    result = megamoe("build", "-n", "l1", "--target", "all", cache=tmp_path)
    assert result.returncode == 0 and not (tmp_path / "builds").exists()
    assert result.stdout.count("would build") == 2 and "sm_90a l1: m128n256s4c1-fused-classic-compact" in result.stdout


@pytest.mark.parametrize("arguments, words", [
    (["l3"], ["'l3'", "nearest name: l2"]),
    (["dispach"], ["nearest name: dispatch"]),
    (["--config", "blok_m=64"], ["blok_m", "block_m"]),
    (["--config", "stages=8"], ["shared-memory", "at most 4 stages"]),
    (["--config", "regs_math=256"], ["register-budget", "64512"]),
    (["--config", "policy=wide_n"], ["policy-tile", "math_threads=128"]),
    (["--config", "block_m=64,math_threads=128"], ["policy-tile", "serial_n"]),
    (["--config", "frontend=standard,block_m=64,regs_math=256"], ["register-budget", "65536"]),
    (["--matrix", "--config", "block_k=64"], ["no combination is legal", "allowed-values"]),
    (["--matrix", "--explain"], ["--matrix", "--explain"]),
    (["--shape", "flsh"], ["flash"]),
    (["--shape", "200x256x8x2"], ["hidden"]),
    (["--ranks", "3"], ["ranks=3"]),
    (["--ranks", "none"], ["--ranks"]),
    (["--target", "sm_90"], ["sm_90a", "emulator"]),
    (["--nvrtc-opt=--gpu-architecture=sm_90a"], ["--gpu-architecture=sm_90a", "sm_90a"]),
    (["-j", "0"], ["--jobs"]),
])
def test_bad_input_is_one_clear_line_and_exit_2(tmp_path, arguments, words):
    result = megamoe("build", *arguments, cache=tmp_path)
    assert result.returncode == 2 and result.stdout == ""
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and all(word in errors[0] for word in words), result.stderr
    assert "Traceback" not in result.stderr and not (tmp_path / "builds").exists()


def test_a_kernel_that_does_not_compile_is_exit_4_with_the_log(tmp_path):
    result = megamoe("build", "stub", "--nvrtc-opt=-Dmegamoe=1", "--json", cache=tmp_path)
    assert result.returncode == 4
    document = json.loads(result.stdout)
    assert document["ok"] is False and document["kernels"][0]["ok"] is False and "error" in document["kernels"][0]["log"]
    # On stderr the beginning of the log, with names as in the repository, then the first error as one line.
    assert "kernels/hw/types.cuh(" in result.stderr and "more lines" in result.stderr and len(result.stderr.splitlines()) < 40


def test_settings_reach_the_build(tmp_path):
    result = megamoe("build", "--explain", "--json", cache=tmp_path, MEGAMOE_CONFIG="block_m=64", MEGAMOE_SHAPE="tiny")
    assert json.loads(result.stdout)["config"]["block_m"] == 64


def test_without_a_host_compiler_the_package_is_named(tmp_path):
    result = megamoe("build", "stub", "--target", "emulator", cache=tmp_path, PATH=str(tmp_path), CXX="")
    assert result.returncode == 3 and "apt-get install g++" in result.stderr


def test_emulator_target():
    """In the user's own cache: entries are found by content, and the emulator's runtime takes a while to compile."""
    from megamoe_cli.paths import cache_dir

    result = megamoe("build", "combine", "--target", "emulator", "--shape", "tiny", "--json", cache=cache_dir())
    assert result.returncode == 0, result.stderr
    kernel = json.loads(result.stdout)["kernels"][0]
    assert kernel["target"] == "emulator" and kernel["resources"] is None and Path(kernel["path"]).suffix == ".so"


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"])
def test_an_interrupted_build_ends_and_leaves_no_compiler_behind(tmp_path, number, code):
    """With a compiler that would take minutes."""
    compiler = tmp_path / "slow-c++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo slow 1.0 && exit\nsleep 300\n')
    compiler.chmod(0o755)
    mark = f"mark{os.getpid()}x{time.monotonic_ns()}"
    process = subprocess.Popen([sys.executable, "-m", "megamoe_cli", "build", "--target", "emulator", "-j", "2"], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env={**os.environ, "CXX": str(compiler), "MEGAMOE_CACHE_DIR": str(tmp_path / "cache"), "MARK": mark})
    try:
        deadline = time.monotonic() + 60
        while not any("sleep" in name for name in marked(mark).values()):
            assert time.monotonic() < deadline and process.poll() is None, "the compiler never started"
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == code and "Traceback" not in errors
    assert marked(mark) == {}


def marked(mark):
    """Live processes whose environment carries ``mark``: pid -> command."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"MARK={mark}".encode() in Path("/proc", pid, "environ").read_bytes():
                found[pid] = Path("/proc", pid, "comm").read_text().strip()
        except OSError:
            continue
    return found
