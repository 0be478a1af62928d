"""The training loop: what it computes, that it stops and goes on, on one process and on two."""

import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import optimize
from optimize import processor
from optimize.errors import OptimizeError, Refused, UsageError
from optimize.training import Attention, Features, Labels, Logits, Similarity, Training
from optimize.training.loop import _Trainer, rate_at

Batches = list[tuple[Tensor, Tensor]]


@pytest.fixture
def batches() -> Batches:
    torch.manual_seed(0)
    return [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(4)]


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def plain(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, 0.1)


def parts(data: Batches) -> DataLoader[Any]:
    x, y = (torch.cat(column) for column in zip(*data, strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=len(data[0][0]))


def test_steps_are_those_of_a_loop_by_hand(batches: Batches) -> None:
    module, by_hand = net(), net()
    history = Training(batches, epochs=2, optimizer=plain, warm_up=0.0)(module)
    optimizer, step, sums = torch.optim.SGD(by_hand.parameters(), 0.1), 0, []
    for _ in range(2):
        losses = []
        for x, y in batches:
            optimizer.param_groups[0]["lr"] = 0.05 * (1 + torch.cos(torch.tensor(torch.pi * step / 8)).item())
            loss = nn.functional.cross_entropy(by_hand(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            step += 1
        sums.append(sum(losses) / 4)
    assert not module.training and history.losses == pytest.approx(sums, rel=1e-6)
    for found, wanted in zip(module.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


def test_the_rate_rises_then_falls_to_zero() -> None:
    shares = [rate_at(step, 100, 0.1) for step in range(101)]
    assert shares[:11] == sorted(shares[:11]) and shares[10:] == sorted(shares[10:], reverse=True)
    assert shares[9] == shares[10] == 1 and shares[100] == pytest.approx(0) and rate_at(0, 1, 0.05) == 1


def test_accumulated_batches_are_one_large_one(batches: Batches) -> None:
    large = [tuple(map(torch.cat, zip(*batches[at : at + 2], strict=True))) for at in (0, 2)]
    apart, together = net(), net()
    Training(batches, optimizer=plain, accumulate=2)(apart)
    Training(large, optimizer=plain)(together)
    for found, wanted in zip(apart.parameters(), together.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_what_is_left_over_is_a_step_too(batches: Batches) -> None:
    steps = []
    told = Training(batches[:3], optimizer=plain, accumulate=2, progress=lambda phase, share: steps.append(share))
    told(net())
    assert steps == [0.5, 1.0]


def test_the_average_is_a_moving_one(batches: Batches) -> None:
    module, weights = net(), []

    class Kept(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            weights.append(self.param_groups[0]["params"][0].detach().cpu().clone())

    start = next(module.parameters()).detach().clone()
    Training(batches, optimizer=lambda given: Kept(given, 0.1), average=0.75)(module)
    wanted = weights[0]  # the first is taken as it is
    for value in weights[1:]:
        wanted = 0.75 * wanted + 0.25 * value
    torch.testing.assert_close(next(module.parameters()), wanted)
    assert not torch.equal(start, wanted)


def test_the_best_epoch_is_kept_and_patience_ends(batches: Batches) -> None:
    scores, states = iter([1.0, 3.0, 2.0, 2.5, 9.0]), []

    def judge(module: nn.Module) -> float:
        assert not module.training
        states.append({name: value.cpu().clone() for name, value in module.state_dict().items()})
        return next(scores)

    module = net()
    history = Training(batches, epochs=5, judge=judge, patience=2)(module)
    assert history.scores == (1.0, 3.0, 2.0, 2.5) and history.best == 1 and len(history.losses) == 4
    for name, value in module.state_dict().items():
        assert torch.equal(value, states[1][name]), name


def test_nothing_of_accelerate_stays_in_a_module(batches: Batches) -> None:
    """By its mark it would leave a module that is trained again where it is, and several processes unsynchronized."""
    module = net()
    before = set(vars(module))
    Training(batches)(module)
    assert set(vars(module)) == before
    with pytest.raises(Refused, match="The loss of epoch 1"):
        Training([(x * math.nan, y) for x, y in batches])(module)
    assert set(vars(module)) == before


def test_a_network_learns_from_what_it_was(batches: Batches) -> None:
    module, before = net(), net()
    unlabelled = [x for x, _ in batches]
    with torch.no_grad():
        module[0].weight.mul_(0.5)
    losses = (Logits(), Features({"1": "1"}), Similarity({"2": "2"}), Similarity({"2": "0"}, 0.01))
    history = Training(unlabelled, losses, before, epochs=30, rate=0.1)(module)
    assert history.losses[-1] < 0.5 * history.losses[0]
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), net().parameters(), strict=True))
    itself = net()
    assert Training(unlabelled, (Logits(),), itself)(itself).losses[0] < 1e-3  # of itself it can learn nothing


def test_half_precision_trains_float_weights(batches: Batches) -> None:
    module = net()
    history = Training(batches, epochs=20, rate=0.5, precision="bfloat16")(module)
    assert history.losses[-1] < history.losses[0]
    assert {value.dtype for value in module.parameters()} == {torch.float32}
    fresh, x = net(), batches[0][0]
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(module(x), fresh(x))  # nothing of the casts is left in it


@pytest.mark.skipif(torch.accelerator.is_available(), reason="not trained on the processor")
@pytest.mark.parametrize(("flags", "slow"), [({"fpu", "avx2"}, 1), ({"fpu", "avx512_bf16"}, 0)])
def test_a_processor_that_multiplies_no_bfloat16_is_told(
    flags: set[str], slow: int, batches: Batches, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(processor, "host", lambda: processor.Processor(flags=frozenset(flags)))
    Training(batches)(net())
    Training(batches, precision="bfloat16")(net())
    told = [each for each in recwarn if "no instruction for products of bfloat16" in str(each.message)]
    assert len(told) == slow and all(each.filename == __file__ for each in told)


def test_inputs_may_be_several_and_named() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 3)

        def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
            return {"logits": self.line(left + right)}

    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    named = Training([({"left": x, "right": x}, y)])(torch.nn.Sequential(Sum())[0]).losses
    assert len(named) == 1 and len(Training([((x, x), y)])(Sum()).losses) == 1


def test_pruned_and_quantized_networks_are_trained_by_it(batches: Batches) -> None:
    module = net()
    program = optimize.capture(module, (batches[0][0],))
    pruned = optimize.Pipeline([optimize.PruneChannels(0.5, round_to=1)]).run(program).program
    thin = optimize.narrow(module, pruned)
    history = Training(batches, (Labels(), Logits(temperature=2.0)), module, epochs=10, rate=0.2)(thin)
    assert thin[0].out_features == 4 and history.losses[-1] < history.losses[0]
    again = optimize.capture(thin, (batches[0][0],))
    train = Training([x for x, _ in batches], (Logits(),), thin, epochs=2, rate=0.01)
    aware, _ = optimize.QuantizeAware(train, calibration=[batches[0][0]]).apply(again)
    assert aware.quantization is not None
    found, wanted = aware(batches[0][0]), thin(batches[0][0])
    assert float((found - wanted).norm() / wanted.norm()) < 0.5


@pytest.mark.parametrize(
    "change, match",
    [
        ({"epochs": 0}, "epochs=0 is not from 1"),
        ({"epochs": "3"}, "epochs='3' is no whole number"),
        ({"accumulate": 1.5}, r"accumulate=1\.5 is no whole number"),
        ({"rate": float("nan")}, r"rate=nan is not from 0 to 1e\+06"),
        ({"warm_up": 1.5}, "warm_up=1.5 is not from 0 to 1"),
        ({"data": iter([])}, "can be gone through again: list_iterator is none"),
        ({"data": 5}, "can be gone through again: int is none"),
        ({"precision": "int8"}, "precision='int8' is none of"),
        ({"patience": 2}, "nothing judges"),
    ],
)
def test_what_cannot_be_is_said_at_once(change: dict[str, Any], match: str, batches: Batches) -> None:
    with pytest.raises(UsageError, match=match):
        Training(**{"data": batches, **change})


@pytest.mark.parametrize(
    "data, losses, match",
    [
        ([], (Labels(),), "no batch"),
        ([torch.randn(8, 4)], (Labels(),), "no labels"),
        ([torch.randn(8, 4)], (Features({"9": "1"}),), "'9' is no module of Sequential"),
        (
            [(torch.full((8, 4), float("nan")), torch.zeros(8, dtype=torch.int64))],
            (Labels(),),
            "loss of epoch 1 is nan",
        ),
        ([torch.randn(8, 4)], (Attention({"0": "0"}),), r"Values of shape \[8, 8\] have no places"),
        (
            [(torch.randn(8, 4), torch.full((8,), 7))],
            (Labels(),),
            "Epoch 1 of the training raised IndexError: Target 7",
        ),
        ([(torch.randn(8, 3), torch.zeros(8))], (Labels(),), "Epoch 1 of the training raised RuntimeError: mat1"),
    ],
)
def test_what_goes_wrong_is_a_sentence(data: Any, losses: Any, match: str) -> None:
    with pytest.raises(OptimizeError, match=match):
        Training(data, losses, net())(net())


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Samples that nobody has counted, with labels of 32 bits."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for place in range(20):
            yield torch.randn(4, generator=generator), torch.tensor(place % 3, dtype=torch.int32)


def test_a_stream_of_samples_is_trained_on() -> None:
    samples = [*Stream()]
    parts = [[*zip(*samples[at : at + 8], strict=True)] for at in range(0, 20, 8)]
    counted = [(torch.stack(x), torch.stack(y).long()) for x, y in parts]
    histories = [Training(data, epochs=2)(net()) for data in (DataLoader(Stream(), batch_size=8), counted)]
    assert histories[0].losses == pytest.approx(histories[1].losses)


def test_masks_of_infinities_are_no_weights(batches: Batches) -> None:
    module = net()
    module.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
    assert Training(batches)(module).losses


def test_what_is_no_number_is_refused(batches: Batches) -> None:
    for judge, told in ((lambda _: math.nan, "judge returned nan"), (lambda _: None, "judge raised TypeError")):
        with pytest.raises(Refused, match=told):
            Training(batches, judge=judge)(net())  # type: ignore[arg-type, return-value]

    class Last(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["params"][0].data.fill_(math.nan)

    with pytest.raises(Refused, match=r"Training left '0\.weight' not finite"):
        Training(batches[:1], optimizer=lambda weights: Last(weights, 0.1))(net())


def test_what_does_not_learn_is_said(batches: Batches) -> None:
    program = optimize.capture(net(), (batches[0][0],))
    with pytest.raises(UsageError, match="Program has no parameter that learns") as caught:
        Training(batches)(program.graph_module)
    assert "narrow()" in caught.value.hint


def test_a_checkpoint_is_of_one_training(batches: Batches, tmp_path: Path) -> None:
    Training(batches, folder=str(tmp_path))(net())
    assert [place.name for place in tmp_path.iterdir()] == ["checkpoint.safetensors"]
    with pytest.raises(Refused, match="The checkpoint is of 1 epochs of 4 steps"):
        Training(batches, epochs=2, folder=tmp_path)(net())
    others = ({"clip": 1.0}, {"warm_up": 0.5}, {"average": 0.9}, {"keep_zeros": True})
    for change in ({"rate": 0.01}, {"seed": 5}, {"losses": (Labels(smoothing=0.1),)}, *others):
        with pytest.raises(Refused, match="The checkpoint is of 1 epochs of 4 steps"):
            Training(batches, folder=tmp_path, **change)(net())
    other = net()
    torch.nn.init.normal_(other[0].weight)
    with pytest.raises(Refused, match="is of a training that began with other weights"):
        Training(batches, folder=tmp_path)(other)
    with pytest.warns(UserWarning, match="Nothing is trained: '.*' holds this training's end"):
        Training(batches, folder=tmp_path)(net())


def test_the_only_checkpoint_is_there_until_the_next_is(batches: Batches, tmp_path: Path, monkeypatch: Any) -> None:
    training, path = Training(batches, folder=tmp_path), tmp_path / "checkpoint.safetensors"
    training(net())
    before = path.read_bytes()

    def write(tensors: object, place: Path, metadata: object) -> None:
        place.write_bytes(b"half of it")
        assert path.read_bytes() == before
        raise SafetensorError("No space left on device")

    with monkeypatch.context() as patched, pytest.raises(Refused, match="cannot be written: No space left"):
        patched.setattr("optimize.training.checkpoint.save_file", write)
        _Trainer(training, net())._keep()
    assert path.read_bytes() == before
    own = tmp_path / ".checkpoint-before-tuning.safetensors"
    for place in (own, tmp_path / ".checkpoint-0123abcd.safetensors"):  # the second of one that was killed
        place.write_bytes(b"weights")
    _Trainer(training, net())._keep()
    assert {*tmp_path.iterdir()} == {path, own}


class Code:
    """What runs when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_a_checkpoint_of_somebody_else_runs_no_code(batches: Batches, tmp_path: Path) -> None:
    training = Training(batches, epochs=2, folder=tmp_path / "kept", average=0.5, judge=lambda _: 0.0)
    training(net())
    found = [place for place in (tmp_path / "kept").rglob("*") if place.is_file()]
    for place in found:
        whole = place.read_bytes()
        torch.save(Code(tmp_path / "owned"), place)
        with pytest.raises(Refused, match="is damaged") as caught:
            training(net())
        assert not (tmp_path / "owned").exists() and "remove it to start anew" in caught.value.hint
        place.write_bytes(whole)
    assert found and len(training(net()).losses) == 2


DAMAGED: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "'module.0.bias' is not in both": lambda held: held.pop("module.0.bias"),
    "'ghost' is not in both": lambda held: held.update(ghost=torch.zeros(1)),
    r"'module.0.bias' is torch.float32 \[9\], not torch.float32 \[8\]": lambda held: held.update(
        {"module.0.bias": torch.zeros(9)}
    ),
    r"'optimizer.state.0.momentum_buffer' is torch.float32 \[1\]": lambda held: held.update(
        {"optimizer.state.0.momentum_buffer": torch.zeros(1)}
    ),
    r"'optimizer.param_groups.\[0\].momentum' is not in both": lambda held: held.update(
        {"optimizer.param_groups.[0].momentum": torch.tensor(0.9)}
    ),
    r"'losses.\[2\]' is not in both": lambda held: held.update(
        {f"losses.[{place}]": torch.zeros(1) for place in range(3)}
    ),
    "'best.0.bias' is not in both": lambda held: held.update({"best.9": torch.zeros(1)}),
}


@pytest.mark.parametrize("match", DAMAGED)
def test_a_checkpoint_holds_what_the_training_has(match: str, batches: Batches, tmp_path: Path) -> None:
    path, training, module = tmp_path / "checkpoint.safetensors", Training(batches, epochs=2, folder=tmp_path), net()
    training(net())
    with safe_open(path, "pt") as file:
        about = file.metadata()
    held = load_file(path)
    DAMAGED[match](held)
    save_file(held, path, about)
    with pytest.raises(Refused, match=match):
        training(module)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), net().parameters(), strict=True))


@pytest.mark.parametrize("step", [-1.0, float("nan"), float("inf")])
def test_a_count_that_none_is_is_refused(step: float, batches: Batches, tmp_path: Path) -> None:
    path, training = tmp_path / "checkpoint.safetensors", Training(batches, epochs=1, folder=tmp_path, optimizer=Adam)
    training(net())
    with safe_open(path, "pt") as file:
        about = file.metadata()
    held = load_file(path)
    save_file({**held, "optimizer.state.0.step": torch.tensor(step)}, path, about)
    with pytest.raises(Refused, match=r"'state\.0\.step' is (-1|nan|inf)"):
        training(net())


def test_what_an_optimizer_raises_is_told(batches: Batches) -> None:
    def broken(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        made = Adam(weights)
        made.step = lambda *_: 1 / 0  # type: ignore[method-assign]
        return made

    with pytest.raises(Refused, match="The optimizer raised ZeroDivisionError"):
        Training(batches, optimizer=broken)(net())


@pytest.mark.parametrize("content", [b"", b"\x08" + bytes(7) + b"{}      ", b"\xff" * 100])
def test_a_damaged_checkpoint_is_refused(content: bytes, batches: Batches, tmp_path: Path) -> None:
    (tmp_path / "checkpoint.safetensors").write_bytes(content)
    with pytest.raises(Refused, match="checkpoint"):
        Training(batches, folder=tmp_path)(net())


def test_a_checkpoint_is_a_regular_file(batches: Batches, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "checkpoint.safetensors")
    with pytest.raises(Refused, match="is a fifo"):
        Training(batches, folder=tmp_path)(net())


class Unsure(nn.Module):
    """It has a parameter that no answer depends on, and one that learns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.fixed = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.tensor([random.random() + np.random.rand()], dtype=torch.float32)  # as data that is changed
        return self.fixed(self.used(nn.functional.dropout(x, 0.5, self.training))) + noise.to(x.device)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda weights: torch.optim.AdamW(weights, 0.1, amsgrad=True),
        lambda weights: torch.optim.Adafactor(weights, 0.1),
        lambda weights: torch.optim.Rprop([{"params": weights[:1]}, {"params": weights[1:], "lr": 1}], 0.1),
        lambda weights: torch.optim.SGD(weights, 0.1),
    ],
)
def test_what_was_cut_off_goes_on_to_the_same_bits(optimizer: Any, batches: Batches, tmp_path: Path) -> None:
    def train(folder: Path | None, stop: float) -> tuple[optimize.training.History, nn.Module]:
        def judge(module: nn.Module) -> float:
            said.append(-math.inf)
            if len(said) > stop:
                raise KeyboardInterrupt
            return said[-1]

        torch.manual_seed(0)
        module, said = Unsure(), list[float]()
        how = {"epochs": 4, "accumulate": 3, "average": 0.5, "folder": folder}
        training = Training(batches, optimizer=optimizer, judge=judge, **how)
        return training(module), module

    whole, wanted = train(None, math.inf)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, 2)
    random.seed(9), np.random.seed(9)
    again, found = train(tmp_path, math.inf)
    assert again == whole and len(again.scores) == 4
    assert all(torch.equal(found.state_dict()[name], value) for name, value in wanted.state_dict().items())


def test_what_gradients_are_scaled_by_is_kept(batches: Batches, tmp_path: Path) -> None:
    before, after = (_Trainer(Training(batches, folder=tmp_path), net()) for _ in range(2))
    before.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    after.accelerator.scaler = torch.amp.GradScaler("cpu")
    before._keep()
    after._resume()
    assert after.accelerator.scaler.get_scale() == 2.0


def ran(*words: object) -> int:
    alone = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # two processes would need two GPUs
    command = [sys.executable, "-m", *map(str, words)]
    return subprocess.run(command, timeout=200, capture_output=True, env=alone).returncode


def left(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "weights.pt")
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a training in one process without a stop leaves."""
    folder = tmp_path_factory.mktemp("whole")
    assert ran("tests.training.work", folder, 99) == 0
    return left(folder)


def test_a_killed_training_goes_on_to_the_same_weights(whole: dict[str, Any], tmp_path: Path) -> None:
    assert ran("tests.training.work", tmp_path, 2) == -signal.SIGKILL and not (tmp_path / "weights.pt").exists()
    assert ran("tests.training.work", tmp_path, 99) == 0
    found = left(tmp_path)
    assert found["losses"] == whole["losses"]
    assert all(torch.equal(found["state"][name], value) for name, value in whole["state"].items())


def test_two_processes_train_as_one(whole: dict[str, Any], tmp_path: Path) -> None:
    assert (
        ran("torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "tests.training.work", tmp_path, 99)
        == 0
    )
    found = left(tmp_path)
    assert (found["together"], whole["together"]) == (2, 1)
    assert found["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    for name, value in whole["state"].items():
        torch.testing.assert_close(found["state"][name], value, rtol=1e-4, atol=1e-6)
