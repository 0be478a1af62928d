"""How a network is run: threads, cuDNN's search for the fastest kernels, and the first call."""

from __future__ import annotations

from optimize import graph, ops
from optimize.advise.base import Case, Finding, Rule, register_rule
from optimize.advise.structure import runner
from optimize.advise.trials import Measured, compare_runs
from optimize.profile.machine import torch_threads

#: A first call this many times as long as the later ones is worth a warm-up.
_SLOW_START = 3.0
#: Below this a run is over before other threads have begun.
_SHORT_S = 200e-6


@register_rule
class Threads(Rule):
    """Fewer threads than processors."""

    name = "threads"
    effort = "setting"

    def look(self, case: Case) -> Finding | None:
        """Find processors without a thread."""
        threads, cores = case.limits.threads, case.host.cores
        least_s = case.least_s(case.fused)
        if threads >= cores or least_s < _SHORT_S:
            return None
        return Finding(
            what=f"{threads} of {cores} processors compute.",
            places=(),
            saved_s=least_s * (1 - threads / cores),
            formula="roofline time * (1 - threads / processors): every operator perfectly parallel, which none is",
            action=f"torch.set_num_threads({cores}) for the latency of one request; for many requests at once rather "
            "one thread each.",
        )

    def attempt(self, case: Case) -> Measured | None:
        """Time the fused network with a thread a processor."""
        run = runner(case, case.fused)

        def with_threads(threads: int) -> None:
            with torch_threads(threads):
                run()

        threads, cores = case.limits.threads, case.host.cores
        what = f"the fused network in eager, {threads} against {cores} threads"
        return compare_runs(lambda: with_threads(threads), lambda: with_threads(cores), what)


@register_rule
class CudnnBenchmark(Rule):
    """cuDNN takes the first kernel that fits unless it is asked to find the fastest.

    The search costs up to seconds for every new shape, so it pays where shapes stay.
    """

    name = "cudnn.benchmark"
    effort = "setting"
    untried = "the search is part of the first call"

    def look(self, case: Case) -> Finding | None:
        """Find convolutions on a machine with CUDA, and a flag that is off."""
        import torch

        convolutions = [graph.origin(node) for node, _ in case.calls(*ops.CONVOLUTIONS)]
        if not (case.host.cuda and convolutions) or torch.backends.cudnn.benchmark:
            return None
        return Finding(
            what=f"{len(convolutions)} convolutions run with the first kernel that cuDNN finds.",
            places=tuple(convolutions),
            saved_s=None,
            formula="none: it depends on the kernels",
            action="torch.backends.cudnn.benchmark = True where input sizes stay the same; leave it off where they "
            "change, each new size is searched again.",
        )


@register_rule
class FirstCall(Rule):
    """The first call of a process allocates, compiles and chooses kernels, and takes many times as long."""

    name = "first call"
    effort = "setting"
    untried = "the figures above are measured; a warm-up moves them out of the first request"

    def look(self, case: Case) -> Finding | None:
        """Find a first call that takes longer than three later ones."""
        if case.startup is None or case.startup.first_call_s < _SLOW_START * case.steady_s:
            return None
        first_s, times = case.startup.first_call_s, case.startup.first_call_s / case.steady_s
        return Finding(
            what=f"The first call takes {1e3 * first_s:.1f} ms, {times:.0f} times a later one, after "
            f"{case.startup.load_s:.1f} s of loading.",
            places=(),
            saved_s=None,
            formula="none a run: it is paid once a process",
            action="Run once on an example of every input size before the first request, and keep the process.",
        )
