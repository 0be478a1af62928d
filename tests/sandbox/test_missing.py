"""What a system lacks to confine a process is told, and what does not depend on it holds."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from optimize.measure.fleet import Fleet
from optimize.measure.openers import Opening
from optimize.targets.base import Artifact, TensorSpec, file_digest


def script_file(path: Path) -> Artifact:
    torch.jit.script(nn.Sequential(nn.Linear(3, 2))).save(path)
    specs = (TensorSpec("x", ("batch", 3), "float32"),)
    return Artifact("torchscript", path, specs, (), "", file_digest(path), path.stat().st_size, "", untrusted=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_worker_without_walls_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of the walls that cannot be imported stand for a kernel that has none."""
    for name in ("landlock", "pyseccomp"):
        (tmp_path / f"{name}.py").write_text("raise OSError('this kernel has none')\n")
    artifact = script_file(tmp_path / "m.pt")
    with Fleet([artifact]) as fleet:
        walled = fleet.sessions[0]
        assert walled.failure is None and walled.outputs([np.ones((2, 3), np.float32)])[0].shape == (2, 2)
    monkeypatch.syspath_prepend(tmp_path)
    with Fleet([artifact]) as fleet:
        bare = fleet.sessions[0]
        assert bare.failure is None and len(bare.missing) == 2 and "this kernel has none" in bare.missing[0]


def test_files_that_a_user_names_are_untrusted_and_stay_so(tmp_path: Path) -> None:
    script_file(tmp_path / "m.pt")
    torch.save(nn.Sequential(nn.Linear(3, 2)), tmp_path / "whole.pt")
    for name in ("m.pt", "whole.pt"):
        assert Opening(tmp_path).open(str(tmp_path / name)).artifact.untrusted
        assert not Opening(tmp_path, trust=True).open(str(tmp_path / name)).artifact.untrusted
