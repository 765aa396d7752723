"""Live progress of a test run on stderr: a moving line on a terminal, plain lines elsewhere, nothing with -q."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from megamoe_cli.cli.app import App
from megamoe_cli.protocol import CaseResult
from megamoe_cli.report.tables import describe_failure, worst_metric
from megamoe_cli.testplan import Case


class Progress:
    """Use as a context manager; ``stage`` and ``result`` are the supervisor's callbacks."""

    def __init__(self, app: App, cases: Sequence[Case]) -> None:
        self.app, self.cases = app, {case.id: case for case in cases}
        self.done = self.failed = 0
        self.running: dict[str, tuple[str, float]] = {}
        self.live: Any = None
        self.console: Any = None

    def __enter__(self) -> Progress:
        if self.app.verbosity >= 0 and self.app.is_tty():
            from rich.live import Live

            self.console = self.app.console(stderr=True)
            self.live = Live(get_renderable=self._draw, console=self.console, refresh_per_second=8, transient=True)
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self.live is not None:
            self.live.stop()

    def stage(self, case_id: str, stage: str) -> None:
        """A case entered a stage (``compile``, ...)."""
        self.running[case_id] = (stage, self.running.get(case_id, ("", time.monotonic()))[1])
        if self.live is None and self.app.verbosity > 0:
            self.app.say(f"{case_id}: {stage}")

    def note(self, text: str) -> None:
        """A message that must be seen at once, also with -q."""
        if self.live is not None:
            self.console.print(text, markup=False)
        else:
            self.app.warn(text)

    def result(self, result: CaseResult) -> None:
        """A case ended: one line, and for one that did not pass everything needed to look into it."""
        self.done += 1
        self.failed += not result.passed
        self.running.pop(result.id, None)
        case = self.cases[result.id]
        width = len(str(len(self.cases)))
        head = f"[{self.done:>{width}}/{len(self.cases)}] {result.status:<5} {case.id}  {result.seconds:.1f} s"
        metric = worst_metric(result.metrics)
        lines = [f"{head}  {metric}" if metric else head]
        if not result.passed:
            lines += describe_failure(case, result)
        for line in lines:
            self._print(line, result.passed)

    def _print(self, line: str, passed: bool) -> None:
        if self.live is not None:
            from rich.text import Text

            self.console.print(Text(line, style="" if passed else "red"))
        else:
            self.app.say(line)

    def _draw(self) -> Any:
        from rich.spinner import Spinner
        from rich.text import Text

        now = time.monotonic()
        parts = [f"{case_id} ({stage} {now - since:.0f} s)" for case_id, (stage, since) in list(self.running.items())[:2]]
        text = f"{self.done}/{len(self.cases)} done"
        if self.failed:
            text += f", {self.failed} failed"
        return Spinner("dots", Text(f"{text}  {'  '.join(parts)}", no_wrap=True, overflow="ellipsis"))
