"""What NNCF and torchao make of a network, for ``benchmarks.best_target``: run by the Python of their own environment.

    python -m benchmarks.best_target_peers MODEL FOLDER

``FOLDER/plain.onnx`` is the float network. Writes ``nncf-f32.xml`` and ``nncf-bf16.xml`` (one network, two hints),
``ov-bf16.xml`` (the float network with the bfloat16 hint) and ``inductor-int8.pt2`` (torchao's X86InductorQuantizer,
compiled ahead of time). What cannot be made is said on standard error and left out.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.int8_onnx import Case, case


def with_nncf(name: str, entry: Case, folder: Path) -> None:
    """Quantize with NNCF's defaults, and its transformer preset for a ViT."""
    import nncf
    import openvino

    core = openvino.Core()
    plain = core.read_model(folder / "plain.onnx")
    _save(openvino, plain, folder / "ov-bf16.xml", "bf16")
    samples = [sample.numpy() for sample in entry.calibration.split(1)]
    preset = {"model_type": nncf.ModelType.TRANSFORMER} if "vit" in name else {}
    quantized = nncf.quantize(
        core.read_model(folder / "plain.onnx"), nncf.Dataset(samples), subset_size=len(samples), **preset
    )
    for hint in ("f32", "bf16"):
        _save(openvino, quantized, folder / f"nncf-{hint}.xml", hint)


def _save(openvino: object, model: object, path: Path, hint: str) -> None:
    """Write a model with the hint that our runner compiles it with."""
    model.set_rt_info(hint, ["optimize", "inference_precision"])  # type: ignore[attr-defined]
    openvino.save_model(model, path, compress_to_fp16=False)  # type: ignore[attr-defined]


def with_torchao(name: str, entry: Case, folder: Path) -> None:
    """Quantize with torchao for inductor and compile with frozen weights, for one sample alone: its fastest."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    example = (entry.calibration[:1],)
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(torch.export.export(entry.peer, example).module(check_guards=False), quantizer)
    for sample in entry.calibration.split(1):
        prepared(sample)
    exported = torch.export.export(convert_pt2e(prepared), example)
    torch._inductor.aoti_compile_and_package(
        exported,
        package_path=str(folder / "inductor-int8.pt2"),
        inductor_configs={"freezing": True, "cpp.dynamic_threads": True},
    )


def main(name: str, folder: Path) -> None:
    """Write what can be written."""
    torch.set_num_threads(1)
    entry = case(name)
    makers: tuple[Callable[[str, Case, Path], None], ...] = (with_nncf, with_torchao)
    for maker in makers:
        try:
            with torch.no_grad():
                maker(name, entry, folder)
        except Exception:  # the peer's failure is a result
            traceback.print_exc(limit=1)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
