"""Model training: loss constraint, training loop, checkpoints, validation."""

from sparse_tl.training.constraint import LossConstraint as LossConstraint, Target as Target
from sparse_tl.training.evaluation import (
    DenseAndSparse as DenseAndSparse,
    HeldOut as HeldOut,
    evaluate_held_out as evaluate_held_out,
)
from sparse_tl.training.loop import (
    NonFiniteLossError as NonFiniteLossError,
    TrainingConfig as TrainingConfig,
    pretrain as pretrain,
    train as train,
)
from sparse_tl.training.post_train import PostTraining as PostTraining, post_train as post_train
from sparse_tl.training.text import sampled_windows as sampled_windows, short_rows as short_rows
