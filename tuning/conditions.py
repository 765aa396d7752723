"""What the GPU was doing around a sample: clocks, throttle reasons, temperature, power, other processes. Through NVML
where nvidia-ml-py is installed; nothing is ever set. Without NVML a sample says so instead of guessing."""

from __future__ import annotations

import hashlib
from typing import Any

# Bits of the clock event reasons that lower clocks for a reason other than being idle or asked to.
_REASONS = {0x4: "power-cap", 0x8: "hardware", 0x20: "software-thermal", 0x40: "hardware-thermal", 0x80: "power-brake"}


class Monitor:
    """Reads one GPU, named by its PCI bus id (``0000:1b:00.0``). ``own`` processes of ours are not counted as others."""

    def __init__(self, bus_id: str, own: int = 1) -> None:
        self.own = own
        self._nvml: Any = None
        self._handle: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(bus_id.encode())
        except Exception:  # noqa: BLE001  no package, no driver, a MIG slice, a container without NVML: all mean "unknown"
            self._nvml = None

    def sample(self) -> dict[str, Any]:
        """Values that could be read: sm_mhz, temp_c, power_w, throttle (names), others (count). Empty without NVML."""
        n, h = self._nvml, self._handle
        if n is None:
            return {}
        readers = {
            "sm_mhz": lambda: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM),
            "temp_c": lambda: n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU),
            "power_w": lambda: round(n.nvmlDeviceGetPowerUsage(h) / 1000),
            "throttle": lambda: throttle_names(n.nvmlDeviceGetCurrentClocksThrottleReasons(h)),
            "others": lambda: max(0, len(n.nvmlDeviceGetComputeRunningProcesses(h)) - self.own),
        }
        out = {}
        for name, read in readers.items():
            try:
                out[name] = read()
            except Exception:  # noqa: BLE001  one counter that a driver hides must not cost the others
                continue
        return out

    def identity(self) -> dict[str, Any]:
        """Driver version and a hash of the GPU's UUID (the UUID itself is nobody's business)."""
        n, out = self._nvml, {}
        if n is None:
            return {}
        try:
            uuid, version = n.nvmlDeviceGetUUID(self._handle), n.nvmlSystemGetDriverVersion()
            out["gpu_uuid_hash"] = hashlib.sha256(uuid if isinstance(uuid, bytes) else uuid.encode()).hexdigest()[:12]
            out["driver"] = version.decode() if isinstance(version, bytes) else str(version)
        except Exception:  # noqa: BLE001
            pass
        return out


def throttle_names(bits: int) -> list[str]:
    return [name for bit, name in _REASONS.items() if bits & bit]


def between(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """One record for the time between two samples: both clocks, every throttle reason seen, most other processes."""
    out: dict[str, Any] = {key: [before[key], after[key]] for key in ("sm_mhz", "temp_c", "power_w") if key in before and key in after}
    if "throttle" in before or "throttle" in after:
        out["throttle"] = sorted({*before.get("throttle", []), *after.get("throttle", [])})
    if "others" in before or "others" in after:
        out["others"] = max(before.get("others", 0), after.get("others", 0))
    return out
