"""What this machine can do, measured: the fastest matrix product of each type, copy bandwidth, the cost of a call.

A peak is the best of several runs: whatever else runs on the machine only slows a run down.

What bounds a kernel is told by the roofline model with these roofs. A kernel that does ``m`` multiply-accumulates and
moves ``b`` bytes can reach at most

    attainable(m / b) = min(peak MACs a second of its type, (m / b) * copy bandwidth)

Left of the ridge (``peak / bandwidth``) memory bounds it, right of it arithmetic. A kernel above the slanted roof finds
its data in the caches, whose bandwidth is higher than the memory's.

Source: S. Williams, A. Waterman, D. Patterson, "Roofline: An Insightful Visual Performance Model for Multicore
Architectures", CACM 2009.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

#: Large enough that the product is bound by arithmetic, small enough for the caches and to fit between interruptions.
_SIZE = 512
#: Larger than any last-level cache, so that copies go to memory.
_COPY_BYTES = 128 * 2**20
_RUNS, _LEAST_S = 5, 0.2
_CALLS = 500


@dataclass(frozen=True)
class MachineLimits:
    """Measured limits of this machine at a thread count.

    Attributes:
        threads: Threads they were measured with.
        macs_per_s: Multiply-accumulates a second of the fastest matrix product by type: ``float32``, ``bfloat16``,
            ``int8`` (without a type torch has no kernel for here).
        copy_bytes_per_s: Bytes read and written a second by a copy that does not fit into the caches.
        call_s: Seconds of the smallest operator called from Python: what every operator costs at least in eager.
    """

    threads: int
    macs_per_s: Mapping[str, float]
    copy_bytes_per_s: float
    call_s: float

    def least_s(self, macs: int, moved_bytes: int, dtype: str = "float32") -> float:
        """Return the roofline's time: that of the arithmetic or of the traffic, whichever is longer.

        >>> MachineLimits(1, {"float32": 50e9}, 10e9, 1e-6).least_s(macs=50_000_000, moved_bytes=20_000_000)
        0.002
        """
        return max(macs / self.peak(dtype), moved_bytes / self.copy_bytes_per_s)

    def peak(self, dtype: str) -> float:
        """Return the MACs a second of a type, those of ``float32`` where none were measured for it."""
        return self.macs_per_s.get(dtype, self.macs_per_s["float32"])

    def attainable(self, intensity: float, dtype: str) -> float:
        """Return the MACs a second that a kernel of this intensity (MACs a byte) can reach."""
        return min(self.peak(dtype), intensity * self.copy_bytes_per_s)

    def ridge(self, dtype: str) -> float:
        """Return the intensity (MACs a byte) from which arithmetic is the bound."""
        return self.peak(dtype) / self.copy_bytes_per_s

    def bound(self, intensity: float, dtype: str) -> str:
        """Return what bounds a kernel: ``memory`` or ``compute``.

        >>> MachineLimits(1, {"float32": 50e9}, 10e9, 1e-6).bound(intensity=2.0, dtype="float32")
        'memory'
        """
        return "memory" if intensity < self.ridge(dtype) else "compute"


def measure_limits(threads: int = 1) -> MachineLimits:
    """Measure this machine with so many threads; takes about two seconds."""
    with torch_threads(threads), torch.inference_mode():
        taken = {name: list(filter(None, map(_attempt, makers))) for name, makers in _PRODUCTS.items()}
        peaks = {name: _SIZE**3 / min(seconds) for name, seconds in taken.items() if seconds}
        return MachineLimits(threads, peaks, _copy_bandwidth(), _call_s())


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Run torch's operators with so many threads, and with as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _attempt(make: Callable[[], Callable[[], object]]) -> float | None:
    """Return the best time of a product; None where torch has no kernel for it on this machine."""
    try:
        return _best(make())
    except (RuntimeError, NotImplementedError):
        return None


def _best(run: Callable[[], object]) -> float:
    run()
    samples: list[float] = []
    while len(samples) < _RUNS or sum(samples) < _LEAST_S:
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return min(samples)


def _float_product(dtype: torch.dtype) -> Callable[[], object]:
    first, second = (torch.randn(_SIZE, _SIZE).to(dtype) for _ in range(2))
    return lambda: first @ second


def _packed_product(dtype: torch.dtype) -> Callable[[], object]:
    """Return oneDNN's product with a packed weight, which convolutions use and plain products may not."""
    first, second = (torch.randn(_SIZE, _SIZE).to(dtype) for _ in range(2))
    packed = torch.ops.mkldnn._reorder_linear_weight(second, _SIZE)
    return lambda: torch.ops.mkldnn._linear_pointwise(first, packed, None, "none", [], "")


def _integer_product() -> Callable[[], object]:
    first, second = (torch.randint(-128, 128, (_SIZE, _SIZE), dtype=torch.int8) for _ in range(2))
    return lambda: torch._int_mm(first, second)


_PRODUCTS: dict[str, tuple[Callable[[], Callable[[], object]], ...]] = {
    "float32": (lambda: _float_product(torch.float32), lambda: _packed_product(torch.float32)),
    "bfloat16": (lambda: _float_product(torch.bfloat16), lambda: _packed_product(torch.bfloat16)),
    "int8": (_integer_product,),
}


def _copy_bandwidth() -> float:
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    goal = torch.empty_like(source)
    return 2 * _COPY_BYTES / _best(lambda: goal.copy_(source))


def _call_s() -> float:
    one, relu = torch.ones(1), torch.relu

    def calls() -> None:
        for _ in range(_CALLS):
            relu(one)

    return _best(calls) / _CALLS
