"""Remote targets: where ``megamoe remote`` runs things, from ``[tool.megamoe.remote.NAME]``. No torch.

    [tool.megamoe.remote]
    default = "box"
    [tool.megamoe.remote.box]
    host = "gpu-box"             # as ssh knows it: aliases, jump hosts and users belong into ~/.ssh/config
    container = "docker:dev"     # docker:NAME, podman:NAME, or none
    path = "/scratch/me/megamoe" # a folder of ours on the host
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from megamoe_cli.errors import UsageError

ENGINES = ("docker", "podman")
MIN_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Limits:
    """Seconds; each lies inside the next, so that the innermost one speaks: case < command < command + grace < remote."""

    case: float
    command: float
    grace: float
    remote: float


@dataclass(frozen=True)
class Target:
    """One place. ``container``: name or empty; ``engine``: the words that start its command line.
    ``gpus``: ``all``, ``none``, or indices as ``0,1``. ``timeout``: seconds of one remote command, start to end."""

    host: str
    name: str = ""
    engine: tuple[str, ...] = ()
    container: str = ""
    path: str = "./megamoe-remote"
    container_path: str = ""
    python: str = "python3"
    host_python: str = "python3"
    gpus: str = "all"
    env: Mapping[str, str] = field(default_factory=dict)
    timeout: float = 60.0
    grace: float = 0.0  # 0: half of what lies around the command
    detach_timeout: float = 6 * 3600.0
    build_timeout: float = 300.0  # for the emulator kernels that are not there yet; 0: they are the command's business
    silence: float = 15.0
    lock_dir: str = "/tmp/megamoe-locks"
    ssh: tuple[str, ...] = ("ssh",)
    rsync: tuple[str, ...] = ("rsync",)

    @property
    def inside(self) -> str:
        """``path`` as the command sees it."""
        return self.container_path or self.path

    @property
    def label(self) -> str:
        return self.name or self.host

    def limits(self) -> Limits:
        """60 s gives 20 < 50 < 55 < 60. Ten seconds at most go to what is around the command: starting it through
        ssh, and ending it."""
        around = min(10.0, 0.6 * self.timeout)
        command = self.timeout - around
        return Limits(case=0.4 * command, command=command, grace=self.grace or around / 2, remote=self.timeout)


# key of the file -> what it must be
_KEYS = {
    "host": "text", "container": "text", "engine": "words", "path": "text", "container_path": "text", "python": "text",
    "host_python": "text", "gpus": "gpus", "env": "table", "timeout": "seconds", "grace": "seconds", "detach_timeout": "seconds",
    "build_timeout": "seconds or 0", "silence": "seconds", "lock_dir": "text", "ssh": "words", "rsync": "words",
}  # fmt: skip


def _value(kind: str, raw: Any, where: str) -> Any:
    if kind == "gpus":
        return parse_gpus(raw, where)
    if kind == "table":
        if not isinstance(raw, Mapping):
            raise UsageError(f"{where} must be a table of NAME = \"value\"", rule="remote-target")
        return {check_env_name(str(k), where): str(v) for k, v in raw.items()}
    if kind.startswith("seconds"):
        try:
            seconds = float("nan") if isinstance(raw, bool) else float(raw)
        except (TypeError, ValueError):
            seconds = float("nan")
        if not (seconds > 0 or seconds == 0 and kind == "seconds or 0") or math.isinf(seconds):
            raise UsageError(f"{where}: {raw!r} is not a positive, finite number of seconds{' (or 0)' * (kind != 'seconds')}", rule="remote-target")
        return seconds
    if not isinstance(raw, str) or not raw.strip() or "\0" in raw or "\n" in raw:
        raise UsageError(f"{where}: expected a line of text, got {raw!r}", rule="remote-target")
    if kind == "words":
        try:
            return tuple(shlex.split(raw))
        except ValueError as error:
            raise UsageError(f"{where}: {error} in {raw!r}", rule="remote-target") from None
    return raw


def check_env_name(name: str, where: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UsageError(f"{where}: {name!r} is no name of an environment variable", rule="remote-target")
    return name


def parse_gpus(raw: Any, where: str) -> str:
    """``all``, ``none``, an index, ``0,1``, or a list of indices."""
    text = ",".join(map(str, raw)) if isinstance(raw, (list, tuple)) else str(raw).replace(" ", "")
    if text in ("all", "none"):
        return text
    parts = text.split(",")
    if isinstance(raw, bool) or not all(part.isdigit() for part in parts) or len(set(parts)) < len(parts):
        raise UsageError(f"{where}: {raw!r} is not all, none, or different GPU indices such as 0,1", rule="remote-target")
    return ",".join(sorted(parts, key=int))


def _container(values: dict[str, Any], where: str) -> None:
    """``docker:NAME`` -> engine and name; an ``engine`` of its own (``sudo docker``) wins."""
    text = values.pop("container", "none")
    engine, colon, name = text.partition(":")
    if text == "none":
        values.update(container="", engine=())
        return
    if not colon:
        engine, name = "docker", text
    if engine not in ENGINES or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise UsageError(f"{_at(where, 'container')}: {text!r} is not docker:NAME, podman:NAME or none", rule="remote-target")
    values.update(container=name, engine=values.get("engine") or (engine,))


def parse_target(name: str, table: Any, origin: str) -> Target:
    """One checked target. UsageError names the file and the key."""
    from megamoe_cli.settings import nearest

    where = f"{origin}: remote.{name}" if name else origin
    if not isinstance(table, Mapping):
        raise UsageError(f"{where} must be a table", rule="remote-target")
    values: dict[str, Any] = {}
    for raw_key, raw in table.items():
        key = str(raw_key).replace("-", "_")
        if key not in _KEYS:
            raise UsageError(f"{where}: unknown key {raw_key!r}{nearest(key, _KEYS)}", rule="remote-target")
        values[key] = _value(_KEYS[key], raw, f"{where}.{key}")
    return make_target(name, values, where)


def _at(where: str, key: str) -> str:
    """``FILE: remote.box.host``, or the flag."""
    return f"--{key.replace('_', '-')}" if where.startswith("--") else f"{where}.{key}"


def make_target(name: str, values: dict[str, Any], where: str) -> Target:
    if "host" not in values:
        raise UsageError(f"{where}: host is missing", rule="remote-target")
    if values["host"].startswith("-") or re.search(r"\s", values["host"]):
        raise UsageError(f"{_at(where, 'host')}: {values['host']!r} is no host name", rule="remote-target")
    _container(values, where)
    target = Target(name=name, **values)
    path = target.path[2:] if target.path.startswith("~/") else target.path  # relative to the home folder, for ssh and rsync
    path = path.rstrip("/").removeprefix("./") or "/"
    if path in ("/", "~", ".", "..") or ".." in path.split("/"):
        raise UsageError(f"{_at(where, 'path')}: {target.path!r} must be a folder of its own", rule="remote-target")
    if path.startswith("~"):
        raise UsageError(f"{_at(where, 'path')}: {target.path!r}: only ~/ is understood; write the other user's folder out", rule="remote-target")
    target = replace(target, path=path if path.startswith("/") else f"./{path}")  # a name may begin with a dash
    if target.container and not target.inside.startswith("/"):
        raise UsageError(f"{where}: with a container, path (or container_path) must be absolute", rule="remote-target")
    if target.timeout < MIN_TIMEOUT_S:
        raise UsageError(f"{_at(where, 'timeout')}: {target.timeout:g} s leaves no room for the limits inside it (at least "
                         f"{MIN_TIMEOUT_S:g})", rule="remote-target")
    limits = target.limits()
    if limits.command + limits.grace >= limits.remote:
        raise UsageError(f"{_at(where, 'grace')}: {target.grace:g} s do not fit between the {limits.command:g} s of the command and the {limits.remote:g} "
                         "s of timeout", rule="remote-target")
    return target


def check_tables(remote: Any, origin: str) -> tuple[dict[str, Target], str]:
    """The ``remote`` table of a settings file: its targets, and the name of the default one (or empty)."""
    if not isinstance(remote, Mapping):
        raise UsageError(f"{origin}: remote must be a table of targets", rule="remote-target")
    default = remote.get("default", "")
    targets = {str(name): parse_target(str(name), table, origin) for name, table in remote.items() if name != "default"}
    if not isinstance(default, str):
        raise UsageError(f"{origin}: remote.default must be the name of a target", rule="remote-target")
    return targets, default


def pick(targets: Mapping[str, Target], name: str | None, default: str, **given: Any) -> Target:
    """The target asked for, with ``given`` (raw text of flags; None: not given) on top.

    ``name``: from --on; ``default``: the configured one. Without any, the only target there is.
    """
    from megamoe_cli.settings import nearest

    wanted = name or ("" if given.get("host") else default)
    if wanted and wanted not in targets:
        raise UsageError(f"no remote target {wanted!r}{nearest(wanted, targets)}",
                         hint=f"targets: {', '.join(targets)}" if targets else "see docs/remote.md", rule="remote-target")
    if not wanted and not given.get("host"):
        if len(targets) != 1:
            raise UsageError("which machine? " + (f"--on one of {', '.join(targets)}" if targets else "no remote target is configured"),
                             hint=None if targets else "pass --host HOST, or add [tool.megamoe.remote.NAME] (docs/remote.md)",
                             rule="remote-target")
        wanted = next(iter(targets))
    values: dict[str, Any] = {}
    if wanted:
        base = targets[wanted]
        values = {f.name: getattr(base, f.name) for f in fields(Target) if f.name != "name"}
        values["container"] = f"{base.engine[0] if base.engine[0] in ENGINES else 'docker'}:{base.container}" if base.container else "none"
    for key, raw in given.items():
        if raw is not None and raw != {}:
            value = _value(_KEYS[key], raw, f"--{key.replace('_', '-')}")
            if key == "container":
                values.pop("engine", None)
            values[key] = {**values.get(key, {}), **value} if key == "env" else value
    return make_target(wanted, values, f"remote target {wanted!r}" if wanted else "--host")
