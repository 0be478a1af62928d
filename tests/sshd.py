"""A real sshd on a port of 127.0.0.1, with keys, configuration and temporary folder of its own."""

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

SSHD, SSH, KEYGEN = "/usr/sbin/sshd", shutil.which("ssh"), shutil.which("ssh-keygen")
NEEDS_SSHD = pytest.mark.skipif(
    not (os.path.exists(SSHD) and SSH and KEYGEN),
    reason="OpenSSH's server is not installed: apt install openssh-server",
)


@dataclass(frozen=True)
class Board:
    """What plays another machine: a port of this one, and a folder for everything that belongs to it."""

    folder: Path
    port: int

    @property
    def scratch(self) -> Path:
        """Its temporary folder."""
        return self.folder / "scratch"

    def url(self, python: str | Path = sys.executable) -> str:
        return f"ssh://{getpass.getuser()}@127.0.0.1:{self.port}{python}"

    @property
    def path(self) -> str:
        """``PATH`` with an ``ssh`` that goes by this board's configuration, as the user's own would be."""
        return f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"

    @property
    def folders(self) -> set[str]:
        """What lies in its temporary folder."""
        return set(os.listdir(self.scratch))

    def left(self, known: Set[str] = frozenset(), within_s: float = 30.0) -> set[str]:
        """What else lies there once it had time to clean up."""
        end = time.monotonic() + within_s
        while (found := self.folders - known) and time.monotonic() < end:
            time.sleep(0.1)
        return found


@contextmanager
def board(folder: Path) -> Iterator[Board]:
    """A server that runs as this user and takes one key."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = Board(folder, port)
    for name in ("scratch", "bin"):
        (folder / name).mkdir(mode=0o700)
    for name in ("host", "key", "stranger"):
        subprocess.run([KEYGEN, "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    shutil.copy(folder / "key.pub", folder / "authorized_keys")
    host = (folder / "host.pub").read_text()
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {host}")
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized_keys\n"
        f"StrictModes no\nUsePAM no\nPasswordAuthentication no\nPidFile none\n"
        f"SetEnv TMPDIR={found.scratch} HOME={folder}\n"  # there a shell finds no start-up files of this user's
    )
    configure(found)
    script = folder / "bin" / "ssh"
    script.write_text(f'#!/bin/sh\nexec {SSH} -F {folder}/ssh_config "$@"\n')
    script.chmod(0o700)
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where Debian's drops its rights
    with (folder / "sshd.log").open("wb") as log:
        server = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "sshd_config"], stderr=log)
        try:
            _wait(port, server)
            yield found
        finally:
            server.terminate()
            server.wait()


def python(found: Board, name: str, script: str) -> Path:
    """Writes a program that stands for a Python there."""
    path = found.folder / "bin" / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return path


def bare(folder: Path) -> Path:
    """Makes a Python that has nothing installed."""
    venv.create(folder / "bare", symlinks=True)
    return folder / "bare" / "bin" / "python"


def having(found: Board, folder: Path, *names: str) -> Path:
    """Makes a Python that has some packages of this one, and nothing else."""
    folder.mkdir(exist_ok=True)
    home = Path(np.__file__).parents[1]
    for entry in (
        path for name in names for path in (home / name, *home.glob(f"{name}.libs"), *home.glob(f"{name}-*"))
    ):
        (folder / entry.name).symlink_to(entry)
    return python(found, f"having-{folder.name}", f'PYTHONPATH="$PYTHONPATH:{folder}" exec {bare(folder)} "$@"')


def configure(found: Board, key: str = "key", known_hosts: str = "known_hosts") -> None:
    """Writes what the user's own configuration of ssh would say."""
    (found.folder / "ssh_config").write_text(
        f"Host *\n  IdentityFile {found.folder / key}\n  IdentitiesOnly yes\n  IdentityAgent none\n"
        f"  UserKnownHostsFile {found.folder / known_hosts}\n  GlobalKnownHostsFile none\n"
    )


def _wait(port: int, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end and server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError("sshd does not listen")
