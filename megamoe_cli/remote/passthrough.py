"""The command that runs on the far side: its arguments are checked here, before anything is sent.

Files that it names are files of this machine: those it reads (``--baseline``, ``--table``, ``--space``) are sent along,
those it writes (``--save-baseline``, ``--junit``) come back. What the far side must know besides (where its records go,
how long a case may take) is added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megamoe_cli.errors import UsageError
from megamoe_cli.remote.commands import Place
from megamoe_cli.remote.targets import Target

if TYPE_CHECKING:
    from megamoe_cli.cli.app import App
    from megamoe_cli.compile.driver import BuildRequest
    from megamoe_cli.testplan import Case

LOCAL_OPTIONS = ("--junit", "--results-dir", "--baseline", "--save-baseline", "--table", "--space")
NO_GPU = ("build",)  # takes no GPU, so no lock
# What our commands import. The far side says what is missing before it starts anything.
NEEDED = ("click", "rich", "yaml", "numpy", "filelock")
_PACKAGES = {"yaml": "pyyaml"}
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
    sent: dict[str, Path] = field(default_factory=dict)  # option -> file that it reads
    kept: dict[str, Path] = field(default_factory=dict)  # option -> file that it writes
    values: dict[str, str] = field(default_factory=dict)  # other options whose text is not the user's word for word
    env: dict[str, str] = field(default_factory=dict)
    builds: list[BuildRequest] = field(default_factory=list)
    # kernels for the emulator, and whether it is the emulator for certain (or only where there is no GPU)
    emulated: list[tuple[BuildRequest, bool]] = field(default_factory=list)

    @property
    def what(self) -> str:
        """For people: what the box is busy with."""
        return " ".join(["megamoe", self.name, *self.args])[:200]

    @property
    def need(self) -> tuple[str, ...]:
        return NEEDED if self.name == "build" else (*NEEDED, "torch")

    def words(self, target: Target, job: str, *, detached: bool) -> list[str]:
        """The command on the far side."""
        place = Place.of(target).inside
        words = [target.python, "-m", "megamoe_cli", self.name, *self.args]
        for option, file in self.sent.items():
            words += [option, f"{place}/{sent_name(option, file)}{self.values.get(option, '')}"]
        words += [word for option, value in self.values.items() if option not in self.sent for word in (option, value)]
        words += [word for option in self.kept for word in (option, f"{place}/jobs/{job}/{kept_name(option)}")]
        if "timeout" in self.params and self.name in ("test", "ci") and not detached and "timeout" not in self.given:
            words += ["--timeout", f"{target.limits().case:g}"]
        return words


def sent_name(option: str, file: Path) -> str:
    return f"inputs/{option[2:]}{file.suffix}"


def kept_name(option: str) -> str:
    return f"{option[2:]}.json"


def packages(modules: Sequence[str]) -> list[str]:
    """What to install for these import names."""
    return [_PACKAGES.get(module, module) for module in modules]


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
    _files(app, inner)
    inner.env = {f"MEGAMOE_{key.upper()}": str(value.value) for key, value in app.settings.values.items()
                 if key in ctx.params and key not in (*_LOCAL_SETTINGS, "table")}
    limit = target.limits().command
    if name == "test" and not detached and "timeout" in inner.given and inner.params["timeout"] > limit:
        raise UsageError(f"--timeout {inner.params['timeout']:g}: a case may not take longer than the whole command, which has "
                         f"{limit:g} s on {target.label}", hint="raise the target's timeout, or use --detach", rule="timeouts-nest")
    if ctx.params.get("output") is not None:
        raise UsageError("-o would name a file on the other machine; the table comes back in the run's folder, as table.yaml",
                         rule="remote-output")
    inner.builds, inner.emulated = builds_of(name, ctx)
    return inner


def _files(app: App, inner: Inner) -> None:
    """The files that the options name. UsageError for a baseline that is none."""
    from megamoe_cli import bench_gate, paths

    params = inner.params
    baseline = params.get("baseline")
    if baseline is None and params.get("limit_text"):
        baseline = Path(inner.results_dir or app.settings.get("results_dir") or paths.results_dir()) / "bench-baseline.json"
    if baseline is not None:
        bench_gate.load_baseline(baseline)
        inner.sent["--baseline"] = baseline
    if params.get("save_baseline"):
        inner.kept["--save-baseline"] = params["save_baseline"]
    for name in ("table", "space"):
        text = params.get(name)
        if text is None or name not in inner.given and text in ("auto", "default"):
            continue
        file, colon, rest = text.rpartition(":") if name == "space" and ":" in text else (text, "", "")
        if Path(file).is_file():
            inner.sent[f"--{name}"] = Path(file)
            inner.values[f"--{name}"] = colon + rest
        else:
            inner.values[f"--{name}"] = text


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


def emulated_by(cases: Sequence[Case], backend: str) -> list[tuple[BuildRequest, bool]]:
    """What these cases need compiled where they run on the emulator."""
    from megamoe_cli.case_options import parse_mix
    from megamoe_cli.compile.driver import BuildRequest

    if backend not in ("auto", "emulator"):
        return []
    found = [BuildRequest(case.phase, config, "emulator", case.problem.shape, case.ranks, flavour=emulator_flavour(case.options))
             for case in cases for config in (case.config, *parse_mix(case.options.get("mix", ""), case.config))]
    return [(request, backend == "emulator") for request in dict.fromkeys(found)]


def emulator_flavour(options: Mapping[str, Any]) -> str:
    """What the emulator will load for a case with these options (its own word: ``EmulatorBackend.flavour``)."""
    checked = options.get("checked")
    needed = options.get("races") or options.get("preempt")
    return "checked" if (needed if checked is None else checked) else "plain"


def builds_of(name: str, ctx: click.Context) -> tuple[list[BuildRequest], list[tuple[BuildRequest, bool]]]:
    """The variants that the command will ask for, so far as its arguments say: for sm_90a, and for the emulator. Checks
    them on the way."""
    from megamoe_cli.compile.driver import BuildRequest

    params, found = ctx.params, []
    emulated: list[tuple[BuildRequest, bool]] = []
    if name == "test":
        from megamoe_cli.cli.test_cmd import selected_cases

        if "list" in params["case_ids"] or params["dry_run"]:
            return [], []
        cases = selected_cases(ctx, params)
        emulated = emulated_by(cases, params["backend"])
        if params["backend"] != "emulator":
            found = [BuildRequest(c.phase, c.config, "sm_90a", c.problem.shape, c.ranks) for c in cases]
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

        plan = Plan.of(params)
        found, emulated = plan.builds(), emulated_by(plan.cases(), plan.backend)
    return list(dict.fromkeys(found)), emulated
