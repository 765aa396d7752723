"""``megamoe doctor``: through the real entry point, and its conclusions from made-up findings."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megamoe_cli.doctor import Finding, conclude

ROOT = Path(__file__).resolve().parents[2]


def doctor(*arguments, **env):
    return subprocess.run([sys.executable, "-m", "megamoe_cli", "doctor", *arguments], cwd=ROOT, capture_output=True, text=True,
                          timeout=150, env={**os.environ, **env})


def test_this_machine(tmp_path):
    result = doctor("--json", MEGAMOE_CACHE_DIR=str(tmp_path), MEGAMOE_SEED="7")
    document = json.loads(result.stdout)
    assert document["schema"] == "megamoe.doctor/1"
    found = {f["name"]: f for f in document["findings"]}
    assert set(found) == {"python", "host", "kernel sources", "build cache", "torch", "g++", "nvrtc", "cuda packages", "cupy", "gpu", "nvml"}
    # The test suite needs these, so here they must be seen to work.
    for name in ("python", "host", "kernel sources", "build cache", "torch", "g++", "nvrtc", "cupy"):
        assert found[name]["state"] == "ok", found[name]
    assert result.returncode == 0 and document["usable"] and document["paths"]["emulator"] == document["paths"]["build"] == ""
    assert document["next_command"].startswith("megamoe test")
    assert found["build cache"]["facts"] == {"entries": 0, "bytes": 0, "hits": 0, "misses": 0}
    assert str(tmp_path) in found["build cache"]["text"]
    assert document["settings"]["seed"] == {"value": 7, "origin": "env MEGAMOE_SEED"}


def test_without_a_compiler_and_without_a_gpu_nothing_can_run(tmp_path):
    result = doctor("-q", PATH=str(tmp_path), CXX="", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 3
    assert "MISSING  g++" in result.stdout and "fix: install the package g++" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("next: install the package g++")


NAMES = ("python", "host", "kernel sources", "build cache", "torch", "g++", "nvrtc", "cuda packages", "cupy", "gpu", "nvml")
GOOD = {name: Finding(name, "ok", "fine") for name in NAMES}
GOOD["torch"] = Finding("torch", "ok", "fine", facts={"cuda_available": True})


def judge(**changes):
    findings = {**GOOD, **{f.name: f for f in changes.values()}}
    return conclude(list(findings.values()))


def test_a_gpu_machine_is_sent_to_the_gpu():
    diagnosis = judge()
    assert set(diagnosis.paths.values()) == {""} and "--backend virtual" in diagnosis.next_command


def test_a_gpu_machine_without_gcc_is_usable():
    diagnosis = judge(a=Finding("g++", "missing", "no g++", "install g++"))
    assert diagnosis.usable and diagnosis.paths["emulator"] == "g++: no g++" and not diagnosis.paths["gpu"]


def test_cpu_torch_cannot_drive_a_gpu():
    diagnosis = judge(a=replace(GOOD["torch"], facts={"cuda_available": False}))
    assert "torch" in diagnosis.paths["gpu"] and diagnosis.usable and "--backend" not in diagnosis.next_command


@pytest.mark.parametrize("name, fix", [("torch", "pip install torch"), ("build cache", "export MEGAMOE_CACHE_DIR=/x")])
def test_what_everything_needs_is_the_next_step(name, fix):
    diagnosis = judge(a=Finding(name, "missing", "not there", fix))
    assert not diagnosis.usable and diagnosis.next_command == fix


def test_no_gpu_is_no_fault():
    diagnosis = judge(a=Finding("gpu", "note", "no driver"), b=Finding("nvml", "note", "none"), c=Finding("nvrtc", "missing", "none", "pip"))
    assert diagnosis.usable and diagnosis.paths["build"] == "nvrtc: none" and diagnosis.next_command == "megamoe test --ranks 8 --phase all"
