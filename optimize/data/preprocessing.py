"""How a picture, or a text, becomes what a model takes: part of the model's contract, written in one line.

    resize=256 size=224 interpolation=bilinear mean=0.485,0.456,0.406 std=0.229,0.224,0.225

or the name of the code that did it in training, ``package.module:transform``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from optimize import named
from optimize.data.conform import InputSpec, as_tensor
from optimize.errors import Refused, UsageError, blaming, nearest
from optimize.regular import shown

if TYPE_CHECKING:
    from PIL import Image

#: Pixels that are moved or stretched by more are all one number in float32.
_MOST_SHIFT = 1e6
_MOST_SIDE = 1 << 16
_LONGEST = 4096
INTERPOLATIONS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
ORDERS = ("rgb", "bgr")


@dataclass(frozen=True)
class ImagePreprocessing:
    """Resize, cut the centre out, to [0, 1], ``(x - mean) / std``. The defaults are ImageNet's.

    Attributes:
        size: Height and width of what is cut out; None takes them from the model's input.
        resize: Of the shorter side before that, or height and width whatever their ratio was; None: ``size / crop``.
        crop: Share of the resized side that is kept, where ``resize`` is None; 0.875 resizes to 256 for a size of 224.
        interpolation: Of Pillow, all but ``nearest`` with antialiasing.
        mean: One number for all channels or one for each, in [0, 1], in the order that the model takes them in.
        std: Likewise.
        order: Of the channels.
        transform: Takes a picture of Pillow and returns ``[C, H, W]``, in place of all that.
        name: Of the transform, as ``package.module:name``.
        tokenizer: Of texts, which become tokens by this file; empty where nobody says.
    """

    size: tuple[int, int] | None = None
    resize: tuple[int, ...] | None = None
    crop: float = 0.875
    interpolation: str = "bicubic"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    order: str = "rgb"
    transform: Callable[[Any], Any] | None = None
    name: str = ""
    tokenizer: str = ""

    def __post_init__(self) -> None:
        """Refuse numbers that no pictures have, NaN and infinities included.

        Raises:
            UsageError: A mean is not in [0, 1], a standard deviation outside or too small, or a word is unknown.
        """
        bad = next((number for number in (*self.mean, *self.std) if not 0 <= number <= 1), None)
        bad = next((number for number in self.std if not number * _MOST_SHIFT >= 1), bad)
        if bad is not None:
            raise UsageError(
                f"A mean or standard deviation of images is {bad:g}, and their pixels are in [0, 1].",
                hint="Divide numbers for pixels to 255 by 255; a standard deviation is greater than 0. ImageNet's are "
                "the default.",
            )
        if not 0.01 <= self.crop <= 1:
            raise UsageError(f"crop={self.crop:g} is not a share of the picture: it lies in [0.01, 1].")
        for word, known in ((self.interpolation, INTERPOLATIONS), (self.order, ORDERS)):
            if word not in known:
                raise UsageError(f"--preprocess: there is no '{shown(word)}'.", hint=nearest(word, known))

    @classmethod
    def read(cls, given: Mapping[str, str]) -> ImagePreprocessing:
        """Read what `read_words` found: ``{"resize": "256", "mean": "0.5,0.5,0.5"}``.

        Raises:
            UsageError: A value is not what its word takes, or none that pictures have.
            Refused: The transform cannot be imported.
        """
        found: dict[str, Any] = {}
        for word, text in given.items():
            try:
                found[word] = _READERS[word](text)
            except ValueError as error:
                raise UsageError(f"--preprocess {word}={shown(text)}: {error}.", hint=_HINTS[word]) from error
        if "transform" in given:
            found["name"] = given["transform"]
        return cls(**found)

    def fits(self, channels: int) -> bool:
        """Say whether there is a mean and a standard deviation for each of so many channels."""
        return all(len(numbers) in (1, channels) for numbers in (self.mean, self.std))

    @property
    def inside(self) -> str:
        """The words that a file which takes pixels (``InputSpec.is_picture``) follows itself."""
        return _said({"mean": self.mean, "std": self.std, "order": self.order})

    def text(self, size: tuple[int, int], *, pixels: bool = False) -> str:
        """Return it as ``--preprocess`` takes it, nothing left to defaults, for pictures of this size.

        Args:
            size: Height and width.
            pixels: Leave out what a file does itself that takes pixels.
        """
        if self.name:
            return self.name
        resize = self.resize or (_before_crop(min(size), self.crop),)
        words = {
            "resize": "x".join(map(str, resize)),
            "size": "x".join(map(str, dict.fromkeys(size))),
            "interpolation": self.interpolation,
        }
        return _said(words) if pixels else f"{_said(words)} {self.inside}"

    def prepared(self, picture: Image.Image, size: tuple[int, int], spec: InputSpec) -> torch.Tensor:
        """Return a picture as the model takes it: ``[C, H, W]``.

        Raises:
            Refused: It is so narrow that what is cut from would be too large, or the transform fails.
        """
        if self.transform is not None:
            return self._transformed(picture, self.transform)
        raw = torch.from_numpy(np.array(self._cropped(picture, size)))
        raw = raw[..., None] if raw.dim() == 2 else raw
        if spec.is_picture:
            return raw
        if spec.torch_dtype == torch.uint8:
            return self._arranged(raw)
        return self.normalized(raw).to(spec.torch_dtype)

    def _arranged(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return pixels ``[..., H, W, C]`` as ``[..., C, H, W]``, in the order that the model takes its channels in."""
        channels = pixels.movedim(-1, -3)
        return channels.flip(-3) if self.order == "bgr" else channels.contiguous()

    def normalized(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return uint8 pixels ``[..., H, W, C]`` in RGB as what the model takes, float32 ``[..., C, H, W]``."""
        mean, std = (torch.tensor(numbers).reshape(-1, 1, 1) for numbers in (self.mean, self.std))
        return (self._arranged(pixels).to(torch.float32) / 255 - mean) / std

    def pixels(self, taken: torch.Tensor) -> torch.Tensor:
        """Return the pixels that come nearest to what the model takes: the inverse of ``normalized``."""
        mean, std = (torch.tensor(numbers).reshape(-1, 1, 1) for numbers in (self.mean, self.std))
        channels = ((taken.to(torch.float32) * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
        return (channels.flip(-3) if self.order == "bgr" else channels).movedim(-3, -1).contiguous()

    def _cropped(self, picture: Image.Image, size: tuple[int, int]) -> Image.Image:
        from PIL import Image

        width, height = self._resized(picture.width, picture.height, size)
        if math.prod((width, height)) > (Image.MAX_IMAGE_PIXELS or math.inf):
            raise Refused(f"An image of {picture.width} x {picture.height} would become one of {width} x {height}.")
        resized = picture.resize((width, height), Image.Resampling[self.interpolation.upper()])
        left, top = round((width - size[1]) / 2), round((height - size[0]) / 2)
        return resized.crop((left, top, left + size[1], top + size[0]))

    def _resized(self, width: int, height: int, size: tuple[int, int]) -> tuple[int, int]:
        """Return width and height that a picture is resized to."""
        if self.resize is None:
            sides = [_before_crop(side, self.crop) for side in size]
            scale = max(sides[0] / height, sides[1] / width)
            return max(int(width * scale + 1e-6), size[1]), max(int(height * scale + 1e-6), size[0])
        if len(self.resize) == 2:
            return self.resize[1], self.resize[0]
        side = self.resize[0]
        return (side, side * height // width) if width <= height else (side * width // height, side)

    def _transformed(self, picture: Image.Image, transform: Callable[[Any], Any]) -> torch.Tensor:
        hint = "It is given a picture of Pillow and returns [C, H, W]; leave out pictures that it cannot take."
        with blaming(f"'{self.name}'", hint):
            found = transform(picture)
        if not isinstance(found, torch.Tensor | np.ndarray):
            hint = "End it with ToTensor, or return an array [C, H, W]."
            raise Refused(f"'{self.name}' returns a {type(found).__name__} and no tensor.", hint=hint)
        return as_tensor(found, f"What '{self.name}' returns")

    def check(self, size: tuple[int, int]) -> None:
        """Check that pictures can be cut to a size.

        Raises:
            UsageError: They are resized to less.
        """
        if self.transform is None and self.resize is not None and any(map(int.__lt__, self._sides(), size)):
            said, asked = ("x".join(map(str, sides)) for sides in (self.resize, size))
            raise UsageError(
                f"Pictures are resized to {said}, and {asked} is to be cut out of them.",
                hint=f"Say what the model takes, size={said}, or a resize that is not smaller.",
            )

    def _sides(self) -> tuple[int, ...]:
        assert self.resize is not None
        return self.resize * (2 // len(self.resize))


def read_words(text: str | Mapping[str, Any]) -> dict[str, str]:
    """Return the words of a ``--preprocess``, or of a recipe's mapping, by name.

    Raises:
        ValueError: It has another form, or a word is unknown.

    >>> read_words("resize=256 mean=0.5,0.5,0.5")
    {'resize': '256', 'mean': '0.5,0.5,0.5'}
    >>> read_words("nets.data:prepare")
    {'transform': 'nets.data:prepare'}
    """
    if isinstance(text, str):
        if named.is_named(text.strip()):
            return {"transform": text.strip()}
        pairs = [part.partition("=") for part in text.split()]
        if not all(equals for _, equals, _ in pairs):
            raise ValueError("write words such as 'resize=256 size=224 mean=0.5,0.5,0.5', or package.module:transform")
        text = {word: value for word, _, value in pairs}
    if not isinstance(text, Mapping):
        raise ValueError("words are wanted, such as 'resize=256 size=224', or a mapping of them")
    unknown = next((word for word in text if word not in _READERS), None)
    if unknown is not None:
        raise ValueError(f"there is no '{shown(str(unknown))}'. {nearest(str(unknown), _READERS).rstrip('.')}")
    if "transform" in text and len(text.keys() - {"tokenizer"}) > 1:
        raise ValueError("a transform does all of it; nothing else is said beside it")
    return {word: ",".join(map(str, value)) if isinstance(value, list) else str(value) for word, value in text.items()}


def unsaid(words: Mapping[str, str]) -> dict[str, str]:
    """Return the words that are ImageNet's because nobody said them; none beside code, which does all of it.

    >>> unsaid({"resize": "70", "mean": "0,0,0", "std": "1,1,1"})
    {'interpolation': 'bicubic', 'order': 'rgb'}
    """
    usual = ImagePreprocessing()
    said = {"crop": (usual.crop,), "interpolation": usual.interpolation, "mean": usual.mean, "std": usual.std}
    found = read_words(_said({**said, "order": usual.order}))
    missing = {} if "transform" in words else found.keys() - words.keys() - ({"crop"} if "resize" in words else set())
    return {word: text for word, text in found.items() if word in missing}


def included(text: str) -> ImagePreprocessing:
    """Read what ``ImagePreprocessing.inside`` wrote, which may come from anybody's file: numbers and an order alone.

    Raises:
        Refused: It is something else.
    """
    try:
        words = read_words(text[:_LONGEST])
        if words.keys() <= {"mean", "std", "order"}:
            return ImagePreprocessing.read(words)
    except (ValueError, UsageError):
        pass
    raise Refused(f"A file says of itself that it prepares pictures by '{shown(text[:80])}', which nobody can follow.")


def of_inside(text: str) -> str:
    """Return what `included` reads, of the words by which a file says all that becomes of pictures; empty of others."""
    try:
        return numbers_of(read_words(text[:_LONGEST]))
    except ValueError:
        return ""


def numbers_of(words: Mapping[str, Any]) -> str:
    """Return what `included` reads, of the words of ``--preprocess``; empty of others."""
    return _said({word: words[word] for word in ("mean", "std", "order") if word in words})


def _said(words: Mapping[str, Any]) -> str:
    """Return words as ``--preprocess`` takes them.

    >>> _said({"size": "224", "std": (0.5, 0.25, 0.5)})
    'size=224 std=0.5,0.25,0.5'
    """
    texts = (value if isinstance(value, str) else ",".join(f"{each:g}" for each in value) for value in words.values())
    return " ".join(f"{word}={text}" for word, text in zip(words, texts, strict=True))


def _before_crop(side: int, crop: float) -> int:
    """Return the side that a share of is kept, rounded as timm does, whose word (``crop_pct``) the share is."""
    return math.floor(side / crop + 1e-6)


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _lengths(text: str) -> tuple[int, ...]:
    found = tuple(int(part) for part in text.replace(",", "x").split("x"))
    if len(found) > 2 or not all(0 < side <= _MOST_SIDE for side in found):
        raise ValueError(f"it is one side or height and width, up to {_MOST_SIDE}")
    return found


def _height_and_width(text: str) -> tuple[int, int]:
    found = _lengths(text)
    return found[0], found[-1]


def _transform(text: str) -> Callable[[Any], Any]:
    """Import a transform, or call what makes one (such as ``Weights.transforms`` of torchvision)."""
    found = named.find(text)
    if not callable(found):
        raise ValueError(f"it is of type {type(found).__name__} and cannot be called")
    if isinstance(found, torch.nn.Module):
        return found
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # of C, which tells none
        return found
    if not _takes(signature):
        if not _takes(signature, "a picture"):
            raise ValueError(f"it is called with one picture alone, and its signature is {shown(str(signature))}")
        return found
    made: Callable[[Any], Any] = named.call(found, text)
    if not callable(made):
        raise ValueError("called without arguments it makes no transform, and it does not take a picture")
    return made


def _takes(signature: inspect.Signature, *given: object) -> bool:
    """Say whether what has a signature can be called with these."""
    try:
        signature.bind(*given)
    except TypeError:
        return False
    return True


_READERS: dict[str, Callable[[str], Any]] = {
    "size": _height_and_width,
    "resize": _lengths,
    "crop": float,
    "interpolation": str.lower,
    "mean": _numbers,
    "std": _numbers,
    "order": str.lower,
    "transform": _transform,
    "tokenizer": str,
}
_CHANNELS = "Write one number for all channels, 0.5, or one for each: 0.5,0.4,0.4."
_HINTS = dict.fromkeys(_READERS, "") | {
    "size": "Write size=224 or size=224x320 (height, width).",
    "resize": "Write resize=256 (the shorter side) or resize=256x320 (height, width).",
    "crop": "Write crop=0.875, the share of the resized side that is kept.",
    "mean": _CHANNELS,
    "std": _CHANNELS,
    "transform": "Name what takes a picture of Pillow and returns [C, H, W], or what makes such a thing.",
}
