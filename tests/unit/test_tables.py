"""What is shown of a run: the error that matters, where a finding is, and the closing line."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from megamoe_cli.protocol import CaseResult
from megamoe_cli.report.tables import (
    describe_failure, finding_line, phase_rows, registers, render_table, summary, table_rows, telling, worst_metric,
)
from megamoe_cli.testplan import Request, expand


@pytest.mark.parametrize("metrics, expected", [
    ({}, ""),
    ({"a": 1e-3, "b": 2e-3}, "b 0.002"),
    ({"a": 1e-3, "b": "nan"}, "b nan"),
    ({"a": "inf", "b": 1e9}, "a inf"),
    ({"a": {"value": 5e-4, "limit": 1e-3}, "b": {"value": 2e-3, "limit": 1e-2}}, "a 0.0005 (limit 0.001)"),
    ({"note": "text", "ok": True, "a": 0.0}, "a 0"),
    ({"rows": 12}, "rows 12"),
])
def test_worst_metric(metrics, expected) -> None:
    assert worst_metric(metrics) == expected


def test_registers() -> None:
    assert registers({}) == "-"
    assert registers({"registers": 168}) == "168"
    assert registers({"registers": 168, "spill_bytes": 32}) == "168 (32 B spilled)"


@pytest.mark.parametrize("finding, expected", [
    ({"rank": 3, "token": 5, "slot": 1, "column": 77, "got": 0.5, "expected": 0.25, "metric": "l2", "message": "too far"},
     "rank 3, token 5, slot 1, column 77: got 0.5, expected 0.25 (l2; too far)"),
    ({"rank": 0, "token": 0, "slot": None, "column": None, "got": "nan", "expected": 0.0},
     "rank 0, token 0: got nan, expected 0"),
    ({"rank": None, "message": "no rows at all"}, "whole output (no rows at all)"),
    ({"rank": 1, "token": -1, "got": 0.1 + 0.2, "expected": 0.3}, "rank 1: got 0.3, expected 0.3"),
])
def test_finding_line(finding, expected) -> None:
    assert finding_line(finding) == expected


def test_failure_text() -> None:
    (case,) = expand(Request(phase="l1", tokens="8"))
    findings = [{"rank": n, "token": 0, "got": 1.0, "expected": 2.0} for n in range(5)]
    result = CaseResult(case.id, "fail", where="emulator", message="5 rows differ", findings=findings, findings_total=40,
                        stderr=["not shown for a plain failure"], exit_code=1)
    lines = describe_failure(case, result)
    assert lines[0] == f"FAIL {case.id} on emulator: 5 rows differ"
    assert lines[1].strip() == "rank 0, token 0: got 1, expected 2" and "40 findings" in lines[4]
    assert lines[-1] == f"  reproduce: {case.repro()}" and not any("not shown" in line for line in lines)
    hung = CaseResult(case.id, "hang", stderr=["last words"], fault={"text": "rank 3 waited for peer 1"}, exit_code=124)
    text = "\n".join(describe_failure(case, hung))
    assert "last words" in text and "rank 3 waited for peer 1" in text


def test_a_hang_shows_where_it_is() -> None:
    """A dump of stacks begins with the innermost frame, of the main thread last: that is what is shown, not its end."""
    dump = ["said before", "Thread 0x1 (most recent call first):", *(f'  File "pool.py", line {n} in wait' for n in range(4)),
            "Current thread 0x2 (most recent call first):", *(f'  File "main.py", line {n} in f{n}' for n in range(9))]
    shown = telling(dump)
    assert shown == ["said before", *dump[6:12]], shown
    crash = ["terminate called", "  what(): out of memory", "Fatal Python error: Aborted", *dump[6:], "Extension modules: numpy"]
    assert telling(crash) == [*crash[1:3], *dump[6:12], "Extension modules: numpy"]
    assert telling(["a", "b"]) == ["a", "b"] and telling([str(n) for n in range(9)]) == list("345678")


@pytest.fixture
def run():
    cases = expand(Request(phase="l1,l2", tokens="8,48"))
    results = [CaseResult(case.id, status, where="emulator", seconds=2.0, metrics={"rel": rel}, exit_code=int(status != "pass"),
                          kernel={"registers": 168})
               for case, status, rel in zip(cases, ("pass", "fail", "pass"), (1e-4, 0.5, 2e-4))]
    return cases, results


def test_rows_and_summary(run) -> None:
    cases, results = run
    rows = table_rows(cases, results)
    assert [(row["phase"], row["result"], row["where"], row["seconds"]) for row in rows] == [
        ("l1", "pass", "emulator", "2.0"), ("l1", "fail", "emulator", "2.0"), ("l2", "pass", "emulator", "2.0"),
        ("l2", "not run", "", "")]
    assert rows[1]["worst error"] == "rel 0.5" and rows[0]["case"] == "r8-tiny-t8-m128-uniform-s0"
    assert summary(cases, results, 6.04) == "2 passed, 1 failed, 1 not run in 6.0 s on emulator"
    assert summary(cases[:1], results[:1], 1) == "1 passed, 0 failed in 1.0 s on emulator"


def test_many_cases_are_summed_by_phase(run) -> None:
    cases, results = run
    rows = phase_rows(cases, results)
    assert [(row["phase"], row["case"], row["result"], row["where"]) for row in rows] == [
        ("l1", "1 of 2 passed", "fail", "emulator"), ("l2", "1 of 1 passed", "pass", "emulator"),
        ("l2", "0 of 1 passed", "not run", "")]
    assert rows[0]["worst error"] == "rel 0.5" and rows[0]["seconds"] == "4.0"
    results[0].metrics["rel"] = "nan"
    assert phase_rows(cases, results)[0]["worst error"] == "rel nan"
    first, second = [r for c, r in zip(cases, results, strict=False) if c.phase == "l1"][:2]
    first.metrics, second.metrics = {"rel": {"value": 0.0205, "limit": 0.0206}}, {"rel": {"value": 0.021, "limit": 0.0389}}
    assert phase_rows(cases, results)[0]["worst error"] == "rel 0.0205 (limit 0.0206)", "what comes nearest to its own limit"


def test_the_table_says_where_and_survives_markup(run) -> None:
    cases, results = run
    results[0].where = "virtual(8 on 1xH200) [red]"
    out = io.StringIO()
    Console(file=out, width=200).print(render_table(table_rows(cases, results)))
    text = out.getvalue()
    assert "virtual(8 on 1xH200) [red]" in text and "168" in text and "not run" in text
    first_words = [line.split()[0] for line in text.splitlines() if line.split()]
    assert [first_words.count(phase) for phase in ("l1", "l2")] == [1, 1], "a phase is named once"
