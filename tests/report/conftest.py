"""One fixed report, built by hand, with a hostile layer name, an artifact that was not run and one that failed."""

from statistics import NormalDist

import pytest

from optimize.measure.accuracy import Accuracy
from optimize.measure.agreement import Agreement
from optimize.measure.environment import Environment
from optimize.measure.latency import Latency, Speedup
from optimize.measure.quality import Quality
from optimize.records import MergeOutlook, Rewrite, Skip, Stats, WeightOutlook
from optimize.report.model import (
    Comparison,
    DataRecord,
    Graph,
    LayerFigures,
    ModelRecord,
    Operation,
    Report,
    Row,
    TraceStep,
)
from optimize.targets.base import Coverage, FloatLayer

HOSTILE = "</script><script>alert('layer')</script>"


def latency(median_s: float, spread: float = 0.02, samples: int = 200) -> Latency:
    """Returns samples at the quantiles of a normal distribution, with a heavy right tail."""
    deviations = [NormalDist().inv_cdf((index + 0.5) / samples) for index in range(samples)]
    return Latency(
        median_s=median_s,
        p95_s=median_s * (1 + 2 * spread),
        ci_low_s=median_s * (1 - spread / 5),
        ci_high_s=median_s * (1 + spread / 4),
        samples_s=tuple(round(median_s * (1 + spread * (z + 0.6 * max(z, 0) ** 2)), 9) for z in deviations),
        first_call_s=3 * median_s,
        load_s=0.8,
        threads=1,
        batch=1,
    )


def stats(batch_norms: int, parameters: int) -> Stats:
    ops = {"conv2d": 21, "linear": 1, "relu": 20, **({"batch_norm": batch_norms} if batch_norms else {})}
    moved_bytes = 9_000_000 + 400_000 * batch_norms
    return Stats(ops=ops, parameters=parameters, weight_bytes=4 * parameters, macs=68_900_000, moved_bytes=moved_bytes)


def graph(*operations: tuple, batch_norms: int) -> Graph:
    """Return a graph of (name, label, where, inputs)."""
    entries = (
        Operation(name=name, kind=label.split()[0], label=label, where=where, shape="N×8", inputs=inputs)
        for name, label, where, inputs in operations
    )
    return Graph(operations=tuple(entries), stats=stats(batch_norms, 2_790_000))


def block(where: str) -> Comparison:
    """Return a block of two branches in a module of this name, that becomes one convolution."""
    return Comparison(
        before=graph(
            ("x", "input N×8", "", ()),
            ("conv2d", "conv2d 3x3 8>8", f"{where}.dense", (0,)),
            ("batch_norm", "batch_norm 8", f"{where}.norm", (1,)),
            ("conv2d_1", "conv2d 1x1 8>8", f"{where}.point", (0,)),
            ("add", "add", where, (2, 3)),
            ("relu", "relu", where, (4,)),
            ("linear", "linear 8>10", "head", (5,)),
            ("output", "output", "", (6,)),
            batch_norms=1,
        ),
        after=graph(
            ("x", "input N×8", "", ()),
            ("conv2d_2", "conv2d 3x3 8>8", where, (0,)),
            ("relu", "relu", where, (1,)),
            ("linear", "linear 8>10", "head", (2,)),
            ("output", "output", "", (3,)),
            batch_norms=0,
        ),
    )


def merges() -> tuple[MergeOutlook, ...]:
    before = WeightOutlook(spread=9.1, channel_spread=4.2, tensor_db=34.2, channel_db=38.9)
    narrow = WeightOutlook(spread=11.4, channel_spread=5.1, tensor_db=33.8, channel_db=38.1)
    wide = WeightOutlook(spread=27.3, channel_spread=9.9, tensor_db=24.1, channel_db=37.2)
    return (
        MergeOutlook(where="stage1.0", weight="stage1.0.weight", before=before, after=narrow, remedy="none"),
        MergeOutlook(where=HOSTILE, weight=f"{HOSTILE}.weight", before=before, after=wide, remedy="equalize"),
    )


def layers() -> tuple[LayerFigures, ...]:
    timed = (
        LayerFigures(row="onnx int8", layer="stage1.0", op="conv2d", float_s=0.0021, int8_s=0.0004, sqnr_db=36.2),
        LayerFigures(row="onnx int8", layer=HOSTILE, op="conv2d", float_s=0.0019, int8_s=0.00041, sqnr_db=41.7),
        LayerFigures(row="onnx int8", layer="head.fc", op="linear", float_s=0.00002, int8_s=0.00009, sqnr_db=58.8),
    )
    return (*timed, LayerFigures(row="torchscript int8", layer="stage1.0", op="conv2d", sqnr_db=36.9))


def trace() -> tuple[TraceStep, ...]:
    fuse = TraceStep(
        pass_name="FuseConvBN",
        options="",
        exactness="exact",
        rewrites=tuple(Rewrite(where=f"stage1.{index}.conv", what="batch_norm folded") for index in range(20)),
        skips=(Skip(where="head.bn", op="batch_norm", reason="its input is read by two layers"),),
        notes=(),
        seconds=0.184,
        max_error=9.5e-7,
        relative_error=2.1e-7,
        before=stats(21, 2_790_000),
        after=stats(1, 2_780_000),
    )
    quantize = TraceStep(
        pass_name="QuantizeStatic",
        options="observer='percentile', weights='per-channel'",
        exactness="lossy",
        rewrites=tuple(
            Rewrite(where=f"stage1.{index}.conv", what="8-bit weights, ranges learned") for index in range(20)
        ),
        skips=tuple(Skip(where=f"attn.{i}", op="matmul", reason="has no constant operand") for i in range(2)),
        notes=("Ranges come from 256 samples.",),
        seconds=2.41,
        max_error=None,
        relative_error=None,
        before=stats(1, 2_780_000),
        after=stats(1, 2_780_000),
    )
    return fuse, quantize


def rows() -> tuple[Row, ...]:
    onnx = Row(
        target="onnx",
        path="optimized/model.onnx",
        precision="float32",
        size_bytes=11_140_000,
        sha256="a" * 64,
        latency=latency(0.00451),
        speedup=Speedup(2.24, 2.22, 2.26),
        agreement=Agreement(sqnr_db=128.4, max_abs_error=3.1e-6, top1=1.0),
        accuracy=Accuracy("top1", 0.9123, 0.9123, 10_000, -0.0004, 0.0004),
        peak_memory_bytes=91_000_000,
        versions={"onnxruntime": "1.31.1"},
    )
    onnx_int8 = Row(
        target="onnx",
        path="optimized/model.int8.onnx",
        precision="int8",
        size_bytes=2_910_000,
        sha256="b" * 64,
        latency=latency(0.00132, 0.03),
        speedup=Speedup(7.67, 7.58, 7.74),
        agreement=Agreement(sqnr_db=34.62, max_abs_error=0.113, top1=0.9871),
        accuracy=Accuracy("top1", 0.9098, 0.9123, 10_000, -0.0046, -0.0004),
        peak_memory_bytes=78_000_000,
        coverage=Coverage(
            quantized=tuple(f"stage1.{index}.conv" for index in range(20)),
            left_float=(
                FloatLayer(HOSTILE, "Softmax", "has no integer kernel"),
                FloatLayer("head.fc", "Gemm", "kept in float by request"),
            ),
            kernels={"QLinearConv": 20, "Gemm": 1, "Softmax": 1},
        ),
        notes=("Activations are unsigned and asymmetric, weights signed per channel.",),
        cpu="vnni",
        elsewhere={
            "here": Quality(Agreement(sqnr_db=34.11, max_abs_error=0.11, top1=1.0)),
            "avx2": Quality(Agreement(sqnr_db=8.71, max_abs_error=2.11, top1=0.875)),
            "sse4": Quality(failure="run: the worker was killed by SIGILL"),
        },
    )
    script = Row(
        target="torchscript",
        path="optimized/model.int8.ts",
        precision="int8",
        size_bytes=3_020_000,
        latency=latency(0.00171, 0.05),
        speedup=Speedup(5.92, 5.81, 6.01),
        agreement=Agreement(sqnr_db=35.11, max_abs_error=0.104, top1=0.9882),
        accuracy=Accuracy("top1", 0.9101, 0.9123, 10_000, -0.0042, -0.0002),
        peak_memory_bytes=312_000_000,
    )
    rtx = Row(
        target="tensorrt",
        path="optimized/model.engine",
        precision="int8",
        status="not_run",
        reason="no NVIDIA GPU on this machine",
        size_bytes=3_400_000,
    )
    broken = Row(target="openvino", status="failed", reason="run: the worker was killed by SIGSEGV")
    return onnx, onnx_int8, script, rtx, broken


@pytest.fixture
def report() -> Report:
    """The fixed report."""
    return Report(
        created="2026-01-02T03:04:05+00:00",
        command="optimize model.pt --fuse --int8 --calib images/ --to onnx,torchscript,tensorrt",
        recipe="model: model.pt\npasses: [FuseConvBN, QuantizeStatic]\n",
        model=ModelRecord(
            source="model.pt",
            sha256="c" * 64,
            parameters=2_790_000,
            macs=68_900_000,
            inputs=("x float32[N, 3, 32, 32]",),
        ),
        calibration=DataRecord(source="images/", samples=256),
        evaluation=DataRecord(source="test/", samples=10_000),
        environment=Environment(
            cpu="Example 9000",
            cpu_flags=("avx2", "avx512_vnni"),
            cores=8,
            memory_bytes=16_000_000_000,
            system="Linux 6.1",
            python="3.11.9",
            load_average=(0.21, 0.2, 0.1),
            versions={"optimize": "0.1.0", "torch": "2.13.0"},
        ),
        baseline=Row(
            target="eager",
            precision="float32",
            size_bytes=11_180_000,
            latency=latency(0.0101),
            accuracy=Accuracy("top1", 0.9123, 0.9123, 10_000),
            peak_memory_bytes=402_000_000,
        ),
        rows=rows(),
        trace=trace(),
        merges=merges(),
        graph=block(f"stage1.{HOSTILE}"),
        layers=layers(),
        warnings=("torchscript int8: the middle half of the runs spreads over 27 % of the median.",),
    )
