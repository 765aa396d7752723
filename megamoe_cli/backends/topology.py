"""Which rank sits on which GPU, and whether those GPUs can reach each other: facts gathered per rank, judged as one.

Devices are compared by UUID: index 0 of one rank need not be index 0 of another (CUDA_VISIBLE_DEVICES, torchrun).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import EnvironmentUnfit


@dataclass(frozen=True)
class Seat:
    """One rank's place. ``peers``: UUIDs this process can see and access from its device (its own included).
    ``nvlinks``: UUID -> whether NVML says NVLink connects it with this device; empty when NVML cannot say."""

    host: str
    uuid: str
    name: str
    index: int
    cc: tuple[int, int]
    sms: int
    peers: frozenset[str] = frozenset()
    visible: frozenset[str] = frozenset()
    nvlinks: dict[str, bool] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Topology:
    """``name``: nvlink (a GPU per rank) or processes (some share). ``sharing[r]``: ranks on rank r's GPU."""

    name: str
    where: str
    sharing: tuple[int, ...]
    notes: tuple[str, ...] = ()


def judge(seats: Sequence[Seat], share_gpu: bool) -> Topology:
    """Raises EnvironmentUnfit, naming the ranks, when these seats cannot run the kernel together."""
    for rank, seat in enumerate(seats):
        if seat.host != seats[0].host:
            raise EnvironmentUnfit(
                f"rank {rank} runs on another host than rank 0; all ranks must share one NVLink domain of one machine",
                hint="start all ranks on one host")  # fmt: skip
    for rank, seat in enumerate(seats):
        if seat.cc != (9, 0):
            raise EnvironmentUnfit(f"rank {rank} is on {seat.name} (sm_{seat.cc[0]}{seat.cc[1]}); an SM90 GPU is needed",
                                   hint="use --backend emulator")  # fmt: skip
        if seat.name != seats[0].name:
            raise EnvironmentUnfit(f"rank {rank} is on {seat.name}, rank 0 on {seats[0].name}; one kind of GPU is needed")
    uuids = [seat.uuid for seat in seats]
    gpus = len(set(uuids))
    sharing = tuple(uuids.count(uuid) for uuid in uuids)
    if gpus < len(seats) and not share_gpu:
        first = next(rank for rank, n in enumerate(sharing) if n > 1)
        other = uuids.index(uuids[first], first + 1)
        raise EnvironmentUnfit(
            f"ranks {first} and {other} are on one GPU ({seats[first].name}); nvlink runs one rank per GPU",
            hint="use --backend processes to share GPUs, or --backend virtual")  # fmt: skip
    notes = _reachable(seats)
    name = "nvlink" if gpus == len(seats) and not (share_gpu and gpus == 1) else "processes"
    where = f"{name}({len(seats)}x{seats[0].name})" if name == "nvlink" else f"{name}({len(seats)} on {gpus}x{seats[0].name})"
    return Topology(name, where, sharing, tuple(notes))


def _reachable(seats: Sequence[Seat]) -> list[str]:
    unknown = False
    for rank, seat in enumerate(seats):
        for other, peer in enumerate(seats):
            if peer.uuid == seat.uuid:
                continue
            # A GPU that a process cannot see (one device each in CUDA_VISIBLE_DEVICES) cannot be asked about.
            if peer.uuid in seat.visible and peer.uuid not in seat.peers:
                raise EnvironmentUnfit(f"rank {rank}'s GPU has no peer access to rank {other}'s; "
                                       "all ranks must share one NVLink domain")  # fmt: skip
            linked = seat.nvlinks.get(peer.uuid)
            if linked is False:
                raise EnvironmentUnfit(f"rank {rank}'s GPU and rank {other}'s are not connected by NVLink")
            if linked is None:
                unknown = True
    if unknown:
        return ["NVLink between the ranks' GPUs was not verified (NVML is not installed or cannot say)"]
    return []


def seat_of(device: int, host: str) -> Seat:
    """This process's seat on CUDA device ``device`` (visible index). Uses torch, and NVML where it is installed."""
    import torch

    count = torch.cuda.device_count()
    uuids = [_uuid(i) for i in range(count)]
    properties = torch.cuda.get_device_properties(device)
    peers = {uuids[device]}
    for other in range(count):
        if other != device and torch.cuda.can_device_access_peer(device, other):
            peers.add(uuids[other])
    return Seat(host, uuids[device], properties.name, device, (properties.major, properties.minor),
                properties.multi_processor_count, frozenset(peers), frozenset(uuids), nvlink_state(uuids[device]))  # fmt: skip


def _uuid(index: int) -> str:
    import torch

    text = str(torch.cuda.get_device_properties(index).uuid)
    return text if text.startswith("GPU-") else f"GPU-{text}"


def nvlink_state(uuid: str, nvml: Any = None) -> dict[str, bool]:
    """NVML's word on NVLink between the GPU ``uuid`` and every other one of the machine; empty when it has none."""
    if nvml is None:
        try:
            import pynvml as nvml
        except ImportError:
            return {}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return {}
    try:
        handles = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name = nvml.nvmlDeviceGetUUID(handle)
            handles[name.decode() if isinstance(name, bytes) else name] = handle
        if uuid not in handles:  # a MIG slice, or NVML shows another set of devices
            return {}
        state = {}
        for other, handle in handles.items():
            if other == uuid:
                continue
            try:
                status = nvml.nvmlDeviceGetP2PStatus(handles[uuid], handle, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            except nvml.NVMLError:
                continue
            if status == nvml.NVML_P2P_STATUS_OK:
                state[other] = True
            elif status != nvml.NVML_P2P_STATUS_UNKNOWN:
                state[other] = False
        return state
    except nvml.NVMLError:
        return {}
    finally:
        nvml.nvmlShutdown()
