"""The workflow files: valid for the service they are for (its own schema), and every command in them exists with these
options. A workflow that nobody runs is wrong within a month."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from megamoe_cli.cli.app import App
from megamoe_cli.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = {".github/workflows/ci.yml": "github", "docs/ci/github-gpu.yml": "github", "docs/ci/gitlab-ci.yml": "gitlab"}
_SCHEMAS = {"github": "vendor.github-workflows", "gitlab": "vendor.gitlab-ci"}
# Keys of a GitLab file that are no jobs.
_GITLAB_GLOBAL = {"stages", "default", "variables", "workflow", "include", "image"}


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def scripts(name: str) -> dict[str, str]:
    """job -> the shell text it runs, variables of the file filled in."""
    document = load(name)
    if WORKFLOWS[name] == "github":
        return {job: "\n".join(step["run"] for step in body["steps"] if "run" in step) for job, body in document["jobs"].items()}
    out = {}
    for job, body in document.items():
        if job in _GITLAB_GLOBAL:
            continue
        text = "\n".join(line for key in ("before_script", "script", "after_script") for line in body.get(key, []))
        for variable, value in body.get("variables", {}).items():
            text = text.replace(f"${variable}", value)
        out[job] = text
    return out


def commands(text: str) -> list[list[str]]:
    """The arguments of every megamoe in a script."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|;|\|\|", line):
            words = shlex.split(re.sub(r"\$\{?\w+\}?", "value", part))
            starts = [n + 1 for n, word in enumerate(words) if word.endswith("/megamoe") or word in ("megamoe", "megamoe_cli")]
            if starts:
                found.append(words[starts[0]:])
    return found


def check_command(words: list[str]) -> None:
    """Parses a command line as the program would, down to the last option; runs nothing."""
    context = click.Context(cli, info_name="megamoe", obj=App())
    name, rest = words[0], words[1:]
    command = cli.get_command(context, name)
    assert command is not None, f"no command {name}"
    if not isinstance(command, click.Group):
        command.make_context(name, rest, parent=context)
        return
    inner = command.make_context(name, rest, parent=context)
    left = [*getattr(inner, "_protected_args", ()), *inner.args]  # click before 9 keeps the first word apart
    sub = command.get_command(inner, left[0])
    assert sub is not None, f"no command {name} {left[0]}"
    parsed = sub.make_context(left[0], left[1:], parent=inner)
    if "args" in parsed.params:
        check_command([left[0], *parsed.params["args"]])


@pytest.mark.parametrize("name", WORKFLOWS)
def test_valid_for_the_service(name: str) -> None:
    """Against the service's published schema, which the linter ships (no network)."""
    if importlib.util.find_spec("check_jsonschema") is None:
        pytest.skip("check-jsonschema is not installed (the dev extra has it)")
    done = subprocess.run([sys.executable, "-m", "check_jsonschema", "--builtin-schema", _SCHEMAS[WORKFLOWS[name]], str(ROOT / name)],
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_linter_can_fail(tmp_path: Path) -> None:
    if importlib.util.find_spec("check_jsonschema") is None:
        pytest.skip("check-jsonschema is not installed (the dev extra has it)")
    bad = tmp_path / "bad.yml"
    bad.write_text((ROOT / ".github/workflows/ci.yml").read_text().replace("runs-on:", "run-on:"))
    done = subprocess.run([sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(bad)],
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 1


@pytest.mark.parametrize("name", WORKFLOWS)
def test_structure(name: str) -> None:
    """What the schema does not say: every job has a time limit, keeps its results when it fails, and pins its actions."""
    document = load(name)
    if WORKFLOWS[name] == "github":
        assert document["permissions"] == {"contents": "read"}
        for job, body in document["jobs"].items():
            assert body["timeout-minutes"] <= 60, job
            uses = [step["uses"] for step in body["steps"] if "uses" in step]
            assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", action) for action in uses), uses
            keep = [step for step in body["steps"] if step.get("uses", "").startswith("actions/upload-artifact")]
            assert keep and keep[0]["if"] == "always()" and "results/" in keep[0]["with"]["path"], job
            # a ${{ }} inside a script is an injection; it belongs into env
            assert not any("${{" in step.get("run", "") for step in body["steps"]), job
    else:
        for job in scripts(name):
            assert document[job]["timeout"] and document[job]["artifacts"]["when"] == "always", job
            assert document[job]["stage"] in document["stages"], job


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_job_runs_the_same_check(name: str) -> None:
    """``megamoe ci``, itself or through make test; and its options exist."""
    found = scripts(name)
    assert found
    for job, text in found.items():
        lines = commands(text)
        for words in lines:
            check_command(words)
        through_make = ".ci/run" in text
        assert through_make or any("ci" in words for words in lines), job
    assert re.search(r"exec make .*\btest\b", (ROOT / ".ci/run").read_text())
    recipe = re.search(r"^test: setup\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    assert recipe and "-m megamoe_cli ci" in recipe[1] and recipe[1].index("megamoe_cli ci") < recipe[1].index("pytest")


def test_a_remote_job_reaps() -> None:
    for name, job in (("docs/ci/github-gpu.yml", "through-ssh"), ("docs/ci/gitlab-ci.yml", "gpu-through-ssh")):
        last = commands(scripts(name)[job])[-1]
        assert last[-2:] == ["reap", "--all"]


def documented(name: str) -> list[list[str]]:
    """The commands of a page's code blocks, without what stands for something else."""
    lines = [line.split("#")[0] for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if re.match(r" {4,}megamoe ", line)]
    return commands("\n".join(lines))


@pytest.mark.parametrize("name", ["docs/remote.md", "docs/ci/README.md"])
def test_commands_of_the_pages_exist(name: str) -> None:
    found = documented(name)
    assert found
    for words in found:
        check_command(words)


def test_the_target_of_the_page_is_one(tmp_path: Path) -> None:
    """What a newcomer copies."""
    from megamoe_cli.remote.targets import pick
    from megamoe_cli.settings import Settings

    pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    block = re.search(r"((?: {8}.*\n|\n)+)", (ROOT / "docs/remote.md").read_text(encoding="utf-8").split("config.toml`:\n")[1])
    assert block
    (tmp_path / "pyproject.toml").write_text(re.sub(r"^ {8}", "", block[1], flags=re.M))
    loaded = Settings.load(tmp_path / "pyproject.toml", environ={})
    target = pick(loaded.remotes, None, loaded.default_remote)
    assert (target.host, target.container, target.path, target.env) == ("gpu-box", "dev", "/scratch/me/megamoe", {"NCCL_DEBUG": "WARN"})


def test_every_key_of_a_target_is_on_the_page() -> None:
    from megamoe_cli.remote.targets import _KEYS, Target

    page = (ROOT / "docs/remote.md").read_text(encoding="utf-8")
    table = page[page.index("| key |"):page.index("Flags:")]
    assert set(re.findall(r"`([a-z_]+)`", "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `")))) == set(_KEYS)
    limits = Target(host="h").limits()
    assert f"case {limits.case:g} s < command {limits.command:g} s < killed after {limits.grace:g} s more < remote {limits.remote:g} s" in page
    assert f"| `grace` | {limits.grace:g} |" in page


def test_unknown_commands_are_seen() -> None:
    assert commands("a && .venv/bin/megamoe ci --x 1\nmake") == [["ci", "--x", "1"]]
    for words in (["cj"], ["ci", "--no-such"], ["remote", "--host", "b", "ci", "--no-such"], ["remote", "fly"]):
        with pytest.raises((click.UsageError, AssertionError)):
            check_command(words)
