"""``megamoe doctor``: what this machine can run, what it lacks, and the one next command."""

from __future__ import annotations

import click

from megamoe_cli.cli.app import App, json_option
from megamoe_cli.doctor import Diagnosis, Finding, diagnose
from megamoe_cli.errors import ExitCode

_MARKS = {"ok": "ok     ", "missing": "MISSING", "note": "note   "}
_PATH_NAMES = {"build": "compile for sm_90a", "emulator": "run on the CPU emulator", "gpu": "run on an SM90 GPU"}


@click.command("doctor")
@click.option("-q", "--quiet", is_flag=True, help="Only what is missing, and the conclusion.")
@click.option("-v", "--verbose", count=True, help="All facts of each probe.")
@json_option
@click.pass_obj
def doctor_command(app: App, quiet: bool, verbose: int) -> int:
    """Say what this machine can run, and what it lacks. Exit 0 when the kernel can run somewhere here, else 3."""
    if quiet or verbose:
        app.verbosity = -1 if quiet else verbose
    show = (lambda finding: None) if app.json else (lambda finding: _print_finding(app, finding))
    diagnosis = diagnose(show)
    settings = {name: {"value": value.value, "origin": value.origin} for name, value in app.settings.values.items()}
    if app.json:
        app.emit(diagnosis.to_dict() | {"settings": settings, "settings_files": [str(f) for f in app.settings.files]})
    else:
        _print_conclusion(app, diagnosis, settings)
    return ExitCode.DONE if diagnosis.usable else ExitCode.ENVIRONMENT


def _print_finding(app: App, finding: Finding) -> None:
    if app.verbosity < 0 and finding.state != "missing":
        return
    click.echo(f"{_MARKS[finding.state]}  {finding.name:<15} {finding.text}")
    if finding.state == "missing" and finding.fix:
        click.echo(f"{'':<9}{'':<15} fix: {finding.fix}")
    if app.verbosity > 0:
        for key, value in finding.facts.items():
            click.echo(f"{'':<9}{'':<15} {key}: {value}")


def _print_conclusion(app: App, diagnosis: Diagnosis, settings: dict[str, dict]) -> None:
    if app.verbosity >= 0:
        for name, entry in settings.items():
            click.echo(f"setting  {name:<15} {entry['value']} (from {entry['origin']})")
        if not settings:
            click.echo(f"setting  {'(none)':<15} all settings are the defaults")
    for name, why in diagnosis.paths.items():
        click.echo(f"{'yes' if not why else 'NO ':<8} {_PATH_NAMES[name]}{': ' + why if why else ''}")
    if diagnosis.next_command:
        click.echo(f"next: {diagnosis.next_command}")
