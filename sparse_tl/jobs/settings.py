"""The settings of each job: options of its command, checks, and what ``run.json`` records.

A field's name, type, default and description are those of its option. Nothing here imports torch,
so that commands show their help and refuse wrong settings at once.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    Strict,
    ValidationError,
    model_validator,
)

from sparse_tl.arguments import (
    MOST,
    AtLeastOne,
    AtLeastTwo,
    Logit,
    NotNegative,
    Positive,
    Seed,
    Share,
    close_choice,
    did_you_mean,
)

INPUT, SETTINGS, RUN = "Input", "Settings", "Run"
"""The panels of the help."""
DEVICE = "cpu, cuda, cuda:1 or mps. Default: a GPU if there is one."
MODEL = "smollm2 (see sparse-tl get), hub name, folder or GGUF file."
OWN = "own"
"""Name of the text that the model generates."""
PAIRS, OWN_PAIRS = 128, 32
"""Default numbers of prompt pairs: for the built-in models, and for models that the user names."""
BuiltInTask = Literal["greater_than", "ioi", "ioi_long", "docstring"]
"""Tasks of the built-in models, in the order of their panels."""
Task = Literal[BuiltInTask, "subject_verb", "anaphor", "induction", "capitals"]
TASK_NAMES = ", ".join(get_args(Task))
PAIRS_FILES = (".csv", ".jsonl", ".parquet")
"""Kinds of files that hold prompt pairs."""
QUESTION_SETS = ("syntax", "common_sense", "math")


def setting(default: Any, help: str, metavar: str = "N", panel: str = SETTINGS, **more: Any) -> Any:
    """A field, with what the help of its option shows; ``exclude``: it is not recorded as it is."""
    extra: Any = {"panel": panel}
    return Field(default, title=metavar, description=help, json_schema_extra=extra, **more)


def _listed(value: Any) -> Any:
    if isinstance(value, str | Path):
        return (str(value),)
    if isinstance(value, list | range | tuple):
        return tuple(str(one) if isinstance(one, Path) else one for one in value)
    return () if value is None else value


def _split(value: Any) -> Any:
    if isinstance(value, int):
        return (value,)
    if not isinstance(value, str):
        return _listed(value)
    if parts := [part.strip() for part in value.split(",") if part.strip()]:
        return tuple(parts)
    raise ValueError("the list is empty")


COMMAS = BeforeValidator(_split)
"""Reads a list that is separated by commas, as in the terminal."""
Texts = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Seeds = Annotated[tuple[Annotated[Seed, Strict(False)], ...], COMMAS]
Model = Annotated[str, BeforeValidator(lambda name: str(name) if isinstance(name, Path) else name)]


def _readable(kind: str, target: float | str) -> float | str:
    from sparse_tl.training.constraint import Target  # slow import: not needed for help

    Target.parse(**{kind: target})
    return target


Loss = Annotated[float | str, AfterValidator(partial(_readable, "loss"))]
Edges = Annotated[float | str, AfterValidator(partial(_readable, "edges"))]


class Job(BaseModel):
    """The settings of a job. Its docstring and its fields are the help of its command.

    Raises:
        ValueError: a setting is unknown, missing or invalid; the message names its option.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    command: ClassVar[str]

    device: str | None = setting(None, DEVICE, "NAME", RUN, exclude=True)
    restart: bool = setting(
        False, "Set an earlier run in --out aside first.", panel=RUN, exclude=True
    )
    progress: bool = setting(True, "Show progress bars.", panel=RUN, exclude=True)

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            message = wrong["msg"].removeprefix("Value error, ")
            if wrong["loc"]:
                message = f"{option_name(str(wrong['loc'][0]))}: {message}"
                if wrong["type"] not in ("missing", "value_error"):
                    message += f"; got {wrong['input']!r:.80}{close_choice(wrong)}"
            raise ValueError(message) from None

    def settings(self, **changed: Any) -> dict[str, Any]:
        """What determines the results, for ``run.json``."""
        return {"command": self.command, **self.model_dump(mode="json"), **changed}

    def only(self, *names: str) -> dict[str, Any]:
        """Some of the settings by name."""
        return {name: getattr(self, name) for name in names}


def takes(kind: type[Job]) -> Callable[[Any], Any]:
    """Let a function of a folder and a job take the fields of the job as keywords."""

    def register(function: Any) -> Any:
        @wraps(function)
        def run(out: str | Path, job: Job | None = None, **settings: Any) -> Any:
            if job is not None and settings:
                raise TypeError(f"the job has its own {', '.join(settings)}")
            return function(Path(out), job or kind(**settings))

        folder, named = (inspect.signature(some).parameters for some in (function, kind))
        parameters = [folder["out"], *named.values()]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return register


def _pairs_file(path: str) -> str:
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}")
    if Path(path).suffix.lower() not in PAIRS_FILES:
        raise ValueError(f"expected a {', '.join(PAIRS_FILES)} file; got {path}")
    return path


def _with_digest(path: str) -> str:
    return f"{Path(path).name} {hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]}"


PairsFile = Annotated[Model, AfterValidator(_pairs_file), PlainSerializer(_with_digest)]


def check_tasks(names: Iterable[str], known: Sequence[str]) -> None:
    if unknown := [name for name in names if name not in known]:
        listed = ", ".join(known)
        hint = did_you_mean(unknown[0], known)
        raise ValueError(f"--tasks: {unknown} are none of {listed} here.{hint}")


def group_name(source: str) -> str:
    """The name of a text in results: that of the file, without suffix, or of the dataset."""
    return Path(source).stem if Path(source).is_file() else source


def option_name(field: str) -> str:
    return "--" + field.strip("_").replace("_", "-")


class AdditionJob(Job):
    """Train a model that adds two-digit numbers, make its attention sparse, and draw both.

    Writes the models (dense/, sparse/), metrics.json, history.csv, a figure of both models
    (addition.html, .svg, .png) and the circuit of each digit (circuits/). Run the command again to
    resume an interrupted run; finished results are reused.
    """

    command = "addition"
    form: Literal["autoregressive", "placeholder"] = setting(
        "placeholder", "autoregressive or placeholder (answer columns hold '?').", "NAME", INPUT
    )
    target_loss: Loss | None = setting(
        None, "Loss per character: 0.01, or +0.01 over the dense model.", "NATS"
    )
    dense_steps: AtLeastOne | None = setting(None, "Maximum steps of dense training.")
    steps: AtLeastOne | None = setting(None, "Number of post-training steps.")
    seed: Seed = setting(0, "Random seed for weights, data order and gate noise.", panel=RUN)


class PostTrainingJob(Job):
    """Make the attention of any model sparse, within a loss limit or a number of edges you choose.

    Without --text, the model generates the text. --text and --task can be repeated; each text and
    task must then meet the target loss. Writes the sparse model (sparse/), metrics.json,
    history.csv, texts.csv and skills.csv. Run the command again to resume an interrupted run. With
    --prompt, it also draws circuit_diagram (.html, .svg, .png), even for a finished run.
    """

    command = "post-train"
    model: Model = setting(..., f"A dense model: {MODEL}", "NAME", INPUT)
    text: Texts = setting(
        (),
        "Text file (.jsonl, .csv or .parquet: its column text), dataset (name or "
        "name:configuration), or own (text that the model generates). Default: own. Repeatable.",
        "SOURCE",
        INPUT,
    )
    task: Annotated[tuple[Task, ...], BeforeValidator(_listed)] = setting(
        (), f"Task to preserve: {TASK_NAMES}. Repeatable.", "NAME", INPUT
    )
    target_loss: Loss | None = setting(
        None,
        "Per token, on every text and task: kl+0.05 (divergence from the dense model, the "
        "default), +0.05 (over its loss) or 2.5 (a loss).",
        "NATS",
        INPUT,
        exclude=True,  # recorded as the target
    )
    target_edges: Edges | None = setting(
        None,
        "Instead of a target loss: attention edges per token, the mean over texts and tasks, such "
        "as 300, or 100x for a hundred times fewer than in the dense model.",
        "EDGES",
        INPUT,
        exclude=True,
    )
    held_out_text: Texts = setting(
        (), "Text that is only evaluated, not trained on. Repeatable.", "SOURCE", INPUT
    )
    own_windows: AtLeastOne = setting(2000, "Windows of text that the model generates.")
    window: AtLeastTwo = setting(128, "Tokens per window.")
    boundaries: Literal["predict", "skip", "split"] = setting(
        "predict", "At a document's end: predict the next, skip that loss, or split there.", "NAME"
    )
    batch_size: AtLeastOne = setting(8, "Windows per step, over all texts.")
    accumulate: AtLeastOne = setting(1, "Micro-batches per step.")
    checkpoint_activations: bool = setting(
        False, "Recompute activations to save memory.", exclude=True
    )
    shard: bool = setting(False, "Shard the weights across ranks.", exclude=True)
    steps: AtLeastOne = setting(2000, "Number of post-training steps.")
    learning_rate: Positive = setting(7e-4, "Peak learning rate of weights or adapters.", "RATE")
    gate_learning_rate: Positive = setting(3e-3, "Peak learning rate of gates.", "RATE")
    trained: Literal["lora", "all", "qk", "gates"] | None = setting(
        None,
        "What to train besides the gates: lora (adapters), all, qk, or gates (nothing else). "
        "Default: lora, or all if the model takes no adapters.",
        "NAME",
    )
    lora: AtLeastOne = setting(16, "Rank of the low-rank adapters.", "RANK")
    head_cost: NotNegative = setting(0.0, "Cost of a head in use.", "EDGES")
    mlps: bool = setting(False, "Gate MLPs too.")
    gates: Literal["score", "share"] = setting(
        "share", "What gates read: share (attention probability) or score.", "KIND"
    )
    initial_threshold: Share | None = setting(
        None, "Initial threshold of share gates; 0.005 by default.", "SHARE"
    )
    initial_bias: Logit | None = setting(None, "Initial bias of score gates; 4 by default.", "B")
    dtype: Literal["float32", "bfloat16"] | None = setting(
        None, "Weights: float32, or bfloat16 with float32 copies of those trained.", "NAME"
    )
    precision: Literal["float32", "bf16"] = setting("float32", "float32 or bf16.", "NAME")
    prompt: str | None = setting(
        None, "Also draw the attention of both models on this prompt.", "TEXT", INPUT, exclude=True
    )
    seed: Seed = setting(0, "Random seed for weights, data order and gate noise.", panel=RUN)

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts to train on: by default the one that the model generates."""
        return self.text or (() if self.task else (OWN,))

    @property
    def n_groups(self) -> int:
        """The parts of a step that have equally many tokens; the model's own short text is one."""
        return len(self.texts) + len(self.task) + (OWN in self.texts)

    @property
    def per_group(self) -> int:
        """Windows of one group per step."""
        return self.batch_size // self.n_groups

    @model_validator(mode="after")
    def _consistent(self) -> PostTrainingJob:
        if self.shard and OWN in self.texts:
            raise ValueError("--shard needs --text: a sharded model cannot generate text")
        names = [*map(group_name, self.texts), *self.task, *map(group_name, self.held_out_text)]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"texts and tasks need different names; {repeated} are given twice")
        if not self.per_group:
            raise ValueError(
                f"--batch-size: each step needs a window of every text and task, {self.n_groups} "
                f"with the model's own short text as one; got {self.batch_size}"
            )
        return self


class CircuitsJob(Job):
    """Find the heads and circuit edges that a task needs in a dense and a sparse model.

    Searches each model for a small circuit with an explained effect of 0.9 on held-out prompt
    pairs, says what its heads do, and ranks all heads and edges by their scores. With --model but
    without --sparse, only the dense model is analysed. --pairs-file takes your own prompts instead
    of a task. A task that a model cannot do gets no circuit, and the command says why. Writes a
    diagram of the circuits of each task and seed (circuit.html), metrics.json, curves.csv, scores,
    evaluations, circuits, and the figures heads_kept and circuit_edges_kept (.html; with Chrome or
    Chromium also .svg and .png), which show every seed and the median. Without --model, it uses the
    built-in task models; seeds that do not ship with the package are trained first and cached. Run
    the command again to resume an interrupted run, whose finished results are kept, or to add
    seeds.
    """

    command = "circuits"
    model: Model | None = setting(
        None, f"The dense model: {MODEL} Default: the built-in pair.", "NAME", INPUT
    )
    sparse: str | Path | None = setting(
        None, "The sparse model made from it; smollm2: the one in the package.", "FOLDER", INPUT
    )
    tasks: Annotated[tuple[Task, ...], COMMAS] = setting(
        (),
        f"Comma-separated: {TASK_NAMES}. Default: the first four, those of the built-in models.",
        "NAMES",
        INPUT,
    )
    pairs_file: PairsFile | None = setting(
        None,
        "Your own prompt pairs instead of tasks: a .csv, .jsonl or .parquet file with the columns "
        "clean, corrupted, answer and, if there is one, wrong.",
        "FILE",
        INPUT,
    )
    pairs: Annotated[int, Field(ge=4, le=MOST)] | None = setting(
        None,
        f"Prompt pairs per task: half score and search, half evaluate. Default: {PAIRS}; with "
        f"--model {OWN_PAIRS}; of a file all.",
    )
    seconds: Positive = setting(120.0, "Time limit of each search for a circuit.", "SECONDS")
    method: Literal["eap", "eap-ig", "relp"] = setting(
        "eap-ig", "How edges and heads are scored: eap, eap-ig, relp.", "NAME"
    )
    patch: Literal["zero", "mean", "corrupted", "resample"] = setting(
        "corrupted", "corrupted, mean, resample or zero.", "NAME"
    )
    batch_size: AtLeastOne = setting(32, "Prompt pairs per forward pass.", exclude=True)
    seeds: Seeds = setting(
        (0,),
        "Comma-separated seeds of prompts and built-in pairs, one pair per seed.",
        "NUMBERS",
        RUN,
        min_length=1,
        exclude=True,  # they can be added to a finished run
    )

    @model_validator(mode="after")
    def _consistent(self) -> CircuitsJob:
        if self.sparse is not None and self.model is None:
            raise ValueError("--sparse needs --model: the dense model that it was made from")
        if self.pairs_file is not None and (self.tasks or self.model is None):
            raise ValueError("--pairs-file needs --model, and replaces --tasks")
        if self.model is None:
            check_tasks(self.tasks, get_args(BuiltInTask))
        return self


class HeadBehaviourJob(Job):
    """Say what each head of a model does: where it attends, what it copies and what it moves.

    The model is run on random tokens that repeat; with --task or --pairs-file also on prompt pairs,
    which show the heads that move the answer. Writes heads.csv, a map of the heads (heads.html;
    with Chrome or Chromium also .svg and .png) and the scores (head_behaviour/).
    """

    command = "head-behaviour"
    model: Model = setting(..., f"Dense or sparse: {MODEL}", "NAME", INPUT)
    task: Task | None = setting(
        None, f"Task that heads contribute to: {TASK_NAMES}.", "NAME", INPUT
    )
    pairs_file: PairsFile | None = setting(
        None, "Your own prompt pairs instead of a task; see sparse-tl circuits.", "FILE", INPUT
    )
    pairs: AtLeastOne | None = setting(
        None, f"Prompt pairs. Default: {OWN_PAIRS}, or all of the file."
    )
    seed: Seed = setting(0, "Random seed for prompts.", panel=RUN)

    @model_validator(mode="after")
    def _consistent(self) -> HeadBehaviourJob:
        if self.task is not None and self.pairs_file is not None:
            raise ValueError("--pairs-file replaces --task; give one of them")
        return self


class GraphJob(Job):
    """Draw which tokens, attention edges and neurons made the next token of one prompt.

    Writes the attribution graph of every model (graph.html), and its nodes and links as tables.
    """

    command = "graph"
    model: Texts = setting(
        ..., f"Dense or sparse: {MODEL} Repeatable.", "NAME", INPUT, min_length=1
    )
    prompt: str = setting(..., "The prompt.", "TEXT", INPUT)
    target: str | None = setting(
        None, "Token whose logit is explained. Default: the prediction.", "TEXT", INPUT
    )
    minus: str | None = setting(None, "Token whose logit is subtracted.", "TEXT", INPUT)
    nodes: AtLeastOne = setting(300, "Maximum number of nodes, besides tokens and the target.")
    examples: bool = setting(
        False, "Where neurons are active in text that the model writes; takes minutes, once."
    )

    @model_validator(mode="after")
    def _consistent(self) -> GraphJob:
        if self.minus is not None and self.target is None:
            raise ValueError("--minus needs --target")
        return self


class HeadRolesJob(Job):
    """Find which heads facilitate a task, are irrelevant to it or interfere, and ablate them.

    Fits causal head gates for every task and model. Writes a grid of ablation curves
    (ablation_grid.html; with Chrome or Chromium also .svg and .png), metrics.json, scores.csv and
    curves.csv; for each task and model also the roles and, with Chrome or Chromium, a heat map of
    the heads and the trajectories of their gates (.png). Without --model, it uses the built-in
    models; seeds that do not ship with the package are trained first and cached. Run the command
    again to resume an interrupted run.
    """

    command = "head-roles"
    model: Texts = setting(
        (), f"Dense or sparse: {MODEL} Repeatable. Default: the built-in pair.", "NAME", INPUT
    )
    tasks: Annotated[tuple[str, ...], COMMAS] = setting(
        (),
        "Comma-separated; default: all. Built-in models: addition, greater_than, ioi, docstring, "
        "ioi_long. Others: syntax, common_sense, math, each with =SOURCE for a file, folder or "
        f"other dataset; text=SOURCE; {TASK_NAMES}.",
        "NAMES",
        INPUT,
    )
    prompts: Annotated[int, Field(ge=8, le=MOST)] = setting(
        128, "Prompts per task; a quarter is held out."
    )
    seeds: Annotated[int, Field(ge=1, le=10_000)] = setting(
        2, "Number of gate matrices, fitted together; 10 in the paper."
    )
    updates: AtLeastOne = setting(100, "Updates per stage; 500 in the paper.")
    lambda_: float = setting(0.1, "Weight of the gate penalty.", "NATS")
    batch_size: AtLeastOne = setting(16, "Prompts per update; 64 in the paper.")
    accumulate: AtLeastOne = setting(1, "Micro-batches per update, to save memory.", exclude=True)
    max_heads: AtLeastOne = setting(50, "Maximum number of heads to ablate.")
    seed: Seed = setting(
        0, "Random seed for prompts, weights, data order and gate noise.", panel=RUN
    )

    @model_validator(mode="after")
    def _consistent(self) -> HeadRolesJob:
        if self.lambda_ == 0:
            raise ValueError("--lambda: gates need a penalty, so it cannot be 0")
        if not self.model:
            check_tasks(self.tasks, ("addition", *get_args(BuiltInTask)))
            return self
        kinds = [name.partition("=")[0] for name in self.tasks if "=" in name]
        check_tasks(kinds, (*QUESTION_SETS, "text"))
        bare = [name for name in self.tasks if "=" not in name]
        check_tasks(bare, (*QUESTION_SETS, "text=SOURCE", *get_args(Task)))
        if len({*kinds, *bare}) < len(set(self.tasks)):
            raise ValueError("--tasks: give each kind of task once")
        return self
