"""The user's secret, which nobody who packs a folder has."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from optimize import sealing


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The place of the secret of a user who has none yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    sealing._secret.cache_clear()
    yield tmp_path / "state" / "optimize" / "key"
    sealing._secret.cache_clear()


def sealed_later(text: str) -> str:
    """Return what another process of this user would make of a text."""
    sealing._secret.cache_clear()
    return sealing.seal(text)


def test_a_seal_is_one_of_a_text_and_a_user(key: Path) -> None:
    before = sealing.seal("text")
    assert sealed_later("text") == before and sealing.seal("another") != before
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and os.listdir(key.parent) == ["key"]
    key.unlink()
    assert sealed_later("text") != before


def _link(key: Path) -> None:
    key.rename(key.with_name("elsewhere"))
    key.symlink_to("elsewhere")


def _fifo(key: Path) -> None:
    key.unlink()
    os.mkfifo(key, 0o600)


@pytest.mark.parametrize(
    "change",
    [
        _link,
        _fifo,
        lambda key: key.chmod(0o640),
        lambda key: key.chmod(0o602),
        lambda key: key.write_bytes(b""),
        lambda key: key.write_bytes(bytes(33)),
        lambda key: (key.unlink(), key.mkdir(0o700)),
        lambda key: key.parent.chmod(0o777),
        lambda key: key.parent.chmod(0o720),
        lambda key: os.link(key, key.with_name("known")),
    ],
)
def test_what_others_may_know_is_no_secret(change: Callable[[Path], object], key: Path) -> None:
    sealing.seal("text")
    change(key)
    assert sealed_later("text") != sealing.seal("text")
    assert os.path.lexists(key)  # whose it is, it stays


def test_a_secret_of_another_user_is_none(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sealing.seal("text")
    monkeypatch.setattr(os, "geteuid", lambda: key.stat().st_uid + 1)
    assert sealed_later("text") != sealing.seal("text")


def test_in_the_home_of_another_user_none_is_made(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.stat("/proc/self").st_uid + 1)
    assert sealing.seal("text") != sealing.seal("text") and not key.parent.parent.exists()


def test_of_two_that_make_it_at_once_the_first_is_heeded(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def late(*names: str) -> None:
        key.write_bytes(bytes(32))
        key.chmod(0o600)
        link(*names)

    monkeypatch.setattr(os, "link", late)
    assert sealing._secret() == bytes(32) and os.listdir(key.parent) == ["key"]


@pytest.mark.parametrize("home", ["", ".", "/dev/null", "~", "missing"])
def test_without_a_home_of_his_own_a_user_has_none(
    home: str, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative name leads into the folder of whoever packed it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", str(tmp_path / home) if home == "missing" else home)
    assert sealing.seal("text") != sealing.seal("text")
    assert not os.listdir(tmp_path) and not Path("/.local").exists()


def test_a_file_system_without_links_has_none(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def linkless(*names: str) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", linkless)
    assert sealing.seal("text") != sealing.seal("text") and not os.listdir(key.parent)
