"""Train the sparse SmolLM2 that comes with the package further, on windows of another length.

The model in the package is the result of such runs, on windows of 256 tokens, after two on windows
of 64 (docs/measurements.md). This continues from its adapters and gates, on the
model's own text and the texts that are given, as windows and as short text, and on six tasks, each
group at a divergence of at most 0.1 nats. With three texts and windows of 192, a step takes 9
seconds on one busy core, evaluations included. Run it again to resume.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/train_sparse_smollm2.py \\
        --text stories.txt wikitext.txt code.txt --window 256 --steps 460 --out runs/longer
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import torch

from sparse_tl import SparseTransformer, load_language_model
from sparse_tl.data import ShuffledStream, TokenBatch, read_documents, text_rows
from sparse_tl.lens import adapt, merge_lora
from sparse_tl.models.pairs import SHIPPED
from sparse_tl.tasks import TASKS_BY_NAME
from sparse_tl.training import post_train, sampled_windows, short_rows

TASKS = ("ioi", "ioi_long", "greater_than", "docstring", "induction", "capitals")


def main() -> None:
    """Continue post-training, and write the sparse model as a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    shipped = SHIPPED / "smollm2" / "sparse"
    parser.add_argument("--adapters", type=Path, default=shipped, help="folder to continue from")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--windows", type=int, default=900, help="of each text")
    parser.add_argument("--own-windows", type=int, default=330, help="that the model generates")
    parser.add_argument("--prompts", type=int, default=1000, help="of each task")
    parser.add_argument("--window-step", type=int, default=1, help="own and other windows")
    parser.add_argument("--short-step", type=int, default=6, help="short rows of each kind")
    parser.add_argument("--task-step", type=int, default=2, help="prompts of each task")
    parser.add_argument("--held-out-tokens", type=int, default=1280, help="that select, by group")
    parser.add_argument("--steps", type=int, default=460)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--gate-learning-rate", type=float, default=1e-3)
    parser.add_argument("--target-loss", default="kl+0.1")
    parser.add_argument("--out", type=Path, default=Path("runs/longer"))
    args = parser.parse_args()
    dense = load_language_model()
    base = adapt(dense).copy()
    sparse = SparseTransformer.from_pretrained(args.adapters, base=base)
    args.out.mkdir(parents=True, exist_ok=True)
    streams, validation = dict[str, ShuffledStream](), dict[str, TokenBatch]()

    def add(name: str, rows: TokenBatch, per_step: int) -> None:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
        n = max(2, args.held_out_tokens * len(rows) // int(rows.loss_mask.numel()))
        validation[name] = rows.select(order[:n])
        streams[name] = ShuffledStream(rows.select(order[n:]), per_step)

    def add_text(name: str, windows: TokenBatch, kinds: int) -> None:
        add(name, windows, args.window_step)
        for kind, rows in islice(short_rows(windows.tokens, dense.tokenizer).items(), kinds):
            add(f"{name}, {kind}", rows, args.short_step)

    file = args.out / "own.safetensors"
    add_text("own", sampled_windows(dense, args.own_windows, args.window, save_to=file), 3)
    texts = [
        text_rows(read_documents(file), dense.tokenizer, args.window, limit=args.windows).tokens
        for file in args.text
    ]
    add_text("texts", TokenBatch.next_token(torch.cat(texts)), 1)
    for name in TASKS:
        rows = TASKS_BY_NAME[name].pairs(sparse, args.prompts, seed=7).answer_rows()
        add(name, rows, args.task_step)
    outcome = post_train(
        sparse,
        streams,
        validation=validation,
        target_loss=args.target_loss,
        steps=args.steps,
        learning_rate={"lora": args.learning_rate},
        gate_learning_rate=args.gate_learning_rate,
        precision="bf16",
        checkpoint=args.out / "checkpoint",
    )
    print(outcome)
    print(sparse.save_pretrained(args.out / "adapters", adapters_only=True))
    merge_lora(sparse.model)
    print(sparse.save_pretrained(args.out / "sparse"))


if __name__ == "__main__":
    main()
