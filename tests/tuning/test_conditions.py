"""Clocks, throttling and neighbours, from a library that answers like NVML, or does not."""

from __future__ import annotations

import ctypes

from megamoe_cli.tuning.conditions import Monitor, between, throttle_names


class Nvml:
    """Getters write through the pointer they get, as NVML's do."""

    def __init__(self, **values: int) -> None:
        self.values = {"mhz": 1965, "temp": 61, "mw": 512_400, "bits": 0, "running": 1, "init": 0} | values

    def nvmlInit_v2(self) -> int:  # noqa: N802
        return self.values["init"]

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus: bytes, handle: object) -> int:  # noqa: N802
        return 0 if bus == b"0000:1b:00.0" else 6

    def _write(self, pointer: object, name: str, code: int = 0) -> int:
        if self.values[name] < 0:
            return 3  # not supported
        pointer._obj.value = self.values[name]  # type: ignore[attr-defined]
        return code

    def nvmlDeviceGetClockInfo(self, device: object, kind: ctypes.c_uint, out: object) -> int:  # noqa: N802
        assert kind.value == 1, "the SM clock"
        return self._write(out, "mhz")

    def nvmlDeviceGetTemperature(self, device: object, sensor: object, out: object) -> int:  # noqa: N802
        return self._write(out, "temp")

    def nvmlDeviceGetPowerUsage(self, device: object, out: object) -> int:  # noqa: N802
        return self._write(out, "mw")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: object, out: object) -> int:  # noqa: N802
        return self._write(out, "bits")

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: object, count: object, infos: object) -> int:  # noqa: N802
        assert infos is None
        return self._write(count, "running", 7 if self.values["running"] else 0)

    def nvmlDeviceGetUUID(self, device: object, text: object, size: ctypes.c_uint) -> int:  # noqa: N802
        text.value = b"GPU-1234"  # type: ignore[attr-defined]
        return 0

    def nvmlSystemGetDriverVersion(self, text: object, size: ctypes.c_uint) -> int:  # noqa: N802
        text.value = b"580.65"  # type: ignore[attr-defined]
        return 0


def test_a_sample() -> None:
    found = Monitor("0000:1b:00.0", library=Nvml(bits=0x4 | 0x40 | 0x1, running=3)).sample()
    assert found == {"sm_mhz": 1965, "temp_c": 61, "power_w": 512, "throttle": ["power-cap", "hardware-thermal"], "others": 2}
    assert Monitor("0000:1b:00.0", own=8, library=Nvml(running=8)).sample()["others"] == 0


def test_the_uuid_is_hashed() -> None:
    found = Monitor("0000:1b:00.0", library=Nvml()).identity()
    assert found["driver"] == "580.65" and len(found["gpu_uuid_hash"]) == 12 and "1234" not in str(found)


def test_what_is_not_known_is_not_said() -> None:
    assert "power_w" not in Monitor("0000:1b:00.0", library=Nvml(mw=-1)).sample()
    for monitor in (Monitor("0000:00:00.0", library=Nvml()), Monitor("0000:1b:00.0", library=Nvml(init=9)), Monitor("x", library=object())):
        assert monitor.sample() == {} == monitor.identity()


def test_between_two_samples() -> None:
    one, two = {"sm_mhz": 1980, "throttle": ["power-cap"], "others": 0}, {"sm_mhz": 1755, "throttle": [], "others": 1}
    assert between(one, two) == {"sm_mhz": [1980, 1755], "throttle": ["power-cap"], "others": 1}
    assert between({}, two) == {"throttle": [], "others": 1} and between({}, {}) == {}
    assert throttle_names(0x1) == [], "idle is no throttling"
