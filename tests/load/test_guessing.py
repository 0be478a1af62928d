"""What a model takes where nobody says it: guessed from its first layer, tried, and said."""

from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from optimize.datasets import example_inputs, open_datasets
from optimize.errors import InputsUnknown, UsageError
from optimize.load import ModelSource, untrusted
from optimize.load.capturing import AS_USUAL, Capturing, capture_model, guess_inputs
from optimize.load.opening import capture_source
from optimize.load.taking import take
from optimize.recipe import parse


def conv_net(side: int | None = None) -> nn.Module:
    """Return a network that takes images of one side, or of any."""
    pooled = [nn.AdaptiveAvgPool2d(1)] if side is None else []
    width = 8 * (1 if side is None else side * side)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), *pooled, nn.Flatten(), nn.Linear(width, 4))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids).mean(1))


class Recurrent(nn.Module):
    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 5, batch_first=batch_first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0][:, -1]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.head(one + other)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.head((self.table(input_ids) * attention_mask[:, :, None]).sum(1))


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (conv_net(), "3,224,224"),
        (conv_net(32), "3,32,32"),
        (conv_net(28), "3,28,28"),
        (nn.Sequential(nn.Conv1d(2, 4, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten()), "2,128"),
        (nn.Sequential(nn.Conv3d(3, 4, 3), nn.AdaptiveAvgPool3d(1), nn.Flatten()), "3,16,112,112"),
        (nn.Sequential(nn.Linear(7, 3), nn.ReLU()), "7"),
        (Tokens(), "128:int64"),
        (Recurrent(batch_first=True), "128,6"),
        (nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.ReLU()), "4,224,224"),
    ],
)
def test_the_first_layer_and_usual_sizes_tell_what_a_model_takes(module: nn.Module, shape: str) -> None:
    found = guess_inputs(module, 3)
    assert found is not None
    (example,), note = found
    sizes = [int(size) for size in shape.partition(":")[0].split(",")]
    assert list(example.shape) == [3, *sizes]
    assert f"--input-shape {shape}." in note
    module(example)


@pytest.mark.parametrize(
    "module",
    [
        Two(),
        Recurrent(batch_first=False),
        conv_net(37),
        nn.ReLU(),
        nn.Sequential(nn.LazyLinear(4)),
        torch.jit.freeze(torch.jit.script(conv_net().eval())),
    ],
    ids=["two inputs", "time first", "an unusual size", "no weights", "not made yet", "frozen TorchScript"],
)
def test_what_tells_nothing_is_not_guessed(module: nn.Module) -> None:
    assert guess_inputs(module, 2) is None


def test_a_guess_leaves_statistics_and_training_flags_alone() -> None:
    module = conv_net().train()
    module[1].eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert guess_inputs(module, 2) is not None
    assert module.training
    assert module[0].training
    assert not module[1].training
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def unknown(_: object) -> tuple[torch.Tensor, ...]:
    raise InputsUnknown("Nothing says what the model takes.")


def malformed(_: object) -> tuple[torch.Tensor, ...]:
    raise UsageError("--input-shape 'x' is not a shape.")


def test_the_program_says_that_its_input_was_guessed_and_a_fixed_batch_is_kept() -> None:
    program = capture_model(conv_net(32).eval(), unknown, Capturing(static_batch=5))
    assert list(program.inputs[0].shape) == [5, 3, 32, 32]
    assert [note for note in program.notes if "3,32,32 was guessed" in note]


def test_a_shape_that_is_wrong_is_not_replaced_by_a_guess() -> None:
    with pytest.raises(UsageError, match="is not a shape"):
        capture_model(conv_net().eval(), malformed, AS_USUAL)
    with pytest.raises(InputsUnknown, match=r"Nothing says what the model takes\.$"):
        capture_model(Recurrent(batch_first=False).eval(), unknown, AS_USUAL)


@pytest.mark.parametrize(
    ("module", "asked"),
    [
        (Two(), 'one sample of one, other, such as --input-shape "16;16"'),
        (Encoder(), 'one sample of input_ids, attention_mask, such as --input-shape "16:int64;16:int64"'),
        (torch.jit.script(Encoder()), 'one sample of input_ids, attention_mask, such as --input-shape "16:int64;'),
    ],
    ids=["floats", "encoder", "TorchScript"],
)
def test_what_several_inputs_are_is_asked_by_their_names(
    module: nn.Module, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the confined process, which alone knows the model of a file that nobody vouches for."""
    with pytest.raises(InputsUnknown) as refused:
        capture_model(module.eval(), unknown, AS_USUAL)
    assert asked in refused.value.hint
    monkeypatch.setattr(untrusted, "open_untrusted", lambda path, kind, name: (module, []))
    told, how = (lambda phase, share: None), asdict(AS_USUAL)
    with pytest.raises(InputsUnknown, match="Nothing says what the model takes") as refused:
        take(tmp_path, told, "net.pt", "net.pt", "CHECKPOINT", how, guess=())
    assert asked in refused.value.hint
    assert take(tmp_path, told, "net.pt", "net.pt", "CHECKPOINT", how, guess=None)["held"] == "needs inputs"


def test_pictures_for_a_guess_of_a_flattened_input_are_told_that_it_is_one(tmp_path: Path) -> None:
    program = capture_model(nn.Sequential(nn.Flatten(), nn.Linear(784, 2)).eval(), unknown, AS_USUAL)
    with pytest.raises(UsageError, match="not one image") as refused:
        open_datasets(parse({"calib": str(tmp_path)}), program)
    assert "--input-shape 1,28,28" in refused.value.hint and "784 was guessed" in refused.value.hint


@pytest.mark.parametrize(
    ("sizes", "side", "wanted"),
    [([(48, 48)], None, (48, 48)), ([(60, 40)], None, (40, 60)), ([(48, 48)], 28, (28, 28)),
     ([(48, 48), (48, 50)], None, (224, 224)), ([(300, 300)], None, (224, 224))],
    ids=["their own", "upright", "what runs", "several", "large"],
)  # fmt: skip
def test_small_pictures_that_are_all_alike_say_their_size(
    sizes: list[tuple[int, int]], side: int | None, wanted: tuple[int, int], tmp_path: Path
) -> None:
    for number in range(3):
        Image.new("RGB", sizes[number % len(sizes)]).save(tmp_path / f"{number}.png")
    inputs = partial(example_inputs, parse({"calib": str(tmp_path)}, source="here"))
    program = capture_model(conv_net(side).eval(), inputs, AS_USUAL)
    assert tuple(program.inputs[0].shape) == (2, 3, *wanted)
    assert ("from its first layer and the pictures" in program.notes[-1]) == (wanted[0] in (40, 48))


@pytest.mark.parametrize("script", [False, True], ids=["module", "TorchScript"])
def test_the_confined_process_guesses_too(tmp_path, script: bool) -> None:
    module = conv_net(28).eval()
    path = tmp_path / "net.pt"
    if script:
        torch.jit.script(module).save(path)
    else:
        torch.save(module, path)
    source = ModelSource.of(path)
    model = capture_source(source, unknown)
    assert list(model.program.inputs[0].shape) == [2, 3, 28, 28]
    assert [note for note in model.program.notes if "3,28,28 was guessed" in note]
    with pytest.raises(UsageError, match="is not a shape"):
        capture_source(source, malformed)
