"""Safetensors checkpoints in the official layout: reading, checking, writing. Source: spec §6."""

from deepinfer.checkpoint.header import TensorInfo
from deepinfer.checkpoint.reader import CheckpointReader, check_closed
from deepinfer.checkpoint.scales import check_weight_scales
from deepinfer.checkpoint.writer import write_checkpoint

__all__ = [
    "CheckpointReader",
    "TensorInfo",
    "check_closed",
    "check_weight_scales",
    "write_checkpoint",
]
