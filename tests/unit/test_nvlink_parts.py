"""Topology, the two peer-memory providers, and the rules of the multi-process backend; each against stand-ins."""

import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megamoe_cli import errors
from megamoe_cli.backends import cuda_ipc, peer_memory, symm_memory, topology
from megamoe_cli.backends.nvlink import NvlinkBackend, _same, open_backend
from megamoe_cli.backends.topology import Seat, judge

ROOT = Path(__file__).resolve().parents[2]


class OneOf:
    """The control plane as one rank sees it: steps run here, ``others[rank]`` is what the other ranks bring."""

    def __init__(self, rank=0, ranks=2, others=None):
        self.rank, self.ranks, self.others, self.steps, self.broken = rank, ranks, others or {}, [], None
        self.group = SimpleNamespace(group_name="our-group")

    def step(self, name, work):
        self.steps.append(name)
        return work()

    def agree(self, name, work):
        mine = self.step(name, work)
        return [mine if r == self.rank else self.others.get(r, mine) for r in range(self.ranks)]

    def gather(self, value):
        return [value] * self.ranks

    def barrier(self, timeout_s=None):
        self.steps.append("barrier")


# ---- topology ----


def seats(count, **changed):
    out = []
    everyone = frozenset(f"GPU-{r}" for r in range(count))
    for r in range(count):
        links = {u: True for u in everyone if u != f"GPU-{r}"}
        values = dict(host="h", uuid=f"GPU-{r}", name="H200", index=r, cc=(9, 0), sms=132, peers=everyone, visible=everyone, nvlinks=links)
        out.append(Seat(**(values | {k: v for k, v in changed.items() if r == count - 1})))
    return out


def test_a_gpu_per_rank():
    place = judge(seats(8), share_gpu=False)
    assert (place.name, place.where, place.sharing, place.notes) == ("nvlink", "nvlink(8xH200)", (1,) * 8, ())


def test_shared_gpus_only_when_asked():
    shared = seats(2, uuid="GPU-0", nvlinks={})
    with pytest.raises(errors.EnvironmentUnfit, match="ranks 0 and 1 are on one GPU"):
        judge(shared, share_gpu=False)
    place = judge(shared, share_gpu=True)
    assert (place.name, place.where, place.sharing) == ("processes", "processes(2 on 1xH200)", (2, 2))
    assert judge(seats(2), share_gpu=True).name == "nvlink"
    assert judge(seats(1), share_gpu=True).where == "processes(1 on 1xH200)"


@pytest.mark.parametrize(("changed", "text"), [
    ({"host": "other"}, "rank 3 runs on another host than rank 0"),
    ({"cc": (8, 0), "name": "A100"}, r"rank 3 is on A100 \(sm_80\)"),
    ({"name": "H100"}, "rank 3 is on H100, rank 0 on H200"),
    ({"peers": frozenset(["GPU-3", "GPU-0"])}, "rank 3's GPU has no peer access to rank 1's"),
    ({"nvlinks": {"GPU-0": False}}, "rank 3's GPU and rank 0's are not connected by NVLink"),
])
def test_what_cannot_work_is_named(changed, text):
    with pytest.raises(errors.EnvironmentUnfit, match=text):
        judge(seats(4, **changed), share_gpu=False)


def test_an_unseen_gpu_is_not_held_against_it_but_noted():
    one_each = [Seat("h", f"GPU-{r}", "H200", 0, (9, 0), 132, frozenset([f"GPU-{r}"]), frozenset([f"GPU-{r}"])) for r in range(2)]
    assert "was not verified" in judge(one_each, share_gpu=False).notes[0]


def fake_nvml(status):
    class NVMLError(Exception):
        pass

    def p2p(a, b, caps):
        if status[(a, b)] is None:
            raise NVMLError
        return status[(a, b)]

    calls = []
    return SimpleNamespace(
        NVMLError=NVMLError, NVML_P2P_CAPS_INDEX_NVLINK=2, NVML_P2P_STATUS_OK=0, NVML_P2P_STATUS_UNKNOWN=6,
        nvmlInit=lambda: calls.append("init"), nvmlShutdown=lambda: calls.append("shutdown"), nvmlDeviceGetCount=lambda: 4,
        nvmlDeviceGetHandleByIndex=lambda i: i, nvmlDeviceGetUUID=lambda h: f"GPU-{h}".encode(), nvmlDeviceGetP2PStatus=p2p,
        calls=calls)  # fmt: skip


def test_nvml_says_which_gpus_are_linked():
    nvml = fake_nvml({(0, 1): 0, (0, 2): 3, (0, 3): 6})
    assert topology.nvlink_state("GPU-0", nvml) == {"GPU-1": True, "GPU-2": False} and nvml.calls == ["init", "shutdown"]
    assert topology.nvlink_state("GPU-9", nvml) == {}
    assert topology.nvlink_state("GPU-0", fake_nvml({(0, 1): None, (0, 2): 0, (0, 3): 0})) == {"GPU-2": True, "GPU-3": True}


# ---- CUDA IPC ----


class FakeRuntime:
    def __init__(self, fail=""):
        self.log, self.fail = [], fail

    def __getattr__(self, name):
        def call(*args):
            self.log.append((name, *args))
            if name == self.fail:
                raise RuntimeError("cudaErrorMapBufferObjectFailed")
            return {"malloc": 0x7F0000000000, "ipcGetMemHandle": b"handle-0", "ipcOpenMemHandle": 0x7E0000000000 + len(self.log)}.get(name)

        return call


def test_ipc_zeroes_and_synchronises_before_it_hands_out_the_memory():
    runtime = FakeRuntime()
    memory = cuda_ipc.CudaIpcMemory(1, runtime, wrap=lambda address, nbytes, device: (address, nbytes, device))
    control = OneOf(0, 3, {1: b"handle-1", 2: b"handle-2"})
    tensor, addresses = memory.allocate(control, 5000, "symm0")
    names = [entry[0] for entry in runtime.log]
    assert names == ["setDevice", "malloc", "memset", "deviceSynchronize", "ipcGetMemHandle", "ipcOpenMemHandle", "ipcOpenMemHandle"]
    assert ("malloc", 2 << 20) in runtime.log and ("memset", 0x7F0000000000, 0, 2 << 20) in runtime.log
    assert ("ipcOpenMemHandle", b"handle-1", 1) in runtime.log and ("ipcOpenMemHandle", b"handle-0", 1) not in runtime.log
    assert addresses[0] == 0x7F0000000000 and len(set(addresses)) == 3 and tensor == (0x7F0000000000, 5000, 1)
    memory.close()
    assert [entry[0] for entry in runtime.log[7:]] == ["ipcCloseMemHandle", "ipcCloseMemHandle", "free"]
    memory.close()
    assert len(runtime.log) == 10


def test_ipc_names_the_rank_whose_memory_cannot_be_mapped():
    memory = cuda_ipc.CudaIpcMemory(0, FakeRuntime("ipcOpenMemHandle"), wrap=lambda *a: None)
    with pytest.raises(errors.EnvironmentUnfit, match="cannot map the memory of rank 1: cudaErrorMap"):
        memory.allocate(OneOf(0, 2), 10, "symm0")


# ---- symmetric memory ----


@pytest.fixture
def symm(monkeypatch):
    """torch's module, replaced; ``handle`` is what its rendezvous returns."""
    module = ModuleType("torch.distributed._symmetric_memory")
    module.handle = SimpleNamespace(rank=0, world_size=2, buffer_ptrs=[], multicast_ptr=0)
    module.log = []

    def empty(nbytes, dtype, device):
        module.log.append(("empty", nbytes, str(device)))
        raw = torch.ones(nbytes + 1024, dtype=dtype)
        module.tensor = raw[-raw.data_ptr() % 1024 :][:nbytes]
        module.handle.buffer_ptrs = module.handle.buffer_ptrs or [module.tensor.data_ptr(), 0x7000]
        return module.tensor

    def rendezvous(tensor, group):
        module.log.append(("rendezvous", group, int(tensor.sum()), os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST")))
        return module.handle

    module.empty, module.rendezvous = empty, rendezvous
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.distributed, "_symmetric_memory", module, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: module.log.append(("synchronize", device)))
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", raising=False)
    return module


def test_symmetric_memory_never_without_the_multicast_switch(symm, monkeypatch):
    with pytest.raises(errors.EnvironmentUnfit, match="DISABLE_MULTICAST"):
        symm_memory.SymmetricMemory(0).allocate(OneOf(), 4096, "symm0")
    assert symm.log == []
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    symm_memory.prepare_environment(shared_gpu=False)
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1", "whatever the user set"
    assert "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES" not in os.environ
    symm_memory.prepare_environment(shared_gpu=True)
    assert os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] == "1"
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")


def test_symmetric_memory_is_zero_and_synchronised_before_rendezvous(symm, monkeypatch):
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    monkeypatch.setattr(torch, "device", lambda kind, index: "cpu")
    tensor, addresses = symm_memory.SymmetricMemory(0).allocate(OneOf(), 4096, "symm0")
    assert [entry[0] for entry in symm.log] == ["empty", "synchronize", "rendezvous"]
    assert symm.log[2] == ("rendezvous", "our-group", 0, "1")
    assert addresses == [tensor.data_ptr(), 0x7000]


@pytest.mark.parametrize(("change", "text"), [
    ({"multicast_ptr": 0x1234}, "made a multicast object although it was told not to"),
    ({"rank": 1}, "numbers this rank 1 of 2"),
    ({"world_size": 4}, "of 4"),
])
def test_symmetric_memory_that_is_not_as_expected_is_refused(symm, monkeypatch, change, text):
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    monkeypatch.setattr(torch, "device", lambda kind, index: "cpu")
    vars(symm.handle).update(change)
    with pytest.raises(errors.EnvironmentUnfit, match=text):
        symm_memory.SymmetricMemory(0).allocate(OneOf(), 4096, "symm0")


def test_the_provider_is_chosen_from_what_is_installed(monkeypatch):
    monkeypatch.delenv("MEGAMOE_PEER_MEMORY", raising=False)
    monkeypatch.setattr(symm_memory, "available", lambda: True)
    assert peer_memory.choose(0).name == "PyTorch symmetric memory"
    monkeypatch.setattr(cuda_ipc.CudaIpcMemory, "__init__", lambda self, device: None)
    assert peer_memory.choose(0, "ipc").name == "CUDA IPC"
    monkeypatch.setattr(symm_memory, "available", lambda: False)
    assert peer_memory.choose(0).name == "CUDA IPC"
    monkeypatch.setenv("MEGAMOE_PEER_MEMORY", "nvshmem")
    with pytest.raises(errors.UsageError, match="unknown peer memory 'nvshmem'"):
        peer_memory.choose(0)
    with pytest.raises(errors.EnvironmentUnfit, match="rank 1 would use CUDA IPC"):
        _same(["PyTorch symmetric memory", "CUDA IPC"])


MULTICAST = re.compile(r"cuMulticast|CUmulticast|multimem|\bNCCL_NVLS|multicast_ptr")
# What may name it: the checks that torch made none (for us, for the public package), and where it is turned off.
ALLOWED = {"megamoe_cli/backends/symm_memory.py": 1, "megamoe_cli/bench/rank_contenders.py": 1, "megamoe_cli/bench/ranks_worker.py": 1}


def test_no_multicast_object_anywhere():
    found = {}
    for folder in ("megamoe_cli", "kernels", "phases", "tuning"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".py", ".cuh", ".cu", ".h", ".cpp"}:
                hits = len(MULTICAST.findall(path.read_text()))
                if hits:
                    found[str(path.relative_to(ROOT))] = hits
    assert found == ALLOWED
    assert MULTICAST.search("cuMulticastCreate(&h, &p)") and MULTICAST.search("multimem.ld_reduce")


def test_no_nccl_in_the_control_plane():
    text = (ROOT / "megamoe_cli/backends/control.py").read_text()
    assert set(re.findall(r'backend="(\w+)"|init_process_group\("(\w+)"', text)) == {("gloo", ""), ("", "gloo")}


# ---- the backend's own rules ----


class FakeCuda:
    def __init__(self):
        self.gpu, self.log = SimpleNamespace(sms=132, name="H200"), []

    def __getattr__(self, name):
        return lambda *args: self.log.append(name) or 0


class FakeMemory:
    name = "fake"

    def __init__(self):
        self.closed = False

    def allocate(self, control, nbytes, name):
        return torch.zeros(nbytes, dtype=torch.uint8), [0x1000 * (r + 1) for r in range(control.ranks)]

    def close(self):
        self.closed = True


def backend(control=None, place=None, **more):
    place = place or topology.Topology("nvlink", "nvlink(2xH200)", (1, 1))
    return NvlinkBackend(control or OneOf(1), FakeCuda(), FakeMemory(), place, **more)


def test_allocations_are_collective_and_equal():
    one = backend()
    one.alloc(1, 64, symmetric=True, name="symm0")
    assert one.peer_addresses(1, "symm0") == [0x1000, 0x2000] and one.local_ranks == (1,)
    with pytest.raises(errors.UsageError, match="allocation is collective"):
        one.peer_addresses(1, "other")
    with pytest.raises(errors.UsageError, match="does not drive rank 0"):
        one.alloc(0, 64, symmetric=False, name="x")
    with pytest.raises(errors.UsageError, match="rank 1 allocates 64 bytes for symm1, rank 0 128 bytes for symm1"):
        backend(OneOf(1, 2, {0: ("symm1", 128)})).alloc(1, 64, symmetric=True, name="symm1")


def test_ctas_when_a_gpu_is_shared():
    shared = topology.Topology("processes", "processes(2 on 1xH200)", (2, 2))
    assert backend().max_ctas_per_rank == 132 and backend(place=shared).max_ctas_per_rank == 66
    assert backend(place=shared, ctas=8).max_ctas_per_rank == 8
    with pytest.raises(errors.UsageError, match="67 CTAs per rank: 2 ranks on 132 SMs leave 1..66"):
        backend(place=shared, ctas=67)


def test_reserved_sms():
    own = backend(reserve_sms=8)
    assert own.max_ctas_per_rank == 124 and own.where == "nvlink(2xH200, 8 SMs reserved)"
    shared = topology.Topology("processes", "processes(2 on 1xH200)", (2, 2))
    assert backend(place=shared, reserve_sms=1).max_ctas_per_rank == 65
    with pytest.raises(errors.UsageError, match="at most 131"):
        backend(reserve_sms=132)


def test_closing_frees_between_two_meetings_and_only_when_all_went_well():
    one = backend()
    one.close()
    one.close()
    assert one.control.steps == ["stop using peers' memory", "free peer memory"] and one.memory.closed
    lost = backend()
    lost.control.broken = "a rank is gone"
    lost.close()
    assert lost.control.steps == [] and not lost.memory.closed
    with pytest.raises(errors.UsageError, match="it was closed"):
        one.run(None, 1.0)


def test_it_needs_a_group():
    with pytest.raises(errors.UsageError, match="one process per rank"):
        open_backend(2)
    with pytest.raises(errors.UsageError, match="4 ranks were asked for, the process group has 2"):
        open_backend(4, control=OneOf())
