"""The side of ``megamoe doctor`` that may crash or hang: one probe per process, one JSON line on stdout."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

_SMS, _MAJOR, _MINOR, _SMEM_OPTIN = 16, 75, 76, 97  # CUdevice_attribute


def torch() -> dict[str, Any]:
    try:
        import torch as module
    except ImportError as error:
        return {"error": f"torch cannot be imported: {error}"}
    return {"version": module.__version__, "cuda": module.version.cuda, "cuda_available": module.cuda.is_available(),
            "float8": hasattr(module, "float8_e4m3fn")}


def cupy() -> dict[str, Any]:
    try:
        import cupy as module
        from cupy.cuda import nvrtc
    except ImportError as error:
        return {"error": f"cupy cannot be imported: {' '.join(str(error).split())[:200]}"}
    return {"version": module.__version__, "nvrtc": list(nvrtc.getVersion())}


def gpu() -> dict[str, Any]:
    """Through the driver API itself: needs neither torch nor cupy."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {"error": "no NVIDIA driver (libcuda.so.1 is not there)"}
    code = cuda.cuInit(0)
    if code != 0:
        return {"error": f"the NVIDIA driver does not start (cuInit: {_error_name(cuda, code)})"}
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    if count.value == 0:
        return {"error": "the NVIDIA driver is there, but no device is visible (CUDA_VISIBLE_DEVICES="
                         f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')})"}
    handles = []
    for ordinal in range(count.value):
        handle = ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(handle), ordinal)
        handles.append(handle)
    missing = [f"{a}-{b}" for a in range(len(handles)) for b in range(len(handles)) if a != b and not _peer(cuda, handles[a], handles[b])]
    return {"driver_cuda": f"{version.value // 1000}.{version.value % 1000 // 10}", "devices": [_device(cuda, h) for h in handles],
            "all_peers": not missing, "missing_peers": " ".join(missing)}


def _device(cuda: Any, handle: Any) -> dict[str, Any]:
    name, memory = ctypes.create_string_buffer(128), ctypes.c_size_t()
    cuda.cuDeviceGetName(name, 128, handle)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), number, handle)
        return value.value

    return {"name": name.value.decode(), "sms": attribute(_SMS), "capability": f"{attribute(_MAJOR)}{attribute(_MINOR)}",
            "smem_optin_bytes": attribute(_SMEM_OPTIN), "memory_bytes": memory.value}


def _peer(cuda: Any, a: Any, b: Any) -> bool:
    answer = ctypes.c_int()
    return cuda.cuDeviceCanAccessPeer(ctypes.byref(answer), a, b) == 0 and bool(answer.value)


def _error_name(cuda: Any, code: int) -> str:
    text = ctypes.c_char_p()
    return text.value.decode() if cuda.cuGetErrorName(code, ctypes.byref(text)) == 0 and text.value else str(code)


def nvml() -> dict[str, Any]:
    try:
        import pynvml
    except ImportError:
        return {"error": "no NVML binding (optional: pip install nvidia-ml-py)"}
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
        return {"driver": _text(pynvml.nvmlSystemGetDriverVersion()), "devices": [_nvml_device(pynvml, h) for h in handles]}
    except pynvml.NVMLError as error:
        return {"error": f"NVML does not answer: {error}"}


def _nvml_device(pynvml: Any, handle: Any) -> dict[str, Any]:
    try:
        mig = "on" if pynvml.nvmlDeviceGetMigMode(handle)[0] else "off"
    except pynvml.NVMLError:
        mig = "unsupported"
    return {"sm_clock_mhz": pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "max_sm_clock_mhz": pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM),
            "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "power_limit_w": pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000, "mig": mig}


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


PROBES = {"torch": torch, "cupy": cupy, "gpu": gpu, "nvml": nvml}


def main() -> None:
    stdout = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not mix with the answer
    answer = json.dumps(PROBES[sys.argv[1]]())
    with os.fdopen(stdout, "w") as stream:
        stream.write(answer)


if __name__ == "__main__":
    main()
