"""Running a torch module on NumPy arrays."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch

from optimize.distances import output_error
from optimize.errors import Refused
from optimize.targets.arrays import to_array, to_tensor
from optimize.targets.base import Artifact, Runner
from optimize.targets.packaging import of_chance

#: How far a module may be from itself where it is asked in another mode, of its largest answer.
_APART = 1e-2


class TorchRunner(Runner):
    """Runs a loaded module in this process, without gradients; copies to and from its device belong to a run.

    ``asks_mode`` is whether the module asks if gradients are recorded: it could answer in one way while it is measured.

    Its ``providers`` are the GPU it runs on, of a CPU nothing is said; its ``notes`` say by what it draws numbers or
    keeps a state.

    Args:
        artifact: What was loaded.
        module: Takes flat tensors; returns a tensor or a flat tuple of them.
        threads: Threads of torch's operators, for the whole process; None leaves them as they are.
        device: Where the module lies, ``cpu`` or ``cuda``.
    """

    shared = True

    def __init__(
        self, artifact: Artifact, module: Callable[..., Any], threads: int | None = None, device: str = "cpu"
    ) -> None:
        super().__init__(artifact)
        self.module, self.device = module, torch.device(device)
        self.watch((), (), is_stateful=False)
        self.asks_mode = False
        if device == "cuda":
            self.providers = (f"cuda ({torch.cuda.get_device_name(self.device)})",)
        if threads is not None:
            torch.set_num_threads(threads)

    def watch(self, by: Collection[str], tensors: Sequence[torch.Tensor], is_stateful: bool) -> None:
        """Note by what the module keeps a state, the tensors it may write into, and whether it does so elsewhere."""
        self.notes, self._is_stateful = of_chance(by), is_stateful
        self._watched = [*tensors]
        self._before = self._kept()

    def is_changed(self) -> bool:
        """Say whether the module is another one since it was loaded; it is read where it may write."""
        return self._is_stateful or self._kept() != self._before

    def _kept(self) -> bytes:
        """Return a digest of what may be written into: whole storages, beyond what a view shows, scales and flags."""
        if not self._watched:
            return b""
        torch.save(self._watched, buffer := io.BytesIO())
        return hashlib.sha256(buffer.getbuffer()).digest()

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run on flat arrays; return flat arrays."""
        with torch.inference_mode():
            result = self.module(*self._tensors(inputs))
        return [to_array(output) for output in _flat(result)]

    def answer(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run on flat arrays, of a module that asks whether gradients are recorded also where they are, and not.

        Raises:
            Refused: It answers otherwise there.
        """
        found = self.run(inputs)
        for recorded in (True, False) if self.asks_mode else ():
            with torch.set_grad_enabled(recorded):
                others = [output.detach() for output in _flat(self.module(*self._tensors(inputs)))]
            for want, got in zip(map(to_tensor, found), others, strict=True):
                error, scale = output_error(want, got.cpu())
                if error > _APART * scale:
                    raise Refused(f"It answers otherwise where gradients {'are' if recorded else 'are not'} recorded.")
        return found

    def device_seconds(self, inputs: Sequence[np.ndarray], runs: int) -> list[float]:
        """Return the seconds between events on the GPU around each run, inputs already there; one wait at the end.

        A CPU has no events: nothing is returned.
        """
        if self.device.type != "cuda":
            return []
        with torch.inference_mode():
            tensors = self._tensors(inputs)
            events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
            for start, end in events:
                start.record()
                self.module(*tensors)
                end.record()
            torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) / 1e3 for start, end in events]

    def _tensors(self, inputs: Sequence[np.ndarray]) -> list[torch.Tensor]:
        return [to_tensor(array).to(self.device) for array in inputs]


def _flat(result: Any) -> Sequence[torch.Tensor]:
    """Return the outputs of a module, also where it has one."""
    return (result,) if isinstance(result, torch.Tensor) else result
