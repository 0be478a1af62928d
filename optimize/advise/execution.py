"""How a network is run: operators one by one, threads, cuDNN's search for the fastest kernels, and the first call."""

from __future__ import annotations

from collections.abc import Container, Iterator

from torch import fx

from optimize import graph, ops
from optimize.advise.base import Finding, Measured, Setting, by_cost, compare_runs, rule
from optimize.profile.machine import torch_threads

#: A chain of so many operators is worth fusing.
_LONG = 2
#: A first call this many times as long as the later ones is worth a warm-up.
_SLOW_START = 3.0
#: Below this a run is over before other threads have begun.
_SHORT_S = 200e-6


@rule("element-wise chains", "exact", untried="optimize bench compares the runtimes")
def find_elementwise_chains(setting: Setting) -> Finding | None:
    """Element-wise operators one after another read and write the same map again and again in eager and TorchScript.

    A chain of ``n`` operators writes and reads ``n - 1`` maps more than one fused loop.
    """
    found = {graph.origin(chain[-1]): chain for chain in chains(setting)}
    if not found:
        return None
    written = {name: cost.written_bytes for name, cost in setting.costs.calls.items()}
    extra = {place: 2.0 * sum(written[node.name] for node in chain[:-1]) for place, chain in found.items()}
    calls = sum(len(chain) - 1 for chain in found.values())
    longest = max(found, key=lambda place: len(found[place]))
    names = ", ".join(map(graph.op_name, found[longest]))
    return Finding(
        what=f"{len(found)} chains of element-wise operators; the longest is {names} in '{longest}'.",
        places=by_cost(extra),
        saved_s=sum(extra.values()) / setting.limits.copy_bytes_per_s + calls * setting.limits.call_s,
        formula="2 * bytes of the values between / copy bandwidth + calls saved * cost of a call",
        action="Use a runtime that fuses them: --to onnx, openvino or pt2.",
    )


def chains(setting: Setting) -> Iterator[list[fx.Node]]:
    """Yield the longest runs of two and more element-wise calls in which each is the only reader of the one before."""
    inside = {
        node for node in setting.fused.graph.nodes if ops.is_elementwise(node) and node.name in setting.costs.calls
    }
    before = {node: _continued(node, inside) for node in inside}
    after = {source: node for node, source in before.items() if source is not None}
    for node in setting.fused.graph.nodes:
        if node not in inside or before[node] is not None:
            continue
        chain = [node]
        while chain[-1] in after:
            chain.append(after[chain[-1]])
        if len(chain) >= _LONG:
            yield chain


def _continued(node: fx.Node, inside: Container[fx.Node]) -> fx.Node | None:
    """Return the call whose chain a call continues: the first it reads that nothing else does."""
    sources = (source for source in node.all_input_nodes if source in inside and list(source.users) == [node])
    return next(sources, None)


def follows_layer(node: fx.Node) -> bool:
    """Say whether a runtime can put an operator of one input behind the layer it follows."""
    computed = [source for source in node.all_input_nodes if not graph.weights_behind(source)]
    return len(computed) == 1 and graph.is_call(computed[0], *ops.WEIGHTED) and len(computed[0].users) == 1


@rule("threads", "setting")
def find_idle_processors(setting: Setting) -> Finding | None:
    """Fewer threads than processors."""
    threads, cores = setting.limits.threads, setting.host.cores
    least_s = setting.least_s(setting.fused)
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


@find_idle_processors.remedy
def try_more_threads(setting: Setting) -> Measured | None:
    """Time the fused network with a thread a processor."""
    run = setting.runner(setting.fused)

    def with_threads(threads: int) -> None:
        with torch_threads(threads):
            run()

    threads, cores = setting.limits.threads, setting.host.cores
    what = f"the fused network in eager, {threads} against {cores} threads"
    return compare_runs(lambda: with_threads(threads), lambda: with_threads(cores), what)


@rule("cudnn.benchmark", "setting", untried="the search is part of the first call")
def find_unsearched_kernels(setting: Setting) -> Finding | None:
    """cuDNN takes the first kernel that fits unless it is asked to find the fastest.

    The search costs up to seconds for every new shape, so it pays where shapes stay.
    """
    import torch

    convolutions = [graph.origin(node) for node, _ in setting.calls(*ops.CONVOLUTIONS)]
    if not (setting.host.cuda and convolutions) or torch.backends.cudnn.benchmark:
        return None
    return Finding(
        what=f"{len(convolutions)} convolutions run with the first kernel that cuDNN finds.",
        places=tuple(convolutions),
        saved_s=None,
        formula="none: it depends on the kernels",
        action="torch.backends.cudnn.benchmark = True where input sizes stay the same; leave it off where they "
        "change, each new size is searched again.",
    )


@rule("first call", "setting", untried="the figures above are measured; a warm-up moves them out of the first request")
def find_slow_start(setting: Setting) -> Finding | None:
    """The first call of a process allocates, compiles and chooses kernels, and takes many times as long."""
    if setting.startup is None or setting.startup.first_call_s < _SLOW_START * setting.startup.median_s:
        return None
    first_s, times = setting.startup.first_call_s, setting.startup.first_call_s / setting.startup.median_s
    return Finding(
        what=f"The first call takes {1e3 * first_s:.1f} ms, {times:.0f} times a later one, after "
        f"{setting.startup.load_s:.1f} s of loading.",
        places=(),
        saved_s=None,
        formula="none a run: it is paid once a process",
        action="Run once on an example of every input size before the first request, and keep the process.",
    )
