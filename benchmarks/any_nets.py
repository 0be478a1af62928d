"""The networks of ``benchmarks.any_model``, by family and name: from configurations, without a download.

Packages are imported by the builder that needs them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks import small_nets as small
from benchmarks.any_inputs import PICTURE, Field, Net, numbers, tokens
from benchmarks.any_transformers import TRANSFORMERS
from benchmarks.efficientnet_lite0 import declare_torchvision_operators
from benchmarks.int8_onnx import randomize


def from_torchvision(path: str, fields: tuple[Field, ...] = PICTURE, **options: Any) -> Net:
    """Return a network of torchvision."""
    module, _, name = path.rpartition(".")
    return Net(getattr(importlib.import_module(f"torchvision.models{module}"), name)(weights=None, **options), fields)


class Heads(nn.Module):
    """A detector of torchvision up to its heads: what comes behind depends on the data."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = detector.backbone, detector.head

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """Take ``[N, 3, H, W]``."""
        return self.head(list(self.backbone(image).values()))  # type: ignore[no-any-return]


def detector_heads(name: str, size: int) -> Net:
    """Return a detector of torchvision without its post-processing."""
    library = importlib.import_module("torchvision.models.detection")
    whole = getattr(library, name)(weights=None, weights_backbone=None, num_classes=10)
    return Net(Heads(whole), (numbers(3, size, size),))


def from_smp(name: str, **options: Any) -> Net:
    """Return a network of segmentation_models_pytorch on a ResNet-18."""
    library = importlib.import_module("segmentation_models_pytorch")
    return Net(getattr(library, name)("resnet18", encoder_weights=None, classes=5, **options), PICTURE)


def from_torchaudio(name: str, fields: tuple[Field, ...], *values: Any, **options: Any) -> Net:
    """Return a network of torchaudio."""
    return Net(getattr(importlib.import_module("torchaudio.models"), name)(*values, **options), fields)


class WithLengths(nn.Module):
    """A network of torchaudio that wants the length of each sample, on samples that are all full."""

    def __init__(self, net: nn.Module, length: int) -> None:
        super().__init__()
        self.net, self.length = net, length

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """Take ``[N, T, features]``."""
        return self.net(frames, torch.full((frames.shape[0],), self.length, device=frames.device))[0]


def with_lengths(name: str, frames: int, features: int, out: int | None = None, **options: Any) -> Net:
    """Return a network of torchaudio that takes full sequences."""
    net = getattr(importlib.import_module("torchaudio.models"), name)(**options)
    return Net(WithLengths(net, out or frames), (numbers(frames, features),))


def from_diffusers(name: str, fields: tuple[Field, ...], part: str = "", **values: Any) -> Net:
    """Return a network of diffusers, or a part of it."""
    whole = getattr(importlib.import_module("diffusers"), name)(**values)
    return Net(Part(whole, part) if part else whole, fields)


class Part(nn.Module):
    """The encoder or decoder of an autoencoder with what belongs to it."""

    def __init__(self, whole: nn.Module, part: str) -> None:
        super().__init__()
        self.net = getattr(whole, part)
        quantizer = getattr(whole, {"encoder": "quant_conv", "decoder": "post_quant_conv"}[part], None)
        self.before, self.after = (None, quantizer) if part == "encoder" else (quantizer, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take pictures, or what stands for them."""
        hidden = self.net(x if self.before is None else self.before(x))
        return hidden if self.after is None else self.after(hidden)


def yolo(file: str) -> Net:
    """Return a network of ultralytics from the YAML that it ships."""
    tasks = importlib.import_module("ultralytics.nn.tasks")
    kind = {"seg": "SegmentationModel", "pose": "PoseModel", "obb": "OBBModel"}.get(
        file.rpartition("-")[2], "DetectionModel"
    )
    net = getattr(tasks, kind)(f"{file}.yaml", verbose=False)
    return Net(net, (numbers(3, 96, 96),))


def torch_transformer() -> Net:
    """Return A. Vaswani et al., "Attention Is All You Need", 2017, arXiv 1706.03762, as torch has it."""
    net = nn.Transformer(64, 4, 2, 2, 128, 0.0, batch_first=True)
    return Net(net, (numbers(20, 64), numbers(12, 64)))


_UNET = {"sample_size": 16, "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
_VAE = {"block_out_channels": (32, 64), "norm_num_groups": 8, "latent_channels": 4, "sample_size": 32,
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}  # fmt: skip
_TIME = Field((), 1000)

NETS: dict[str, Callable[[], Net]] = {
    **TRANSFORMERS,
    "object detection/YOLOv8n": lambda: yolo("yolov8n"),
    "object detection/YOLO11n": lambda: yolo("yolo11n"),
    "object detection/YOLOv5n": lambda: yolo("yolov5n"),
    "object detection/YOLO11n-seg": lambda: yolo("yolo11n-seg"),
    "object detection/SSDLite heads": lambda: detector_heads("ssdlite320_mobilenet_v3_large", 160),
    "object detection/RetinaNet heads": lambda: detector_heads("retinanet_resnet50_fpn", 64),
    "segmentation/DeepLabV3": lambda: from_torchvision(
        ".segmentation.deeplabv3_mobilenet_v3_large", weights_backbone=None),
    "segmentation/FCN": lambda: from_torchvision(".segmentation.fcn_resnet50", weights_backbone=None),
    "segmentation/LR-ASPP": lambda: from_torchvision(".segmentation.lraspp_mobilenet_v3_large", weights_backbone=None),
    "segmentation/U-Net": lambda: from_smp("Unet"),
    "segmentation/U-Net++": lambda: from_smp("UnetPlusPlus"),
    "segmentation/FPN": lambda: from_smp("FPN"),
    "segmentation/PSPNet": lambda: from_smp("PSPNet"),
    "segmentation/LinkNet": lambda: from_smp("Linknet"),
    "segmentation/MA-Net": lambda: from_smp("MAnet"),
    "keypoints/Simple Baseline": lambda: Net(small.SimpleBaseline(), PICTURE),
    "keypoints/YOLOv8n-pose": lambda: yolo("yolov8n-pose"),
    "optical flow/RAFT small": lambda: from_torchvision(
        ".optical_flow.raft_small", (numbers(3, 128, 128), numbers(3, 128, 128)), progress=False),
    "video/R3D-18": lambda: from_torchvision(".video.r3d_18", (numbers(3, 4, 32, 32),)),
    "speech/Conformer": lambda: with_lengths("Conformer", 40, 40, input_dim=40, num_heads=4, ffn_dim=128, num_layers=2,
        depthwise_conv_kernel_size=15),
    "speech/Emformer": lambda: with_lengths("Emformer", 40, 64, 32, input_dim=64, num_heads=4, ffn_dim=128,
        num_layers=2, segment_length=8, right_context_length=8),
    "speech/Wav2Letter": lambda: from_torchaudio("Wav2Letter", (numbers(40, 100),), 29, "mfcc", 40),
    "speech/DeepSpeech": lambda: from_torchaudio("DeepSpeech", (numbers(1, 40, 64),), 64, 128),
    "audio/Conv-TasNet": lambda: from_torchaudio("ConvTasNet", (numbers(1, 2000),), enc_num_feats=64, msk_num_feats=32,
        msk_num_hidden_feats=64, msk_num_layers=3, msk_num_stacks=2),
    "audio/spectrogram network": lambda: Net(small.SpectralNet(), (numbers(4096),)),
    "audio/WaveNet": lambda: Net(small.WaveNet(), (numbers(1, 512),)),
    "diffusion/UNet2D": lambda: from_diffusers("UNet2DModel", (numbers(3, 16, 16), _TIME), **_UNET,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D")),
    "diffusion/UNet2D with text": lambda: from_diffusers("UNet2DConditionModel",
        (numbers(4, 16, 16), _TIME, numbers(8, 32)), **_UNET, cross_attention_dim=32, attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D")),
    "diffusion/VAE encoder": lambda: from_diffusers("AutoencoderKL", (numbers(3, 32, 32),), "encoder", **_VAE),
    "diffusion/VAE decoder": lambda: from_diffusers("AutoencoderKL", (numbers(4, 16, 16),), "decoder", **_VAE),
    "diffusion/DiT": lambda: from_diffusers("DiTTransformer2DModel", (numbers(4, 16, 16), _TIME, Field((), 10)),
        num_attention_heads=4, attention_head_dim=16, num_layers=2, sample_size=16, num_embeds_ada_norm=1000),
    "diffusion/SD3": lambda: from_diffusers("SD3Transformer2DModel",
        (numbers(4, 16, 16), numbers(8, 32), numbers(64), _TIME), sample_size=16, patch_size=2, in_channels=4,
        num_layers=2, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=64,
        pooled_projection_dim=64, out_channels=4, pos_embed_max_size=16),
    "recommender/DLRM": lambda: Net(small.DLRM(), (numbers(13), tokens(1000, 8, 4))),
    "recommender/DeepFM": lambda: Net(small.DeepFM(), (tokens(2000, 26),)),
    "recommender/Wide & Deep": lambda: Net(small.WideAndDeep(), (numbers(200), tokens(1000, 16))),
    "recommender/NCF": lambda: Net(small.NCF(), (Field((), 2000), Field((), 2000))),
    "recommender/SASRec": lambda: Net(small.SASRec(), (tokens(1000),)),
    "sequence/LSTM tagger": lambda: Net(small.Tagger(nn.LSTM), (tokens(1000),)),
    "sequence/BiLSTM tagger": lambda: Net(small.Tagger(nn.LSTM, both=True), (tokens(1000),)),
    "sequence/GRU tagger": lambda: Net(small.Tagger(nn.GRU), (tokens(1000),)),
    "sequence/attention": lambda: Net(small.Seq2Seq(), (tokens(1000, 20), tokens(1000, 12))),
    "sequence/CRNN": lambda: Net(small.CRNN(), (numbers(1, 32, 96),)),
    "sequence/torch Transformer": torch_transformer,
    "time series/LSTM forecaster": lambda: Net(small.Forecaster(), (numbers(24, 8),)),
    "time series/TCN": lambda: Net(small.TCN(), (numbers(16, 64),)),
    "points and graphs/PointNet": lambda: Net(small.PointNet(), (numbers(3, 256),)),
    "points and graphs/DGCNN": lambda: Net(small.DGCNN(), (numbers(3, 64),)),
    "points and graphs/GCN": lambda: Net(small.GCN(), (numbers(32, 64), numbers(32, 32))),
    "super-resolution/EDSR": lambda: Net(small.EDSR(), (numbers(3, 32, 32),)),
    "super-resolution/ESPCN": lambda: Net(small.espcn(), (numbers(1, 48, 48),)),
    "super-resolution/FSRCNN": lambda: Net(small.fsrcnn(), (numbers(1, 48, 48),)),
}  # fmt: skip


def build(name: str) -> Net:
    """Return a network of ``NETS``, the same for every call.

    Raises:
        ImportError: Its package is not installed.
    """
    declare_torchvision_operators()
    _declare_torchaudio()
    torch.manual_seed(0)
    net = NETS[name]()
    net.module.eval()
    randomize(net.module)
    return net


def _declare_torchaudio() -> None:
    """Let torchaudio's models import beside a CPU torch: its package opens a library of its CUDA wheel first."""
    spec = importlib.util.find_spec("torchaudio")
    if spec is None or "torchaudio" in sys.modules:
        return
    package = types.ModuleType("torchaudio")
    package.__spec__, package.__path__ = spec, list(spec.submodule_search_locations or ())
    sys.modules["torchaudio"] = package
