"""JUnit XML of a test run, in the dialect that CI systems read: one testsuite per phase, one testcase per case."""

from __future__ import annotations

import os
import re
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megamoe_cli.errors import UsageError
from megamoe_cli.protocol import CaseResult
from megamoe_cli.report.tables import describe_failure
from megamoe_cli.testplan import Case

# XML 1.0 cannot hold most control characters, not even escaped; compilers and crashing processes print them.
_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def clean(text: Any) -> str:
    """``text`` without characters that XML cannot hold."""
    return _ILLEGAL.sub("?", str(text))


def junit_xml(cases: Sequence[Case], results: Sequence[CaseResult], name: str = "megamoe") -> str:
    """The document as text. A case without a result is ``skipped`` (not run); ``seconds`` are wall time.

    fail -> <failure>; fault, error, hang, crash -> <error>. Each carries the reproducing command.
    """
    by_id = {result.id: result for result in results}
    root = ET.Element("testsuites", name=name)
    totals = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    seconds = 0.0
    for phase in dict.fromkeys(case.phase for case in cases):
        suite = ET.SubElement(root, "testsuite", name=f"{name}.{phase}")
        counts, spent = dict.fromkeys(totals, 0), 0.0
        for case in (c for c in cases if c.phase == phase):
            result = by_id.get(case.id)
            element = ET.SubElement(suite, "testcase", classname=f"{name}.{phase}", name=clean(case.id),
                                    time=f"{result.seconds if result else 0.0:.3f}")
            counts["tests"] += 1
            if result is None:
                counts["skipped"] += 1
                ET.SubElement(element, "skipped", message="not run")
                continue
            spent += result.seconds
            properties = ET.SubElement(element, "properties")
            values = {"where": result.where, "repro": case.repro(), **{f"metric.{k}": v for k, v in result.metrics.items()}}
            for key, value in values.items():
                ET.SubElement(properties, "property", name=clean(key), value=clean(value))
            if not result.passed:
                kind = "failure" if result.status == "fail" else "error"
                counts["failures" if kind == "failure" else "errors"] += 1
                lines = describe_failure(case, result)
                ET.SubElement(element, kind, type=result.status,
                              message=clean(result.message or lines[0])).text = clean("\n".join(lines))
                if result.stderr:
                    ET.SubElement(element, "system-err").text = clean("\n".join(result.stderr))
        for key, value in counts.items():
            suite.set(key, str(value))
            totals[key] += value
        suite.set("time", f"{spent:.3f}")
        seconds += spent
    for key, value in totals.items():
        root.set(key, str(value))
    root.set("time", f"{seconds:.3f}")
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def check_writable(path: Path, option: str) -> None:
    """Before anything starts: can ``write_text`` write ``path``? UsageError that names the option."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        os.unlink(temporary)
    except OSError as error:
        raise UsageError(f"{option}: {path} cannot be written: {error.strerror}") from None


def write_text(path: Path, text: str) -> None:
    """Writes atomically (a reader sees the old file or the new one), creating the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
