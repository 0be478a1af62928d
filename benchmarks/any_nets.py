"""The networks of ``benchmarks.any_model``, by family and name: from configurations, without a download.

Each builder returns a module in evaluation mode and the fields that it takes, in order. Packages are imported by the
builder that needs them.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks import small_nets as small
from benchmarks.efficientnet_lite0 import declare_torchvision_operators
from benchmarks.int8_onnx import randomize

#: Length of sequences where nobody asks for another.
LENGTH = 64
#: The word for a length in shapes, and for the free dimension.
SEQUENCE = "sequence"


@dataclass(frozen=True)
class Field:
    """One input.

    Attributes:
        shape: Of one sample; ``"sequence"`` stands for a length.
        rows: How many tokens there are; 0 for numbers, of a normal distribution.
        ones: Whether it is a mask without holes.
        ordered: Whether tokens rise along the last dimension, as the corners of a box do.
    """

    shape: tuple[int | str, ...]
    rows: int = 0
    ones: bool = False
    ordered: bool = False

    def draw(self, batch: int, length: int, draws: torch.Generator) -> torch.Tensor:
        """Return ``[batch, *shape]``."""
        sizes = (batch, *(length if size == SEQUENCE else int(size) for size in self.shape))
        if self.ones:
            return torch.ones(sizes, dtype=torch.int64)
        if self.rows:
            drawn = torch.randint(0, self.rows, sizes, generator=draws)
            return drawn.sort(-1).values if self.ordered else drawn
        return torch.randn(sizes, generator=draws)


@dataclass(frozen=True)
class Net:
    """A network and what it takes."""

    module: nn.Module
    fields: tuple[Field, ...]

    def draw(self, batch: int, *, seed: int, length: int = LENGTH) -> tuple[torch.Tensor, ...]:
        """Return inputs of a batch size, the same ones for the same seed."""
        draws = torch.Generator().manual_seed(seed)
        return tuple(field.draw(batch, length, draws) for field in self.fields)

    @property
    def free_lengths(self) -> dict[str, dict[int, str]]:
        """The dimensions that hold a sequence's length, by the names of the inputs."""
        names = [name for name in inspect.signature(self.module.forward).parameters]
        lengths = [
            {place: SEQUENCE for place, size in enumerate(field.shape, 1) if size == SEQUENCE} for field in self.fields
        ]
        return {name: dims for name, dims in zip(names, lengths, strict=False) if dims}


def numbers(*shape: int | str) -> Field:
    """Return a field of normal numbers."""
    return Field(shape)


def tokens(rows: int, *shape: int | str) -> Field:
    """Return a field of tokens below ``rows``."""
    return Field(shape or (SEQUENCE,), rows)


MASK = Field((SEQUENCE,), ones=True)
TEXT = (tokens(1000), MASK)
PICTURE = (numbers(3, 64, 64),)
_VOCABULARY = {"vocab_size": 1000}
_SMALL = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 1024}
_BERT = {**_VOCABULARY, **_SMALL, "max_position_embeddings": 128}
_LLAMA = {**_BERT, "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_VIT = {**_SMALL, "image_size": 64, "patch_size": 16}
_SPEECH = {**_VOCABULARY, **_SMALL, "conv_dim": (64, 64, 64), "conv_stride": (5, 4, 4), "conv_kernel": (10, 8, 4)}
_SPEECH |= {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 3}
_T5 = {**_VOCABULARY, "d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 2, "num_heads": 4}
_BART = {**_VOCABULARY, "d_model": 256, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
_BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024, "use_cache": False}
_BART |= {"max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BART |= {"decoder_start_token_id": 2, "forced_eos_token_id": None}
_DETR = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "num_queries": 20}
_DETR |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "use_timm_backbone": False}
_DETR |= {"use_pretrained_backbone": False, "backbone": None}
_SERIES = {"prediction_length": 8, "context_length": 24, "lags_sequence": [1, 2], "d_model": 32, "num_time_features": 2}
_SERIES |= {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
_SERIES |= {"num_static_real_features": 1, "num_static_categorical_features": 1, "cardinality": [4]}
_SERIES |= {"embedding_dimension": [4]}
_SERIES_FIELDS = (numbers(26), numbers(26, 2), Field((26,), ones=True), tokens(4, 1), numbers(1), numbers(8), numbers(8, 2))

#: transformers: family/name: class, configuration, its values, fields.
_TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any], tuple[Field, ...]]] = {
    "text encoder/BERT": ("BertModel", "BertConfig", _BERT, TEXT),
    "text encoder/BERT classifier": ("BertForSequenceClassification", "BertConfig", _BERT, TEXT),
    "text encoder/RoBERTa": ("RobertaModel", "RobertaConfig", {**_BERT, "max_position_embeddings": 130}, TEXT),
    "text encoder/DistilBERT": ("DistilBertModel", "DistilBertConfig",
        {**_VOCABULARY, "dim": 256, "n_layers": 2, "n_heads": 4, "hidden_dim": 1024}, TEXT),
    "text encoder/ALBERT": ("AlbertModel", "AlbertConfig", {**_BERT, "embedding_size": 64}, TEXT),
    "text encoder/MPNet": ("MPNetModel", "MPNetConfig", {**_BERT, "max_position_embeddings": 130}, TEXT),
    "text encoder/DeBERTa-v2": ("DebertaV2Model", "DebertaV2Config",
        {**_BERT, "relative_attention": True, "position_buckets": 32, "pos_att_type": ["p2c", "c2p"]}, TEXT),
    "text encoder/ELECTRA": ("ElectraModel", "ElectraConfig", {**_BERT, "embedding_size": 64}, TEXT),
    "text encoder/T5": ("T5EncoderModel", "T5Config", _T5, TEXT),
    "text encoder/ModernBERT": ("ModernBertModel", "ModernBertConfig",
        {**_BERT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}, TEXT),
    "text encoder/LayoutLM": ("LayoutLMModel", "LayoutLMConfig", _BERT, (tokens(1000), Field((SEQUENCE, 4), 500, ordered=True), MASK)),
    "text encoder/SqueezeBERT": ("SqueezeBertModel", "SqueezeBertConfig", {**_BERT, "embedding_size": 256}, TEXT),
    "text encoder/MobileBERT": ("MobileBertModel", "MobileBertConfig", {**_BERT, "intra_bottleneck_size": 64}, TEXT),
    "text encoder/FNet": ("FNetModel", "FNetConfig", _BERT, (tokens(1000),)),
    "text decoder/GPT-2": ("GPT2LMHeadModel", "GPT2Config",
        {**_VOCABULARY, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 128, "use_cache": False}, (tokens(1000),)),
    "text decoder/GPT-2 with its cache": ("GPT2LMHeadModel", "GPT2Config",
        {**_VOCABULARY, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 128}, (tokens(1000),)),
    "text decoder/Llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA, TEXT),
    "text decoder/Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _LLAMA, TEXT),
    "text decoder/Phi": ("PhiForCausalLM", "PhiConfig", _LLAMA, TEXT),
    "text decoder/Gemma": ("GemmaForCausalLM", "GemmaConfig", {**_LLAMA, "head_dim": 64}, TEXT),
    "text decoder/GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_BERT, "use_cache": False}, TEXT),
    "text decoder/OPT": ("OPTForCausalLM", "OPTConfig", {**_VOCABULARY, "hidden_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "ffn_dim": 1024, "max_position_embeddings": 128, "word_embed_proj_dim": 256,
        "use_cache": False}, TEXT),
    "text decoder/Mamba": ("MambaForCausalLM", "MambaConfig",
        {**_VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "use_cache": False}, (tokens(1000, 24),)),
    "sequence to sequence/BART": ("BartModel", "BartConfig", _BART, (tokens(1000), MASK, tokens(1000))),
    "sequence to sequence/Marian": ("MarianModel", "MarianConfig", _BART, (tokens(1000), MASK, tokens(1000))),
    "sequence to sequence/T5": ("T5Model", "T5Config", {**_T5, "use_cache": False}, (tokens(1000), MASK, tokens(1000))),
    "object detection/YOLOS": ("YolosForObjectDetection", "YolosConfig",
        {**_SMALL, "image_size": [64, 64], "num_detection_tokens": 20}, PICTURE),
    "segmentation/SegFormer": ("SegformerForSemanticSegmentation", "SegformerConfig",
        {"depths": [1, 1, 1, 1]}, PICTURE),
    "depth/DPT": ("DPTForDepthEstimation", "DPTConfig", {**_VIT, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [32, 32, 64, 64], "fusion_hidden_size": 32}, PICTURE),
    "depth/GLPN": ("GLPNForDepthEstimation", "GLPNConfig",
        {"depths": [1, 1, 1, 1]}, PICTURE),
    "speech/Wav2Vec2": ("Wav2Vec2ForCTC", "Wav2Vec2Config", _SPEECH, (numbers(4000),)),
    "speech/HuBERT": ("HubertForCTC", "HubertConfig", _SPEECH, (numbers(4000),)),
    "speech/WavLM": ("WavLMModel", "WavLMConfig", _SPEECH, (numbers(4000),)),
    "speech/Whisper encoder": ("encoder of WhisperModel", "WhisperConfig",
        {**_BART, "max_source_positions": 100, "num_mel_bins": 40}, (numbers(40, 200),)),
    "audio/AST": ("ASTForAudioClassification", "ASTConfig", {**_SMALL, "max_length": 128, "num_mel_bins": 64},
        (numbers(128, 64),)),
    "audio/CLAP": ("ClapAudioModel", "ClapAudioConfig", {"patch_embeds_hidden_size": 32, "spec_size": 128,
        "depths": [1, 1, 2, 1], "num_attention_heads": [2, 2, 4, 4], "hidden_size": 256, "num_mel_bins": 32,
        "window_size": 4, "enable_fusion": False}, (numbers(1, 512, 32),)),
    "vision and language/CLIP text": ("CLIPTextModel", "CLIPTextConfig", {**_BERT, "eos_token_id": 2}, TEXT),
    "vision and language/CLIP vision": ("CLIPVisionModel", "CLIPVisionConfig", _VIT, PICTURE),
    "vision and language/SigLIP vision": ("SiglipVisionModel", "SiglipVisionConfig", _VIT, PICTURE),
    "vision and language/SigLIP text": ("SiglipTextModel", "SiglipTextConfig", _BERT, TEXT),
    "vision and language/BLIP vision": ("BlipVisionModel", "BlipVisionConfig", _VIT, PICTURE),
    "vision and language/ViLT": ("ViltModel", "ViltConfig", {**_BERT, **_VIT, "max_image_length": -1},
        (tokens(1000), MASK, tokens(2), numbers(3, 64, 64), Field((64, 64), ones=True))),
    "time series/Time Series Transformer": ("TimeSeriesTransformerModel", "TimeSeriesTransformerConfig",
        {**_SERIES, "use_cache": False}, _SERIES_FIELDS),
    "time series/Informer": ("InformerModel", "InformerConfig", {**_SERIES, "use_cache": False}, _SERIES_FIELDS),
    "time series/Autoformer": ("AutoformerModel", "AutoformerConfig", {**_SERIES, "use_cache": False}, _SERIES_FIELDS),
    "time series/PatchTST": ("PatchTSTForPrediction", "PatchTSTConfig", {"num_input_channels": 4, "context_length": 64,
        "prediction_length": 16, "patch_length": 8, "patch_stride": 8, "d_model": 64, "num_attention_heads": 4,
        "num_hidden_layers": 2, "ffn_dim": 128}, (numbers(64, 4),)),
    "time series/PatchTSMixer": ("PatchTSMixerForPrediction", "PatchTSMixerConfig", {"num_input_channels": 4,
        "context_length": 64, "prediction_length": 16, "patch_length": 8, "patch_stride": 8, "d_model": 32}, (numbers(64, 4),)),
    "keypoints/SuperPoint encoder": ("encoder of SuperPointForKeypointDetection", "SuperPointConfig",
        {"encoder_hidden_sizes": [16, 16, 32, 32], "decoder_hidden_size": 64}, (numbers(1, 64, 64),)),
    "super-resolution/Swin2SR": ("Swin2SRForImageSuperResolution", "Swin2SRConfig", {"image_size": 32, "embed_dim": 32,
        "depths": [2, 2], "num_heads": [2, 2], "window_size": 8, "upscale": 2}, (numbers(3, 32, 32),)),
    "video/VideoMAE": ("VideoMAEForVideoClassification", "VideoMAEConfig", {**_VIT, "num_frames": 4},
        (numbers(4, 3, 64, 64),)),
    "video/TimeSformer": ("TimesformerForVideoClassification", "TimesformerConfig", {**_VIT, "num_frames": 4},
        (numbers(4, 3, 64, 64),)),
}  # fmt: skip


def from_transformers(model: str, config: str, values: Mapping[str, Any], fields: tuple[Field, ...]) -> Net:
    """Return a network of transformers; ``encoder of NAME`` takes that part alone."""
    library = importlib.import_module("transformers")
    part, _, name = model.rpartition(" of ")
    whole = getattr(library, name)(getattr(library, config)(**values))
    return Net(getattr(whole, part) if part else whole, fields)


def from_detr(name: str, **values: Any) -> Net:
    """Return a detector of the family of DETR on a small ResNet."""
    library = importlib.import_module("transformers")
    backbone = library.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], layer_type="basic", out_indices=[2, 3, 4]
    )
    config = getattr(library, f"{name}Config")(**{**_DETR, "backbone_config": backbone, **values})
    return Net(getattr(library, f"{name}ForObjectDetection")(config), PICTURE)


def rt_detr() -> Net:
    """Return W. Lv et al., "DETRs Beat YOLOs on Real-time Object Detection", arXiv 2304.08069."""
    library = importlib.import_module("transformers")
    backbone = library.RTDetrResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], layer_type="basic", out_indices=[2, 3, 4]
    )
    config = library.RTDetrConfig(
        backbone_config=backbone, encoder_in_channels=[32, 48, 64], encoder_hidden_dim=64, d_model=64, num_queries=20,
        decoder_in_channels=[64, 64, 64], encoder_ffn_dim=128, decoder_ffn_dim=128, decoder_layers=2, use_timm_backbone=False,
        decoder_attention_heads=4, encoder_attention_heads=4, anchor_image_size=None, use_pretrained_backbone=False,
    )  # fmt: skip
    return Net(library.RTDetrForObjectDetection(config), PICTURE)


def mask_former(name: str) -> Net:
    """Return B. Cheng et al., arXiv 2107.06278 (MaskFormer) or 2112.01527 (Mask2Former), on a small Swin."""
    library = importlib.import_module("transformers")
    swin = library.SwinConfig(
        image_size=64, embed_dim=16, depths=[1, 1, 1, 1], num_heads=[1, 2, 2, 4], window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    if name == "Mask2Former":
        config = library.Mask2FormerConfig(
            backbone_config=swin, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=64,
            encoder_layers=1, decoder_layers=2, num_attention_heads=4, dim_feedforward=64, num_queries=10,
        )  # fmt: skip
        return Net(library.Mask2FormerForUniversalSegmentation(config), PICTURE)
    decoder = library.DetrConfig(**{**_DETR, "num_queries": 10, "backbone_config": library.ResNetConfig()})
    config = library.MaskFormerConfig(
        backbone_config=swin, decoder_config=decoder, fpn_feature_size=32, mask_feature_size=32
    )
    return Net(library.MaskFormerForInstanceSegmentation(config), PICTURE)


def vit_pose() -> Net:
    """Return Y. Xu et al., "ViTPose", 2022, arXiv 2204.12484."""
    library = importlib.import_module("transformers")
    backbone = library.VitPoseBackboneConfig(
        image_size=[64, 64], patch_size=[16, 16], hidden_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    return Net(library.VitPoseForPoseEstimation(library.VitPoseConfig(backbone_config=backbone, num_labels=17)), PICTURE)


def clip() -> Net:
    """Return A. Radford et al., "Learning Transferable Visual Models", 2021, arXiv 2103.00020, both towers."""
    library = importlib.import_module("transformers")
    config = library.CLIPConfig(text_config={**_BERT, "eos_token_id": 2}, vision_config=_VIT, projection_dim=64)
    return Net(library.CLIPModel(config), (tokens(1000), numbers(3, 64, 64), MASK))


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
    kind = {"seg": "SegmentationModel", "pose": "PoseModel", "obb": "OBBModel"}.get(file.rpartition("-")[2], "DetectionModel")
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
    **{key: lambda values=values: from_transformers(*values) for key, values in _TRANSFORMERS.items()},
    "object detection/DETR": lambda: from_detr("Detr"),
    "object detection/Conditional DETR": lambda: from_detr("ConditionalDetr"),
    "object detection/Deformable DETR": lambda: from_detr("DeformableDetr", num_feature_levels=3),
    "object detection/Table Transformer": lambda: from_detr("TableTransformer"),
    "object detection/RT-DETR": rt_detr,
    "object detection/YOLOv8n": lambda: yolo("yolov8n"),
    "object detection/YOLO11n": lambda: yolo("yolo11n"),
    "object detection/YOLOv5n": lambda: yolo("yolov5n"),
    "object detection/YOLO11n-seg": lambda: yolo("yolo11n-seg"),
    "object detection/SSDLite heads": lambda: detector_heads("ssdlite320_mobilenet_v3_large", 160),
    "object detection/RetinaNet heads": lambda: detector_heads("retinanet_resnet50_fpn", 64),
    "segmentation/DeepLabV3": lambda: from_torchvision(".segmentation.deeplabv3_mobilenet_v3_large", weights_backbone=None),
    "segmentation/FCN": lambda: from_torchvision(".segmentation.fcn_resnet50", weights_backbone=None),
    "segmentation/LR-ASPP": lambda: from_torchvision(".segmentation.lraspp_mobilenet_v3_large", weights_backbone=None),
    "segmentation/U-Net": lambda: from_smp("Unet"),
    "segmentation/U-Net++": lambda: from_smp("UnetPlusPlus"),
    "segmentation/FPN": lambda: from_smp("FPN"),
    "segmentation/PSPNet": lambda: from_smp("PSPNet"),
    "segmentation/LinkNet": lambda: from_smp("Linknet"),
    "segmentation/MA-Net": lambda: from_smp("MAnet"),
    "segmentation/MaskFormer": lambda: mask_former("MaskFormer"),
    "segmentation/Mask2Former": lambda: mask_former("Mask2Former"),
    "keypoints/Simple Baseline": lambda: Net(small.SimpleBaseline(), PICTURE),
    "keypoints/ViTPose": vit_pose,
    "keypoints/YOLOv8n-pose": lambda: yolo("yolov8n-pose"),
    "optical flow/RAFT small": lambda: from_torchvision(
        ".optical_flow.raft_small", (numbers(3, 128, 128), numbers(3, 128, 128)), progress=False),
    "video/R3D-18": lambda: from_torchvision(".video.r3d_18", (numbers(3, 4, 32, 32),)),
    "vision and language/CLIP": clip,
    "speech/Conformer": lambda: with_lengths("Conformer", 40, 40, input_dim=40, num_heads=4, ffn_dim=128, num_layers=2,
        depthwise_conv_kernel_size=15),
    "speech/Emformer": lambda: with_lengths("Emformer", 40, 64, 32, input_dim=64, num_heads=4, ffn_dim=128, num_layers=2,
        segment_length=8, right_context_length=8),
    "speech/Wav2Letter": lambda: from_torchaudio("Wav2Letter", (numbers(40, 100),), 29, "mfcc", 40),
    "speech/DeepSpeech": lambda: from_torchaudio("DeepSpeech", (numbers(1, 40, 64),), 64, 128),
    "audio/Conv-TasNet": lambda: from_torchaudio("ConvTasNet", (numbers(1, 2000),), enc_num_feats=64, msk_num_feats=32,
        msk_num_hidden_feats=64, msk_num_layers=3, msk_num_stacks=2),
    "audio/spectrogram network": lambda: Net(small.SpectralNet(), (numbers(4096),)),
    "audio/WaveNet": lambda: Net(small.WaveNet(), (numbers(1, 512),)),
    "diffusion/UNet2D": lambda: from_diffusers("UNet2DModel", (numbers(3, 16, 16), _TIME), **_UNET,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D")),
    "diffusion/UNet2D with text": lambda: from_diffusers("UNet2DConditionModel", (numbers(4, 16, 16), _TIME, numbers(8, 32)),
        **_UNET, cross_attention_dim=32, attention_head_dim=8, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D")),
    "diffusion/VAE encoder": lambda: from_diffusers("AutoencoderKL", (numbers(3, 32, 32),), "encoder", **_VAE),
    "diffusion/VAE decoder": lambda: from_diffusers("AutoencoderKL", (numbers(4, 16, 16),), "decoder", **_VAE),
    "diffusion/DiT": lambda: from_diffusers("DiTTransformer2DModel", (numbers(4, 16, 16), _TIME, Field((), 10)),
        num_attention_heads=4, attention_head_dim=16, num_layers=2, sample_size=16, num_embeds_ada_norm=1000),
    "diffusion/SD3": lambda: from_diffusers("SD3Transformer2DModel",
        (numbers(4, 16, 16), numbers(8, 32), numbers(64), _TIME), sample_size=16, patch_size=2, in_channels=4, num_layers=2,
        attention_head_dim=16, num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=64,
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
