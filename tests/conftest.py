"""Fixed seeds and one thread for every test; hypothesis draws the same examples in every run, however slow."""

import gc
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from optimize.cli import interrupt, keeper, main
from tests.preloaded import fork_children
from tests.sessions import run_files_here

Ended = subprocess.CompletedProcess[str]
ROOT = Path(__file__).parents[1]
#: Looking for examples in them would register targets that no other process has.
collect_ignore = ["contract/linear_target.py", "measure/arithmetic_target.py"]

#: Where tests are of processes: of their start, their memory, their walls and their end.
OF_PROCESSES = (
    "sandbox/",
    "cli/test_keeper.py", "cli/test_failures.py", "cli/test_on.py", "cli/test_outlets.py",
)  # fmt: skip

#: What takes half a minute is begun first: no process is left with it at the end.
LONG = (
    "tests/test_house.py::test_types", "tests/docs/test_pages.py", "tests/docs/test_site.py",
    "tests/contract/test_entry_points.py", "tests/targets/test_pt2.py", "tests/load/test_fuzz.py",
)  # fmt: skip

#: Inductor reads what the processor has; to try it out, it would compile a program an instruction set, in each process.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
#: Processes of pytest-xdist are told a width that no pipe has; commands obey it.
os.environ.pop("COLUMNS", None)

#: Searches for garbage that rare take a sixth of the time.
gc.set_threshold(50_000, 10, 10)

# Neither a deadline nor the health check that takes time: no test fails because the machine is slow.
settings.register_profile("fixed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fixed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the long ones first."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


def pytest_collection_finish() -> None:
    """Leaves what is imported by now out of every search for garbage."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Leaves what lives to the end out of pytest's last ten searches for garbage: a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield


@pytest.fixture(autouse=True, scope="module")
def _rights_are_kept() -> Iterator[None]:
    """Lets a command that is run in this process run in it alone: what confines itself stays so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper, "can_confine", lambda: False)
        yield


@pytest.fixture(autouse=True, scope="module")
def _torch_is_imported_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forks children that import torch from one that has it, but where tests are of the processes themselves."""
    with pytest.MonkeyPatch.context() as patch:
        if not str(request.path.relative_to(ROOT / "tests")).startswith(OF_PROCESSES):
            fork_children(patch)
        yield


@pytest.fixture(scope="module")
def files_run_here() -> Iterator[None]:
    """Runs files in this process, for tests that are not of processes: ``pytest.mark.usefixtures``."""
    with pytest.MonkeyPatch.context() as patch:
        run_files_here(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def _user_s_secret_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Gives this session, and all processes that it starts, a state of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


class _Unread(type):
    """A type of callables whose parameters nobody reads."""

    def __instancecheck__(cls, value: object) -> bool:
        return callable(value)

    def __getitem__(cls, parameters: object) -> "_Unread":
        return cls


@pytest.fixture(autouse=True, scope="session")
def _annotations_are_left() -> Iterator[None]:
    """Keeps torch from working out, ten thousand times a decomposition, the annotation of a function inside another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._ops, "Callable", _Unread("Callable", (), {}))
        yield


@pytest.fixture(scope="session")
def typed() -> Callable[..., Ended]:
    """Returns a function that runs the command as a user types it, in this process: without importing torch again."""

    def run(*words: object, cwd: Path = ROOT) -> Ended:
        code, texts = 0, [io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2)]
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(texts[0]), redirect_stderr(texts[1]):
            patch.chdir(cwd)
            patch.setattr(sys, "argv", ["optimize", *map(str, words)])
            for name in ("install", "ignore"):  # Ctrl-C stays that of pytest
                patch.setattr(interrupt, name, lambda: None)
            try:
                main()
            except SystemExit as stop:
                code = int(stop.code or 0)
        return subprocess.CompletedProcess(words, code, *(text.buffer.getvalue().decode() for text in texts))

    return run
