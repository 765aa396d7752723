"""What the GPU was doing around a sample: clocks, throttle reasons, temperature, power, other processes. Straight from
the driver's NVML library (ctypes, as backends/driver.py does with libcuda); nothing is ever set. Where NVML does not
answer, a sample says so instead of guessing."""

from __future__ import annotations

import ctypes
import hashlib
from ctypes import byref, c_uint, c_ulonglong, c_void_p
from typing import Any

# Bits of the clock event reasons that lower clocks for a reason other than being idle or asked to.
_REASONS = {0x4: "power-cap", 0x8: "hardware", 0x20: "software-thermal", 0x40: "hardware-thermal", 0x80: "power-brake"}
_CLOCK_SM, _SENSOR_GPU = 1, 0
_SUCCESS, _TOO_SMALL = 0, 7  # asked for a list with no room: the count comes back


class Monitor:
    """Reads one GPU, named by its PCI bus id (``0000:1b:00.0``). ``own`` processes of ours are not counted as others.
    ``library`` replaces NVML in tests."""

    def __init__(self, bus_id: str, own: int = 1, library: Any = None) -> None:
        self.own, self._device = own, c_void_p()
        try:
            self._nvml: Any = library or ctypes.CDLL("libnvidia-ml.so.1")
            found = self._nvml.nvmlInit_v2() == _SUCCESS and \
                self._nvml.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), byref(self._device)) == _SUCCESS
        except (OSError, AttributeError):
            found = False
        if not found:  # no driver, a MIG slice, a container without NVML: all mean "unknown"
            self._nvml = None

    def _number(self, name: str, *args: int, kind: Any = c_uint, allowed: tuple[int, ...] = (_SUCCESS,), extra: tuple = ()) -> int | None:
        """The value that an NVML getter writes, or None when it has none to give."""
        value = kind()
        try:
            code = getattr(self._nvml, name)(self._device, *(c_uint(a) for a in args), byref(value), *extra)
        except AttributeError:
            return None
        return int(value.value) if code in allowed else None

    def sample(self) -> dict[str, Any]:
        """Values that could be read: sm_mhz, temp_c, power_w, throttle (names), others (count). Empty without NVML."""
        if self._nvml is None:
            return {}
        out: dict[str, Any] = {
            "sm_mhz": self._number("nvmlDeviceGetClockInfo", _CLOCK_SM),
            "temp_c": self._number("nvmlDeviceGetTemperature", _SENSOR_GPU),
        }
        milliwatts = self._number("nvmlDeviceGetPowerUsage")
        out["power_w"] = None if milliwatts is None else round(milliwatts / 1000)
        bits = self._number("nvmlDeviceGetCurrentClocksThrottleReasons", kind=c_ulonglong)
        out["throttle"] = None if bits is None else throttle_names(bits)
        running = self._number("nvmlDeviceGetComputeRunningProcesses_v3", allowed=(_SUCCESS, _TOO_SMALL), extra=(None,))
        out["others"] = None if running is None else max(0, running - self.own)
        return {key: value for key, value in out.items() if value is not None}

    def identity(self) -> dict[str, Any]:
        """Driver version and a hash of the GPU's UUID (the UUID itself is nobody's business)."""
        if self._nvml is None:
            return {}
        out: dict[str, Any] = {}
        uuid = self._text(lambda text, size: self._nvml.nvmlDeviceGetUUID(self._device, text, size))
        version = self._text(lambda text, size: self._nvml.nvmlSystemGetDriverVersion(text, size))
        if uuid:
            out["gpu_uuid_hash"] = hashlib.sha256(uuid.encode()).hexdigest()[:12]
        if version:
            out["driver"] = version
        return out

    @staticmethod
    def _text(call: Any) -> str:
        buffer = ctypes.create_string_buffer(96)
        try:
            return buffer.value.decode() if call(buffer, c_uint(len(buffer))) == _SUCCESS else ""
        except AttributeError:
            return ""


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
