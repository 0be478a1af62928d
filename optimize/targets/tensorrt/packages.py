"""Which TensorRT is installed, which one to build with, and whether there is a GPU."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Any

from optimize.errors import TargetUnavailable
from optimize.targets.base import Availability
from optimize.targets.packaging import versions_of
from optimize.targets.tensorrt.driver import load_driver

NO_GPU = "no GPU"


@dataclass(frozen=True)
class Package:
    """One of the libraries that build engines.

    Attributes:
        title: Its name, for sentences.
        module: What Python imports.
        distribution: What pip installs, and the extra of this package that asks for it.
        tool: Its command-line builder.
        needs_gpu: Whether building times kernels on a GPU.
    """

    title: str
    module: str
    distribution: str
    tool: str
    needs_gpu: bool

    @property
    def install(self) -> str:
        """The command that installs it, however this package was installed.

        >>> TENSORRT_RTX.install
        'pip install tensorrt-rtx'
        """
        return f"pip install {self.distribution}"

    @property
    def installed(self) -> bool:
        """Whether Python finds its module; nothing is imported."""
        return importlib.util.find_spec(self.module) is not None

    @property
    def version(self) -> str:
        """The version pip knows, empty when it was installed otherwise."""
        return versions_of(self.distribution).get(self.distribution, "")

    def load(self) -> Any:
        """Return its module.

        Raises:
            TargetUnavailable: It cannot be imported.
        """
        try:
            return importlib.import_module(self.module)
        except (ImportError, OSError) as error:
            raise TargetUnavailable(f"{self.title} cannot be imported: {error}.", hint=self.install) from error


TENSORRT = Package("TensorRT", "tensorrt", "tensorrt", "trtexec", needs_gpu=True)
TENSORRT_RTX = Package("TensorRT-RTX", "tensorrt_rtx", "tensorrt-rtx", "tensorrt_rtx", needs_gpu=False)
#: Builds engines of TensorRT from the program's own operators; it has no tool of its own, trtexec runs what it makes.
TORCH_TENSORRT = Package("Torch-TensorRT", "torch_tensorrt", "torch-tensorrt", "trtexec", needs_gpu=True)
_PACKAGES = {package.distribution: package for package in (TENSORRT, TENSORRT_RTX, TORCH_TENSORRT)}


def asked(library: str = "auto") -> tuple[Package | None, str, str]:
    """Return the package to build with; None where none can here, with why and what to do about it.

    Args:
        library: Name of its distribution, or ``auto``: TensorRT where a GPU is, else TensorRT-RTX.
    """
    if library != "auto":
        package = _PACKAGES[library]
        if not package.installed:
            return None, f"{package.title} is not installed", package.install
        if package.needs_gpu and not has_gpu():
            return None, f"{package.title} builds engines on a GPU and there is none", "Leave library out"
        return package, "", ""
    if TENSORRT.installed and has_gpu():
        return TENSORRT, "", ""
    if TENSORRT_RTX.installed:
        return TENSORRT_RTX, "", ""
    reason = "neither TensorRT nor TensorRT-RTX is installed"
    if TENSORRT.installed:
        reason = "TensorRT builds engines on a GPU and there is none; TensorRT-RTX builds them without"
    return None, reason, (TENSORRT if has_gpu() else TENSORRT_RTX).install


def availability() -> Availability:
    """Say whether engines can be built and run here."""
    (package, reason, install), gpu = asked(), has_gpu()
    versions = {entry.distribution: entry.version for entry in (TENSORRT, TENSORRT_RTX) if entry.installed}
    if package is not None and not gpu:
        reason = NO_GPU
    return Availability(package is not None, gpu and package is not None, versions, reason, install)


@cache
def has_gpu() -> bool:
    """Say whether the NVIDIA driver is there and offers a GPU to this process."""
    try:
        driver = load_driver()
    except OSError:
        return False
    count = ctypes.c_int()
    started: bool = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return started and count.value > 0
