"""The finetuning phase: loss constraint, loop, checkpoints, validation evaluation."""

from sparse_tl.training.config import Selection, Trained, TrainingConfig
from sparse_tl.training.constraint import LossConstraint, TargetLoss
from sparse_tl.training.evaluation import HeldOut, evaluate_held_out
from sparse_tl.training.loop import NonFiniteLossError, train
from sparse_tl.training.outcome import PostTraining
from sparse_tl.training.post_train import post_train
from sparse_tl.training.pretrain import pretrain

__all__ = [
    "HeldOut",
    "LossConstraint",
    "NonFiniteLossError",
    "PostTraining",
    "Selection",
    "TargetLoss",
    "Trained",
    "TrainingConfig",
    "evaluate_held_out",
    "post_train",
    "pretrain",
    "train",
]
