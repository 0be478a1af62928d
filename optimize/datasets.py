"""The data of one run: what calibrates, what is judged, and example inputs where nobody gives any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from optimize.costs import fitting_batch
from optimize.data import Batch, ImagePreprocessing, InputSpec, Samples, open_data, open_texts
from optimize.data.preprocessing import read_words, unsaid
from optimize.data.samples import draw_inputs
from optimize.data.sources import named_inputs
from optimize.dimensions import BATCH
from optimize.errors import OptimizeError, UsageError
from optimize.measure import quality
from optimize.measure.accuracy import Accuracy, AccuracyMeter
from optimize.measure.metrics import Metric
from optimize.program import Program
from optimize.progress import Progress, silent
from optimize.quantization.batches import FlatBatches, sample_specs
from optimize.recipe import Recipe
from optimize.regular import shown
from optimize.targets.arrays import to_array, to_tensor
from optimize.wording import plural

#: Enough to read disagreement from when no labelled data is given.
UNLABELLED_SAMPLES = 256
#: Of so many calibration samples one is judged on where nothing else is, and no pass learns from it; of fewer samples
#: than the second number none, for what is left must tell ranges.
_HELD_BACK, _FEW_SAMPLES = 4, 16
_SPREAD = 2654435761  # of multiplicative hashing (Knuth, The Art of Computer Programming 6.4)
#: Labels that the original is tried on first, and those that it is where it does not do more than guess with these.
_FEW_TRIED, _MOST_TRIED = 32, 256
#: Of fewer whole numbers in the examples others are drawn between them, of more they are shuffled.
_FEW_NUMBERS = 64


@dataclass(frozen=True)
class Datasets:
    """What one run reads.

    Attributes:
        calibration: Data that INT8 ranges are learned from; None where none was given.
        evaluation: Labelled data; None where none was given.
        said: How pictures become inputs, as far as somebody said it, by the words of ``--preprocess``.
        metric: What files are judged by; None for that which fits labels and outputs.
        included: Whether the files do themselves what was said.
        size_guessed: Whether nobody said how large the pictures are that the model takes.
        held_back: Of so many samples of the calibration data one is judged on, and no pass learns from it; 0 where
            there are few, they may come in another order, passes have them, or there are others to judge on.
        shared: Whether the labelled data is the calibration data.
    """

    calibration: Samples | None
    evaluation: Samples | None
    said: Mapping[str, str] = field(default_factory=dict)
    metric: Metric | None = None
    included: bool = False
    size_guessed: bool = False
    held_back: int = 0
    shared: bool = False

    @property
    def learned_from(self) -> Samples | None:
        """What passes learn from; None where nothing was given."""
        if self.calibration is None or not self.held_back:
            return self.calibration
        return self.calibration.picked(lambda place: not self._is_held(place))

    @property
    def judged_on(self) -> Samples | None:
        """What files are judged on; None where nothing was given."""
        if self.evaluation or self.calibration is None or not self.held_back:
            return self.evaluation or self.calibration
        return self.calibration.picked(self._is_held, UNLABELLED_SAMPLES * self.held_back)

    def _is_held(self, place: int) -> bool:
        """Say whether a sample is judged on: one of each run, wherever in it, for classes may come in turns."""
        run, inside = divmod(place, self.held_back)
        return run < UNLABELLED_SAMPLES and inside == (run * _SPREAD >> 16) % self.held_back

    @property
    def preprocessing(self) -> str:
        """How pictures became inputs, as ``--preprocess`` takes it; empty where there were none."""
        return next((data.prepared for data in (self.evaluation, self.calibration) if data and data.prepared), "")

    @property
    def unsaid(self) -> dict[str, str]:
        """The words that pictures became inputs by and that nobody said; empty where there were none."""
        used = {*read_words(self.preprocessing), "crop"} if self.preprocessing else set()
        return {word: text for word, text in unsaid(self.said).items() if word in used}

    @property
    def synthetic(self) -> bool:
        """Whether there is no data to judge on but noise."""
        return self.evaluation is None and self.calibration is None

    @property
    def warnings(self) -> list[str]:
        """What the report must say about the data."""
        found = []
        if self.evaluation is None and not (self.metric and self.metric.beside_original):
            found.append("Accuracy was not measured: no labelled data was given (--eval, in Python evaluate=).")
        if self.shared:
            found.append("Files are judged on the samples that calibrate them, which flatters what is fitted to them.")
        if self.evaluation is None and self.calibration is not None:
            learned = f"one of {self.held_back} of them, which no pass learned from"
            flattered = "them all, which flatters what is fitted to them"
            found.append(f"Of the calibration samples files are judged on {learned if self.held_back else flattered}.")
        opened = (self.calibration, self.evaluation)
        found += dict.fromkeys(note for data in opened if data is not None for note in data.notes)
        return [*found, *filter(None, (self.guessed, self.unused))]

    @property
    def unused(self) -> str:
        """That nothing was prepared as somebody said; empty where it was, or nobody said."""
        words = [word for word in ("mean", "std", "transform") if word in self.said]
        data = self.evaluation or self.calibration
        if not words or data is None or self.preprocessing or self.included:
            return ""
        what = f"{' and '.join(words)} of --preprocess were not used: '{shown(data.name)}' is no folder of pictures"
        return f"{what}, and arrays are taken as they are, uint8 divided by 255. Normalise them as in training."

    @property
    def guessed(self) -> str:
        """That pictures were prepared in a way that nobody said; empty where somebody did, or there were none."""
        words = [word for word in self.unsaid if word != "order"]  # which is RGB for all but a few
        if self.size_guessed and self.preprocessing and (size := read_words(self.preprocessing).get("size")):
            words.insert(0, f"size ({size}, guessed)")
        told = (
            f"Pictures were prepared ImageNet's way in {', '.join(words)}, because nothing else was said: if the "
            f"model was trained otherwise, change what differs in --preprocess '{self.preprocessing}'."
        )
        return told if words else ""

    def miscounted(self, found: Accuracy | None, original: Program) -> str:
        """Return that an answer names one of fewer classes than there are sub-folders, or of more; empty otherwise."""
        data, sizes = self.evaluation, original.outputs[0].meta["val"].shape[1:]
        is_of_classes = found is not None and found.guessed is not None and len(sizes) == 1
        if data is None or not is_of_classes or data.classes in (0, *sizes):
            return ""
        return (
            f"'{shown(data.name)}' has {plural(data.classes, 'sub-folder')}, the model {plural(sizes[0], 'output')}: "
            "folders are numbered from 0 by name, so a missing one shifts all behind it. An empty one keeps the place."
        )

    def left_out(self, found: Accuracy | None, original: Program) -> str:
        """Return that labelled samples were not judged, because they fill no whole batch; empty where all were."""
        count = self.evaluation.count if self.evaluation else None
        if found is None or not count or original.batch or found.samples >= count:
            return ""
        return (
            f"{found.samples:,} of {plural(count, 'labelled sample')} were judged: the model takes batches of "
            f"{original.samples}, and samples that fill none were left out. Leave --static-batch out to judge all."
        )

    def doubt(self, found: Accuracy | None, original: Program) -> str:
        """Return why an original's accuracy shows nothing of its files, and what to do; empty where it shows it."""
        if found is None or not found.no_better:
            return ""
        data = self.evaluation if self.evaluation and self.evaluation.classes else None
        labels = "labels" if data is None else f"the sub-folders of '{shown(data.name)}', counted from 0,"
        prepared = self.preprocessing and f"Pictures were prepared by --preprocess '{self.preprocessing}'."
        texts = (
            f"The original has {found.no_better}: what is no better than guessing does not show what a file loses.",
            f"Check that {labels} are the model's classes, in its order, and samples as in training.",
            self.miscounted(found, original),
            self.guessed or self.unused or prepared,
            "Where nearly all are of one class, judge by another figure: --metric package.module:callable.",
        )
        return " ".join(filter(None, texts))

    def judged(self, program: Program, batch: int, progress: Progress) -> Iterator[quality.Batch]:
        """Yield the batches that agreement and accuracy are taken on: labelled data, else what is held back, or noise.

        Args:
            program: The captured model; a fixed batch decides the size, and smaller batches are left out.
            batch: Samples a batch where the program leaves that free, and they fit into the memory.
            progress: Told how much has been read.
        """
        if not any(tensor.dim() for tensor in program.inputs):  # no inputs, or single numbers: there is no batch
            yield [to_array(tensor) for tensor in program.inputs], None
            return
        fixed = None if program.batch else program.samples
        batch = fixed or fitting_batch(program, batch)
        data = self.judged_on
        chunks = data.batches(batch) if data else _noise(program, batch)
        limit = data.count if self.evaluation and data else UNLABELLED_SAMPLES
        seen = 0
        for chunk in chunks:
            if fixed and len(chunk) != fixed:
                continue  # at the end, or where the next samples have another length
            program.require_sizes(chunk.inputs)
            # The labels of calibration data are not looked at: accuracy on what ranges were learned from flatters.
            yield [to_array(tensor) for tensor in chunk.inputs], chunk.wanted if self.evaluation else None
            seen += len(chunk)
            if limit:
                progress("judge", min(1.0, seen / limit))
            if not self.evaluation and seen >= UNLABELLED_SAMPLES:
                return

    def usual(self, program: Program) -> Program:
        """Return the program with example inputs as large as the data's sample in the middle.

        Times, and whatever else is told of one size, are then told of what the user has. A program of which nothing
        is free but the batch stays as it is.
        """
        data = self.calibration or self.evaluation
        if data is None or not set(program.free) - {BATCH}:
            return program
        read = (program.sizes_of(chunk.inputs) for chunk in islice(data.batches(1), UNLABELLED_SAMPLES))
        free = [{name: size for name, size in sizes.items() if name != BATCH} for sizes in read]
        several = sorted((sizes for sizes in free if min(sizes.values()) > 1), key=lambda sizes: prod(sizes.values()))
        return program.at(several[(len(several) - 1) // 2]) if several else program

    def try_out(self, program: Program) -> str:
        """Check on samples, the first of which a label counts, that these fit the metric, before anything is made.

        Of labels that may be guessed it takes more, until the original surely does more than that.

        Returns:
            Why its accuracy on these shows nothing of its files; empty where it shows it.

        Raises:
            Refused: They do not, no label counts, or the user's function raises.
        """
        meter = AccuracyMeter(self.metric)
        for inputs, labels in () if self.synthetic else self.judged(program, 2, silent):
            outputs = program.run([to_tensor(array) for array in inputs])
            told = dict(zip(program.output_names, map(to_array, outputs), strict=True))
            meter.update(told, told, labels)
            if meter.is_void:
                continue
            found = meter.result() if meter.metric and meter.metric.guesses else None
            in_order = found is not None and found.guessed == 1.0  # of one class: those of others come behind
            tried = _MOST_TRIED if found and found.no_better and not in_order else _FEW_TRIED
            if found is None or found.samples >= tried:
                return "" if in_order else self.doubt(found, program)
        return self.doubt(meter.result(), program)


def open_datasets(
    recipe: Recipe,
    program: Program,
    *,
    evaluate: Any = None,
    calibrate: Any = None,
    metric: Metric | None = None,
    taught: bool = False,
) -> Datasets:
    """Open and check the data of a run against what the program takes.

    Args:
        recipe: Names the data.
        program: The captured model.
        evaluate: Labelled data of a Python caller, in place of the recipe's.
        calibrate: What a Python caller's passes are calibrated on, where the recipe names nothing.
        metric: What files are judged by; labels are numbers of classes where nobody says.
        taught: Whether a Python caller has given the passes their data: nothing of it can be held back.

    Raises:
        OptimizeError: The data is missing, damaged or does not fit.
    """
    specs, image = sample_specs(program), ImagePreprocessing.read(recipe.preprocessing)
    labelled = evaluate if evaluate is not None else recipe.eval
    held = None if calibrate is None else FlatBatches(program, calibrate).samples
    wanted = {"labelled": metric is None or not metric.beside_original, "classes": metric is None}
    try:
        given = open_data(recipe.calib, inputs=specs, image=image) if recipe.calib else held
        return Datasets(
            calibration=given,
            evaluation=open_data(labelled, inputs=specs, image=image, **wanted) if labelled is not None else None,
            said=recipe.preprocessing,
            metric=metric,
            included=any(entry.name == "IncludePreprocess" for entry in recipe.passes),
            size_guessed=bool(program.guessed) and "size" not in recipe.preprocessing,
            shared=labelled == recipe.calib if isinstance(labelled, str) else labelled is calibrate is not None,
            held_back=0 if taught else _share(given, program, recipe.held_back, others=labelled is not None),
        )
    except UsageError as error:
        raise UsageError(error.what, hint="\n".join(filter(None, (error.hint, program.guessed)))) from error


def _share(data: Samples | None, program: Program, asked: int | None, *, others: bool) -> int:
    """Return of how many samples one is held back, or 0.

    None is of samples that nobody has counted: they come from a generator, in an order that may be another each time.
    """
    if data is None or (data.count or 0) < _FEW_SAMPLES or any(dims.get(0) != BATCH for dims in program.dynamic):
        return 0
    return asked or (0 if others else _HELD_BACK)


def example_inputs(recipe: Recipe, takes: Mapping[str, bool] = MappingProxyType({})) -> tuple[torch.Tensor, ...]:
    """Return example inputs from ``--input-shape``, or the first samples of the data where the shape is not given.

    Args:
        recipe: What is asked.
        takes: The arguments of the model, and whether it can do without each; none where nobody knows them.

    Raises:
        UsageError: Neither shape nor data is given, or the shape is malformed.
    """
    samples, spec = recipe.static_batch or 2, recipe.calib or recipe.eval
    if recipe.input_shape or spec is None:
        return draw_inputs(recipe.input_shape, samples)
    chunk = next(_open_of_any_rank(spec, ImagePreprocessing.read(recipe.preprocessing), takes).batches(samples))
    return tuple(torch.cat([tensor] * samples)[:samples] for tensor in chunk.inputs)


def _noise(program: Program, batch: int) -> Iterator[Batch]:
    """Yield batches of normal noise, and for other inputs of example values shuffled, or of others between them."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(-(-UNLABELLED_SAMPLES // batch)):
        yield Batch(tuple(_fresh(tensor, generator) for tensor in program.sample(batch)))


def _fresh(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    if tensor.numel() < _FEW_NUMBERS and tensor.dtype is not torch.bool:  # a category of each sample: two in all
        low, high = int(tensor.min()), int(tensor.max())
        return torch.randint(low, high + 1, tensor.shape, generator=generator).to(tensor.dtype)
    return tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].reshape(tensor.shape)


def _open_of_any_rank(spec: str, image: ImagePreprocessing, takes: Mapping[str, bool]) -> Samples:
    """Open data of one input whose rank is not known yet, of several that a file names, or of texts."""
    if image.tokenizer:
        return open_texts(spec, image, takes)
    if inputs := named_inputs(Path(spec), takes):
        return open_data(spec, inputs=inputs)
    refusals: list[OptimizeError] = []
    for rank in (3, 1, 2, 4):
        try:
            return open_data(spec, inputs=[InputSpec("x", (None,) * rank)], image=image)
        except OptimizeError as error:
            refusals.append(error)
    raise refusals[0]
