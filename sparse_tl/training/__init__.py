"""Model training: loss constraint, training loop, checkpoints, validation."""

from sparse_tl.training.constraint import (
    LossConstraint as LossConstraint,
    TargetEdges as TargetEdges,
    TargetLoss as TargetLoss,
)
from sparse_tl.training.evaluation import (
    HeldOut as HeldOut,
    evaluate_held_out as evaluate_held_out,
)
from sparse_tl.training.loop import (
    NonFiniteLossError as NonFiniteLossError,
    Selection as Selection,
    TrainingConfig as TrainingConfig,
    train as train,
)
from sparse_tl.training.outcome import (
    DenseAndSparse as DenseAndSparse,
    PostTraining as PostTraining,
)
from sparse_tl.training.own_text import sampled_windows as sampled_windows
from sparse_tl.training.post_train import post_train as post_train
from sparse_tl.training.pretrain import pretrain as pretrain
from sparse_tl.training.short_text import short_rows as short_rows
