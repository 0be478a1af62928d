"""Models outside image classification, from a module in memory to INT8 files: what is captured, right, and faster.

    pip install transformers diffusers segmentation_models_pytorch ultralytics
    pip install --no-deps torchvision==0.28.0 torchaudio==2.11.0 timm==1.0.31
    python -m benchmarks.any_model [--only FAMILY[/MODEL] ...] [--rows rows.jsonl] [--depth float|files|times]

The networks (``benchmarks.any_nets``) are built from configurations with fixed seeds, small but whole; nothing is
downloaded. Each has a process of its own with a time limit: one that crashes or takes too long is a row that says so,
and so is one whose package is not installed. Rows are kept in the file behind ``--rows``; a model in it is not run
again, but where it went less deep: ``--depth float`` ends behind ONNX Runtime's float file, ``files`` times none.

``captured`` is the batch that the program has: free, or fixed to the example's where it was refused free. Decibels of
float files are those against the module itself, on inputs that nothing was captured with, in batches of 2 and 3 (the
worse). ``length`` is the same for a sequence half as long again. INT8 files are judged on their calibration samples and
timed beside the float32 file of the same runtime: all files of a model in lock-step, one thread, batch 1, the ratio
that of the medians. A file is not slower where that is 0.97 at least: layers that are slower in INT8 have been given
back to float by measuring.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.conditions import conditions

TARGETS, RUNTIMES = ("onnx", "openvino", "torchscript"), ("ONNX Runtime", "OpenVINO", "TorchScript")
RIGHT_DB, NEAR_DB, NOT_SLOWER = 90.0, 25.0, 0.97
CALIBRATION = 16
LIMIT_S = 600
DEPTHS = ("float", "files", "times")
_Row = dict[str, Any]


def try_model(name: str, say: Callable[[_Row], None], depth: str) -> None:
    """Take one model as far as it goes in this process; what is found is said at once, in case the process dies."""
    import torch

    torch.set_num_threads(1)
    from benchmarks.any_nets import build

    try:
        net = build(name)
    except ImportError as error:
        say({"missing": f"not installed: {error}".splitlines()[0]})
        return
    say({"stage": "capture"})
    captured = _capture(net, say)
    if captured is None:
        return
    program, batch = captured
    with tempfile.TemporaryDirectory() as folder:
        say({"stage": "float32 on ONNX Runtime"})
        say(_float_on_onnx(net, program, Path(folder)))
        say({"stage": "another length"})
        say(_another_length(net, Path(folder)))
        say({"stage": "all files"})
        if depth != "float":
            data = [net.draw(1 if program.batch else program.samples, seed=10 + at) for at in range(CALIBRATION)]
            work = Path(folder) / "out"
            say(_run(net, batch, data, work) if depth == "times" else _untimed(net, program, data, Path(folder)))
    say({"stage": ""})


def _capture(net: Any, say: Callable[[_Row], None]) -> tuple[Any, int | None] | None:
    """Return the program and the batch it is fixed to, or None where it is refused; say so."""
    import optimize
    from optimize.errors import OptimizeError

    inputs, refusals = net.draw(2, seed=0), []
    for batch in (None, 2):
        try:
            program = optimize.capture(net.module, inputs, dynamic_batch=batch is None)
        except OptimizeError as error:
            refusals.append(error.what)
            continue
        say({"captured": "free batch" if program.batch else "fixed batch", "why": refusals, "notes": program.notes})
        return program, batch
    say({"captured": "refused", "why": refusals[-1:]})
    return None


def _float_on_onnx(net: Any, program: Any, folder: Path) -> _Row:
    """Write the float file and compare it with the module, in a second batch size too."""
    import optimize
    from optimize.errors import OptimizeError

    try:
        runner = optimize.export(program, "onnx", folder / "float.onnx").load(threads=1)
    except OptimizeError as error:
        return {"onnx": {"refused": error.what}}
    found: _Row = {}
    for key, batch in (("db", 2), ("second_db", 3)):
        if batch == 2 or program.batch:
            found[key] = _decibels(net, runner, net.draw(batch, seed=batch))
    return {"onnx": found}


def _decibels(net: Any, runner: Any, *batches: Sequence[Any]) -> float | str:
    """Return how near a file is to the module; what it says where it does not run."""
    import torch

    from optimize.measure.agreement import AgreementMeter

    meter = AgreementMeter()
    try:
        for inputs in batches:
            with torch.no_grad():
                want = [value.numpy() for value in _tensors(net.module(*inputs))]
            found = runner.run([tensor.numpy() for tensor in inputs])
            meter.update(want[: len(found)], found)
        result = meter.result()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return float("nan") if result is None else result.sqnr_db


def _tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors that a module returned, in the order of its structure."""
    import torch
    from torch.utils import _pytree as pytree

    yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _another_length(net: Any, folder: Path) -> _Row:
    """Capture with free lengths, where that can be asked for, and compare the file at another one."""
    import optimize
    from benchmarks.any_inputs import LENGTH
    from optimize.errors import OptimizeError

    if not net.free_lengths:
        return {"length": "none"}
    if "dynamic" not in inspect.signature(optimize.capture).parameters:
        return {"length": "cannot be asked for"}
    free: Mapping[str, Any] = {"dynamic": net.free_lengths}
    try:
        program = optimize.capture(net.module, net.draw(2, seed=0), **free)
        runner = optimize.export(program, "onnx", folder / "length.onnx").load(threads=1)
    except OptimizeError as error:
        return {"length": error.what}
    return {"length": _decibels(net, runner, net.draw(2, seed=4, length=LENGTH * 3 // 2))}


def _run(net: Any, batch: int | None, data: Sequence[Any], folder: Path) -> _Row:
    """Run the whole line, with INT8; without it where a pass refuses."""
    import optimize
    from benchmarks.flags import quantizing
    from optimize.errors import OptimizeError

    fusing: list[Any] = [optimize.Reparameterize(), optimize.FuseConvBN()]
    try:
        report = _whole_line(net, batch, [*fusing, *quantizing(data)], folder)
    except OptimizeError as error:
        try:
            return _told(_whole_line(net, batch, fusing, folder)) | {"int8_refused": error.what}
        except OptimizeError as plain:
            return {"run_refused": plain.what}
    return _told(report)


def _untimed(net: Any, program: Any, data: Sequence[Any], folder: Path) -> _Row:
    """Write all files in this process and judge them on what calibrated them; nothing is timed."""
    import optimize
    from benchmarks.flags import quantizing
    from optimize.errors import OptimizeError
    from optimize.workflow import transform

    fusing: list[Any] = [optimize.Reparameterize(), optimize.FuseConvBN()]
    refused: _Row = {}
    try:
        variants = transform(program, [*fusing, *quantizing(data)], TARGETS)
    except OptimizeError as error:
        variants, refused = transform(program, fusing, TARGETS), {"int8_refused": error.what}
    rewrites = sum(len(step.outcome.rewrites) for step in variants[0].steps)
    files = {
        f"{target} {variant.precision}": _written(net, variant.program, target, folder / variant.precision, data)
        for variant in variants for target in TARGETS if variant.is_for(target)
    }  # fmt: skip
    return {"rewrites": rewrites, "files": files, **refused}


def _written(net: Any, program: Any, target: str, path: Path, data: Sequence[Any]) -> _Row:
    import optimize
    from optimize import registry
    from optimize.errors import OptimizeError

    try:
        runner = optimize.export(program, target, path.with_suffix(registry.find_target(target).suffix)).load(threads=1)
    except OptimizeError as error:
        return {"status": "failed", "reason": error.what}
    found = _decibels(net, runner, *data)
    if isinstance(found, str):
        return {"status": "failed", "reason": found}
    return {"status": "measured", "reason": "", "db": found}


def _whole_line(net: Any, batch: int | None, passes: Sequence[Any], folder: Path) -> Any:
    from optimize.job import Job
    from optimize.recipe import parse
    from optimize.workflow import run_job

    recipe = parse({"targets": TARGETS, "threads": 1, "static_batch": batch}, source="benchmarks.any_model")
    return run_job(Job(net.module, recipe, net.draw(2, seed=0), folder, given_passes=tuple(passes)))


def _told(report: Any) -> _Row:
    """Return what a report says of the files."""
    fused = ("Reparameterize", "FuseConvBN")
    rewrites = sum(len(step.rewrites) for step in report.trace if step.pass_name in fused)
    return {"rewrites": rewrites, "files": {row.name: _file(row) for row in report.rows}}


def _file(row: Any) -> _Row:
    found: _Row = {"status": row.status, "reason": row.reason}
    if row.latency is not None:
        found["ms"] = row.latency.median_s * 1e3
    if row.agreement is not None:
        found["db"] = row.agreement.sqnr_db
    if row.speedup is not None:
        found["over_eager"] = row.speedup.ratio
    if row.coverage is not None:
        found["int8"] = f"{len(row.coverage.quantized)} of {len(row.coverage.quantized) + len(row.coverage.left_float)}"
    return found


def run_apart(name: str, depth: str) -> _Row:
    """Try one model in a process of its own; what it said before it died stands."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "said.jsonl"
        command = [sys.executable, "-m", "benchmarks.any_model", "--one", name, "--said", str(said), "--depth", depth]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder, "YOLO_CONFIG_DIR": folder}
        row: _Row = {"model": name, "depth": depth}
        with (Path(folder) / "log").open("w+") as log:
            try:
                done = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=LIMIT_S, check=False)
                died = f"ended with {done.returncode}: {_last_line(Path(log.name))}" if done.returncode else ""
            except subprocess.TimeoutExpired:
                died = f"took more than {LIMIT_S} s"
        for line in said.read_text().splitlines() if said.exists() else ():
            row |= json.loads(line)
    told = {"died": f"{row.get('stage', 'start')}: {died}"} if died else {}
    return {**row, **told, "seconds": round(time.monotonic() - started, 1)}


def _last_line(path: Path) -> str:
    return next((line[:300] for line in reversed(path.read_text(errors="replace").splitlines()) if line.strip()), "")


def captured(row: _Row) -> bool:
    """Say whether a model was captured."""
    return row.get("captured", "refused") != "refused"


def right(row: _Row) -> bool:
    """Say whether its float file is right on ONNX Runtime, in both batches where both are allowed."""
    found = row.get("onnx", {})
    values = [found[key] for key in ("db", "second_db") if key in found]
    return bool(values) and all(isinstance(value, float) and value >= RIGHT_DB for value in values)


def int8_db(row: _Row, target: str = "onnx") -> float | None:
    """Return the decibels of an INT8 file; None where there is none that runs."""
    return row.get("files", {}).get(f"{target} int8", {}).get("db")  # type: ignore[no-any-return]


def int8_gain(row: _Row, target: str = "onnx") -> float | None:
    """Return the time of the float file over that of the INT8 file; None where one was not timed."""
    files = row.get("files", {})
    times = [files.get(f"{target} {precision}", {}).get("ms") for precision in ("float32", "int8")]
    return times[0] / times[1] if all(times) else None


def good_int8(row: _Row) -> bool:
    """Say whether INT8 on ONNX Runtime is near and not slower."""
    near, gain = int8_db(row), int8_gain(row)
    return near is not None and gain is not None and near >= NEAR_DB and gain >= NOT_SLOWER


def table(rows: Sequence[_Row]) -> str:
    """Return the page."""
    here = [row for row in rows if "missing" not in row]
    taken = [row for row in here if captured(row)]
    tried, timed = [row for row in taken if "onnx" in row], [row for row in taken if row["depth"] == "times"]
    judged, fixed = [row for row in taken if "files" in row], sum(row["captured"] == "fixed batch" for row in taken)
    near = [row for row in judged if (int8_db(row) or 0) >= NEAR_DB]
    sums = [
        f"- captured: {_share(taken, here)}, {fixed} of them with a fixed batch",
        f"- right on ONNX Runtime, {RIGHT_DB:g} dB at least: {_share(list(filter(right, tried)), tried)}",
        f"- INT8 on ONNX Runtime, {NEAR_DB:g} dB at least: {_share(near, judged)}",
        f"- that, and not slower than float32: {_share(list(filter(good_int8, timed)), timed)}",
    ]
    runtimes = [f"{name} {what}" for name in RUNTIMES for what in ("float32, ms (dB)", "INT8, dB", "INT8, times")]
    heads = ("family", "model", "captured", "fused", "right, dB", "second batch, dB", "length, dB", *runtimes)
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * 3}{'---:|' * (len(heads) - 3)}"]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    reasons = [f"- **{row['model']}**: {reason}" for row in rows for reason in _reasons(row)]
    title = "# Models outside image classification"
    packages = ("transformers", "diffusers", "ultralytics", "segmentation_models_pytorch", "torchaudio")
    said = conditions("onnxruntime", "openvino", *packages)
    return "\n".join([title, "", said, "", *sums, "", *lines, "", "## What was refused, and why", "", *reasons, ""])


def _share(some: Sequence[_Row], of: Sequence[_Row]) -> str:
    return f"**{len(some)} of {len(of)}** ({100 * len(some) / max(1, len(of)):.0f} %)"


def _cells(row: _Row) -> list[str]:
    family, _, model = row["model"].partition("/")
    onnx = row.get("onnx", {})
    first = row.get("captured", "not installed" if "missing" in row else "died")
    cells = [
        family,
        model,
        first,
        _shown(row.get("rewrites"), 0),
        _shown(onnx.get("db")),
        _shown(onnx.get("second_db")),
    ]
    cells.append(_shown(row.get("length")))
    for target in TARGETS:
        plain = row.get("files", {}).get(f"{target} float32", {})
        took = f"{plain['ms']:.2f} " if "ms" in plain else ""
        cells.append(f"{took}({plain['db']:.1f})" if "db" in plain else _shown(plain.get("reason")))
        cells += [_shown(int8_db(row, target)), _shown(int8_gain(row, target), 2)]
    return cells


def _shown(value: Any, places: int = 1) -> str:
    if isinstance(value, str):
        return "no" if value not in ("none", "cannot be asked for", "") else ""
    return "" if value is None else f"{value:.{places}f}"


def _reasons(row: _Row) -> Iterator[str]:
    """Yield why something is missing of a row."""
    yield from (row[key] for key in ("missing", "died") if key in row)
    yield from (f"{row['captured']}: {why}" for why in (*row.get("why", ()), *row.get("notes", ())))
    yield from (f"ONNX Runtime: {value}" for key, value in row.get("onnx", {}).items() if isinstance(value, str))
    if isinstance(row.get("length"), str) and row["length"] not in ("none", "cannot be asked for"):
        yield f"another length: {row['length']}"
    yield from (
        f"{words}: {row[key]}" for key, words in (("int8_refused", "INT8"), ("run_refused", "the run")) if key in row
    )
    for name, file in row.get("files", {}).items():
        if file["reason"]:
            yield f"{name}: {file['reason']}"


def _asked(only: Sequence[str]) -> list[str]:
    from benchmarks.any_nets import NETS

    return [name for name in sorted(NETS) if not only or any(name == one or name.startswith(f"{one}/") for one in only)]


def _read(path: Path) -> dict[str, _Row]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["model"]: row for row in map(json.loads, lines)}


def main() -> int:
    """Print the table; return the exit code, 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--rows", type=Path, default=Path("any_model.jsonl"))
    parser.add_argument("--depth", choices=DEPTHS, default=DEPTHS[-1])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--one")
    parser.add_argument("--said", type=Path)
    given = parser.parse_args()
    if given.one:
        with given.said.open("a") as said:
            try_model(given.one, lambda found: print(json.dumps(found), file=said, flush=True), given.depth)
        return 0
    rows, names = _read(given.rows), _asked(given.only)
    deep = DEPTHS.index(given.depth)
    left = [name for name in names if name not in rows or DEPTHS.index(rows[name]["depth"]) < deep]
    with (
        given.rows.open("a") as kept,
        concurrent.futures.ThreadPoolExecutor(given.jobs) as pool,
        contextlib.suppress(KeyboardInterrupt),
    ):
        for row in pool.map(lambda name: run_apart(name, given.depth), left):
            rows[row["model"]] = row
            print(json.dumps(row), file=kept, flush=True)
            print(" | ".join(_cells(row)), *_reasons(row), sep="\n  ", file=sys.stderr, flush=True)
    print(table([rows[name] for name in names if name in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
