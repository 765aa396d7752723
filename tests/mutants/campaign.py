"""The mutation campaign: every fault of the catalogue must be seen by a case whose unmutated twin passes.

    python -m tests.mutants.campaign [--jobs N] [--only ID,ID,...|CATEGORY] [--json FILE] [--list]

Prints one line for each fault: killed, by which detector, in which case; or survived. Exit code 0: all killed; 1: not,
or a twin failed; 2: usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megamoe_cli.errors import MegamoeError
from megamoe_cli.paths import cache_dir, checkout_root, kernels_dir
from megamoe_cli.protocol import CaseResult
from megamoe_cli.supervisor import run_cases
from tests.mutants.cases import REQUESTS, SEEDS, campaign_case
from tests.mutants.catalogue import MUTANTS
from tests.mutants.patching import CATEGORIES, DoesNotApply, Mutant, digest, write_tree

TIMEOUT_S = 60.0


@dataclass
class Verdict:
    """What became of a fault. ``detector``: race, deadlock, value, ... ; ``reached``: times it was asked for, when it
    survived (0: no case gets there)."""

    mutant: Mutant
    killed: bool = False
    detector: str = ""
    case: str = ""
    message: str = ""
    reached: int = 0

    def line(self) -> str:
        how = f"killed by {self.detector:<9} in {self.case:<12}" if self.killed else f"SURVIVED (reached {self.reached} times)"
        return f"{self.mutant.name:<14} {how}  {self.mutant.what}"


def detector(result: CaseResult) -> str:
    """Who saw it: an emulator check by its kind, the device's own bounded wait, or the oracle (value)."""
    if result.status in ("hang", "crash", "error"):
        return result.status
    first = result.findings[0]["metric"] if result.findings else ""
    if first.startswith("emulator_"):
        return first.removeprefix("emulator_")
    return "fault" if result.status == "fault" else "value"


def attempts(mutant: Mutant) -> list[tuple[str, int]]:
    """The cases and seeds to try, likeliest first."""
    names = [*mutant.cases, *(name for name in REQUESTS if name not in mutant.cases)]
    return [(name, seed) for seed in SEEDS for name in names]


def patched_kernels(mutants: Sequence[Mutant] = MUTANTS) -> Path:
    """The folder of kernel sources with all faults in them, made once for each state of the sources."""
    folder = cache_dir() / "mutants" / digest(kernels_dir(), mutants)
    if not folder.is_dir():
        staging = folder.with_name(f"{folder.name}.{os.getpid()}")
        write_tree(kernels_dir(), staging, mutants)
        try:
            staging.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder


def run_batch(batch: Sequence[tuple[str, str, int, int]], jobs: int) -> dict[str, CaseResult]:
    """Runs (key, case name, seed, mutant id) against the patched kernel; results by key."""
    env = {"MEGAMOE_KERNELS_DIR": str(patched_kernels()), "OMP_NUM_THREADS": "1"}
    found: dict[str, CaseResult] = {}
    cases = {key: campaign_case(name, seed, **({"mutant": fault} if fault else {})) for key, name, seed, fault in batch}
    for ranks in dict.fromkeys(case.ranks for case in cases.values()):
        chosen = [case.to_dict() | {"id": key} for key, case in cases.items() if case.ranks == ranks]
        for result in run_cases(chosen, backend="emulator", ranks=ranks, timeout_s=TIMEOUT_S, jobs=jobs, env=env):
            found[result.id] = result
    return found


def check_twins(wanted: Sequence[tuple[str, int]], jobs: int) -> dict[tuple[str, int], CaseResult]:
    """The same cases without a fault, on the same binary."""
    done = run_batch([(f"{name}/{seed}", name, seed, 0) for name, seed in wanted], jobs)
    return {(name, seed): done[f"{name}/{seed}"] for name, seed in wanted}


def run_campaign(mutants: Sequence[Mutant], jobs: int = 2, say: Callable[[str], None] = print,
                 rounds: int = len(SEEDS) * len(REQUESTS)) -> tuple[list[Verdict], bool]:  # fmt: skip
    """Verdicts in order, and whether every twin that was needed passed. ``rounds``: cases to try for each fault."""
    verdicts = [Verdict(mutant) for mutant in mutants]
    twins: dict[tuple[str, int], CaseResult] = {}
    for round_number in range(rounds):
        alive = [verdict for verdict in verdicts if not verdict.killed]
        if not alive:
            break
        tries = {verdict.mutant.name: attempts(verdict.mutant)[round_number] for verdict in alive}
        missing = [attempt for attempt in dict.fromkeys(tries.values()) if attempt not in twins]
        twins |= check_twins(missing, jobs)
        good = [v for v in alive if twins[tries[v.mutant.name]].passed]
        done = run_batch([(v.mutant.name, *tries[v.mutant.name], v.mutant.id) for v in good], jobs)
        for verdict in good:
            judge(verdict, done.get(verdict.mutant.name), tries[verdict.mutant.name])
            if verdict.killed:
                say(verdict.line())
    for verdict in verdicts:
        if not verdict.killed:
            say(verdict.line())
    failed = [f"{name}-s{seed}: {result.message}" for (name, seed), result in twins.items() if not result.passed]
    for text in failed:
        say(f"TWIN FAILED    {text}")
    return verdicts, not failed


def judge(verdict: Verdict, result: CaseResult | None, attempt: tuple[str, int]) -> None:
    if result is None:
        return
    if result.status == "error":
        raise MegamoeError(f"{verdict.mutant.name} did not run: {result.message}")
    if not result.passed:
        verdict.killed, verdict.detector, verdict.case = True, detector(result), f"{attempt[0]}-s{attempt[1]}"
        verdict.message = result.message
    else:
        notes = str(result.metrics.get("notes", ""))
        verdict.reached += int(notes.rpartition("reached ")[2].split()[0]) if "reached" in notes else 0


def summary(verdicts: Sequence[Verdict], seconds: float) -> str:
    killed = sum(verdict.killed for verdict in verdicts)
    lines = [f"{killed} of {len(verdicts)} faults killed in {seconds:.0f} s"]
    for category in dict.fromkeys(v.mutant.category for v in verdicts):
        some = [v for v in verdicts if v.mutant.category == category]
        counts: dict[str, int] = {}
        for verdict in some:
            key = verdict.detector if verdict.killed else "SURVIVED"
            counts[key] = counts.get(key, 0) + 1
        lines.append(f"  {category:<10} {sum(v.killed for v in some):>3} of {len(some):<3} " + ", ".join(f"{k} {n}" for k, n in sorted(counts.items())))
    return "\n".join(lines)


def chosen(text: str | None) -> list[Mutant]:
    """``101,205`` or ``rings`` (several, comma-separated) to faults; ValueError names what is unknown."""
    if not text:
        return list(MUTANTS)
    out: list[Mutant] = []
    for part in text.split(","):
        some = [m for m in MUTANTS if part in (str(m.id), m.name, m.category)]
        if not some:
            raise ValueError(f"no fault {part!r} (ids {MUTANTS[0].id}..{MUTANTS[-1].id}; categories {', '.join(CATEGORIES)})")
        out += some
    return list(dict.fromkeys(out))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.campaign", description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--only", metavar="ID|CATEGORY,...")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(arguments)
    try:
        mutants = chosen(options.only)
        if options.list:
            print("\n".join(f"{m.name:<14} {m.file}: {m.what}\n    - {m.before}\n    + {m.after}" for m in mutants))
            return 0
        assert checkout_root() is not None
        patched_kernels()
    except (ValueError, DoesNotApply) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    began = time.monotonic()
    verdicts, twins_passed = run_campaign(mutants, options.jobs, lambda line: print(line, flush=True))
    print(summary(verdicts, time.monotonic() - began))
    if options.json:
        options.json.write_text(json.dumps([_plain(v) for v in verdicts], indent=1) + "\n")
    return 0 if twins_passed and all(verdict.killed for verdict in verdicts) else 1


def _plain(verdict: Verdict) -> dict[str, Any]:
    return asdict(verdict) | {"mutant": {k: v for k, v in asdict(verdict.mutant).items() if k in ("id", "category", "what")}}


if __name__ == "__main__":
    sys.exit(main())
