"""Remote targets: what a settings file may say, how limits nest, how command lines are quoted. No ssh here."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megamoe_cli.errors import UsageError
from megamoe_cli.remote import commands
from megamoe_cli.remote.passthrough import without
from megamoe_cli.remote.targets import Target, check_tables, parse_target, pick
from megamoe_cli.remote.transport import Step, explain_rsync, explain_ssh
from megamoe_cli.settings import Settings

BOX = {"host": "box", "container": "podman:dev", "path": "/srv/megamoe", "gpus": [3, 0], "env": {"A": 1}, "timeout": 60}


def test_a_target() -> None:
    target = parse_target("box", BOX, "file")
    assert (target.engine, target.container, target.gpus, target.env) == (("podman",), "dev", "0,3", {"A": "1"})
    assert parse_target("", {"host": "h", "path": "~/x/"}, "f").path == "./x"
    dashed = parse_target("", {"host": "h", "path": "-x"}, "f")
    assert dashed.path == "./-x" == parse_target("", {"host": "h", "path": dashed.path}, "f").path, "no option of whoever gets it"
    assert parse_target("", {**BOX, "engine": "sudo docker"}, "f").engine == ("sudo", "docker")
    assert parse_target("", {**BOX, "container": "none"}, "f").engine == ()


@pytest.mark.parametrize("change, words", [
    ({"host": "-oProxyCommand=x"}, "is no host name"), ({"host": "a b"}, "is no host name"), ({"hots": "x"}, "did you mean 'host'"),
    ({"container": "lxc:a"}, "docker:NAME"), ({"container": "docker:a b"}, "docker:NAME"), ({"path": "/"}, "a folder of its own"),
    ({"path": "../x"}, "a folder of its own"), ({"path": "~eve/x", "container": "none"}, "only ~/"), ({"path": "./"}, "a folder of its own"),
    ({"grace": 11}, "do not fit between"), ({"grace": 0}, "positive"), ({"path": "relative"}, "must be absolute"), ({"gpus": "0,0"}, "different GPU"),
    ({"gpus": True}, "different GPU"), ({"timeout": 0}, "positive"), ({"timeout": 3}, "leaves no room"), ({"timeout": True}, "positive"),
    ({"env": {"A B": 1}}, "no name of an environment variable"), ({"env": 3}, "table"), ({"python": ""}, "line of text"), ({"ssh": "'"}, "quot"),
])  # fmt: skip
def test_what_a_target_may_not_say(change: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        parse_target("box", {**BOX, **change}, "here.toml")
    assert "here.toml" in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("timeout", [5, 10, 17, 60, 600])
def test_limits_nest(timeout: float) -> None:
    limits = Target(host="h", timeout=timeout).limits()
    assert 0 < limits.case < limits.command < limits.command + limits.grace < limits.remote == timeout
    sixty = Target(host="h").limits()
    assert (sixty.case, sixty.command, sixty.grace) == (20, 50, 5)
    assert Target(host="h", grace=2).limits().grace == 2


def test_which_target() -> None:
    targets, default = check_tables({"default": "b", "a": {"host": "ha"}, "b": {"host": "hb", "env": {"X": "1"}}}, "f")
    assert pick(targets, None, default).host == "hb" and pick(targets, "a", default).host == "ha"
    over = pick(targets, None, default, container="docker:c", path="/p", env={"Y": "2"}, timeout="90", gpus=None)
    assert (over.container, over.path, over.env, over.timeout) == ("c", "/p", {"X": "1", "Y": "2"}, 90.0)
    assert pick(targets, None, default, host="other").env == {}, "another host is not the default target"
    assert pick({"a": targets["a"]}, None, "").host == "ha"
    for arguments, words in (((targets, None, ""), "which machine"), (({}, None, ""), "no remote target"), ((targets, "c", ""), "no remote target 'c'")):
        with pytest.raises(UsageError, match=words):
            pick(*arguments)


def test_settings_files(tmp_path: Path) -> None:
    pytest.importorskip("tomllib" if __import__("sys").version_info >= (3, 11) else "tomli")
    path = tmp_path / "c.toml"
    path.write_text('ranks = 2\n[remote]\ndefault = "box"\n[remote.box]\nhost = "h"\n')
    loaded = Settings.load(path, environ={})
    assert loaded.remotes["box"].host == "h" and loaded.default_remote == "box" and loaded.get("ranks") == "2"
    assert Settings.load(path, environ={"MEGAMOE_REMOTE": "other"}).default_remote == "other"
    path.write_text("[remote.box]\nhots = 3\n")
    with pytest.raises(UsageError, match="c.toml: remote.box: unknown key"):
        Settings.load(path, environ={})


def test_quoting() -> None:
    target = parse_target("", {"host": "h", "ssh": "ssh -F \"it's here\"", "path": "/a b"}, "f")
    line = commands.ssh(target, ["echo", "it's", "$HOME"])
    assert line[:3] == ["ssh", "-F", "it's here"] and line[-2:] == ["h", "echo 'it'\"'\"'s' '$HOME'"]
    assert commands.rsync_shell(target).startswith("ssh -F 'it''s here' ")
    command, _ = commands.sync(target)
    assert "-s" in command and command[-1] == f"h:/a b/{commands.client_name()}/tree/" and "--delete" in command


def test_the_job_runs_under_lock_container_agent_and_limit() -> None:
    target = parse_target("box", BOX, "f")
    words = shlex.split(commands.job(target, "j", ["python3", "-m", "megamoe_cli", "test"], {"K": "v w"}, what="w")[-1])
    order = [words.index(word) for word in ("--gpus=0,3", "podman", "--limit=50", "timeout", "megamoe_cli")]
    assert order == sorted(order)
    assert words[words.index("timeout"):] == ["timeout", "--foreground", "-k", "5", "50", "python3", "-m", "megamoe_cli", "test"]
    assert "--env=K=v w" in words


def test_local_options_stay_here() -> None:
    args = ["--ranks", "8", "--junit", "x.xml", "--results-dir=r", "-k", "a b", "--junitx"]
    assert without(args, ("--junit", "--results-dir")) == ["--ranks", "8", "-k", "a b", "--junitx"]


@pytest.mark.parametrize("stderr, words", [
    ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @", "host key"), ("me@h: Permission denied (publickey).", "refuses the login"),
    ("ssh: Could not resolve hostname h", "no host h"), ("ssh: connect to host h port 22: Connection refused", "cannot be reached"),
    ("client_loop: send disconnect: Broken pipe", "connection broke: client_loop"), ("", "connection broke"),
])  # fmt: skip
def test_what_ssh_means(stderr: str, words: str) -> None:
    error = explain_ssh(Target(host="h"), stderr)
    assert words in str(error) and error.exit_code == 3


@pytest.mark.parametrize("code, stderr, words", [
    (11, "", "cannot be written"), (2, "protocol version mismatch -- is your shell clean?", "login shell"), (11, 'rsync: [receiver] write failed on "x": Kein Platz mehr (28)', "disk is full"), (127, "sh: rsync: command not found", "not installed"),
    (12, "rsync: connection unexpectedly closed", "connection broke"), (255, "Permission denied", "refuses"), (23, "strange (5)", "rsync failed with 23"),
])  # fmt: skip
def test_what_rsync_means(code: int, stderr: str, words: str) -> None:
    error = explain_rsync(Target(host="h"), Step("sync", [], exit_code=code, stderr=stderr))
    assert words in str(error) and error.exit_code == 3


def test_a_disk_that_was_found_full() -> None:
    assert "h: the disk is full" in str(explain_rsync(Target(host="h"), Step("sync", [], exit_code=11), disk_full=True))
