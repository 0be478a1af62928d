"""Training after a network was changed: a loop on one device or many, and what a network is taught by."""

from optimize.training.loop import History, Training
from optimize.training.losses import Attention, Features, Labels, Lesson, Logits, Loss, Similarity
from optimize.training.masks import rewind

__all__ = ["Attention", "Features", "History", "Labels", "Lesson", "Logits", "Loss", "Similarity", "Training", "rewind"]
