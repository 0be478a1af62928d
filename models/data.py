"""Fashion-MNIST from its IDX files, and the two small samples shipped beside the checkpoint.

`python -m models.data --out models/` writes `fashion_calib.npz` and `fashion_eval.npz`.

Source: Han Xiao, Kashif Rasul, Roland Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine
Learning Algorithms", 2017, arXiv:1708.07747.
"""

import argparse
import gzip
import math
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from optimize.errors import UsageError

Split = Literal["train", "test"]
Samples = tuple[NDArray[np.uint8], NDArray[np.int64]]

DEFAULT_ROOT = Path("/usr/share/datasets/fashion-mnist")
CLASSES = 10
CALIBRATION_COUNT = 512
EVALUATION_COUNT = 2500
INSTALL_HINT = "Install it with `apt-get install dataset-fashion-mnist`, or name its folder with --data."

_PREFIX = {"train": "train", "test": "t10k"}
_UINT8_TYPE_CODE = 0x08


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Reads one gzipped IDX file of unsigned bytes.

    The format is: two zero bytes, a type code, the number of dimensions, one big-endian int32 a dimension, the data.

    Args:
        path: A `.gz` file.

    Returns:
        A read-only uint8 array of the stated shape.

    Raises:
        UsageError: The file is missing, is not an IDX file of bytes, or holds more or less data than it states.
    """
    try:
        content = gzip.decompress(path.read_bytes())
    except FileNotFoundError as error:
        raise UsageError(f"Fashion-MNIST is not at {path}.", hint=INSTALL_HINT) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UsageError(f"{path} is not a complete gzip file: {error}.", hint=INSTALL_HINT) from error
    if len(content) < 4 or content[:3] != bytes([0, 0, _UINT8_TYPE_CODE]):
        raise UsageError(f"{path} is not an IDX file of unsigned bytes.", hint=INSTALL_HINT)
    header_bytes = 4 + 4 * content[3]
    if len(content) < header_bytes:
        raise UsageError(f"{path} ends within its IDX header.", hint=INSTALL_HINT)
    shape = tuple(np.frombuffer(content[4:header_bytes], ">i4").tolist())
    data = np.frombuffer(content, np.uint8, offset=header_bytes)
    if data.size != math.prod(shape):
        raise UsageError(f"{path} states shape {shape} and holds {data.size} bytes.", hint=INSTALL_HINT)
    return data.reshape(shape)


def fashion_mnist(split: Split, root: Path = DEFAULT_ROOT) -> Samples:
    """Reads one split of Fashion-MNIST.

    Args:
        split: `"train"` (60,000 images) or `"test"` (10,000 images).
        root: Folder with the four `.gz` files.

    Returns:
        Images uint8 `[N, 1, 28, 28]` and labels int64 `[N]` in 0..9.

    Raises:
        UsageError: A file is missing or damaged.
    """
    prefix = _PREFIX[split]
    images = read_idx(root / f"{prefix}-images-idx3-ubyte.gz")
    labels = read_idx(root / f"{prefix}-labels-idx1-ubyte.gz")
    return images[:, None], labels.astype(np.int64)


def balanced_sample(labels: NDArray[np.int64], count: int, seed: int) -> NDArray[np.int64]:
    """Draws the indices of a random sample in which class sizes differ by at most one.

    Args:
        labels: Labels in 0..9, shape `[N]`, with at least `count / 10` rounded up of each class.
        count: Number of indices to draw.
        seed: Seed of the draw.

    Returns:
        Distinct indices in random order, shape `[count]`.
    """
    rng = np.random.default_rng(seed)
    sizes = [count // CLASSES + (label < count % CLASSES) for label in range(CLASSES)]
    drawn = [rng.choice(np.flatnonzero(labels == label), size, replace=False) for label, size in enumerate(sizes)]
    return rng.permutation(np.concatenate(drawn))


def write_samples(out: Path, root: Path = DEFAULT_ROOT, seed: int = 0) -> None:
    """Writes `fashion_calib.npz` (512 training images) and `fashion_eval.npz` (the first 2,500 test images).

    Both hold `x` uint8 `[N, 1, 28, 28]` and `y` int64 `[N]`. Only calibration is drawn at random.

    Args:
        out: Existing folder to write into.
        root: Folder with the IDX files.
        seed: Seed of the class-balanced draw.

    Raises:
        UsageError: A data file is missing or damaged.
    """
    images, labels = fashion_mnist("train", root)
    chosen = balanced_sample(labels, CALIBRATION_COUNT, seed)
    np.savez_compressed(out / "fashion_calib.npz", x=images[chosen], y=labels[chosen])
    images, labels = fashion_mnist("test", root)
    np.savez_compressed(out / "fashion_eval.npz", x=images[:EVALUATION_COUNT], y=labels[:EVALUATION_COUNT])


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Write the calibration and evaluation samples of Fashion-MNIST.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the two .npz files into")
    parser.add_argument("--data", type=Path, default=DEFAULT_ROOT, help="folder with the IDX files (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the calibration draw (%(default)s)")
    options = parser.parse_args()
    try:
        write_samples(options.out, options.data, options.seed)
    except UsageError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
