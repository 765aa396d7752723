"""A real sshd on a loopback port, all of it in one folder: the far side of the remote tests.

It has a host key, a user key and configuration files of its own; nothing of the person who runs the tests is read.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

SBIN = ("/usr/sbin", "/usr/local/sbin", "/sbin")


def find_sshd() -> str | None:
    return shutil.which("sshd") or shutil.which("sshd", path=os.pathsep.join(SBIN))


def missing() -> str | None:
    """Why there can be no box here, or None."""
    for program, found in (("sshd", find_sshd()), ("ssh", shutil.which("ssh")), ("ssh-keygen", shutil.which("ssh-keygen")),
                           ("rsync", shutil.which("rsync"))):
        if not found:
            return f"{program} is not installed: .ci/setup tools installs openssh-server and rsync"
    return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


@dataclass
class Box:
    """``folder``: keys and configuration; ``ssh``: the ssh command line that reaches it as host ``box``."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    file_size_limit: int | None = None
    gpus: int = 8  # that it seems to have
    port: int = 0
    socket: Path | None = None
    process: subprocess.Popen | None = None

    @property
    def ssh(self) -> str:
        return f"ssh -F {self.folder}/config"

    @property
    def shared_ssh(self) -> str:
        """As people set it up who are tired of waiting: one connection for all commands."""
        self.socket = self.socket or Path(tempfile.mkdtemp(prefix="mm-"))  # a socket's path has to be short
        return f"{self.ssh} -o ControlMaster=auto -o ControlPath={self.socket}/m -o ControlPersist=60"

    def set_up(self) -> Box:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.new_host_key()
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / "user_key"))
        shutil.copyfile(self.folder / "user_key.pub", self.folder / "authorized_keys")
        os.chmod(self.folder / "authorized_keys", 0o600)
        (self.folder / "config").write_text(
            f"Host box\n  HostName 127.0.0.1\n  Port {self.port}\n  User {getpass.getuser()}\n  IdentityFile {self.folder}/user_key\n"
            f"  IdentitiesOnly yes\n  IdentityAgent none\n  UserKnownHostsFile {self.folder}/known_hosts\n  GlobalKnownHostsFile none\n"
            "  StrictHostKeyChecking yes\n  HostKeyAlias box\n  KexAlgorithms curve25519-sha256\n")
        self.trust()
        return self

    def new_host_key(self) -> None:
        for path in self.folder.glob("host_key*"):
            path.unlink()
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / "host_key"))

    def trust(self) -> None:
        """What the user did at the first login."""
        (self.folder / "known_hosts").write_text("box " + (self.folder / "host_key.pub").read_text())

    def start(self) -> Box:
        # SHLVL: bash then does not take itself for a remote login and reads no .bashrc of the person who runs the tests
        sets = [f'{name}="{value}"' for name, value in {"SHLVL": "2", "MEGAMOE_DEVICES": str(self.folder / "dev"), **self.environment}.items()]
        (self.folder / "dev").mkdir(exist_ok=True)
        for index in range(self.gpus):
            (self.folder / "dev" / f"nvidia{index}").touch()
        (self.folder / "sshd_config").write_text(
            f"ListenAddress 127.0.0.1:{self.port}\nHostKey {self.folder}/host_key\nPidFile none\n"
            f"AuthorizedKeysFile {self.folder}/authorized_keys\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
            f"UsePAM no\nStrictModes no\nPermitRootLogin yes\nMaxStartups 100\nPrintMotd no\nLogLevel ERROR\n"
            f"SetEnv {' '.join(sets)}\n")
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd, as root, refuses to start without it
        command = [find_sshd() or "sshd", "-D", "-e", "-f", str(self.folder / "sshd_config")]
        if self.file_size_limit is not None:
            # in KiB blocks; SIGXFSZ ignored turns the signal into the error a full disk gives
            command = ["bash", "-c", f"trap '' XFSZ; ulimit -f {self.file_size_limit}; exec \"$@\"", "sh", *command]
        log = open(self.folder / "sshd.log", "ab")
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        log.close()
        until = time.monotonic() + 10
        while time.monotonic() < until:
            if self.process.poll() is not None:
                break
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return self
            except OSError:
                time.sleep(0.05)
        raise RuntimeError(f"sshd does not start: {(self.folder / 'sshd.log').read_text()}")

    def sessions(self) -> list[int]:
        """The processes that serve connections: sshd's children and theirs that are sshd too."""
        assert self.process is not None
        found, todo = [], [self.process.pid]
        while todo:
            parent = todo.pop()
            for entry in filter(str.isdigit, os.listdir("/proc")):
                try:
                    fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                    name = Path("/proc", entry, "comm").read_text().strip()
                except OSError:
                    continue
                if int(fields[1]) == parent and name.startswith("sshd"):
                    found.append(int(entry))
                    todo.append(int(entry))
        return found

    def drop_connections(self) -> None:
        """As if the network went: whoever serves a connection dies without a word."""
        for pid in self.sessions():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def stop(self) -> None:
        if self.socket is not None:
            subprocess.run([*self.shared_ssh.split(), "-O", "exit", "box"], capture_output=True, timeout=30)
            shutil.rmtree(self.socket, ignore_errors=True)
            self.socket = None
        if self.process is not None:
            self.drop_connections()
            self.process.kill()
            self.process.wait(10)
            self.process = None
