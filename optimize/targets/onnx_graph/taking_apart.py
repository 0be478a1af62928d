"""What ONNX has no operator for, computed by those it has: poolings, orders, running products, small matrices.

Torch's exporter refuses these; torch takes each apart into what stands here before the exporter sees it. Sizes along
which something is unrolled must be known: the operator stays whole otherwise, and is refused by name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from optimize import graph
from optimize.graph import aten

#: The largest matrix whose elimination is written out, which takes ten operators a row.
LARGEST_MATRIX = 16
#: Windows of a pool that are written out one by one, where they are not all of one size.
MOST_WINDOWS = 256


def _first_of(way: Callable[..., Any]) -> Callable[..., Any]:
    """Return what computes the first of several values, unless nothing can."""

    def compute(*args: Any, **options: Any) -> Any:
        made = way(*args, **options)
        return made if made is NotImplemented else made[0]

    return compute


def windows(size: int, count: int) -> list[tuple[int, int]]:
    """Return where the windows of an adaptive pool begin and end.

    >>> windows(5, 2)
    [(0, 3), (2, 5)]
    """
    return [(place * size // count, -(-(place + 1) * size // count)) for place in range(count)]


def _adaptive_mean(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Average one axis after another: all windows that one count makes of an axis hold as many rows."""
    for axis, count in zip(range(-len(sizes), 0), sizes, strict=True):
        size = x.shape[axis]
        if not isinstance(size, int) or (size % count and count > MOST_WINDOWS):
            return NotImplemented
        if size % count:
            cuts = [x.narrow(axis, start, end - start).mean(axis, keepdim=True) for start, end in windows(size, count)]
            x = torch.cat(cuts, axis)
        else:
            x = x.unflatten(axis, (count, size // count)).mean(axis)
    return x


def _adaptive_max(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the largest of each window, and its place in the image."""
    around = x.shape[-len(sizes) :]
    if not all(isinstance(size, int) for size in around):
        return NotImplemented
    if not any(size % count for size, count in zip(around, sizes, strict=True)):
        pool = aten.max_pool2d_with_indices if len(sizes) == 2 else aten.max_pool3d_with_indices
        kernel = [size // count for size, count in zip(around, sizes, strict=True)]
        return pool.default(x, kernel, kernel)
    if math.prod(sizes) > MOST_WINDOWS:
        return NotImplemented
    places = torch.arange(math.prod(around), device=x.device).reshape(around)
    values, found = [], []
    for cut in itertools.product(*map(windows, around, sizes)):
        window, where = x, places
        for axis, (start, end) in zip(range(-len(sizes), 0), cut, strict=True):
            window, where = window.narrow(axis, start, end - start), where.narrow(axis, start, end - start)
        value, place = window.flatten(-len(sizes)).max(-1)
        values.append(value)
        found.append(where.flatten()[place])
    shape = (*x.shape[: -len(sizes)], *sizes)
    return torch.stack(values, -1).reshape(shape), torch.stack(found, -1).reshape(shape)


def _kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    if x.dim() == 0:
        return NotImplemented
    values, places = (each.narrow(dim, k - 1, 1) for each in torch.topk(x, k, dim, largest=False))
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def _median_of(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the lower middle; NaN where there is one, at the place of the first."""
    if x.dim() == 0 or not isinstance(x.shape[dim], int):
        return NotImplemented
    value, place = _kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)
    if not x.is_floating_point():
        return value, place
    unknown = x.isnan()
    is_lost = unknown.any(dim, keepdim=keepdim)
    first = unknown.to(torch.int64).argmax(dim, keepdim=keepdim)
    return torch.where(is_lost, math.nan, value), torch.where(is_lost, first, place)


def _running(x: Tensor, dim: int, is_ahead: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the running extreme and its last place, in as many steps as doubling takes; a NaN stays."""
    if x.dim() == 0 or not isinstance(x.shape[dim], int):
        return NotImplemented
    size, dim = x.shape[dim], dim % x.dim()
    shape = [size if axis == dim else 1 for axis in range(x.dim())]
    places = torch.arange(size, device=x.device).reshape(shape).expand(x.shape)
    by = 1
    while by < size:
        value, place = x.narrow(dim, 0, size - by), places.narrow(dim, 0, size - by)
        rest, held = x.narrow(dim, by, size - by), places.narrow(dim, by, size - by)
        wins = is_ahead(value, rest)
        if x.is_floating_point():
            wins = (wins | value.isnan()) & ~rest.isnan()
        x = torch.cat([x.narrow(dim, 0, by), torch.where(wins, value, rest)], dim)
        places = torch.cat([places.narrow(dim, 0, by), torch.where(wins, place, held)], dim)
        by *= 2
    return x, places


def _cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    if x.dim() == 0 or not isinstance(x.shape[dim], int):
        return NotImplemented
    x = x.to(dtype or (x.dtype if x.is_floating_point() else torch.int64))
    size, by = x.shape[dim], 1
    while by < size:
        before, rest = x.narrow(dim, 0, size - by), x.narrow(dim, by, size - by)
        x, by = torch.cat([x.narrow(dim, 0, by), before * rest], dim), by * 2
    return x


def _searchsorted(
    rows: Tensor,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """Count the numbers before each: as many comparisons as there are pairs."""
    if not isinstance(x, Tensor):
        x = torch.full((), x, dtype=torch.result_type(rows, x), device=rows.device)
    if sorter is not None:
        rows = rows.gather(-1, sorter)
    shaped = x.reshape(-1) if rows.dim() == 1 else x
    pairs = shaped.unsqueeze(-1), rows.unsqueeze(-2)
    behind = pairs[1] > pairs[0] if right or side == "right" else pairs[1] >= pairs[0]
    before = ~behind | pairs[0].isnan() if shaped.is_floating_point() else ~behind  # OpenVINO finds NaN to be larger
    return before.sum(-1).reshape(x.shape).to(torch.int32 if out_int32 else torch.int64)


def _bucketize(x: Any, rows: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    return _searchsorted(rows, x, out_int32=out_int32, right=right)


def _norm(apart: Tensor, p: float) -> Tensor:
    """Return the norm along the last axis."""
    apart = apart.abs()
    if p == 0:
        return (apart != 0).to(apart.dtype).sum(-1)
    if math.isinf(p):
        return apart.amax(-1)
    return apart.sum(-1) if p == 1 else (apart * apart).sum(-1).sqrt() if p == 2 else apart.pow(p).sum(-1).pow(1 / p)


def _cdist(x: Tensor, other: Tensor, p: float, mode: int | None) -> Tensor:
    return _norm(x.unsqueeze(-2) - other.unsqueeze(-3), p)


def _pdist(x: Tensor, p: float = 2.0) -> Tensor:
    if not isinstance(x.shape[0], int):
        return NotImplemented
    first, second = torch.triu_indices(x.shape[0], x.shape[0], 1)
    return _norm(x[first] - x[second], p)


def _scattered(x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, include_self: bool = True) -> Tensor:
    """Compute means of what is scattered by sums and counts: ONNX has none, and the exporter writes what comes last."""
    if reduce != "mean":
        return NotImplemented
    held = x if include_self else x.scatter(dim, index, 0)
    count = (torch.ones_like if include_self else torch.zeros_like)(x).scatter_add(dim, index, torch.ones_like(source))
    rounding = None if x.is_floating_point() else "floor"
    return torch.div(held.scatter_add(dim, index, source), count.clamp(min=1), rounding_mode=rounding)


def _with_one_head(*tensors: Any, **options: Any) -> Tensor:
    """Compute attention of three axes as the exporter has it: with heads, of which there is one."""
    if tensors[0].dim() != 3:
        return NotImplemented
    apart = (each.unsqueeze(1) if isinstance(each, Tensor) and each.dim() == 3 else each for each in tensors)
    return aten.scaled_dot_product_attention.default(*apart, **options).squeeze(1)


def _index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    shape = [-1 if axis == dim % x.dim() else 1 for axis in range(x.dim())]
    index = index.to(torch.int64).reshape(shape).expand(source.shape)
    reduced = _scattered if reduce == "mean" else torch.scatter_reduce
    return reduced(x, dim, index, source, reduce, include_self=include_self)


def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    flat, where, values = x.reshape(-1), index.reshape(-1), source.reshape(-1)
    where = torch.where(where < 0, where + flat.shape[0], where)
    put = flat.scatter_add(0, where, values) if accumulate else flat.scatter(0, where, values)
    return put.reshape(x.shape)


def _hypot(x: Tensor, other: Tensor) -> Tensor:
    most, least = torch.maximum(x.abs(), other.abs()), torch.minimum(x.abs(), other.abs())
    share = torch.where((most == 0) | most.isinf(), 0, least / most)  # squares would leave the range
    return most * (1 + share * share).sqrt()


def _known(of: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what is taken of two numbers, or the other where one is NaN."""

    def take(x: Tensor, other: Tensor) -> Tensor:
        if not (x.is_floating_point() and other.is_floating_point()):
            return NotImplemented
        return torch.where(x.isnan(), other, torch.where(other.isnan(), x, of(x, other)))

    return take


def _signbit(x: Tensor) -> Tensor:
    return (x < 0) | ((x == 0) & (1 / x < 0)) if x.is_floating_point() else x < 0


def _copysign(x: Tensor, other: Any) -> Tensor:
    if not isinstance(other, Tensor):
        return -x.abs() if math.copysign(1, other) < 0 else x.abs()
    return torch.where(_signbit(other), -x.abs(), x.abs())


def _aminmax(x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    dims = list(range(x.dim())) if dim is None else [dim]
    return x.amin(dims, keepdim), x.amax(dims, keepdim)


def _is_small(a: Tensor) -> bool:
    return isinstance(a.shape[-1], int) and a.shape[-1] <= LARGEST_MATRIX


def _solution(a: Tensor, b: Tensor) -> Tensor:
    """Solve ``a [..., n, n] @ x = b [..., n, k]`` by elimination with the largest of each column as its pivot."""
    size = a.shape[-1]
    rows = torch.cat([a, b], -1)
    for column in range(size):
        pivot = rows[..., column:, column].abs().argmax(-1) + column
        order = torch.arange(size, device=a.device)
        moved = torch.where(order == pivot.unsqueeze(-1), column, order)
        moved = torch.where(order == column, pivot.unsqueeze(-1), moved)
        rows = rows.gather(-2, moved.unsqueeze(-1).expand(rows.shape))
        chosen = rows[..., column : column + 1, :]
        chosen = chosen / chosen[..., column : column + 1]
        factors = torch.where((order == column).unsqueeze(-1), 0, rows[..., column : column + 1])
        rows = torch.where((order == column).unsqueeze(-1), chosen, rows - factors * chosen)
    return rows[..., size:]


def _solve(a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False) -> tuple[Tensor, ...]:
    if not _is_small(a):
        return NotImplemented
    is_vector = b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1])
    if is_vector:
        solved = _solution(*_together(a, b.unsqueeze(-1))).squeeze(-1)
    elif left:
        solved = _solution(*_together(a, b))
    else:
        solved = _solution(*_together(a.mT, b.mT)).mT
    none = torch.zeros(a.shape[:-2], dtype=torch.int32, device=a.device)
    return solved, a, none.unsqueeze(-1).expand(a.shape[:-1]), none


def _together(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])


def _inverse(a: Tensor, *, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    if not _is_small(a):
        return NotImplemented
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return _solution(a, identity.expand(a.shape)), torch.zeros(a.shape[:-2], dtype=torch.int32, device=a.device)


def _cholesky(a: Tensor, upper: bool = False) -> Tensor:
    """Return the triangle whose product with its transpose is ``a``, a column after another."""
    if not _is_small(a):
        return NotImplemented
    a = a.mT if upper else a
    size, columns = a.shape[-1], list[Tensor]()
    order, rest = torch.arange(size, device=a.device), a
    for place in range(size):
        column = rest[..., place] / rest[..., place : place + 1, place].sqrt()
        columns.append(torch.where(order >= place, column, 0))
        rest = rest - columns[-1].unsqueeze(-1) * columns[-1].unsqueeze(-2)
    lower = torch.stack(columns, -1)
    return lower.mT if upper else lower


def _cholesky_ex(a: Tensor, *, upper: bool = False, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    made = _cholesky(a, upper)
    return made if made is NotImplemented else (made, torch.zeros(a.shape[:-2], dtype=torch.int32, device=a.device))


def _solve_triangular(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """Solve by what stands on one side of the diagonal alone, a row after another."""
    if not _is_small(a):
        return NotImplemented
    if not left:
        solved = _solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular)
        return solved if solved is NotImplemented else solved.mT
    a, b = _together(a, b)
    rows: dict[int, Tensor] = {}
    order = range(a.shape[-1])
    for place in reversed(order) if upper else order:
        row = b[..., place, :]
        for other, known in rows.items():
            row = row - a[..., place, other].unsqueeze(-1) * known
        rows[place] = row if unitriangular else row / a[..., place, place].unsqueeze(-1)
    return torch.stack([rows[place] for place in order], -2)


def _triangular_solve(
    b: Tensor, a: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Tensor, Tensor]:
    turned = (a.mT, not upper) if transpose else (a, upper)
    solved = _solve_triangular(turned[0], b, upper=turned[1], unitriangular=unitriangular)
    return solved if solved is NotImplemented else (solved, a)


def _on_pairs(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return what moves complex numbers as an operator does it: as pairs of real ones, which are an axis more."""
    names = [entry.name for entry in target._schema.arguments]  # type: ignore[attr-defined]

    def pair(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.view_as_real(value) if value.is_complex() else value
        if name == "dim":
            return [pair(name, dim) for dim in value] if isinstance(value, list) else value - (value < 0)
        if name == "pad":
            return [0, 0, *value]
        return [*value, 2] if name == "size" else value

    def move(*args: Any, **options: Any) -> Any:
        if not any(isinstance(value, Tensor) and value.is_complex() for value in args):
            return NotImplemented
        made = target(*map(pair, names, args), **options)
        return torch.view_as_complex(made)

    return move


def _full(size: Sequence[int], value: complex, **options: Any) -> Tensor:
    made = options.get("dtype")
    if made is None or not made.is_complex:
        return NotImplemented
    options["dtype"] = made.to_real()
    number = complex(value)
    return torch.complex(torch.full(size, number.real, **options), torch.full(size, number.imag, **options))


def _einsum(equation: str, given: Sequence[Tensor], *, path: Sequence[int] | None = None) -> Tensor:
    """Multiply complex numbers by their parts."""
    if len(given) != 2 or not any(each.is_complex() for each in given):
        return NotImplemented
    (a, b), (c, d) = ((x.real, x.imag) if x.is_complex() else (x, torch.zeros_like(x)) for x in given)

    def product(x: Tensor, y: Tensor) -> Tensor:
        return torch.einsum(equation, x, y)

    return torch.complex(product(a, c) - product(b, d), product(a, d) + product(b, c))


#: What the exporter knows of real numbers alone.
_COMPLEX: dict[Any, Callable[..., Any]] = {
    target: _on_pairs(target)
    for target in (
        aten.constant_pad_nd.default, aten.expand.default, aten.index_select.default, aten.select.int,
        aten.select_scatter.default, aten.slice_scatter.default, aten.squeeze.dims, aten.unsqueeze.default,
    )
}  # fmt: skip
_COMPLEX |= {
    aten.einsum.default: _einsum,
    aten.full.default: _full,
    aten.zeros.default: lambda size, **options: _full(size, 0, **options),
}


def is_unknown(target: Any, call: fx.Node) -> bool:
    """Say whether torch's exporter, which knows an operator, does not know it as a call of a graph asks for it."""
    if target in _COMPLEX:  # torch takes others apart into them
        value = call.meta.get("val")
        return isinstance(value, Tensor) and value.is_complex()
    if call.target is not target:
        return False
    if target is aten.scatter_reduce.two:
        return bool(graph.argument(call, "reduce") == "mean")
    return target is aten.scaled_dot_product_attention.default and call.args[0].meta["val"].dim() == 3  # type: ignore[union-attr]


#: By the operators that torch's exporter knows no translation of, or none of all that they do.
APART: dict[Any, Callable[..., Any]] = {
    **_COMPLEX,
    aten._adaptive_avg_pool3d.default: _adaptive_mean,
    aten.adaptive_max_pool2d.default: _adaptive_max,
    aten.adaptive_max_pool3d.default: _adaptive_max,
    aten.aminmax.default: _aminmax,
    aten.bucketize.Tensor: _bucketize,
    aten.bucketize.Scalar: _bucketize,
    aten.cholesky.default: _cholesky,
    aten._cdist_forward.default: _cdist,
    aten.copysign.Tensor: _copysign,
    aten.copysign.Scalar: _copysign,
    aten.cummax.default: lambda x, dim: _running(x, dim, torch.gt),
    aten.cummin.default: lambda x, dim: _running(x, dim, torch.lt),
    aten.cumprod.default: _cumprod,
    aten.fmax.default: _known(torch.maximum),
    aten.fmin.default: _known(torch.minimum),
    aten.hypot.default: _hypot,
    aten.index_reduce.default: _index_reduce,
    aten.kthvalue.default: _kthvalue,
    aten.linalg_cholesky.default: lambda a, *, upper=False: _cholesky(a, upper),
    aten.linalg_cholesky_ex.default: _cholesky_ex,
    aten.linalg_inv.default: _first_of(_inverse),
    aten.linalg_inv_ex.default: _inverse,
    aten.linalg_solve.default: _first_of(_solve),
    aten._linalg_solve_ex.default: _solve,
    aten.linalg_solve_triangular.default: _solve_triangular,
    aten.median.default: _first_of(lambda x: _median_of(x.reshape(-1), 0)),
    aten.median.dim: _median_of,
    aten._pdist_forward.default: _pdist,
    aten.put.default: _put,
    aten.scaled_dot_product_attention.default: _with_one_head,
    aten.scatter_reduce.two: _scattered,
    aten.searchsorted.Scalar: _searchsorted,
    aten.searchsorted.Tensor: _searchsorted,
    aten.triangular_solve.default: _triangular_solve,
}
