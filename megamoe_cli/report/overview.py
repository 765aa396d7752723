"""One run in plain data: what ran where, and what came out. The same for a terminal, a page and ``--json``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megamoe_cli.report.found_runs import FoundRun
from megamoe_cli.report.waiters import shortened

SHOWN_FAILURES = 20
_MARKS = {"pass": "pass", "not run": "not run"}


def overview(run: FoundRun, others: Mapping[str, FoundRun] | None = None) -> dict[str, Any]:
    """``others``: id -> run, where the steps of a ci run are looked up."""
    inner = [others[step["run"]] for step in run.record.get("steps", []) if others and step.get("run") in others]
    tests = [record for record in (run.record, *(i.record for i in inner)) if isinstance(record.get("results"), list)]
    results = [result for record in tests for result in record["results"]]
    benches = [record for record in (run.record, *(i.record for i in inner)) if "rows" in record and "gate" in record]
    return {
        "id": run.id, "kind": run.kind, "command": shlex.join(map(str, run.get("command") or run.line.get("command") or [])),
        "when": run.when.isoformat(timespec="seconds"), "seconds": run.get("seconds"), "exit_code": run.line.get("exit_code", run.get("exit_code")),
        "folder": str(run.folder) if run.folder else None, "where": places(run), "source": run.get("source") or {}, "host": run.get("host") or {},
        "remote": remote(run), "problems": [*run.problems, *(p for i in inner for p in i.problems)],
        "steps": [{key: step.get(key) for key in ("name", "exit_code", "seconds", "text", "run")} for step in run.record.get("steps", [])],
        "tested": tested(results), "failures": failures(results),
        "bench": [row for record in benches for row in bench_rows(record)], "costs": run.record.get("costs", []),
        "failed_contenders": [f for record in benches for f in record.get("failed", [])],
        "tune": tune(run) if run.kind == "tune" else None,
    }


def overview_or_problem(run: FoundRun, others: Mapping[str, FoundRun] | None = None) -> dict[str, Any]:
    """The same; of a record that is not what megamoe writes (edited, or of another version) only that this is so."""
    try:
        return overview(run, others)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        problem = f"{run.folder}: its record is not one that megamoe writes: {type(error).__name__}: {error}"
        return overview(replace(run, record={}, line={}, folder=None, problems=[*run.problems, problem]))


def places(run: FoundRun) -> list[str]:
    """``emulator(8 ranks x 2 CTAs)``, ``nvlink(8xH200)``, ...; empty when nothing says."""
    found = run.get("where") or []
    return [found] if isinstance(found, str) else [str(place) for place in found]


def remote(run: FoundRun) -> dict[str, Any] | None:
    """The other machine, its container and its GPUs, as the fetched record has them."""
    about = run.document("remote.json")
    if not about:
        return None
    machine = about.get("machine") or {}
    return {"target": about.get("target"), "host": about.get("host"), "container": about.get("container"), "job": about.get("job"),
            "gpus": [" ".join(gpu[1:2]) for gpu in machine.get("gpus") or []], "machine": machine.get("host"), "end": about.get("end")}


def tokens_label(counts: Sequence[int]) -> str:
    """``48``, or ``uneven 3..40``."""
    return str(counts[0]) if len(set(counts)) == 1 else f"uneven {min(counts)}..{max(counts)}"


def tested(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry per place, phase, ranks, BLOCK_M and tokens: cases, passed, not run, and the statuses of the others."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for result in results:
        case = result["case"]
        key = (result.get("where") or "", result["phase"], case["ranks"], case["config"].get("block_m"), tokens_label(case["tokens"]))
        names = ("where", "phase", "ranks", "block_m", "tokens")
        row = rows.setdefault(key, dict(zip(names, key)) | {"cases": 0, "passed": 0, "not_run": 0, "others": {}})
        row["cases"] += 1
        status = result["status"]
        if status == "pass":
            row["passed"] += 1
        elif status == "not run":
            row["not_run"] += 1
        else:
            row["others"][status] = row["others"].get(status, 0) + 1
    for row in rows.values():
        row["verdict"] = verdict(row)
    return list(rows.values())


def verdict(row: Mapping[str, Any]) -> str:
    """``pass`` only when every case passed; else the commonest way it failed, or ``not run``."""
    if row["others"]:
        return max(row["others"], key=lambda status: row["others"][status])
    return "pass" if row["passed"] == row["cases"] else "not run"


def failures(results: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    bad = [r for r in results if r["status"] not in ("pass", "not run")]
    return [{"id": r["id"], "status": r["status"], "where": r.get("where") or "",
             "text": " ".join(shortened(str((r.get("fault") or {}).get("text") or r.get("message") or _first_finding(r))).split()),
             "repro": r.get("repro") or ""} for r in bad]  # fmt: skip


def _first_finding(result: Mapping[str, Any]) -> str:
    from megamoe_cli.report.tables import finding_line

    return finding_line(result["findings"][0]) if result.get("findings") else ""


def bench_rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Times in microseconds, over their floors (weights through HBM, FLOPs through the tensor cores), and the gate's word."""
    gate = {(j["shape"], j["tokens"]): j for j in record.get("gate", [])}
    rows = []
    for row in record["rows"]:
        floors = {name: row.get(f"{name}_floor_us") for name in ("weight", "tensor")}
        floor = row.get("floor_us") or max((f for f in floors.values() if f), default=None)
        rivals = [{"name": r["name"], "version": r.get("version"), "ratio": (r.get("ratios", {}).get("kernel") or {}).get("median"),
                   "low": (r.get("ratios", {}).get("kernel") or {}).get("low"), "high": (r.get("ratios", {}).get("kernel") or {}).get("high"),
                   "to_reach": r.get("to_reach"), "verdict": r.get("verdict")} for r in row.get("rivals", ())]  # fmt: skip
        rows.append({
            "shape": row["shape"], "tokens": row["tokens"], "where": record.get("where", ""), "config": row.get("config", ""),
            "kernel_us": row["kernel_us"], "low_us": row.get("low_us"), "high_us": row.get("high_us"), "in_a_row_us": row.get("back_to_back_us"),
            "floor_us": floor, "floor": max((n for n in floors if floors[n]), key=lambda n: floors[n], default=None),
            "times_floor": row["kernel_us"] / floor if floor else None, "gate": gate.get((row["shape"], row["tokens"])), "rivals": rivals})
    return rows


def tune(run: FoundRun) -> dict[str, Any]:
    """What a search came to: measured (summary), from a model (ranking), or not finished (plan alone)."""
    plan, summary, ranking = run.document("plan.json"), run.document("summary.json"), run.document("ranking.json")
    about = {"shape": plan.get("shape"), "ranks": plan.get("ranks"), "machine": plan.get("machine"), "sizes": plan.get("sizes")}
    table = str(run.folder / "table.yaml") if run.folder and (run.folder / "table.yaml").is_file() else None
    if summary:
        noise = summary.get("noise", {})
        state = "partial" if summary.get("partial") else "complete"
        picks = [{**pick, "noise": noise.get(str(pick["tokens"]))} for pick in summary.get("picks", [])]
        return {**about, "state": state, "stopped": summary.get("stopped"), "picks": picks, "validation": summary.get("validation"),
                "accounts": summary.get("accounts"), "trials": summary.get("trials"), "notes": summary.get("notes", []), "table": table}
    if ranking:
        picks = [{"tokens": p["tokens"], "config": p["config"], "vs_incumbent": None, "noise": None} for p in ranking.get("picks", [])]
        return {**about, "state": "a model's ranking, nothing was run", "stopped": None, "picks": picks, "validation": None, "accounts": None,
                "trials": None, "notes": [], "table": table}
    path = run.folder / "trials.jsonl" if run.folder else None
    measured = path.read_bytes().count(b"\n") if path and path.is_file() else 0
    return {**about, "state": "not finished", "stopped": None, "picks": [], "validation": None, "accounts": None,
            "trials": {"measured": measured}, "notes": [f"continue with: megamoe tune --resume {run.id}"], "table": None}


def result_text(view: Mapping[str, Any]) -> str:
    """The run's answer in a few words."""
    names = {0: "passed", 1: "failed", 2: "refused", 3: "machine unfit", 4: "build failed", 5: "nothing selected", 6: "inconclusive",
             124: "timeout", 130: "interrupted", 143: "terminated"}
    code = view["exit_code"]
    said = "unreadable" if view["problems"] and not view["command"] else "not finished" if code is None else names.get(code, f"exit {code}")
    if view["tested"]:
        total, passed = sum(r["cases"] for r in view["tested"]), sum(r["passed"] for r in view["tested"])
        skipped = sum(r["not_run"] for r in view["tested"])
        said += f": {passed} of {total} cases passed" + (f", {skipped} not run" if skipped else "")
    if view["bench"]:
        slower = sum((row["gate"] or {}).get("verdict") == "slower" for row in view["bench"])
        said += f": {len(view['bench'])} rows" + (f", {slower} slower" if slower else "")
    if view["tune"]:
        said = view["tune"]["state"] + (f": {len(view['tune']['picks'])} sizes" if view["tune"]["picks"] else "")
    return said
