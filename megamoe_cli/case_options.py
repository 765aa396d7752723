"""What a case's ``options`` may be called and hold: those of the harness and those of each backend. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from .backends.emu_binding import COMPLETIONS, MOST_SUM_BITS, SCHEDULES, EmuOptions
from .config import KernelConfig
from .errors import UsageError
from .shapes import nearest_name

# What a case's ``options`` may say to the harness; everything else goes to the backend, which refuses what it
# does not know.
HARNESS_OPTIONS: dict[str, tuple[type, ...]] = {
    "wait_s": (int, float),  # bound of every device-side wait, seconds
    "tokens_bound": (int,),  # what the host says no rank exceeds; many tokens make all CTAs send
    "launch_ctas": (int,),  # CTAs of a launch, at most what the backend allows
    "sample_rows": (int,),  # rows per rank the float64 reference recomputes; 0 = all
    "full_reference": (bool,),  # FP32 reference of every row (phase combine)
    "snapshot": (str,),  # "last" or "all": launches whose buffer views are checked too
    "raw": (bool,),  # raw L1 accumulators (phase l1)
    "inputs": (str,),  # "cpu" or "device": where random inputs are made (they differ)
    "skew": (str,),  # emulator: ranks that start late, are slow or die (skew.py)
    "mix": (str,),  # other configurations for later launches: KEY=VAL+KEY=VAL;... in turn after the case's own
    "vary_tokens": (bool,),  # each launch has token counts of its own, zero on some ranks
    "replay": (int,),  # the whole sequence of launches runs so many times, as a captured graph would
    "save": (str,),  # folder for the outputs of the last launch, for comparing backends
}

_ANNOTATED: dict[str, tuple[type, ...]] = {"int": (int,), "bool": (bool,), "str": (str,), "float": (int, float),
                                           "Sequence[int]": (list, tuple)}  # fmt: skip
_ANYWHERE: dict[str, tuple[type, ...]] = {"ctas": (int,), "reserve_sms": (int,)}
_ON_A_GPU = _ANYWHERE | {"device": (int,)}
# What goes to the backend's ``open_backend``.
BACKEND_OPTIONS: dict[str, dict[str, tuple[type, ...]]] = {
    "emulator": _ANYWHERE | {"checked": (bool,)} | {f.name: _ANNOTATED[str(f.type)] for f in fields(EmuOptions)},
    "virtual": _ON_A_GPU,
    "nvlink": _ON_A_GPU | {"peer_memory": (str,)},
    "processes": _ON_A_GPU | {"peer_memory": (str,)},
}
_CHOICES: dict[str, tuple[str, ...]] = {"schedule": SCHEDULES, "completion": COMPLETIONS,
                                        "peer_memory": ("auto", "symmetric", "ipc")}  # fmt: skip
_WIDE = ("seed", "max_slices", "jump_ns")  # 64 bits; other counts have 32
_MOST = {"fp8_sum_bits": MOST_SUM_BITS}


LONGEST_WAIT_S = 1e6


def check_type(key: str, value: Any, kinds: tuple[type, ...]) -> None:
    """UsageError unless ``value`` is of one of ``kinds``; a bool is no number."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "a name", list: "a list with a value for each rank"}
        wanted = words[float] if float in kinds else words[kinds[0]]
        raise UsageError(f"option {key}={value!r} must be {wanted}", rule="option")


def check_backend_options(backend: str, given: Mapping[str, Any]) -> None:
    """Names, types and ranges of a backend's options; for ``auto`` every backend's are known. UsageError with the
    nearest name."""
    known: dict[str, tuple[type, ...]] = {}
    for name, options in BACKEND_OPTIONS.items():
        known |= options if backend in (name, "auto") else {}
    for key, value in given.items():
        if key not in known:
            everything = {**known, **HARNESS_OPTIONS}
            said = "no backend knows" if backend == "auto" else f"the {backend} backend does not know"
            raise UsageError(f"{said} an option {key!r}; nearest name: {nearest_name(key, everything)}",
                             hint=f"options: {', '.join(sorted(everything))}", rule="backend-option")  # fmt: skip
        check_type(key, value, known[key])
        if key in _CHOICES and value not in _CHOICES[key]:
            raise UsageError(f"option {key}={value!r}; nearest: {nearest_name(value, _CHOICES[key])} "
                             f"(one of {', '.join(_CHOICES[key])})", rule="option")  # fmt: skip
        least = 1 if key == "ctas" else 0
        limit = _MOST.get(key, (1 << (64 if key in _WIDE or isinstance(value, (list, tuple)) else 32)) - 1)
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(value, (list, tuple)):
                check_type(key, each, (int,))
            if isinstance(each, (int, float)) and not least <= each <= limit:
                raise UsageError(f"option {key}={each!r} is outside {least}..{limit}", rule="option")


def check_options(options: Mapping[str, Any], backend: str, base: KernelConfig | None = None) -> None:
    """All options of a case, before anything is started."""
    mine, rest = split_options(options)
    check_backend_options(backend, rest)
    parse_mix(mine.get("mix", ""), base or KernelConfig())
    if "skew" in mine and backend not in ("auto", "emulator"):
        raise UsageError(f"option skew is for the emulator, not for {backend}", rule="backend-option")


def split_options(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(options of the harness, options of the backend). UsageError for a harness option of the wrong type."""
    mine, rest = {}, {}
    for key, value in given.items():
        if key not in HARNESS_OPTIONS:
            rest[key] = value
            continue
        check_type(key, value, HARNESS_OPTIONS[key])
        mine[key] = value
    for key, allowed in (("snapshot", ("last", "all")), ("inputs", ("cpu", "device"))):
        if key in mine and mine[key] not in allowed:
            raise UsageError(f"option {key}={mine[key]!r}; nearest: {nearest_name(mine[key], allowed)} "
                             f"(one of {', '.join(allowed)})", rule="option")  # fmt: skip
    if "wait_s" in mine and not mine["wait_s"] <= LONGEST_WAIT_S:
        raise UsageError(f"option wait_s={mine['wait_s']!r} is more than {LONGEST_WAIT_S:g} s", rule="option")
    if not mine.get("sample_rows", 0) >= 0:
        raise UsageError(f"option sample_rows={mine['sample_rows']!r} is negative", rule="option")
    for key in ("wait_s", "launch_ctas", "replay", "tokens_bound"):
        if key in mine and not mine[key] > 0:
            raise UsageError(f"option {key}={mine[key]!r} must be positive", rule="option")
    return mine, rest


def parse_mix(text: str, base: KernelConfig) -> list[KernelConfig]:
    """``block_m=64+frontend=standard;block_m=32`` to configurations on top of ``base``."""
    return [KernelConfig.parse(part.replace("+", ","), base) for part in text.split(";") if part.strip()]
