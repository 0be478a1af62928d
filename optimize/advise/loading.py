"""Getting data to the network in time: workers, prefetch and pinned memory of a ``torch.utils.data.DataLoader``."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np

from optimize.advise.base import Finding, Setting, rule
from optimize.advise.structure import runner
from optimize.advise.trials import Measured, summarize

_BATCHES = 8
_MOST_WORKERS = 4
_ROUNDS = 3
_USUAL_PREFETCH = 2


@rule("data loader workers", "setting")
def find_loader_without_workers(setting: Setting) -> Finding | None:
    """Data loaded by the process that computes: each waits for the other.

    With ``L`` seconds to load a batch and ``M`` to compute it, a run takes ``L + M`` in one process and
    ``max(L / workers, M)`` with workers.
    """
    if setting.loader is None or setting.loader.num_workers:
        return None
    load_s, run_s = _seconds_a_batch(setting.loader), _run_s(setting)
    workers = _workers(setting)
    return Finding(
        what=f"The loader reads in the computing process: {1e3 * load_s:.2f} ms a batch beside "
        f"{1e3 * run_s:.2f} ms of computing.",
        places=(),
        saved_s=max(load_s + run_s - max(load_s / workers, run_s), 0.0),
        formula="L + M - max(L / workers, M) a batch, both measured",
        action=f"DataLoader(..., num_workers={workers}, persistent_workers=True).",
    )


@find_loader_without_workers.remedy
def try_workers(setting: Setting) -> Measured | None:
    """Time passes over the first batches with and without workers; starting them is left out."""
    workers = _workers(setting)
    loaders = [setting.loader, _with_workers(setting.loader, workers)]
    rounds = []
    for _ in range(_ROUNDS):
        rounds.append([_seconds_a_batch(loader) for loader in loaders])
    return summarize(np.array(rounds), f"a batch of the loader, 0 against {workers} workers")


@rule("prefetch", "setting", untried="shows over whole epochs")
def find_short_prefetch(setting: Setting) -> Finding | None:
    """Workers that hold too few batches ready, or that start anew for every epoch."""
    loader = setting.loader
    if loader is None or not loader.num_workers:
        return None
    few = (loader.prefetch_factor or 0) < _USUAL_PREFETCH
    if loader.persistent_workers and not few:
        return None
    wrong = [
        *(["end with every epoch"] if not loader.persistent_workers else []),
        *(["hold one batch ready"] * few),
    ]
    return Finding(
        what=f"The loader's {loader.num_workers} workers {' and '.join(wrong)}.",
        places=(),
        saved_s=None,
        formula="none: the start of the workers once an epoch, and waits when batches take unequally long",
        action="DataLoader(..., persistent_workers=True, prefetch_factor=2 or more).",
    )


@rule("pinned memory", "setting", untried="shows only while a GPU computes")
def find_pageable_batches(setting: Setting) -> Finding | None:
    """Batches in pageable memory are copied twice on their way to the GPU, and the copy is waited for."""
    if setting.loader is None or not setting.host.cuda or setting.loader.pin_memory:
        return None
    moved = sum(tensor.nbytes for tensor in setting.inputs(setting.program))
    return Finding(
        what=f"The loader gives batches in pageable memory, {moved} bytes a run.",
        places=(),
        saved_s=moved / setting.limits.copy_bytes_per_s,
        formula="bytes of a batch / copy bandwidth: the copy into the driver's own pinned memory",
        action="DataLoader(..., pin_memory=True) and tensor.to(device, non_blocking=True).",
    )


def _workers(setting: Setting) -> int:
    return max(1, min(setting.host.cores, _MOST_WORKERS))


def _with_workers(loader: Any, workers: int) -> Any:
    """Return a loader of the same data in the same batches, read by workers that stay."""
    from torch.utils.data import DataLoader

    batches = {"batch_sampler": loader.batch_sampler} if loader.batch_sampler else {"batch_size": loader.batch_size}
    return DataLoader(
        loader.dataset, collate_fn=loader.collate_fn, num_workers=workers, persistent_workers=True, **batches
    )


def _seconds_a_batch(loader: Any) -> float:
    """Return the mean seconds of the first batches after the first, which waits for workers to start."""
    batches = iter(loader)
    next(batches, None)
    start = time.perf_counter()
    count = sum(1 for _ in itertools.islice(batches, _BATCHES))
    return (time.perf_counter() - start) / max(count, 1)


def _run_s(setting: Setting) -> float:
    run = runner(setting, setting.program)
    run()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
