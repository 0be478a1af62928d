"""Device memory and a stream through the CUDA driver itself, which every machine with an NVIDIA GPU has."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from optimize.errors import Refused

_NON_BLOCKING_STREAM = 1
#: Other threads may call the driver while this one records.
_RECORD_THIS_THREAD = 1


def load_driver() -> Any:
    """Return the CUDA driver library.

    Raises:
        OSError: There is none: no NVIDIA GPU, or no driver.
    """
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


class Device:
    """The first visible GPU: its primary context (the one TensorRT and torch use), one stream, some memory.

    Attributes:
        stream: Handle of the stream that copies and kernels are queued on.
    """

    def __init__(self) -> None:
        """Open the device.

        Raises:
            Refused: The driver reports an error.
        """
        self._addresses: set[int] = set()
        self._pinned: set[int] = set()
        self._driver = load_driver()
        self._call("cuInit", ctypes.c_uint(0))
        device, self._context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.enter()
        self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING_STREAM))
        self._stream = stream
        self.stream = int(stream.value or 0)

    def enter(self) -> None:
        """Make the device current on the calling thread."""
        self._call("cuCtxSetCurrent", self._context)

    def allocate(self, size_bytes: int) -> int:
        """Return the address of new device memory.

        Raises:
            Refused: The GPU has no memory left.
        """
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
        self._addresses.add(address.value)
        return address.value

    def free(self, address: int) -> None:
        """Give device memory back."""
        self._addresses.discard(address)
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def pinned(self, size_bytes: int) -> np.ndarray:
        """Return host memory of so many bytes that the GPU copies from and to by itself, without a staging copy.

        Raises:
            Refused: The system has no memory left that may be locked.
        """
        address = ctypes.c_void_p()
        self._call("cuMemAllocHost_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
        located = int(address.value or 0)
        self._pinned.add(located)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(located))

    def release(self, memory: np.ndarray) -> None:
        """Give memory from ``pinned`` back; nobody may read it any more."""
        address = memory.ctypes.data
        self._pinned.discard(address)
        self._call("cuMemFreeHost", ctypes.c_void_p(address))

    def copy_in(self, address: int, array: np.ndarray) -> None:
        """Queue a copy of a contiguous array to the device; the array must live until ``synchronize``."""
        source, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
        self._call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), source, size, self._stream)

    def copy_out(self, array: np.ndarray, address: int) -> None:
        """Queue a copy from the device into a contiguous array; it is filled after ``synchronize``."""
        target, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
        self._call("cuMemcpyDtoHAsync_v2", target, ctypes.c_uint64(address), size, self._stream)

    def record(self, queue: Callable[[], None]) -> int:
        """Record what ``queue`` puts on the stream instead of doing it; return a graph for ``replay``.

        Raises:
            Refused: Something it queues cannot be recorded.
        """
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamBeginCapture_v2", self._stream, ctypes.c_int(_RECORD_THIS_THREAD))
        try:
            queue()
        finally:
            self._call("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        self._call("cuGraphDestroy", graph)
        return int(executable.value or 0)

    def replay(self, recorded: int) -> None:
        """Queue everything that was recorded, in one call."""
        self._call("cuGraphLaunch", ctypes.c_void_p(recorded), self._stream)

    def forget(self, recorded: int) -> None:
        """Give back what a recorded graph holds."""
        self._call("cuGraphExecDestroy", ctypes.c_void_p(recorded))

    def synchronize(self) -> None:
        """Wait until everything queued is done.

        Raises:
            Refused: A kernel failed.
        """
        self._call("cuStreamSynchronize", self._stream)

    def __del__(self) -> None:
        for address in self._addresses:  # at interpreter exit the driver may be gone; its answer does not matter
            self._driver.cuMemFree_v2(ctypes.c_uint64(address))
        for address in self._pinned:
            self._driver.cuMemFreeHost(ctypes.c_void_p(address))

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._driver, function)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(text))
            reason = (text.value or b"unknown error").decode()
            raise Refused(f"The CUDA driver failed in {function}: {reason} (code {code}).")
