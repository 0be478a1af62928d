"""The networks of ``benchmarks.any_model`` that transformers builds, from configurations."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.any_inputs import MASK, PICTURE, SEQUENCE, TEXT, Field, Net, numbers, tokens

_VOCABULARY = {"vocab_size": 1000}
_SMALL = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 1024}
_BERT = {**_VOCABULARY, **_SMALL, "max_position_embeddings": 128}
_LLAMA = {
    **_BERT,
    "num_key_value_heads": 2,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
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
_SERIES_FIELDS = (
    numbers(26),
    numbers(26, 2),
    Field((26,), ones=True),
    tokens(4, 1),
    numbers(1),
    numbers(8),
    numbers(8, 2),
)

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
    "text encoder/LayoutLM": ("LayoutLMModel", "LayoutLMConfig", _BERT,
        (tokens(1000), Field((SEQUENCE, 4), 500, ordered=True), MASK)),
    "text encoder/SqueezeBERT": ("SqueezeBertModel", "SqueezeBertConfig", {**_BERT, "embedding_size": 256}, TEXT),
    "text encoder/MobileBERT": ("MobileBertModel", "MobileBertConfig", {**_BERT, "intra_bottleneck_size": 64}, TEXT),
    "text encoder/FNet": ("FNetModel", "FNetConfig", _BERT, (tokens(1000),)),
    "text decoder/GPT-2": ("GPT2LMHeadModel", "GPT2Config",
        {**_VOCABULARY, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 128, "use_cache": False},
        (tokens(1000),)),
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
        {**_VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "use_cache": False},
        (tokens(1000, 24),)),
    "sequence to sequence/BART": ("BartModel", "BartConfig", _BART, (tokens(1000), MASK, tokens(1000))),
    "sequence to sequence/Marian": ("MarianModel", "MarianConfig", _BART, (tokens(1000), MASK, tokens(1000))),
    "sequence to sequence/T5": ("T5Model", "T5Config", {**_T5, "use_cache": False}, (tokens(1000), MASK, tokens(1000))),
    "object detection/YOLOS": ("YolosForObjectDetection", "YolosConfig",
        {**_SMALL, "image_size": [64, 64], "num_detection_tokens": 20}, PICTURE),
    "segmentation/SegFormer": ("SegformerForSemanticSegmentation", "SegformerConfig",
        {"depths": [1, 1, 1, 1]}, PICTURE),
    "depth/DPT": ("DPTForDepthEstimation", "DPTConfig", {**_VIT, "num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [32, 32, 64, 64],
        "fusion_hidden_size": 32}, PICTURE),
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
    "vision and language/BLIP vision": ("BlipVisionModel", "BlipVisionConfig",  # whose own weights are nought
        {**_VIT, "initializer_range": 0.02}, PICTURE),
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
        "context_length": 64, "prediction_length": 16, "patch_length": 8, "patch_stride": 8, "d_model": 32},
        (numbers(64, 4),)),
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
        decoder_in_channels=[64, 64, 64], encoder_ffn_dim=128, decoder_ffn_dim=128, decoder_layers=2,
        use_timm_backbone=False, decoder_attention_heads=4, encoder_attention_heads=4, anchor_image_size=None,
        use_pretrained_backbone=False,
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
    return Net(
        library.VitPoseForPoseEstimation(library.VitPoseConfig(backbone_config=backbone, num_labels=17)), PICTURE
    )


def clip() -> Net:
    """Return A. Radford et al., "Learning Transferable Visual Models", 2021, arXiv 2103.00020, both towers."""
    library = importlib.import_module("transformers")
    config = library.CLIPConfig(text_config={**_BERT, "eos_token_id": 2}, vision_config=_VIT, projection_dim=64)
    return Net(library.CLIPModel(config), (tokens(1000), numbers(3, 64, 64), MASK))


TRANSFORMERS: dict[str, Callable[[], Net]] = {
    **{key: functools.partial(from_transformers, *values) for key, values in _TRANSFORMERS.items()},
    "object detection/DETR": lambda: from_detr("Detr"),
    "object detection/Conditional DETR": lambda: from_detr("ConditionalDetr"),
    "object detection/Deformable DETR": lambda: from_detr("DeformableDetr", num_feature_levels=3),
    "object detection/Table Transformer": lambda: from_detr("TableTransformer"),
    "object detection/RT-DETR": rt_detr,
    "segmentation/MaskFormer": lambda: mask_former("MaskFormer"),
    "segmentation/Mask2Former": lambda: mask_former("Mask2Former"),
    "keypoints/ViTPose": vit_pose,
    "vision and language/CLIP": clip,
}
