"""JUnit XML: counts that CI reads, text that XML can hold, files that are never half written."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from megamoe_cli.protocol import CaseResult
from megamoe_cli.report.junit import clean, junit_xml, write_text
from megamoe_cli.testplan import Request, expand


def document(cases, results) -> ET.Element:
    return ET.fromstring(junit_xml(cases, results).encode())


def test_counts_and_places() -> None:
    cases = expand(Request(phase="l1,l2", tokens="0,8,48"))
    statuses = ["pass", "fail", "crash", "pass", "hang"]  # the sixth did not run
    results = [CaseResult(case.id, status, where="emulator", seconds=1.5, message="why" if status != "pass" else "",
                          metrics={"l1_rel": 1e-4}, exit_code=int(status != "pass"))
               for case, status in zip(cases, statuses)]
    root = document(cases, results)
    assert {key: root.get(key) for key in ("tests", "failures", "errors", "skipped", "time")} == {
        "tests": "6", "failures": "1", "errors": "2", "skipped": "1", "time": "7.500"}
    suites = {suite.get("name"): suite for suite in root}
    assert [suites["megamoe.l1"].get(key) for key in ("tests", "failures", "errors", "skipped")] == ["3", "1", "1", "0"]
    assert [suites["megamoe.l2"].get(key) for key in ("tests", "failures", "errors", "skipped")] == ["3", "0", "1", "1"]
    tests = {test.get("name"): test for test in root.iter("testcase")}
    assert set(tests) == {case.id for case in cases}
    failed = tests[cases[1].id].find("failure")
    assert failed.get("message") == "why" and cases[1].repro() in failed.text
    assert tests[cases[2].id].find("error").get("type") == "crash"
    assert tests[cases[5].id].find("skipped") is not None and tests[cases[0].id].find("failure") is None
    properties = {p.get("name"): p.get("value") for p in tests[cases[0].id].iter("property")}
    assert properties["where"] == "emulator" and properties["metric.l1_rel"] == "0.0001"


def test_text_that_xml_cannot_hold() -> None:
    assert clean("a\x00b\x1b[31m\ud800 <&> \u00e4\n") == "a?b?[31m? <&> \u00e4\n"
    (case,) = expand(Request(phase="l1", tokens="8"))
    result = CaseResult(case.id, "crash", message="died \x1b[31m <&>", stderr=["\x00 last words", "]]>"], exit_code=1)
    element = document([case], [result]).find(".//testcase")
    assert element.find("error").get("message") == "died ?[31m <&>"
    assert element.find("system-err").text == "? last words\n]]>"


def test_no_cases() -> None:
    assert document([], []).get("tests") == "0"


def test_files_are_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "new" / "junit.xml"
    write_text(target, "one")
    assert target.read_text() == "one" and target.stat().st_mode & 0o777 == 0o644

    def fails(*args):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(OSError):
        write_text(target, "two")
    assert target.read_text() == "one" and [p.name for p in target.parent.iterdir()] == ["junit.xml"]
