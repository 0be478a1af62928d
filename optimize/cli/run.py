"""``optimize run``: transform a model, export it to each target and report; what ``optimize MODEL`` means."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from optimize import bounds, presets
from optimize.cli import options
from optimize.errors import UsageError
from optimize.processor import CPU_NAMES
from optimize.registry import find_target
from optimize.regular import require_file, require_model, shown
from optimize.report import FILES, RECIPE

if TYPE_CHECKING:
    from optimize.recipe import Recipe
    from optimize.report.model import Report

#: Of the layers' time, where only ``--latency`` says how much goes.
_MOST_CUT = 0.95


@options.command(short_help="Optimize MODEL and report on it; the word may be left out.")
@click.argument("model", type=require_model)
@options.targets(
    "--to", "targets", metavar="TARGET[,...]", multiple=True, help="Where it shall run; see 'optimize targets'."
)
@options.target_option
@options.targets(
    "--opset",
    type=options.count(bounds.OPSET),
    help="Of ONNX files; 20 if not given, which has Gelu and is read widely.",
)
@options.out((*FILES, RECIPE), "Folder for artifacts and report.", "optimized")
@options.named_model
@options.samples("--calib", "Calibration data: .npz, .npy, image folder, texts (.jsonl) or package.module:callable.")
@options.samples("--eval", "Labelled data, given like --calib: accuracy of each artifact.", "evaluate")
@options.pictures
@options.data(
    "--include-preprocess",
    is_flag=True,
    help="Files take uint8 [N, H, W, C] pictures: order, scaling, --mean and --std (or --preprocess) are in the graph.",
)
@options.passes("--fuse", is_flag=True, help="Merge parallel branches, then fold BatchNorm.")
@options.passes(
    "--reparam/--no-reparam", default=None, help="Merge parallel branches (RepVGG, ACNet); implied by --fuse."
)
@options.passes(
    "--prune",
    metavar="RATIO|macs=RATIO|params=RATIO",
    type=options.SHARE,
    help="Cut this share of each layer's channels, or of all macs or params; with --calib, the rest makes up for it.",
)
@options.passes(
    "--criterion",
    metavar="NAME",
    type=click.Choice(options.CRITERIA),
    help=f"With --prune: which channels go first, in place of what --calib shows: {', '.join(options.CRITERIA)}.",
)
@options.passes(
    "--depth",
    metavar="RATIO|macs=RATIO|params=RATIO",
    type=options.SHARE,
    help="Let one layer stand for several until this share of all macs (or params) is gone, by what --calib shows.",
)
@options.passes(
    "--latency",
    metavar="TIME|SHAREx",
    type=options.Quantity(bounds.check_pace),
    help="Cut as much as a file needs to run in 5ms, or in 0.5x its time uncut; --prune or --depth says the most.",
)
@options.passes(
    "--int8",
    metavar="[=static|dynamic|weights]",
    type=options.Int8Choice(["static", "dynamic", "weights"]),
    help="Quantize; static calibrates, dynamic is for Linear, LSTM, GRU, weights for large Linear and Embedding.",
)
@options.passes(
    "--effort",
    metavar="|".join(presets.EFFORTS),
    type=click.Choice(presets.EFFORTS),
    help="With --int8: seconds for fewer decibels, or minutes where channels can gain by shifts and scales.",
)
@options.passes(
    "--weights",
    metavar="BITSbits",
    type=options.Quantity(bounds.read_bits),
    help="Store weights in so many bits by what --calib shows: those of --int8, or alone large Linear and Embedding.",
)
@options.passes("--int4", is_flag=True, help="The same as --weights 4bits.")
@options.passes("--fp16", is_flag=True, help="Cast to float16 (GPUs).")
@options.passes("--bf16", is_flag=True, help="Cast to bfloat16.")
@options.passes(
    "--mixed",
    metavar="FLOAT16|BFLOAT16",
    type=click.Choice(["float16", "bfloat16"]),
    help="With --int8: one more file, INT8 with what is not in integers in this type.",
)
@options.half_policy
@options.half_io
@options.passes("--jit", is_flag=True, help="Compile with TorchScript and write it (--to torchscript is implied).")
@options.passes(
    "--pass",
    "named_passes",
    metavar="NAME[:OPTION=VALUE,...]",
    multiple=True,
    help="One more pass, of 'optimize passes' or package.module:Pass, where its stage and promise put it. May be given "
    "again.",
)
@options.passes(
    "--keep",
    metavar="NAME[,NAME...]",
    help="Modules that stay in float, whatever is quantized or cast: paths such as head,stages.0,*.gate.",
)
@options.targets(
    "--cpu",
    metavar="|".join(CPU_NAMES),
    type=click.Choice(CPU_NAMES),
    help="Processors that INT8 files are right on; 'any' x86 and ARM if not given, 'host' is this one.",
)
@options.verify_on
@options.passes(
    "--recipe", "recipe_file", type=click.Path(path_type=Path), help="YAML file in place of the pass flags."
)
@options.timing(
    "--threads", type=options.count(bounds.THREADS), default=None, help="Compute threads while measuring.  [default: 1]"
)
@options.workers_or_machine
@options.model(
    "--static-batch", type=options.count(bounds.BATCH), help="Fix the batch size instead of leaving it free."
)
@options.model("--dynamic-size", is_flag=True, help="Leave height and width of images free, like the batch.")
@options.model(
    "--dynamic",
    metavar="NAME",
    multiple=True,
    help="Leave a length free: 'sequence' for dimension 1 of all inputs, input_ids:1=sequence, with a range "
    "sequence:16..512. Again, or with commas, for more.",
)
@options.metric
@options.model("--outputs", metavar="NAME[,NAME...]", help="Outputs of the model that files have.  [default: all]")
@options.judgement(
    "--max-drop",
    metavar="POINTS",
    help="What INT8, half or cutting may cost of the metric, in its unit (points of a share): INT8 layers go back to "
    "float until the file keeps that.",
)
@options.min_accuracy
@options.judgement(
    "--min-sqnr", metavar="DB", type=float, help="The same without labels: dB that the outputs must keep."
)
@options.judgement(
    "--layer-timing/--no-layer-timing",
    default=True,
    help="Time each layer and keep in float what INT8 makes slower here.  [default: on]",
)
def run(model: str, **given: Any) -> None:
    """Optimize MODEL (.pt, .pth, .pt2, TorchScript, .safetensors, .onnx or package.module:factory) and report on it."""
    recipe = recipe_of(given)
    from optimize.report.run import tell_run
    from optimize.workers import working
    from optimize.workflow import run_job

    workers, machine = options.workers_and_machine(given["on"])
    with options.phases() as phases, working(workers, threads=recipe.threads, trust=given["trust"]):
        report = run_job(options.job_of(model, recipe, given, out=given["out"], on=machine), progress=phases.update)
    options.tell(tell_run(report), lambda: report)
    options.told("Report", given["out"] / "report.html")
    if any(row.status == "not_run" and row.path and row.notes for row in report.rows):
        options.told("How to rebuild and run elsewhere what did not run here: its notes in", given["out"] / "report.md")
    sys.exit(exit_code(report))


def exit_code(report: Report) -> int:
    """Return 4 when a target was unavailable (no file was made), 1 when one failed or misses the bound, else 0.

    And 3 where a float32 file answers differently, or the samples do not tell whether a file keeps the bound.
    """
    if any(row.status == "not_run" and row.path is None for row in report.rows):
        return 4
    kept = {row.bound.met for row in report.rows if row.bound is not None}
    failed = {row.differs for row in report.rows if row.status == "failed"}
    if False in kept or False in failed:
        return 1
    return 3 if None in kept or failed else 0


def recipe_of(given: dict[str, Any]) -> Recipe:
    """Return the recipe that the options or the file describe; options for data and targets win over the file's."""
    targets = _targets(given)
    if given["recipe_file"]:
        require_file(given["recipe_file"])  # this and what follows before what takes seconds to import
    else:
        _require_targets(targets)
    for name in targets:
        find_target(name)
    from optimize.recipe import Recipe, parse, read

    flags = _pass_entries(given)
    overrides = {**given, "targets": targets, "eval": given["evaluate"], "dynamic": ",".join(given["dynamic"])}
    overrides |= {
        "dynamic_size": given["dynamic_size"] or None,
        "layer_timing": None if given["layer_timing"] else False,
    }
    overrides |= {"preprocess": options.preprocessing(given), "mean": None, "std": None}
    content: dict[str, Any] = {"passes": flags}
    if given["recipe_file"]:
        if flags:
            raise UsageError("--recipe names the passes already.", hint="Leave out the pass flags, or edit the recipe.")
        content = read(given["recipe_file"], trust=given["trust"]).model_dump(exclude_defaults=True)
    given_keys = ((key, overrides.get(key)) for key in Recipe.model_fields)
    chosen = {key: value for key, value in given_keys if value or value == 0}
    if given["keep"]:
        chosen["keep"] = [*content.get("keep", ()), *given["keep"].split(",")]
    asked_anew = {"keep", "cpu", "metric", "max_drop", "min_accuracy", "min_sqnr", "latency"}
    if not asked_anew.isdisjoint(chosen):  # it was decided for something else
        content.pop("decided", None)
    written = chosen.get("targets") or content.get("targets", ())
    texts = [*given["target_options"], *_opset(given["opset"], written)]
    target_options = _target_options(texts, content.get("target_options", {}))
    recipe = parse({**content, **chosen, "target_options": target_options}, source="options")
    _require_targets(recipe.targets)
    return recipe


def _require_targets(targets: Sequence[str]) -> None:
    if not targets:
        raise UsageError("No target was given.", hint="Add --to onnx, for example; 'optimize targets' lists them.")


def _pass_entries(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the passes that the flags ask for, in the order they run."""
    reparameterize = given["fuse"] if given["reparam"] is None else given["reparam"]
    half, merge, timed = _half(given), given["depth"] or {}, {"of": "time"} if given["latency"] else {}
    cut = given["prune"] or ({"ratio": _MOST_CUT, **timed} if timed and not merge else {})
    if given["criterion"] and not cut:
        raise UsageError("--criterion says which channels go first, and none goes.", hint="Add --prune macs=0.5.")
    cut = {**cut, "criterion": given["criterion"]} if given["criterion"] else cut
    static = given["int8"] == "static"
    if given["mixed"] and not static:
        raise UsageError("--mixed needs static INT8 to mix with.", hint="Add --int8.")
    if given["effort"] and not static:
        raise UsageError(
            "--effort says what static INT8 may take to make.", hint="Add --int8; recipes name the passes."
        )
    if given["int4"] and given["weights"]:
        raise UsageError("--int4 and --weights say the same of two numbers of bits.", hint="Leave out --int4.")
    few = given["weights"] or (4 if given["int4"] else 0)
    entries = [
        *(_including(given) if given["include_preprocess"] else ()),
        *presets.fusing(fuse=given["fuse"], reparameterize=reparameterize),
        *presets.chosen((merge, "ReduceDepth", {**timed, **merge}), (cut, "PruneChannels", cut)),
        *(presets.quantizing(given["effort"] or "default", given["cpu"] or "any", few or 8) if static else ()),
        *(presets.quantizing_at_run_time(data=bool(given["calib"])) if given["int8"] == "dynamic" else ()),
        *presets.chosen(
            (given["int8"] == "weights", "QuantizeWeights", {}),
            (few and not static, "QuantizeWeights", {"bits": few}),
            (given["fp16"], "CastFP16", half),
            (given["bf16"], "CastBF16", half),
            (given["mixed"] == "float16", "CastFP16", {**half, "mixed": True}),
            (given["mixed"] == "bfloat16", "CastBF16", {**half, "mixed": True}),
            (given["jit"], "Script", {}),
        ),
    ]
    return presets.ordered(entries, options.named_passes(given["named_passes"]))


def _target_options(given: Sequence[str], stated: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the options of targets by name: those given, and of the recipe's stated ones the others."""
    chosen = options.target_options(given)
    return {name: {**stated.get(name, {}), **chosen.get(name, {})} for name in {**stated, **chosen}}


def _targets(given: dict[str, Any]) -> list[str]:
    names = [name.strip() for name in ",".join(given["targets"]).split(",") if name.strip()]
    if given["jit"] and "torchscript" not in names:
        names.append("torchscript")
    return list(dict.fromkeys(names))


def _half(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the passes that cast to half, those that were given.

    Raises:
        UsageError: They are given without such a pass.
    """
    asked = {"policy": given["half_policy"], "io": "half" if given["half_io"] else None}
    chosen = {name: value for name, value in asked.items() if value}
    if chosen and not (given["fp16"] or given["bf16"] or given["mixed"]):
        raise UsageError("--half-policy and --half-io say how to cast.", hint="Add --fp16, --bf16 or --mixed.")
    return chosen


def _opset(number: int | None, targets: Sequence[str]) -> list[str]:
    """Return what ``--opset`` means for those targets that have one, as ``--target-option``.

    Raises:
        UsageError: None has.
    """
    from dataclasses import fields, is_dataclass

    found = [find_target(name) for name in targets] if number else []
    names = [each.name for each in found if is_dataclass(each) and "opset" in {field.name for field in fields(each)}]
    if number and not names:
        raise UsageError("--opset is the version of an ONNX file's operators.", hint="Add --to onnx, or leave it out.")
    return [f"{name}.opset={number}" for name in names]


def _including(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the pass that takes what the options say of pictures into the files.

    Raises:
        UsageError: They do not say it, or name code for it.
    """
    found = options.preprocessing(given)
    if "transform" in found:
        raise UsageError(
            f"--include-preprocess cannot take '{shown(found['transform'])}' into a file: it is code.",
            hint="Say what it does in words: --preprocess 'resize=256 size=224 mean=0.5,0.5,0.5 std=0.5,0.5,0.5'.",
        )
    if missing := next((word for word in ("mean", "std") if word not in found), None):
        raise UsageError(
            f"--include-preprocess puts mean and std into the files, and nothing says the {missing}.",
            hint="Add --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225 (ImageNet's), or 0,0,0 and 1,1,1 for [0, 1].",
        )
    from optimize.data import ImagePreprocessing

    image = ImagePreprocessing.read(found)
    words = {"mean": list(image.mean), "std": list(image.std), "order": image.order}
    return presets.chosen((True, "IncludePreprocess", {word: value for word, value in words.items() if value != "rgb"}))
