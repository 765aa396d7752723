"""From lines of the journal and their run records to the evidence of a log entry: what ran, and what came out."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megamoe_cli.devlog.journal import file_digest
from megamoe_cli.errors import ExitCode, MegamoeError

_ISSUES = 10  # failures named in an entry; the record has all


class Refused(MegamoeError):
    """An entry would claim what no record shows."""

    exit_code = ExitCode.NO


def records_of(line: Mapping[str, Any], results_dir: Path, needed: bool = True) -> list[dict[str, Any]]:
    """The run records of a line, unchanged since. Refused when one was changed, or (``needed``) is gone."""
    found = []
    for record in line.get("records") or ():
        path = results_dir / record["path"]
        if not path.is_file():
            if needed:
                raise Refused(f"run {line['id']}: its record {path} is gone", hint="run it again")
            continue
        if file_digest(path) != record["sha256"]:
            raise Refused(f"run {line['id']}: its record {path} was changed after the run", hint="run it again")
        try:
            found.append(json.loads(path.read_bytes()))
        except ValueError as error:
            raise Refused(f"run {line['id']}: its record {path} is no JSON: {error}", hint="run it again") from None
        if not isinstance(found[-1], dict):
            raise Refused(f"run {line['id']}: its record {path} is no run record", hint="run it again")
    return found


def tested(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per phase, ranks, BLOCK_M and place: tokens tried, cases, passed. Only what ran counts."""
    rows: dict[tuple[str, int, int, str], dict[str, Any]] = {}
    for record in records:
        for result in record.get("results", []):
            if result["status"] == "not run":
                continue
            case = result["case"]
            key = (result["phase"], case["ranks"], case["config"]["block_m"], result.get("where", ""))
            row = rows.setdefault(key, {"phase": key[0], "ranks": key[1], "block_m": key[2], "where": key[3], "tokens": [], "cases": 0,
                                        "passed": 0})
            tokens = _tokens(case["tokens"])
            if tokens not in row["tokens"]:
                row["tokens"].append(tokens)
            row["cases"] += 1
            row["passed"] += result["status"] == "pass"
    return list(rows.values())


def _tokens(counts: Sequence[int]) -> str:
    """``48``, or ``uneven 3..40``."""
    return str(counts[0]) if len(set(counts)) == 1 else f"uneven {min(counts)}..{max(counts)}"


def times(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of bench records: shape, tokens, median and interval in microseconds, place."""
    return [{"shape": row["shape"], "tokens": row["tokens"], "config": row["config"], "kernel_us": round(row["kernel_us"], 2),
             "low_us": round(row["low_us"], 2), "high_us": round(row["high_us"], 2), "where": record["where"]}
            for record in records if record.get("schema") in ("megamoe.bench/1", "megamoe.bench-ranks/1") for row in record["rows"]]  # fmt: skip


def issues(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """What did not pass, in a line each, and what that means for the claims."""
    bad = [r for record in records for r in record.get("results", []) if r["status"] not in ("pass", "not run")]
    found = [f"{r['id']}: {r['status']}{': ' + _head(r['message']) if r.get('message') else ''}" for r in bad[:_ISSUES]]
    if len(bad) > _ISSUES:
        found.append(f"{len(bad) - _ISSUES} more cases did not pass")
    skipped = sum(r["status"] == "not run" for record in records for r in record.get("results", []))
    if skipped:
        found.append(f"{skipped} cases were planned and not run")
    places = {place for record in records for place in record.get("where", []) if isinstance(record.get("where"), list)}
    if places and all(place.startswith("emulator") for place in places):
        found.append("emulator only: nothing here is about a GPU")
    return found


def _head(message: str) -> str:
    """A hang's message has a line for every warp that waits: its first one says what is the matter."""
    first, _, rest = message.strip().partition("\n")
    return f"{first} (more in the record)" if rest else first


def command_rows(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The local command, and for a remote run every command line that went out, with outcome and seconds."""
    remote = line.get("remote")
    rows = [{"place": "here", "command": shlex.join(line["command"]), "exit_code": line["exit_code"], "seconds": round(line["seconds"], 1),
             "run": line["id"], "started": line["started"]}]  # fmt: skip
    for step in remote["steps"] if remote else ():
        rows.append({"place": f"to {remote['target']} ({step['what']})", "command": shlex.join(step["command"]),
                     "exit_code": step["exit_code"], "seconds": round(step["seconds"], 1), "run": line["id"], "started": ""})
    return rows


def gather(lines: Sequence[Mapping[str, Any]], results_dir: Path) -> dict[str, Any]:
    """The evidence of an entry about ``lines``. Refused when they are about different sources."""
    sources = {(line["source"].get("kernel_sources"), line["source"].get("commit"), bool(line["source"].get("dirty"))) for line in lines}
    if len(sources) > 1:
        raise Refused("these runs are about different commits or sources: " + "; ".join(
            f"{(commit or 'no commit')[:10]}{' (dirty)' if dirty else ''}, kernel {kernel}" for kernel, commit, dirty in sorted(sources, key=str)),
            hint="log them one by one: --run ID")
    records = [record for line in lines for record in records_of(line, results_dir)]
    return {
        "runs": [{"id": line["id"], "kind": line["kind"], "digest": line["digest"], "records": line.get("records") or []} for line in lines],
        "source": lines[0]["source"], "commands": [row for line in lines for row in command_rows(line)],
        "machines": _machines(lines), "tested": tested(records), "times": times(records), "issues": issues(records),
        "phases": list(dict.fromkeys(result["phase"] for record in records for result in record.get("results", []))),
    }  # fmt: skip


def _machines(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """System, processors, Python of each machine; where it ran stands in the table."""
    return list(dict.fromkeys(f"{h['system']} {h['machine']}, {h['cpus']} CPUs, Python {h['python']}" for h in (line["host"] for line in lines)))


def require(evidence: Mapping[str, Any], phases: Sequence[str], ranks: Sequence[int]) -> None:
    """Refused unless every one of these phases ran on every one of these rank counts."""
    ran = {(row["phase"], row["ranks"]) for row in evidence["tested"]}
    for phase in phases or [""]:
        for count in ranks or [0]:
            if not any((not phase or phase == p) and (not count or count == r) for p, r in ran):
                what = " on ".join(filter(None, [f"phase {phase}" if phase else "", f"{count} ranks" if count else ""]))
                command = " ".join(["megamoe test", *(["--phase", phase] if phase else []), *(["--ranks", str(count)] if count else [])])
                raise Refused(f"{what} was not run: no record of these runs has it", hint=f"run it first: {command}")
