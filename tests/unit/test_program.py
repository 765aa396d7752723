"""Stream programs: what may be recorded, and how they are cut at launches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megamoe_cli.abi import FaultRecord, KernelParams
from megamoe_cli.backends.base import Copy, Fill, Kernel, Launch, Program, RunResult
from megamoe_cli.config import KernelConfig
from megamoe_cli.errors import LaunchFault, UsageError


def kernel(cluster: int = 1) -> Kernel:
    return Kernel(KernelConfig(cluster=cluster), "stub", 0, Path("k"))


def test_segments_end_with_launches() -> None:
    a, b = torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    program = Program(2)
    assert not program
    program.copy(0, a, b)
    program.launch(0, kernel(), KernelParams(), 1)
    program.launch(0, kernel(), KernelParams(), 1)
    program.fill(0, a, 7)
    kinds = [[type(op) for op in part] for part in program.segments(0)]
    assert kinds == [[Copy, Launch], [Launch], [Fill]] and program.segments(1) == []
    assert program and len(program.launches(0)) == 2


def test_copies_are_byte_copies() -> None:
    program = Program(1)
    program.copy(0, torch.zeros(2, 4), torch.zeros(32, dtype=torch.uint8))
    program.copy(0, torch.zeros(4, 2).t(), torch.zeros(8))  # dense in another order: still one span of bytes
    program.copy(0, torch.zeros(0, 4), torch.zeros(0))
    program.fill(0, torch.zeros(0), 1)
    assert [op.nbytes for op in program.ops[0]] == [32, 32]
    with pytest.raises(ValueError, match="copy of 4 bytes into 8"):
        program.copy(0, torch.zeros(2), torch.zeros(1))
    with pytest.raises(ValueError, match="must be dense"):
        program.copy(0, torch.zeros(2), torch.zeros(4)[::2])
    with pytest.raises(ValueError, match="must be dense"):
        program.fill(0, torch.zeros(2, 4)[:, :2], 0)
    with pytest.raises(ValueError, match="256 is not a byte"):
        program.fill(0, torch.zeros(2), 256)


def test_a_launch_keeps_the_parameters_it_was_given() -> None:
    program, params = Program(1), KernelParams(num_tokens=3)
    program.launch(0, kernel(), params, 2)
    params.num_tokens = 9
    assert program.launches(0)[0].params.num_tokens == 3


@pytest.mark.parametrize(("cluster", "grid"), [(1, 0), (2, 3), (2, 0)])
def test_grids_are_whole_clusters(cluster: int, grid: int) -> None:
    with pytest.raises(UsageError, match="not a positive multiple of the cluster size"):
        Program(1).launch(0, kernel(cluster), KernelParams(), grid)


def test_faults_are_told_in_the_order_they_were_given_up() -> None:
    late, early = FaultRecord(code=2, rank=0, at_ns=9, expected=4), FaultRecord(code=2, rank=1, at_ns=3, expected=4)
    with pytest.raises(LaunchFault, match="^rank 1.*; rank 0"):
        RunResult(faults={0: late, 1: early}).raise_for_faults()
    RunResult().raise_for_faults()
    assert RunResult().report is None
    assert RunResult(diagnostics=[{"text": "a", "report": "race: a"}, {"text": "b"}]).report == "race: a\nb"
