"""The command that runs on the far side: its arguments are checked here, before anything is sent.

What names files of this machine (``--junit``, ``--results-dir``) stays here; what the far side must know besides (where
its records go, how long a case may take) is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megamoe_cli.errors import UsageError
from megamoe_cli.remote.targets import Target

if TYPE_CHECKING:
    from megamoe_cli.cli.app import App
    from megamoe_cli.compile.driver import BuildRequest

LOCAL_OPTIONS = ("--junit", "--results-dir")
NO_GPU = ("build",)  # takes no GPU, so no lock
# Settings that mean this machine or this terminal.
_LOCAL_SETTINGS = ("results_dir", "color", "timeout")


@dataclass
class Inner:
    """A checked command. ``args``: without the options that stay here."""

    name: str
    args: list[str]
    params: dict[str, Any] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    junit: Path | None = None
    results_dir: Path | None = None
    env: dict[str, str] = field(default_factory=dict)
    builds: list[BuildRequest] = field(default_factory=list)

    @property
    def what(self) -> str:
        """For people: what the box is busy with."""
        return " ".join(["megamoe", self.name, *self.args])[:200]

    def words(self, target: Target, *, detached: bool) -> list[str]:
        """The command on the far side."""
        words = [target.python, "-m", "megamoe_cli", self.name, *self.args]
        if "timeout" in self.params and self.name in ("test", "ci") and not detached and "timeout" not in self.given:
            words += ["--timeout", f"{target.limits().case:g}"]
        return words


def parse(app: App, name: str, args: Sequence[str], target: Target, *, detached: bool) -> Inner:
    """UsageError (from click or the plan) for arguments that the far side would refuse."""
    from click.core import ParameterSource

    from megamoe_cli.cli.main import cli

    group = click.Context(cli, info_name="megamoe", obj=app)
    command = cli.get_command(group, name)
    if command is None:
        raise UsageError(f"this version has no command {name!r}")
    defaults = app.settings.default_map(p.name for p in command.params)
    ctx = command.make_context(name, list(args), parent=group, obj=app, default_map=defaults)
    inner = Inner(name, without(args, LOCAL_OPTIONS), dict(ctx.params))
    inner.given = {p for p in ctx.params if ctx.get_parameter_source(p) != ParameterSource.DEFAULT}
    inner.junit, inner.results_dir = ctx.params.get("junit"), ctx.params.get("results_dir")
    inner.env = {f"MEGAMOE_{key.upper()}": str(value.value) for key, value in app.settings.values.items()
                 if key in ctx.params and key not in _LOCAL_SETTINGS}
    limit = target.limits().command
    if name == "test" and not detached and "timeout" in inner.given and inner.params["timeout"] > limit:
        raise UsageError(f"--timeout {inner.params['timeout']:g}: a case may not take longer than the whole command, which has "
                         f"{limit:g} s on {target.label}", hint="raise the target's timeout, or use --detach", rule="timeouts-nest")
    if ctx.params.get("output") is not None:
        raise UsageError("-o would name a file on the other machine; the table comes back in the run's folder, as table.yaml",
                         rule="remote-output")
    inner.builds = builds_of(name, ctx)
    return inner


def without(args: Sequence[str], names: Sequence[str]) -> list[str]:
    """``args`` without these options and their values."""
    kept: list[str] = []
    rest = iter(args)
    for word in rest:
        if word in names:
            next(rest, None)
        elif not any(word.startswith(f"{name}=") for name in names):
            kept.append(word)
    return kept


def builds_of(name: str, ctx: click.Context) -> list[BuildRequest]:
    """The sm_90a variants that the command will ask for, so far as its arguments say. Checks them on the way."""
    from megamoe_cli.compile.driver import BuildRequest

    params, found = ctx.params, []
    if name == "test":
        from megamoe_cli.cli.test_cmd import selected_cases

        if "list" in params["case_ids"] or params["backend"] == "emulator":
            return []
        found = [BuildRequest(c.phase, c.config, "sm_90a", c.problem.shape, c.ranks) for c in selected_cases(ctx, params)]
    elif name == "build":
        from megamoe_cli.cli.build_cmd import requests_of

        found = [r for r in requests_of(params) if r.target == "sm_90a"]
    elif name == "bench":
        from megamoe_cli.cli.bench_cmd import requests_of as bench_requests

        found = bench_requests(params)
    elif name == "tune" and not (params["resume"] or params["plan_only"] or params["static"] or params["fake"]):
        from megamoe_cli.cli.tune_cmd import request_of as tune_request
        from megamoe_cli.tuning.run import make_plan
        from megamoe_cli.tuning.space import kernels_of

        plan, _ = make_plan(tune_request(params))
        configs = kernels_of([*plan.candidates, *(choice for _, choice in plan.incumbents)])
        found = [BuildRequest("combine", config, "sm_90a", plan.shape, plan.ranks) for config in configs]
    elif name == "ci":
        from megamoe_cli.ci import Plan

        found = Plan.of(params).builds()
    return list(dict.fromkeys(found))
