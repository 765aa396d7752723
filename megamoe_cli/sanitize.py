"""The emulator as sanitizer: what ``megamoe test --sanitize`` switches on, how seeds become schedules, and how all of
it is spelled in a command. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .backends.emu_binding import COMPLETIONS, SCHEDULES
from .errors import UsageError
from .skew import check_ranks, parse_skew

if TYPE_CHECKING:
    from .testplan import Case

# Race detection, switches at plain accesses, reads of bytes never written. Bounds, owners, alignment, barriers,
# registers and deadlocks are always checked.
CHECKS: dict[str, Any] = {"races": True, "preempt": True, "uninit": True}
# What replaces the defaults of ``megamoe test``: small enough for many seeds, and dozens of rows for every expert.
DEFAULTS: dict[str, Any] = {"ranks": "2", "tokens": "uneven:72", "shape": "256x256x4x2", "seeds": 8}
MIXED = "mixed"
# Seeds take turns: warps at random or by priorities with a few changes, copies and WGMMA as late as possible or at random.
TURNS = (("random", "lazy"), ("pct", "lazy"), ("random", "random"), ("pct", "random"))
SCHEDULE_CHOICES, COMPLETION_CHOICES = (MIXED, *SCHEDULES), (MIXED, *COMPLETIONS)
# Options of the emulator and the harness that have a flag of their own.
FLAGS = {"schedule": "--schedule", "completion": "--completion", "skew": "--skew", "resident_ctas": "--resident-ctas",
         "mix": "--mix", "replay": "--replay", "reserve_sms": "--reserve-sms"}
EMULATOR_ONLY = ("sanitize", "schedule", "completion", "skew", "resident_ctas")


def options_from(values: Mapping[str, Any]) -> dict[str, Any]:
    """Case options for the command-line values; ``mixed`` stays until the seed is known (``settle``)."""
    out: dict[str, Any] = dict(CHECKS) if values["sanitize"] else {}
    for name in ("schedule", "completion"):
        if values[name] or values["sanitize"]:
            out[name] = values[name] or MIXED
    if values["skew"]:
        out["skew"] = "+".join(str(skew) for skew in parse_skew("+".join(values["skew"])))
    if values["mix"]:
        out["mix"] = ";".join(text.replace(",", "+") for text in values["mix"])
    out |= {name: values[name] for name in ("resident_ctas", "replay") if values[name]}
    return out | ({"vary_tokens": True} if values["vary_tokens"] else {})


def check_backend(values: Mapping[str, Any]) -> str:
    """The backend to use: what only the emulator can do picks it; asking another for it is a UsageError."""
    asked = [name for name in EMULATOR_ONLY if values[name]]
    if not asked or values["backend"] == "emulator":
        return values["backend"]
    if values["backend"] != "auto":
        raise UsageError(f"--{asked[0].replace('_', '-')} is for the emulator, not for {values['backend']}", rule="backend-option")
    return "emulator"


def settle(case: Case) -> Case:
    """A case whose options say ``mixed``: the schedule and the completion that its seed has a turn for."""
    schedule, completion = TURNS[case.seed % len(TURNS)]
    turn = {"schedule": schedule, "completion": completion}
    options = {key: turn[key] if key in turn and value == MIXED else value for key, value in case.options.items()}
    if "skew" in options:
        check_ranks(parse_skew(options["skew"]), case.ranks)
    return replace(case, options=options)


def command_words(options: Mapping[str, Any]) -> list[str]:
    """The options as words of a ``megamoe test`` command line."""
    left, words = dict(options), []
    if all(left.get(name) == value for name, value in CHECKS.items()):
        words.append("--sanitize")
        left = {key: value for key, value in left.items() if key not in CHECKS}
    for name, flag in FLAGS.items():
        if name not in left:
            continue
        for part in str(left.pop(name)).split(";") if name == "mix" else [left.pop(name)]:
            words += [flag, str(part).replace("+", ",") if name == "mix" else str(part)]
    if left.pop("vary_tokens", False):
        words.append("--vary-tokens")
    for key, value in sorted(left.items()):
        words += ["--option", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
    return words


def default_jobs() -> int:
    return max(1, min(4, os.cpu_count() or 1))


def corpus_path() -> Path | None:
    """Where the fuzzer keeps its cases: in a checkout only."""
    from .paths import checkout_root

    root = checkout_root()
    return root / "tests" / "data" / "fuzz_corpus.jsonl" if root else None
