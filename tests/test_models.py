"""The reference networks, their training script and the files shipped beside them."""

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from models import REFERENCES, randomize_batch_norm
from models.data import balanced_sample, fashion_mnist, read_idx, write_samples
from models.diverse_branch import BNAndPad
from models.repvgg import fashion_repvgg
from models.train import accuracy, augment, command_line, load_split, save, train
from optimize.errors import UsageError
from tests import references

MODELS = Path(__file__).parents[1] / "models"
CHECKPOINT = MODELS / "fashion_repvgg.pt"


def write_idx(path: Path, array: NDArray[np.uint8]) -> None:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    path.write_bytes(gzip.compress(header + array.tobytes()))


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    """Holds 600 training and 60 test images of noise, classes in turn, in the format of Fashion-MNIST."""
    rng = np.random.default_rng(0)
    for prefix, count in (("train", 600), ("t10k", 60)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte.gz", images)
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte.gz", np.arange(count, dtype=np.uint8) % 10)
    return tmp_path


def load_sample(name: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    with np.load(MODELS / name) as archive:
        assert sorted(archive) == ["x", "y"]
        return archive["x"], archive["y"]


# Reference networks


def test_references_cover_every_architecture() -> None:
    assert set(REFERENCES) == {
        "acnet",
        "diverse_branch",
        "lstm",
        "mobilenetv3",
        "repvgg",
        "resnet",
        "unet",
        "vit",
    }


@pytest.mark.parametrize("name", references.each("resnet", "vit", "lstm"))
def test_reference_exports_with_a_dynamic_batch(name: str) -> None:
    reference = REFERENCES[name]
    model = reference.build()
    randomize_batch_norm(model, seed=1)
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(model, (reference.inputs(2),), dynamic_shapes=({0: batch},)).module()
    for size in (1, 2, 5):
        x = reference.inputs(size, seed=size)
        torch.testing.assert_close(exported(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", REFERENCES)
def test_reference_treats_samples_alone_and_unlike(name: str) -> None:
    reference = REFERENCES[name]
    model = reference.build()
    randomize_batch_norm(model, seed=1)
    x = reference.inputs(3)
    with torch.no_grad():
        y = model(x)
        alone = torch.cat([model(sample) for sample in x.split(1)])
    torch.testing.assert_close(y, alone, rtol=1e-4, atol=1e-5)
    assert (y[0] - y[1]).abs().max() > 0.02 * y.std()


def test_unet_returns_a_map_as_large_as_the_image() -> None:
    reference = REFERENCES["unet"]
    assert reference.build()(reference.inputs(2)).shape == (2, 4, 32, 32)


def test_build_is_seeded_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (REFERENCES["vit"].build(seed).get_parameter("head.weight") for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_randomize_batch_norm_is_seeded_and_not_trivial() -> None:
    def draw(seed: int) -> nn.BatchNorm2d:
        layer = nn.BatchNorm2d(64)
        randomize_batch_norm(nn.Sequential(layer), seed)
        return layer

    layer = draw(0)
    state = layer.state_dict()
    assert (layer.weight < 0).any()
    assert (layer.weight > 0).any()
    assert (state["running_var"] > 0).all()
    assert all(state[name].std() > 0.05 for name in ("weight", "bias", "running_mean", "running_var"))
    assert all(torch.equal(value, draw(0).state_dict()[name]) for name, value in state.items())
    assert not torch.equal(layer.weight, draw(1).weight)


def test_bn_and_pad_pads_with_what_zero_becomes() -> None:
    layer = BNAndPad(4, padding=2).eval()
    randomize_batch_norm(layer, seed=0)
    x = torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    expected = layer.bn(nn.functional.pad(x, (2, 2, 2, 2)))
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


# Data


def test_fashion_mnist_reads_images_and_labels(data_folder: Path) -> None:
    images, labels = fashion_mnist("test", data_folder)
    assert (images.shape, images.dtype) == ((60, 1, 28, 28), np.uint8)
    assert (labels.shape, labels.dtype) == ((60,), np.int64)
    assert labels[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]


def test_missing_data_names_the_package(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="apt-get install dataset-fashion-mnist") as caught:
        fashion_mnist("train", tmp_path)
    assert str(tmp_path) in caught.value.what


def unzipped(content: bytes) -> bytes:
    return content


@pytest.mark.parametrize(
    ("content", "pack", "message"),
    [
        (b"not gzip", unzipped, "not a complete gzip file"),
        (gzip.compress(b"a" * 100, mtime=0)[:-12], unzipped, "not a complete gzip file"),
        (gzip.compress(b"a" * 100, mtime=0)[:10] + b"\xff" * 20, unzipped, "not a complete gzip file"),
        (b"\0\0\x0d\1", gzip.compress, "not an IDX file"),
        (b"", gzip.compress, "not an IDX file"),
        (b"\0\0\x08\1\0\0\0\3ab", gzip.compress, r"states shape \(3,\) and holds 2 bytes"),
        (b"\0\0\x08\3\0\0", gzip.compress, "header"),
    ],
)
def test_damaged_data_is_refused(tmp_path: Path, content: bytes, pack: Callable[[bytes], bytes], message: str) -> None:
    path = tmp_path / "damaged.gz"
    path.write_bytes(pack(content))
    with pytest.raises(UsageError, match=message):
        read_idx(path)


def test_balanced_sample_is_seeded_distinct_and_balanced() -> None:
    labels = np.arange(1000, dtype=np.int64) % 10
    chosen = balanced_sample(labels, 512, seed=0)
    assert len(set(chosen.tolist())) == 512
    assert set(np.bincount(labels[chosen]).tolist()) == {51, 52}
    assert np.array_equal(chosen, balanced_sample(labels, 512, seed=0))
    assert not np.array_equal(chosen, balanced_sample(labels, 512, seed=1))


def test_write_samples_draws_from_the_right_splits(data_folder: Path) -> None:
    write_samples(data_folder, data_folder)
    train_images, _ = fashion_mnist("train", data_folder)
    test_images, test_labels = fashion_mnist("test", data_folder)
    with np.load(data_folder / "fashion_calib.npz") as calibration:
        assert calibration["x"].shape == (512, 1, 28, 28)
        assert {image.tobytes() for image in calibration["x"]} <= {image.tobytes() for image in train_images}
    with np.load(data_folder / "fashion_eval.npz") as evaluation:
        assert np.array_equal(evaluation["x"], test_images[:2500])
        assert np.array_equal(evaluation["y"], test_labels[:2500])


def test_shipped_samples_have_the_stated_form() -> None:
    for name, count in (("fashion_calib.npz", 512), ("fashion_eval.npz", 2500)):
        x, y = load_sample(name)
        assert (x.shape, x.dtype) == ((count, 1, 28, 28), np.uint8)
        assert (y.shape, y.dtype) == ((count,), np.int64)
        assert set(y.tolist()) == set(range(10))
    _, y = load_sample("fashion_calib.npz")
    assert set(np.bincount(y).tolist()) == {51, 52}


def test_shipped_samples_share_no_image() -> None:
    calibration, _ = load_sample("fashion_calib.npz")
    evaluation, _ = load_sample("fashion_eval.npz")
    assert not {image.tobytes() for image in calibration} & {image.tobytes() for image in evaluation}


# Training


def test_augment_only_shifts_and_mirrors() -> None:
    x = torch.zeros(2000, 1, 28, 28)
    x[:, 0, 10, 5] = 1
    y = augment(x, torch.Generator().manual_seed(0))
    rows, columns = np.unravel_index(y.flatten(1).argmax(1).numpy(), (28, 28))
    assert torch.equal(y.flatten(1).sum(1), torch.ones(2000))
    assert set(rows.tolist()) == {8, 9, 10, 11, 12}
    assert set(columns.tolist()) == {3, 4, 5, 6, 7, 20, 21, 22, 23, 24}


def test_training_is_repeatable_and_its_checkpoint_loads(data_folder: Path, tmp_path: Path) -> None:
    def weights(name: str) -> dict[str, Tensor]:
        out = tmp_path / name
        options = command_line().parse_args(
            ["--out", str(out), "--data", str(data_folder), "--epochs", "1", "--batch", "200"]
        )
        save(train(options), out)
        return torch.load(out, weights_only=True)

    first, again = weights("first.pt"), weights("again.pt")
    fashion_repvgg().load_state_dict(first, strict=True)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert first["blocks.0.conv3x3.bn.num_batches_tracked"] == 3
    assert not list(tmp_path.glob("*.part"))


def test_load_split_scales_pixels_to_one(data_folder: Path) -> None:
    images, labels = load_split("test", data_folder)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert images.min() == 0
    assert images.max() == 1


# Checkpoint


def test_checkpoint_is_a_small_float32_state_dict() -> None:
    assert CHECKPOINT.stat().st_size <= 3_000_000
    state = torch.load(CHECKPOINT, weights_only=True)
    counters = {name for name in state if name.endswith("num_batches_tracked")}
    assert {value.dtype for name, value in state.items() if name not in counters} == {torch.float32}
    fashion_repvgg().load_state_dict(state, strict=True)


def test_checkpoint_classifies_the_shipped_slice() -> None:
    model = fashion_repvgg()
    model.load_state_dict(torch.load(CHECKPOINT, weights_only=True))
    x, y = (array[::5] for array in load_sample("fashion_eval.npz"))
    assert accuracy(model, torch.from_numpy(x).float() / 255, torch.from_numpy(y)) >= 0.92
