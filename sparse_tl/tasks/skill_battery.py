"""Which tasks a model does, and which skills a sparse model kept.

`task_report` measures the tasks, before a search for their circuits. `compare_skills` compares
families of short prompts, dense beside sparse: a model is *right* if its most likely next token is
a right answer, and has *right above wrong* if a right answer is more likely than every wrong one. A
skill fell if the share of prompts with right above wrong fell by more than `FALL`; the fall exceeds
noise if the exact sign test on the prompts that only one of the models has so has a p below
`NOISE`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sparse_tl.arguments import AtLeastOne, Seed, checked
from sparse_tl.backend import HookedModel, Model, adapt, evaluation_mode
from sparse_tl.circuits.evaluation import ENDS, effect_interval
from sparse_tl.circuits.pair_runs import batches_of
from sparse_tl.circuits.task_skill import Skill, measure_skill
from sparse_tl.data import PromptPairs
from sparse_tl.data.prompts import start_of_prompts
from sparse_tl.gates import SparseTransformer
from sparse_tl.metrics import check_wrong, chooses_right, is_right
from sparse_tl.progress import tracked
from sparse_tl.results import Result
from sparse_tl.tasks.docstring import DocstringTask
from sparse_tl.tasks.greater_than import GreaterThanTask
from sparse_tl.tasks.induction import InductionTask
from sparse_tl.tasks.ioi import IOILongTask, IOITask
from sparse_tl.tasks.task import Pairs, Task
from sparse_tl.tasks.templates import BATTERY, AnaphorTask, CapitalsTask, SubjectVerbTask
from sparse_tl.training.distillation import DensePredictions, losses_and_divergences

_ALL: tuple[Task, ...] = (
    GreaterThanTask(),
    IOITask(),
    IOILongTask(),
    DocstringTask(),
    SubjectVerbTask(),
    AnaphorTask(),
    InductionTask(),
    CapitalsTask(),
)
TASKS_BY_NAME = {task.name: task for task in _ALL}
"""The tasks that work for any tokenizer, by the names that commands take."""


@dataclass(frozen=True, eq=False)
class TaskReport(Result):
    """How well a model does tasks.

    Args:
        skills: the measured skill, by task.
        lacks: by task, the reason why the model does not do it or cannot be tested; empty if the
            model does it.
    """

    skills: dict[str, Skill]
    lacks: dict[str, str]

    @property
    def done(self) -> list[str]:
        """The tasks that the model does."""
        return [name for name, lack in self.lacks.items() if not lack]

    def to_pandas(self) -> pd.DataFrame:
        """One row per task, as in `Skill`; clean and corrupted are means of the task's metric.

        A task has no numbers if the model cannot be tested on it.
        """
        rows = []
        for name, lack in self.lacks.items():
            row: dict[str, Any] = {"task": name}
            if name in self.skills:
                skill = self.skills[name]
                row |= {"prompts": len(skill.right), **skill.numbers}
                row["clean"] = skill.clean.mean().item()
                row["corrupted"] = skill.corrupted.mean().item()
            rows.append({**row, "done": not lack})
        columns = ["task", "prompts", "accuracy", "choice", "chance", "clean", "corrupted", "done"]
        return pd.DataFrame(rows, columns=columns).set_index("task")

    def __repr__(self) -> str:
        return f"TaskReport(does {len(self.done)} of {len(self.lacks)} tasks: {self.done})"

    def __str__(self) -> str:
        """One line per task."""
        return "\n".join(
            f"{name}: {lack or self.skills[name]}" for name, lack in self.lacks.items()
        )

    def _summary(self) -> pd.DataFrame:
        return self.to_pandas().assign(lack=[*self.lacks.values()])


@checked
def task_report(
    model: HookedModel,
    tasks: Sequence[str | Task] = (),
    *,
    n: Pairs = 64,
    seed: Seed = 0,
    prepend_bos: bool | None = None,
    chat: bool = False,
    batch_size: AtLeastOne = 32,
    progress: bool = True,
) -> TaskReport:
    """Measure how well a model does tasks, before searching it for their circuits.

    `Skill` describes the measurements, and when a model does a task. Other arguments are those of
    `Task.pairs` and `measure_skill`.

    Args:
        model: dense or sparse model, with a tokenizer for all tasks but induction.
        tasks: tasks, or their names in `TASKS_BY_NAME`; all tasks if empty.
        n: number of prompts per task.

    Raises:
        ValueError: a task is unknown or given twice, or prompts cannot begin as requested.
    """
    if model.tokenizer is not None:
        start_of_prompts(model, prepend_bos, chat=chat)  # fail here, not in every task
    names = [task if isinstance(task, str) else task.name for task in tasks or _ALL]
    unknown = {task for task in tasks if isinstance(task, str)} - TASKS_BY_NAME.keys()
    if unknown or len(set(names)) < len(names):
        raise ValueError(f"give each task once, of {list(TASKS_BY_NAME)} or your own; got {names}")
    chosen = [TASKS_BY_NAME[task] if isinstance(task, str) else task for task in tasks or _ALL]
    skills, lacks = {}, {}
    for task in chosen:
        try:
            pairs = task.pairs(model, n, seed=seed, prepend_bos=prepend_bos, chat=chat)
        except ValueError as error:  # the tokenizer lacks the task's words
            lacks[task.name] = str(error)
            continue
        skills[task.name] = measure_skill(
            model, pairs, task.metric, batch_size=batch_size, progress=progress
        )
        lacks[task.name] = skills[task.name].lack
    return TaskReport(skills, lacks)


# ---- what a sparse model kept ------------------------------------------------------------------

FALL, NOISE = 0.03, 0.05
_KEPT, _FELL, _LEFT_OUT = "kept", "fell", "left out"


@dataclass(frozen=True, eq=False)
class SkillComparison(Result):
    """Which skills a sparse model kept.

    Args:
        table: one row per family. Shares of prompts, ``right`` and ``above`` (right above wrong),
            of the dense and the sparse model, and the mean divergence ``KL(dense || sparse)`` in
            nats at the answer, each with the ends of its 95 % interval (``_low``, ``_high``);
            ``chance``; ``change``, of right above wrong, with its ``p``; ``edges``, the open
            attention edges per token of the sparse model, and ``possible`` ones; and ``outcome``,
            which says of a family without numbers why it has none.
    """

    table: pd.DataFrame

    @property
    def kept(self) -> list[str]:
        """The families that the dense model does and that did not fall by more than `FALL`."""
        return [row["family"] for row in self._rows(_KEPT)]

    @property
    def lost(self) -> list[str]:
        """The families that fell by more than `FALL`, within noise or not; the largest first."""
        fell = sorted(self._rows(_FELL), key=lambda row: row["change"])
        return [row["family"] for row in fell]

    @property
    def left_out(self) -> list[str]:
        """The families that were left out on request."""
        return [row["family"] for row in self._rows(_LEFT_OUT)]

    @property
    def verdict(self) -> str:
        """One sentence: how many skills were kept, and which fell."""
        table, n = self.to_pandas().loc[self.lost], len(self.kept)
        fell = [
            f"{row['title']} {row['above_dense']:.0%} to {row['above_sparse']:.0%}"
            + row["outcome"].removeprefix(_FELL)
            for row in table.to_dict("records")
        ]
        return f"kept {n} of {n + len(fell)} skills" + "; fell: " * bool(fell) + ", ".join(fell)

    def to_pandas(self) -> pd.DataFrame:
        """The table, by family."""
        return self.table.set_index("family")

    def _rows(self, outcome: str) -> list[dict[Any, Any]]:
        rows = self.table.to_dict("records")
        return [row for row in rows if row["outcome"].startswith(outcome)]

    def _summary(self) -> pd.DataFrame:
        return self.to_pandas().filter(regex="(?<!_low)(?<!_high)$")

    def __repr__(self) -> str:
        return f"SkillComparison({self.verdict})"


@checked
@torch.no_grad()
def compare_skills(
    dense: Model | SparseTransformer,
    sparse: SparseTransformer,
    families: Sequence[Task] = BATTERY,
    *,
    leave_out: Sequence[str] = (),
    n: Pairs = 64,
    seed: Seed = 0,
    batch_size: AtLeastOne = 64,
    progress: bool = True,
) -> SkillComparison:
    """Measure what post-training kept of skills that no training group asks for.

    Args:
        dense: the dense model; a sparse one is run with its gates open and its adapters off.
        sparse: the sparse model, with the same tokenizer.
        families: families of prompts; any tasks with answers of a single token.
        leave_out: names of families that a training group came from.
        n: number of prompts per family, or as many as there are.
        seed: random seed for the prompts.
        batch_size: prompts per forward pass.
        progress: whether to show a progress bar.

    Raises:
        ValueError: a name is unknown or given twice, the dense model is the one inside the sparse
            one, or a prompt does not fit a model.
    """
    names = [task.name for task in families]
    if len({*names}) < len(names) or not {*leave_out} <= {*names}:
        raise ValueError(
            f"give each family once, and as leave_out only names of families; got {names}, and "
            f"{[*leave_out]} to leave out"
        )
    reference, rows = DensePredictions(dense, capacity=0), []
    with (
        evaluation_mode(dense),
        evaluation_mode(sparse),
        tracked("measuring skills", len(names), progress) as step,
    ):
        for task in families:
            row: dict[str, Any] = {"family": task.name, "title": task.title, "outcome": _LEFT_OUT}
            if task.name not in leave_out:
                try:
                    pairs = _distinct(task.pairs(dense, n, seed=seed))
                    pairs = pairs.of_one_token("the next token is compared")
                except ValueError as error:  # the tokenizer lacks the task's words as tokens
                    row["outcome"] = f"not measured: {error}"
                else:
                    row |= _measured(sparse, reference, pairs, batch_size)
            rows.append(row)
            step()
    return SkillComparison(pd.DataFrame(rows))


def _measured(
    sparse: SparseTransformer, reference: DensePredictions, pairs: PromptPairs, batch_size: int
) -> dict[str, Any]:
    """The numbers of one family, and its outcome."""
    check_wrong(pairs)
    adapter, parts = adapt(sparse), []
    for batch in batches_of(adapter, pairs, batch_size):
        rows = batch.answer_rows()
        with adapter.only_at(rows.loss_mask) as logits_at:
            output, counts = sparse.run_with_counts(rows.tokens, **rows.model_kwargs)
        both = reference.logits(rows), logits_at(output)
        edges = [x.sum(dim=(0, 2)) for x in (counts.active, counts.possible)]
        part = [
            torch.stack([is_right(logits, batch) for logits in both]),
            torch.stack([chooses_right(logits, batch) for logits in both]),
            losses_and_divergences(both[1], both[0], rows.loss_labels())[1].double(),
            torch.stack([*edges, counts.tokens]).double(),
        ]
        parts.append([values.cpu() for values in part])
    by_prompt = [torch.cat(values, dim=-1) for values in zip(*parts, strict=True)]
    return numbers(pairs.chance, *by_prompt)


def numbers(
    chance: float,
    right: Bool[Tensor, "2 prompt"],
    above: Bool[Tensor, "2 prompt"],
    divergence: Float[Tensor, " prompt"],
    edges: Float[Tensor, "3 prompt"],
) -> dict[str, Any]:
    """A row of `SkillComparison.table`, from values of every prompt.

    `right` and `above` are of the dense and the sparse model; `edges` are open edges, possible
    edges, and tokens.
    """
    n, row = len(divergence), dict[str, Any](chance=chance)
    ends = effect_interval(divergence, torch.ones_like(divergence), torch.zeros_like(divergence))
    found = {"divergence": (divergence.mean().item(), *(end.item() for end in ends))}
    for name, values in (("right", right), ("above", above)):
        for side, hits in zip(("dense", "sparse"), values.sum(dim=1).tolist(), strict=True):
            found[f"{name}_{side}"] = hits / n, *wilson_interval(hits, n)
    for name, ends in found.items():
        row |= zip((name, f"{name}_low", f"{name}_high"), ends, strict=True)
    lost, won = (int((one & ~other).sum()) for one, other in (above, above.flip(0)))
    active, possible, tokens = edges.sum(dim=1).tolist()
    row |= {"prompts": n, "change": (won - lost) / n, "p": sign_test(lost, won)}
    row |= {"edges": active / tokens, "possible": possible / tokens, "outcome": _KEPT}
    if row["above_dense_low"] <= chance:
        row["outcome"] = "the dense model is at chance"
    elif row["change"] < -FALL:
        row["outcome"] = _FELL if row["p"] < NOISE else f"{_FELL} (within noise)"
    return row


def wilson_interval(n_true: int, n: int) -> tuple[float, float]:
    """Lower and upper ends of Wilson's 95 % interval of a share, 0 to 1.

    Reference: Wilson (1927), Journal of the American Statistical Association 22, 209-212.
    """
    z = statistics.NormalDist().inv_cdf(ENDS[1])
    half = z * math.sqrt(n_true * (n - n_true) / n + z**2 / 4)
    middle, total = n_true + z**2 / 2, n + z**2
    return max(0.0, (middle - half) / total), min(1.0, (middle + half) / total)


def sign_test(lost: int, won: int) -> float:
    """The two-sided p of as unequal a split of the pairs that only one of two models has right.

    Reference: McNemar (1947), Psychometrika 12, 153-157, with exact probabilities.
    """
    tail = sum(math.comb(lost + won, k) for k in range(min(lost, won) + 1))
    return min(1.0, 2 * tail / 2 ** (lost + won))


def _distinct(pairs: PromptPairs) -> PromptPairs:
    """Each prompt once; tasks repeat prompts if they have fewer than requested."""
    prompts = torch.cat([pairs.positions[:, None], pairs.clean], dim=1).tolist()
    first = {tuple(prompt): row for row, prompt in reversed([*enumerate(prompts)])}
    return pairs.select(torch.tensor(sorted(first.values())))
