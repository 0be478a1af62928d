"""A training loop on Hugging Face Accelerate: one device, several, or several machines, by how the program is started.

``python train.py`` trains on one device, ``torchrun --nproc-per-node 2 train.py`` on two with the same batches: each
gets its part of them, and gradients are averaged.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import operator
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import swa_utils
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint as computed_again
from torch.utils.data import DataLoader, Dataset, IterableDataset

from optimize import processor
from optimize.bounds import require_trained
from optimize.errors import Refused, TargetUnavailable, UsageError, blaming, nearest
from optimize.progress import Progress, silent
from optimize.regular import find, shown
from optimize.training import checkpoint
from optimize.training.losses import Labels, Lesson, Loss
from optimize.training.masks import Masks, Pruner

_SLOW = (
    "This processor has no instruction for products of bfloat16: they take many times as long as in float32, nine "
    "times for a ResNet-20. precision='float32' trains as well."
)
_FITTING = (
    "A batch is a pair of tensors: what the module takes, alone, as a tuple or a dictionary, and what losses read."
)
#: What numbers are, and from where to where.
_RANGES: dict[str, tuple[type, float, float]] = {
    "epochs": (Integral, 1, math.inf), "accumulate": (Integral, 1, math.inf), "seed": (Integral, -math.inf, math.inf),
    "warm_up": (Real, 0, 1), "average": (Real, 0, 1), "rate": (Real, 0, 1e6), "clip": (Real, 0, math.inf),
}  # fmt: skip
_PRECISIONS = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
_DONE = (
    "Nothing is trained: '{}' holds this training's end. Remove it, or give another folder, to train anew, as with "
    "other data."
)
#: Numbers of each weight that a checkpoint knows a training's beginning by, and how near they are: what a network is
#: prepared for may be computed on another processor.
_LOOKED_AT, _ALIKE = 8, 1e-2
#: Letters that a module says of itself in a checkpoint's name.
_LONGEST = 60
#: What a checkpoint tells of a training beside its rate, optimizer, seed and losses, where somebody chose it.
_TOLD = ("accumulate", "warm_up", "precision", "clip", "average", "keep_zeros")


@dataclass(frozen=True)
class History:
    """What became of a training.

    Attributes:
        losses: Mean loss of each epoch.
        scores: What ``judge`` said after each; empty without it.
        movement: Of each parameter by name, how far it was moved away from zero: ``-sum(w * dL/dw)`` over the steps
            (V. Sanh et al., 2020, arXiv 2005.07683). Empty where it was not asked for.
    """

    losses: tuple[float, ...]
    scores: tuple[float, ...] = ()
    movement: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def best(self) -> int:
        """The epoch, from 0, whose weights the module has: that of the highest score, the last without scores."""
        return max(range(len(self.scores)), key=self.scores.__getitem__, default=len(self.losses) - 1)


@dataclass(frozen=True)
class Training:
    """A training loop: called with a module, it trains its parameters in place and leaves it in evaluation mode.

    It is what ``QuantizeAware(train=...)`` takes, and trains what ``narrow`` and ``insert_branches`` return.

    Attributes:
        data: A ``DataLoader``, or batches that can be gone through again: pairs of inputs (a tensor, a tuple or a
            dictionary) and labels, or inputs alone where no loss reads labels.
        losses: What is made small, summed.
        teacher: What losses compare with, in evaluation mode; the module itself for what it was before.
        epochs: How often all data is seen.
        rate: The highest learning rate: it rises linearly, and falls as a half cosine to 0.
        warm_up: Share of the steps that it rises in.
        optimizer: Makes one from parameters, its rates the highest in place of ``rate``; SGD with Nesterov momentum
            of 0.9 and weight decay of 5e-4 if None.
        accumulate: Batches whose gradients make one step.
        precision: What products are computed in; the weights stay as they are. A processor that does not multiply
            ``bfloat16`` takes many times as long, and a ``UserWarning`` says so.
        clip: Longest gradient; None leaves them.
        average: Decay of the moving average of the weights that the module gets at the end; None for the last weights.
        judge: Says how good a module is, larger is better, after each epoch, on the device it is trained on; the module
            gets the best epoch's weights.
        patience: Epochs without a better score after which it stops; None for all of them.
        folder: Where a checkpoint is kept after each epoch, named by the ``extra_repr`` of the module where it has one;
            a training that was cut off goes on from it.
        seed: Of the order of a ``DataLoader`` that shuffles, of dropout, and of what the data draws from ``random`` and
            NumPy: each epoch has its own.
        prune: What is zero at which step, such as ``Gradual``.
        keep_zeros: Whether weights that are zero stay zero (biases may begin at zero and learn).
        movement: Whether ``History.movement`` is gathered.
        recompute: Names of modules, such as a network's blocks, that keep nothing but inputs and outputs in memory:
            what is inside is computed again for the gradients.
        progress: Told which share is done.

    Example:
        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch._C.Generator object at ...>
        >>> net, batches = nn.Linear(4, 3), [(torch.randn(8, 4), torch.randint(3, (8,)))]
        >>> history = Training(batches, epochs=20, rate=0.5)(net)
        >>> history.losses[-1] < history.losses[0]
        True
    """

    data: Iterable[Any]
    losses: Sequence[Loss] = (Labels(),)
    teacher: nn.Module | None = None
    epochs: int = 1
    rate: float = 0.05
    warm_up: float = 0.05
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    accumulate: int = 1
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    clip: float | None = None
    average: float | None = None
    judge: Callable[[nn.Module], float] | None = None
    patience: int | None = None
    folder: str | Path | None = None
    seed: int = 0
    prune: Pruner | None = None
    keep_zeros: bool = False
    movement: bool = False
    recompute: Sequence[str] = ()
    progress: Progress | None = None

    def __post_init__(self) -> None:
        """Check what can be.

        Raises:
            UsageError: A number is out of its range, or the data is gone once it was gone through.
        """
        for name, (kind, low, high) in _RANGES.items():
            value: Any = getattr(self, name)
            if value is None:
                continue
            is_number = isinstance(value, kind)
            if not is_number:
                raise UsageError(f"{name}={value!r} is no {'whole ' * (kind is Integral)}number.")
            if not low <= value <= high:
                raise UsageError(f"{name}={value} is not from {low} to {high:g}.")
        if self.precision not in _PRECISIONS:
            raise UsageError(f"precision='{self.precision}' is none of {', '.join(_PRECISIONS)}.")
        if self.patience is not None and self.judge is None:
            raise UsageError("patience waits for a better score, and nothing judges.", hint="Give judge as well.")
        if self.prune is not None and self.judge is not None:
            hint = "Train with prune first, then with judge and keep_zeros=True."
            raise UsageError("The best epoch that judge keeps may be one before prune was done.", hint=hint)
        if isinstance(self.data, Dataset) and not isinstance(self.data, IterableDataset):
            hint = "DataLoader(dataset, batch_size=64, shuffle=True)."
            raise UsageError("Training takes batches, and a Dataset gives single samples.", hint=hint)
        if isinstance(self.data, Iterator) or not isinstance(self.data, Iterable):
            hint = "Give a list of batches, a DataLoader, or an object whose __iter__ begins anew."
            raise UsageError(
                f"Batches are wanted that can be gone through again: {type(self.data).__name__} is none.", hint=hint
            )

    def __call__(self, module: nn.Module) -> History:
        """Train a module.

        Raises:
            UsageError: There is no batch, nothing that learns, or a loss lacks what it compares.
            TargetUnavailable: Accelerate is not installed.
            Refused: A loss, a score or a weight is not finite, a batch does not fit the module or a loss, or the folder
                holds a damaged checkpoint or that of another training.
        """
        with _brought_back(module, self.teacher):
            return _Trainer(self, module).run()


class _Trainer:
    """One call of a training."""

    def __init__(self, asked: Training, module: nn.Module) -> None:
        accelerate = _import_accelerate()
        self.asked, self.module = asked, module
        accelerate.state.AcceleratorState._reset_state()  # a second training may have another precision
        self.accelerator = accelerate.Accelerator(
            cpu=not torch.accelerator.is_available(),  # unasked, it takes two processes on CPUs for strangers
            mixed_precision=_PRECISIONS[asked.precision],
            gradient_accumulation_steps=asked.accumulate,
            dataloader_config=accelerate.utils.DataLoaderConfiguration(
                split_batches=True, use_seedable_sampler=True, data_seed=asked.seed, non_blocking=True
            ),
        )
        if asked.precision == "bfloat16" and self.accelerator.device.type == "cpu" and processor.host().lacks_bfloat16:
            warnings.warn(_SLOW, stacklevel=3)
        teacher = copy.deepcopy(asked.teacher) if asked.teacher is module else asked.teacher
        self.teacher = None if teacher is None else teacher.to(self.accelerator.device).eval()
        weights = [weight for weight in module.parameters() if weight.requires_grad]
        if not weights:
            hint = "A captured graph is not trained: narrow() gives a module of your own the widths of a pruned one."
            raise UsageError(f"{type(module).__name__} has no parameter that learns.", hint=hint)
        optimizer = asked.optimizer(weights) if asked.optimizer else _sgd(weights, asked.rate)
        self.rates = [group["lr"] for group in optimizer.param_groups]
        self.student, self.optimizer = self.accelerator.prepare(module, optimizer)
        # Its own casts would stay in the module, which is judged, and captured afterwards, in float.
        self.accelerator.unwrap_model(self.student, keep_fp32_wrapper=False)
        self.batches = self._placed(asked.data)
        self.averaged = None if asked.average is None else swa_utils.AveragedModel(
            module, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(asked.average), use_buffers=True
        )  # fmt: skip
        self.steps_of_epoch = math.ceil(_length(asked.data) / asked.accumulate)
        losses = ", ".join(
            repr(each) if dataclasses.is_dataclass(each) else type(each).__name__ for each in asked.losses
        )
        told = {name: getattr(asked, name) for name in _TOLD}
        changed = [f"{name}={value!r}" for name, value in told.items() if value != getattr(Training, name)]
        rates = ", ".join(f"{rate:g}" for rate in self.rates)
        self.settings = ", ".join([
            f"{asked.epochs} epochs of {self.steps_of_epoch} steps", f"{type(module).__name__}({module.extra_repr()})",
            f"{type(optimizer).__name__} at {rates}", f"seed {asked.seed}", losses, *changed,
        ])  # fmt: skip
        self.began = torch.cat([weight.detach().flatten()[:_LOOKED_AT].double().cpu() for weight in weights])
        # Of a module that says more of itself each kind has its own: one with 4 bits is trained before one with 2.
        said = "-".join(re.findall(r"\w+", module.extra_repr().partition(",")[0]))[:_LONGEST]
        name = f"checkpoint-{said}" if said else "checkpoint"
        self.path = None if asked.folder is None else Path(asked.folder) / f"{name}.safetensors"
        self.losses, self.scores, self.best = list[float](), list[float](), dict[str, Tensor]()
        self.masks, self.share = Masks(module), 0.0
        learning = module.named_parameters(remove_duplicate=False) if asked.movement else ()
        self.movement = {name: torch.zeros_like(weight) for name, weight in learning if weight.requires_grad}

    def run(self) -> History:
        if self.asked.keep_zeros:
            self.masks.keep_zeros()
        self._resume()
        if self.losses and (len(self.losses) >= self.asked.epochs or self._is_over()):
            warnings.warn(_DONE.format(shown(str(self.path))), stacklevel=3)
        for epoch in range(len(self.losses), self.asked.epochs):
            if self._is_over():
                break
            with blaming(f"Epoch {epoch + 1} of the training", _FITTING):
                self.losses.append(self._epoch(epoch))
            self._judge()
            self._keep()
        result = self.averaged.module if self.averaged is not None else self.module
        self.module.load_state_dict(self.best or result.state_dict())
        self._prune(self.steps_of_epoch * self.asked.epochs)
        self.masks.apply()  # an average remembers what has gone
        require_trained(dict(self.module.named_parameters()))  # buffers may be masks of infinities
        self.accelerator.wait_for_everyone()
        self.module.eval()
        moved = {name: value.cpu() for name, value in self.movement.items()}
        return History(tuple(self.losses), tuple(self.scores), moved)

    def _epoch(self, epoch: int) -> float:
        """Go through the data once; return the mean loss."""
        # Dropout, and data that is changed by chance: a training that is resumed goes on alike.
        _import_accelerate().utils.set_seed((self.asked.seed + epoch) % 2**32)
        self.batches.set_epoch(epoch)
        self.module.train()
        step, total, count = epoch * self.steps_of_epoch, torch.zeros((), device=self.accelerator.device), 0
        for batch in self.batches:
            with self.accelerator.accumulate(self.student), recomputing(self.module, self.asked.recompute):
                self._set_rate(step)
                self._prune(step)
                loss = self._loss(batch)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self._look_at_gradients()
                with blaming("The optimizer", "Where it went on from a checkpoint, remove that to start anew."):
                    self.optimizer.step()
                self.optimizer.zero_grad()
                self.masks.apply()
            if self.accelerator.sync_gradients:
                step += 1
                if self.averaged is not None:
                    self.averaged.update_parameters(self.module)
                (self.asked.progress or silent)("train", step / (self.steps_of_epoch * self.asked.epochs))
            total, count = total + loss.detach(), count + 1
        mean = float(self.accelerator.reduce(total / max(count, 1), "mean"))
        if not math.isfinite(mean):
            raise Refused(f"The loss of epoch {epoch + 1} is {mean}.", hint="Lower the rate, or give clip=1.0.")
        return mean

    def _prune(self, step: int) -> None:
        """Ask again what is zero, where it is another share than before."""
        if self.asked.prune is not None:
            share = self.asked.prune.share(step, self.steps_of_epoch * self.asked.epochs)
            if share != self.share:
                self.share = share
                self.masks.choose(self.asked.prune.masks(self.module, share, self.movement))

    def _look_at_gradients(self) -> None:
        """Make them no longer than is asked; add up what they say of the weights."""
        if self.asked.clip is not None:
            self.accelerator.clip_grad_norm_(self.student.parameters(), self.asked.clip)
        elif self.movement:
            self.accelerator.unscale_gradients()
        for name, moved in self.movement.items():
            weight = self.module.get_parameter(name)
            if weight.grad is not None:
                moved -= (weight.detach() * weight.grad).nan_to_num(0.0, 0.0, 0.0)  # a step of float16 may be left out

    def _loss(self, batch: Any) -> Tensor:
        """Return the sum of the losses on a batch."""
        inputs, labels = batch if isinstance(batch, (tuple, list)) and len(batch) == 2 else (batch, None)
        pairs = [pair for loss in self.asked.losses for pair in loss.layers.items()]
        with _watch(self.module, {own for own, _ in pairs}) as inner, self.accelerator.autocast():
            outputs = _first(_call(self.student, inputs))
        taught, shown = None, dict[str, Tensor]()
        if self.teacher is not None:
            with (
                torch.no_grad(),
                _watch(self.teacher, {other for _, other in pairs}) as shown,
                self.accelerator.autocast(),
            ):
                taught = _first(_call(self.teacher, inputs)).float()
        lesson = Lesson(outputs.float(), labels, taught, inner, shown)
        return torch.stack([loss(lesson) for loss in self.asked.losses]).sum()

    def _set_rate(self, step: int) -> None:
        share = rate_at(step, self.steps_of_epoch * self.asked.epochs, self.asked.warm_up)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * share

    def _judge(self) -> None:
        """Judge what the module would be now; keep the weights where they are the best so far."""
        if self.asked.judge is None:
            return
        subject = self.averaged.module if self.averaged is not None else self.module
        with torch.no_grad(), blaming("judge", "It takes the module, and returns a number."):
            (score,) = _broadcast([float(self.asked.judge(subject.eval()))])
        if math.isnan(score):
            raise Refused(f"judge returned {score}.", hint="Lower the rate, or look at what it computes.")
        if not self.scores or score > max(self.scores):
            self.best = {name: value.detach().cpu().clone() for name, value in subject.state_dict().items()}
        self.scores.append(score)

    def _is_over(self) -> bool:
        scores, patience = self.scores, self.asked.patience
        return patience is not None and len(scores) - 1 - History((), tuple(scores)).best >= patience

    def _keep(self) -> None:
        """Write a checkpoint; whenever the program is ended, a whole one lies in the folder."""
        if self.path is not None and self.accelerator.is_main_process:
            told = {"losses": self.losses, "scores": self.scores, "best": self.best}
            checkpoint.write(self.path, self.settings, {**self._state(self.optimizer.optimizer), **told})
        self.accelerator.wait_for_everyone()

    def _resume(self) -> None:
        """Go on from a checkpoint.

        Raises:
            Refused: It is damaged, or another training's.
        """
        if (path := self.path) is None or find(path) is None:
            return
        state = checkpoint.read(path, self.settings, self._wanted)
        for name, value in checkpoint.leaves(state["optimizer"]).items():
            if name.endswith(".step") and not 0 <= float(value) < math.inf:
                raise Refused(f"The checkpoint '{shown(path)}' is damaged: '{name}' is {float(value):g}.")
        if not torch.allclose(state["began"], self.began, rtol=_ALIKE):
            what = f"The checkpoint '{shown(path)}' is of a training that began with other weights."
            raise Refused(what, hint=f"{checkpoint.HINT} A network that begins at random needs a seed to go on.")
        self.module.load_state_dict(state["module"])
        # What the user asked of it is not the file's to say.
        self.optimizer.load_state_dict({**self.optimizer.optimizer.state_dict(), **state["optimizer"]})
        if self.averaged is not None:
            self.averaged.load_state_dict(state["averaged"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.losses, self.scores, self.best = state["losses"], state["scores"], state["best"]
        self.movement = state["movement"]

    def _state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return what a checkpoint holds beside what was seen; the state of an optimizer is that of the one given."""
        scaler = self.accelerator.scaler
        return {
            "module": self.module.state_dict(),
            "optimizer": {"state": optimizer.state_dict()["state"]},
            "averaged": {} if self.averaged is None else self.averaged.state_dict(),
            "scaler": {} if scaler is None else scaler.state_dict(),
            "movement": self.movement,
            "began": self.began,
        }

    def _wanted(self, names: Collection[str]) -> dict[str, Any]:
        """Return values as a checkpoint of this training with these names holds them.

        An optimizer makes its state at its first step: a copy takes one.
        """
        self._set_rate(0)
        tried, own = copy.deepcopy(self.optimizer.optimizer), vars(self.optimizer.optimizer)
        vars(tried).update({name: own[name] for name in own.keys() - vars(tried).keys()})  # a step on a GPU reads some
        for group in tried.param_groups:
            for weight in group["params"]:
                weight.grad = torch.zeros_like(weight)
        tried.step()
        state, made = self._state(tried), tried.state_dict()["state"]
        # A parameter that had no gradient yet has no state.
        held = {name.split(".")[2] for name in names if name.startswith("optimizer.state.")}
        state["optimizer"]["state"] = {key: made[key] for key in made if str(key) in held}
        for told in ("losses", "scores"):
            state[told] = [0.0] * min(sum(name.startswith(f"{told}.") for name in names), self.asked.epochs)
        state["best"] = self.module.state_dict() if any(name.startswith("best.") for name in names) else {}
        return state

    def _placed(self, data: Iterable[Any]) -> Any:
        """Return the batches of this process, on its device."""
        sharing = self.accelerator.num_processes
        if isinstance(data, DataLoader):
            if (data.batch_size or sharing) % sharing:
                raise UsageError(f"Batches of {data.batch_size} cannot be shared out to {sharing} processes.")
            return self.accelerator.prepare(data)
        if sharing > 1:
            raise UsageError("Only a DataLoader can be shared out to several processes.")
        return self.accelerator.prepare(DataLoader(_Stream(data), collate_fn=operator.itemgetter(0)))


class _Stream(IterableDataset[Any]):
    """Batches that somebody made, as torch's loader takes them."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def rate_at(step: int, steps: int, warm_up: float) -> float:
    """Return the share of the highest rate: a linear rise, then a half cosine to 0 (arXiv 1608.03983).

    Args:
        step: From 0.
        steps: Of the whole training.
        warm_up: Share of them that it rises in.

    >>> [round(rate_at(step, 12, 0.25), 2) for step in (0, 2, 3, 6, 11)]
    [0.33, 1.0, 1.0, 0.75, 0.03]
    """
    rising = round(warm_up * steps)
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(steps - rising, 1)))


@contextlib.contextmanager
def _brought_back(*modules: nn.Module | None) -> Iterator[None]:
    """Take modules back to their devices, without the mark for which Accelerate would not move them again."""
    homes = {each: _device(each) for each in modules if each is not None}
    try:
        yield
    finally:
        for each, home in homes.items():
            vars(each.to(home)).pop("_is_accelerate_prepared", None)


@contextlib.contextmanager
def _watch(module: nn.Module, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """Yield a dictionary that gets what modules return, by their names.

    Raises:
        UsageError: There is no module of that name.
    """
    found, hooks, known = dict[str, Tensor](), [], dict(module.named_modules())
    for name in names:
        if name not in known:
            raise UsageError(f"'{name}' is no module of {type(module).__name__}.")
        hooks.append(known[name].register_forward_hook(lambda _, __, out, name=name: found.update({name: _first(out)})))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _device(module: nn.Module) -> torch.device:
    return next((weight.device for weight in module.parameters()), torch.device("cpu"))


def _call(module: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, (tuple, list)) else module(inputs)


def _first(value: Any) -> Tensor:
    """Return the first tensor of a structure."""
    found: Tensor = next(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
    return found


def _length(batches: Iterable[Any]) -> int:
    try:
        found = len(cast(Sized, batches))
    except TypeError:  # nor has a loader of what nobody has counted
        found = sum(1 for _ in batches)
    if not found:
        raise UsageError("There is no batch to train on.")
    return found


def _sgd(weights: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, rate, momentum=0.9, weight_decay=5e-4, nesterov=True)


def _broadcast(values: list[float]) -> list[float]:
    """Return what the first process has: all stop together."""
    found: list[float] = _import_accelerate().utils.broadcast_object_list(values)
    return found


def _import_accelerate() -> Any:
    try:
        import accelerate
    except ImportError as error:
        raise TargetUnavailable("Accelerate is not installed.", hint="pip install accelerate") from error
    return accelerate


@contextlib.contextmanager
def recomputing(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Let modules keep nothing but their inputs and outputs until gradients are computed, within a ``with``.

    Gradients and statistics of BatchNorm are those of the modules as they are (T. Chen et al., "Training Deep Nets
    with Sublinear Memory Cost", 2016, arXiv 1604.06174).

    Args:
        module: Whose modules they are.
        names: Their names.

    Raises:
        UsageError: There is no module of that name.
    """
    known = {name: child for name, child in module.named_modules() if name}
    with contextlib.ExitStack() as stack:
        for name in names:
            if name not in known:
                hint = nearest(name, known)
                raise UsageError(f"recompute: '{name}' is no module of {type(module).__name__}.", hint=hint)
            child = known[name]
            contexts = functools.partial(_contexts, child)
            again = functools.partial(computed_again, child.forward, use_reentrant=False, context_fn=contexts)
            stack.callback(_restore, child, vars(child).get("forward"))
            child.forward = again
        yield


def _restore(child: nn.Module, forward: Any) -> None:
    del child.forward
    if forward is not None:
        child.forward = forward


def _contexts(
    child: nn.Module,
) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    return contextlib.nullcontext(), _counted_once(child)


@contextlib.contextmanager
def _counted_once(child: nn.Module) -> Iterator[None]:
    """Let no BatchNorm take the same batch into its statistics again."""
    norms = [norm for norm in child.modules() if isinstance(norm, _BatchNorm)]
    held = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm, _, count in held:
        norm.momentum = 0.0
        norm.num_batches_tracked = None if count is None else torch.clone(count)
    try:
        yield
    finally:
        for norm, momentum, count in held:
            norm.momentum, norm.num_batches_tracked = momentum, count
