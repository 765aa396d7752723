"""The virtual backend's own logic, on a stand-in for the device: grids, co-residency, order, timeouts, faults."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

from megamoe_cli.abi import FaultRecord, KernelParams
from megamoe_cli.backends.base import Kernel, Program
from megamoe_cli.backends.cuda_runtime import pack_argument
from megamoe_cli.backends.sm_share import ctas_per_rank
from megamoe_cli.backends.virtual import VirtualBackend, open_backend
from megamoe_cli.config import KernelConfig
from megamoe_cli.errors import EnvironmentUnfit, LaunchFault, TimedOut, UsageError
from tests.unit.fake_cuda import H200, FakeCuda

CONFIG = KernelConfig(stages=3)


def kernel(config: KernelConfig = CONFIG, smem: int = 200_000) -> Kernel:
    return Kernel(config, "combine", smem, Path("k.cubin"), handle="handle")


def program(backend: VirtualBackend, launches: int = 1) -> Program:
    out = Program(backend.ranks)
    for _ in range(launches):
        for rank in range(backend.ranks):
            out.fill(rank, torch.zeros(16, dtype=torch.uint8), 0xFF)
            out.launch(rank, kernel(), KernelParams(rank=rank), backend.grid(CONFIG))
    return out


@pytest.mark.parametrize(("sms", "ranks", "expected"), [(132, 1, 132), (132, 8, 16), (132, 5, 26), (78, 32, 2), (132, 132, 1)])
def test_every_cta_has_an_sm(sms: int, ranks: int, expected: int) -> None:
    assert ctas_per_rank(sms, ranks) == expected
    assert ctas_per_rank(sms, ranks) * ranks <= sms


def test_ctas_on_request() -> None:
    assert ctas_per_rank(132, 8, 4) == 4
    with pytest.raises(UsageError, match="leave 1..16 for each"):
        ctas_per_rank(132, 8, 17)
    with pytest.raises(UsageError, match="133 ranks cannot be resident at once on 132 SMs"):
        ctas_per_rank(132, 133)


def test_grids_are_whole_clusters() -> None:
    backend = VirtualBackend(5, FakeCuda())
    assert backend.where == "virtual(5 on 1xNVIDIA H200)"
    assert (backend.max_ctas_per_rank, backend.grid(CONFIG)) == (26, 26)
    assert backend.grid(replace(CONFIG, cluster=2), 9) == 8
    assert backend.grid(CONFIG, 1000) == 26
    with pytest.raises(UsageError, match="no CTAs to launch: 1 requested"):
        backend.grid(replace(CONFIG, cluster=2), 1)
    with pytest.raises(UsageError, match="1 fit per rank"):
        VirtualBackend(70, FakeCuda()).grid(replace(CONFIG, cluster=2))


def built(config: KernelConfig, smem: int) -> SimpleNamespace:
    return SimpleNamespace(config=config, phase="combine", smem_bytes=smem, path=Path("k.cubin"))


def test_a_kernel_that_does_not_fit_is_refused() -> None:
    cuda = FakeCuda()
    backend = VirtualBackend(2, cuda)
    assert backend.load_built(built(CONFIG, 1000)).handle == (Path("k.cubin"), "mega_moe")
    assert ("load", "k.cubin", "mega_moe", 1000) in cuda.log
    cuda.blocks = 0
    with pytest.raises(UsageError, match="does not fit on one SM of NVIDIA H200") as caught:
        backend.load_built(built(CONFIG, 2000))
    assert caught.value.exit_code == 2


def test_clusters_that_fit_bound_the_grid() -> None:
    cuda = FakeCuda()
    cuda.clusters = 60
    backend = VirtualBackend(8, cuda)
    backend.load_built(built(replace(CONFIG, cluster=2), 1000))
    assert backend.max_ctas_per_rank == 14, "7 clusters each, where the SM count alone would allow 8"
    cuda.clusters = 7
    with pytest.raises(UsageError, match="8 ranks of clusters of 2 cannot all be resident"):
        backend.load_built(built(replace(CONFIG, cluster=2), 2000))


def test_reserved_sms_are_in_no_grid() -> None:
    backend = VirtualBackend(8, FakeCuda(), reserve_sms=4)
    assert (backend.max_ctas_per_rank, backend.grid(CONFIG)) == (16, 16), "128 SMs are still 16 each"
    assert backend.where == "virtual(8 on 1xNVIDIA H200, 4 SMs reserved)"
    backend = VirtualBackend(8, FakeCuda(), reserve_sms=5)
    assert backend.grid(CONFIG) == 15 and backend.grid(replace(CONFIG, cluster=2)) == 14 and backend.grid(CONFIG, 132) == 15
    assert VirtualBackend(1, FakeCuda(), reserve_sms=131).grid(CONFIG) == 1
    for reserve, words in ((132, "leaves no SM for the kernel: the device has 132, so at most 131"), (-1, "reserve_sms=-1 is negative"),
                           (125, "8 ranks cannot be resident at once on 7 SMs .132 less 125 reserved.")):  # fmt: skip
        with pytest.raises(UsageError, match=words) as caught:
            VirtualBackend(8, FakeCuda(), reserve_sms=reserve)
        assert caught.value.exit_code == 2
    with pytest.raises(UsageError, match="leave 1..15 for each"):
        VirtualBackend(8, FakeCuda(), ctas=16, reserve_sms=5)


def test_a_reserved_sm_may_spoil_a_cluster() -> None:
    cuda = FakeCuda()
    cuda.clusters = 60
    backend = VirtualBackend(2, cuda, reserve_sms=3)
    backend.load_built(built(replace(CONFIG, cluster=2), 1000))
    assert backend.max_ctas_per_rank == 56, "(60 - 3) // 2 clusters, where 129 SMs alone would allow 64 CTAs"
    backend.leave_sms(7)
    assert backend.max_ctas_per_rank == 52 and backend.where == "virtual(2 on 1xNVIDIA H200, 7 SMs reserved)"
    backend.leave_sms(3)
    assert backend.share.reserve == 7, "the most that anybody asked for"
    with pytest.raises(UsageError, match="leaves no SM"):
        backend.leave_sms(132)
    assert backend.max_ctas_per_rank == 52, "unchanged by what was refused"


def test_more_ranks_than_hardware_queues() -> None:
    cuda = FakeCuda()
    cuda.few_queues = True
    VirtualBackend(8, cuda)
    with pytest.raises(UsageError, match="9 ranks need 9 hardware queues") as caught:
        VirtualBackend(9, cuda)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in caught.value.hint


def test_all_ranks_have_their_first_launch_before_any_runs() -> None:
    cuda = FakeCuda()
    backend = VirtualBackend(3, cuda)
    result = backend.run(program(backend, launches=2), 5)
    order = [entry[0] for entry in cuda.log]
    assert cuda.log[0] == ("synchronize",), "uploads end before anything is enqueued"
    assert order.count("hold") == 3 and order.index("hold") < order.index("enqueue fill")
    launches = [i for i, name in enumerate(order) if name == "enqueue launch"]
    assert order.index("ran") > launches[2]
    assert [entry[1] for entry in cuda.log if entry[0] == "enqueue launch"] == [0, 1, 2, 0, 1, 2], "launch by launch"
    assert ("enqueue launch", 0, 44, 384, 200_000) in cuda.log
    assert {rank: len(times) for rank, times in result.launch_ms.items()} == {0: 2, 1: 2, 2: 2}
    assert all(ms > 0 for times in result.launch_ms.values() for ms in times) and not result.faults and not result.notes


def test_a_held_program_starts_once_all_of_it_is_enqueued() -> None:
    cuda = FakeCuda()
    backend, todo, opened = VirtualBackend(2, cuda), None, []
    real = backend._open
    backend._open = lambda gate: opened.append(sum(entry[0] == "enqueue launch" for entry in cuda.log)) or real(gate)  # type: ignore[method-assign]
    for held in (False, True):
        cuda.log.clear(), opened.clear()
        todo = program(backend, launches=3)
        todo.held = held
        result = backend.run(todo, 5)
        assert min(opened) == (6 if held else 2)
        if held:
            assert {r: len(at) for r, at in result.launch_at_ms.items()} == {0: 3, 1: 3} and result.launch_at_ms[1][0] == 0
            assert result.launch_at_ms[1] == sorted(result.launch_at_ms[1])
        else:
            assert result.launch_at_ms == {}


def test_without_a_gate_it_runs_and_says_so() -> None:
    cuda = FakeCuda()
    cuda.can_hold = False
    backend = VirtualBackend(2, cuda)
    result = backend.run(program(backend), 5)
    assert len(result.notes) == 1 and "not together" in result.notes[0]


def test_a_program_runs_in_order() -> None:
    a, b, y = (torch.full((8,), value, dtype=torch.uint8) for value in (1, 2, 0))
    seen = []
    backend = VirtualBackend(1, FakeCuda(kernel=lambda p, grid: seen.append(y.tolist())))
    todo = Program(1)
    for source in (a, b):
        todo.copy(0, y, source)
        todo.launch(0, kernel(), KernelParams(), 1)
    todo.fill(0, y, 9)
    backend.run(todo, 5)
    assert seen == [[1] * 8, [2] * 8] and y.tolist() == [9] * 8


def test_a_kernel_that_does_not_end_times_out_with_its_fault() -> None:
    backend = VirtualBackend(2, cuda := FakeCuda())

    def stuck(params: KernelParams, grid: int) -> bool:
        record = bytes(FaultRecord(code=1, wait=2, rank=1, index=0, waited_ns=10**9))
        ctypes.memmove(backend.fault_address(1), record, len(record))
        return params.rank == 0

    cuda.kernel = stuck
    with pytest.raises(TimedOut, match="rank 1 did not finish within 0.05 s; rank 1, .* waited 1 s for the expert counts of rank 0"):
        backend.run(program(backend), 0.05)
    with pytest.raises(UsageError, match="cannot run any more: rank 1 did not finish"):
        backend.run(program(backend), 0.05)
    backend.close()
    assert not cuda.closed, "freeing would wait for the kernel"


def test_faults_are_cleared_before_and_read_after() -> None:
    backend = VirtualBackend(2, cuda := FakeCuda())

    def faulty(params: KernelParams, grid: int) -> None:
        assert not backend.read_fault(params.rank)
        if params.rank == 1:
            record = bytes(FaultRecord(code=2, rank=1, index=5, observed=9, expected=8))
            ctypes.memmove(backend.fault_address(1), record, len(record))

    cuda.kernel = faulty
    for _ in range(2):
        assert set(backend.run(program(backend), 5).faults) == {1}
    cuda.kernel = lambda p, grid: True
    assert not backend.run(program(backend), 5).faults


def test_a_device_failure_is_told_with_the_record() -> None:
    backend = VirtualBackend(1, cuda := FakeCuda())
    cuda.failure = "cudaErrorLaunchFailure: unspecified launch failure"
    with pytest.raises(LaunchFault, match="the device failed: cudaErrorLaunchFailure"):
        backend.run(program(backend), 5)
    with pytest.raises(UsageError, match="cannot run any more"):
        backend.run(program(backend), 5)


def test_an_error_while_enqueueing_opens_the_gate() -> None:
    backend = VirtualBackend(2, cuda := FakeCuda())
    cuda.launch = lambda *args: (_ for _ in ()).throw(RuntimeError("no"))
    with pytest.raises(RuntimeError, match="no"):
        backend.run(program(backend), 5)
    assert all(cuda.is_done(stream) for stream in cuda.streams)


def test_ranks_must_launch_equally_often() -> None:
    backend = VirtualBackend(2, FakeCuda())
    todo = Program(2)
    todo.launch(0, kernel(), KernelParams(), 1)
    with pytest.raises(UsageError, match="rank 0: 1, rank 1: 0"):
        backend.run(todo, 5)
    with pytest.raises(UsageError, match="a program of 3 ranks"):
        backend.run(Program(3), 5)
    todo.launch(1, kernel(), KernelParams(), 67)
    with pytest.raises(UsageError, match="rank 1 asks for 67 CTAs; 66 fit"):
        backend.run(todo, 5)


def test_symmetric_memory() -> None:
    backend = VirtualBackend(2, FakeCuda())
    first = backend.alloc(0, 64, symmetric=True, name="s")
    with pytest.raises(UsageError, match="rank 1 has no symmetric allocation 's' yet"):
        backend.peer_addresses(0, "s")
    second = backend.alloc(1, 64, symmetric=True, name="s")
    assert backend.peer_addresses(1, "s") == [first.data_ptr(), second.data_ptr()]
    with pytest.raises(ValueError, match="already has"):
        backend.alloc(1, 64, symmetric=True, name="s")


def test_tensors_are_adopted_where_they_are() -> None:
    backend = VirtualBackend(1, FakeCuda())
    whole = torch.arange(64, dtype=torch.float32).view(8, 8)
    assert backend.adopt(0, whole, name="w") is whole
    turned = backend.adopt(0, whole.t(), name="w")
    assert turned.is_contiguous() and torch.equal(turned, whole.t())
    crooked = whole.view(-1)[1:9]
    assert backend.adopt(0, crooked, name="w").data_ptr() % 16 == 0


def test_close_frees_once() -> None:
    backend = VirtualBackend(1, cuda := FakeCuda())
    backend.close()
    backend.close()
    assert cuda.closed
    with pytest.raises(UsageError, match="it was closed"):
        backend.run(program(backend), 5)


def test_the_parameter_blob_is_one_scalar() -> None:
    params = KernelParams(rank=7, timeout_ns=1 << 50)
    argument = pack_argument(params.pack())
    assert isinstance(argument, numpy.void) and argument.itemsize == 896 and argument.tobytes() == params.pack()
    with pytest.raises(ValueError, match="896 bytes"):
        pack_argument(b"short")


def test_no_gpu_is_exit_3_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megamoe_cli.backends.cuda_runtime.visible_gpus", lambda: [])
    with pytest.raises(EnvironmentUnfit, match="no GPU is visible") as caught:
        open_backend(8)
    assert caught.value.exit_code == 3 and "--backend emulator" in caught.value.hint
    old = replace(H200, name="NVIDIA A100", cc=(8, 0))
    monkeypatch.setattr("megamoe_cli.backends.cuda_runtime.visible_gpus", lambda: [old])
    with pytest.raises(EnvironmentUnfit, match="A100 .sm_80.; the kernel needs SM90"):
        open_backend(8)
    with pytest.raises(EnvironmentUnfit, match="there is no GPU 3"):
        open_backend(8, device=3)
    with pytest.raises(UsageError, match="unknown option 'seed'"):
        open_backend(8, seed=3)
