"""Makes docs/gallery: every kind of figure, from real runs of the built-in models and of SmolLM2.

    python docs/gallery.py --runs runs/gallery
    python docs/gallery.py --figure head_roles --figure gate_trajectories

The second form makes some figures anew, from runs that are there. Runs that are finished in that
folder are not done again. Each function below makes one figure; the page shows its first words, its
code, and what the runs that it reads were set to.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from html import escape
from pathlib import Path
from typing import Annotated, Any

import typer
from PIL import Image

from sparse_tl import (
    DocstringTask,
    IOITask,
    Scores,
    ablation_grid,
    attention_view,
    attribute_circuit_edges,
    attribute_heads,
    attribute_logits,
    attribution_graph,
    check_scores,
    circuit_diagram,
    compare_skills,
    component_diagram,
    effect_figure,
    explore,
    head_behaviour,
    head_map,
    layer_map,
    load_addition_models,
    load_language_models,
    load_task_models,
    logit_lens,
    neuron_effects,
    patch_activations,
    plots,
)
from sparse_tl.circuits import Circuit, SeedCurves
from sparse_tl.head_roles import ROLES, AblationCurve, HeadRoles
from sparse_tl.jobs import run_circuits
from sparse_tl.jobs.circuits import effect_curves
from sparse_tl.jobs.head_roles import run_head_roles
from sparse_tl.plots import Figure
from sparse_tl.plots.panels.curves import Parts
from sparse_tl.storage.files import read_json
from sparse_tl.zoo import TASKS

OUT = Path(__file__).parent / "gallery"
SIDES = {"dense": "Task Model", "sparse": "Sparse Task Model"}
WITHOUT_RUN = {
    "addition": "the built-in addition models of seed 0, dense and sparse, on one sum",
    "language model": "the models of `load_language_models`, on one prompt",
    "task models": "the built-in task models of seed 0, on 16 prompt pairs",
    "pairs": "the models of `load_language_models`, on 16 prompt pairs",
    "families": "the models of `load_language_models`, on 24 prompts of each family",
}
# Smaller than the defaults of `sparse-tl head-roles`: 100 updates, 128 prompts, 5 tasks.
HEAD_ROLES: dict[str, Any] = {
    "tasks": ("addition", "ioi", "docstring"),
    "seeds": 2,
    "updates": 60,
    "prompts": 96,
    "batch_size": 32,
}
PROMPT = "When Mary and John went to the store, John gave a drink to"
_MOST_PICTURE, _MOST_PAGE, _MOST_ALL = 200_000, 350_000, 8_000_000


# ---- the figures -------------------------------------------------------------------------------


def addition(runs: Path) -> Figure:
    """Where attention moves the digits of a sum: dense model above, sparse model below."""
    dense, sparse = load_addition_models()
    models = {"Base Model": dense, "Sparse Model": sparse}
    return circuit_diagram(models, "36+28=?????", position=9)


def addition_attribution(runs: Path) -> Figure:
    """The same sum by effect on the log-probability of the 6: all that is drawn helps."""
    dense, sparse = load_addition_models()
    models = {"Base Model": dense, "Sparse Model": sparse}
    style = {"weight": "effect", "threshold": 0.05, "transition": None}
    return circuit_diagram(models, "36+28=?????", position=9, **style)


def attention_patterns(runs: Path) -> Figure:
    """Where the heads of the sparse model attend; eleven of sixteen attend to nothing."""
    _, sparse = load_addition_models()
    return attention_view(sparse, "36+28=?????")


def heads_kept(runs: Path) -> Figure:
    """How much of a task circuits of growing size explain, counted in heads."""
    return effect_figure(curves(runs / "circuits", "heads"), parts="heads")


def edges_kept(runs: Path) -> Figure:
    """The same in circuit edges; the multiplier says how many times fewer sparse needs."""
    return effect_figure(curves(runs / "circuits", "circuit_edges"), parts="circuit_edges")


def circuit_docstring(runs: Path) -> Figure:
    """The strongest circuit edges for the next argument of a docstring, by what reads them."""
    circuits, scores = measured_circuits(runs / "circuits/docstring/seed-0")
    return component_diagram(circuits, scores=scores, max_circuit_edges=30, unit="logits")


def circuit_sign(runs: Path) -> Figure:
    """A circuit for indirect objects, by whether an edge helps or hurts the right answer."""
    circuits, scores = measured_circuits(runs / "circuits/ioi/seed-0")
    name = "Sparse Task Model"
    return circuits[name].figure(scores=scores[name], max_circuit_edges=25, colour="sign")


def language_model(runs: Path) -> Figure:
    """SmolLM2 on one prompt: attention edges of the dense model above, of the sparse one below."""
    dense, sparse = load_language_models()
    models = {"Base Model": dense, "Sparse Model": sparse}
    return circuit_diagram(models, PROMPT, positions=[-1], size=(960, 1100))


def language_model_circuit(runs: Path) -> Figure:
    """SmolLM2 and its sparse version on indirect objects: circuit edges, and what heads do."""
    task, (dense, sparse) = IOITask(), load_language_models()
    pairs = task.pairs(dense, 16)
    models = {"SmolLM2": dense, "Sparse SmolLM2": sparse}
    scores = {name: attribute_circuit_edges(m, pairs, task.metric) for name, m in models.items()}
    circuits = {name: found.top(60).connected() for name, found in scores.items()}
    heads = {name: head_behaviour(m, pairs) for name, m in models.items()}
    return component_diagram(circuits, scores=scores, roles=heads, unit="logits")


def attribution(runs: Path) -> Figure:
    """How sparse SmolLM2 comes to the answer: heads, neurons and tokens at their positions."""
    _, sparse = load_language_models()
    return attribution_graph(sparse, PROMPT, max_nodes=40).figure()


def explorer(runs: Path) -> Figure:
    """What an explorer saves after a click on a head: the attention edges without it."""
    dense, sparse = load_addition_models()
    live = explore({"Base Model": dense, "Sparse Model": sparse}, "36+28=?????", position=9)
    live.toggle_head("Base Model", 2, 0)
    return live.figure()


def activation_patching(runs: Path) -> Figure:
    """What each head brings back of the answer when it is patched into corrupted prompts."""
    task, (dense, sparse) = IOITask(), load_language_models()
    pairs = task.pairs(dense, 16)
    models = {"SmolLM2": dense, "Sparse SmolLM2": sparse}
    effects = {name: patch_activations(m, pairs, task.metric, "z") for name, m in models.items()}
    return layer_map(effects)


def lens(runs: Path) -> Figure:
    """What SmolLM2 would predict if it ended before a layer; after the last layer on top."""
    dense, _ = load_language_models()
    return logit_lens(dense, PROMPT, answer=" Mary").figure(title="SmolLM2")


def direct_attribution(runs: Path) -> Figure:
    """What each component writes towards the right name and away from the wrong one."""
    dense, _ = load_language_models()
    return attribute_logits(dense, IOITask().pairs(dense, 16)).figure(title="SmolLM2")


def kinds_of_heads(runs: Path) -> Figure:
    """What heads do on indirect objects: movers, inhibition, induction, sinks."""
    dense, sparse = load_language_models()
    pairs = IOITask().pairs(dense, 16)
    models = {"SmolLM2": dense, "Sparse SmolLM2": sparse}
    return head_map({name: head_behaviour(model, pairs) for name, model in models.items()})


def head_scores(runs: Path) -> Figure:
    """How much each head matters for indirect objects, and the movers of the dense model framed."""
    task, (dense, sparse) = IOITask(), load_language_models()
    pairs = task.pairs(dense, 16)
    models = {"SmolLM2": dense, "Sparse SmolLM2": sparse}
    scores = {name: attribute_heads(m, pairs, task.metric) for name, m in models.items()}
    marked = {"Mover": head_behaviour(dense, pairs).heads["mover"]}
    return head_map(scores, marked=marked, unit="logits")


def skills(runs: Path) -> Figure:
    """What the sparse model kept of skills that it was not trained on, the largest fall on top."""
    dense, sparse = load_language_models()
    return compare_skills(dense, sparse, n=24).figure()


def score_check(runs: Path) -> Figure:
    """First-order scores of two methods beside the exact effects of the same edges."""
    task, (_, sparse) = DocstringTask(), load_task_models()
    pairs = task.pairs(sparse, 16)
    checks = {}
    for method in ("eap", "eap-ig"):
        scores = attribute_circuit_edges(sparse, pairs, task.metric, method=method)
        checks[method] = check_scores(sparse, pairs, task.metric, scores)
    return plots.score_figure(checks, unit="logits")


def neurons(runs: Path) -> Figure:
    """The neurons of one MLP with the largest effects on the right name."""
    task, (_, sparse) = IOITask(), load_language_models()
    pairs = task.pairs(sparse, 16)
    return neuron_effects(sparse, pairs, task.metric, "m20").figure(unit="logits")


def head_ablation(runs: Path) -> Figure:
    """What happens to the target response when heads of each role are ablated, one by one."""
    rows = {
        title: {name: ablation_curves(runs / "head-roles" / task / side) for side, name in COLUMNS}
        for task, title in ROWS.items()
    }
    return ablation_grid(rows)


def ablation_curve(runs: Path) -> Figure:
    """One ablation curve against its control: heads in random order."""
    curve = AblationCurve.load(runs / "head-roles/ioi/sparse/facilitation")
    return curve.figure(title="IOI, sparse model")


def head_roles(runs: Path) -> Figure:
    """How much each head facilitates, does not matter, or interferes."""
    return HeadRoles.load(runs / "head-roles/ioi/sparse/roles").figure()


def gate_trajectories(runs: Path) -> Figure:
    """Every head's gate through the three stages of a fit, in the colour of its role."""
    return plots.gate_trajectories(HeadRoles.load(runs / "head-roles/ioi/sparse/roles"))


# ---- what they read ----------------------------------------------------------------------------

COLUMNS = (("dense", "Dense"), ("sparse", "Sparse"))
ROWS = {"addition": "Addition", "ioi": "IOI", "docstring": "Docstring"}
SEEDS = (0,)
"""Of the models whose circuits are drawn; those but 0 are built where they are not in the cache."""


def curves(folder: Path, parts: Parts) -> dict[str, list[SeedCurves]]:
    """The curves of `run_circuits`, of all its seeds, by the title of their task."""
    return {
        task.title: [
            effect_curves(folder, task.name, SEEDS, side, parts, name)
            for side, name in SIDES.items()
        ]
        for task in TASKS
    }


def measured_circuits(folder: Path) -> tuple[dict[str, Circuit], dict[str, Scores]]:
    """The circuits that `run_circuits` found for an explained effect of 0.9, and their scores."""
    circuits, scores = {}, {}
    for side, name in SIDES.items():
        scores[name] = Scores.load(folder / side / "circuit_edge_scores")
        kept = [said["edge"] for said in read_json(folder / f"{side}_circuit.json")]
        circuits[name] = Circuit.of(scores[name].grid, kept)
    return circuits, scores


def ablation_curves(folder: Path) -> list[AblationCurve]:
    """The ablation curves of all roles that `run_head_roles` measured."""
    return [AblationCurve.load(folder / role) for role in ROLES]


# ---- the page ----------------------------------------------------------------------------------

FIGURES: dict[Callable[[Path], Figure], tuple[str, str]] = {
    addition: ("Attention edges of a sum", "addition"),
    addition_attribution: ("Attention edges by effect", "addition"),
    attention_patterns: ("Attention patterns", "addition"),
    heads_kept: ("Heads kept", "circuits"),
    edges_kept: ("Edges kept", "circuits"),
    circuit_docstring: ("A circuit", "circuits"),
    circuit_sign: ("A circuit by sign", "circuits"),
    language_model: ("Attention edges of a real language model", "language model"),
    language_model_circuit: ("A circuit of a real language model", "pairs"),
    attribution: ("Attribution graph", "language model"),
    explorer: ("The explorer", "addition"),
    activation_patching: ("Activation patching", "pairs"),
    lens: ("Logit lens", "language model"),
    direct_attribution: ("Direct logit attribution", "pairs"),
    kinds_of_heads: ("Behaviour of heads", "pairs"),
    head_scores: ("Scores of heads", "pairs"),
    skills: ("Skills", "families"),
    score_check: ("Checked scores", "task models"),
    neurons: ("Neurons", "pairs"),
    head_ablation: ("Head ablation", "head-roles"),
    ablation_curve: ("One ablation curve", "head-roles"),
    head_roles: ("Roles of heads", "head-roles"),
    gate_trajectories: ("Trajectories of gates", "head-roles"),
}

HEADING = """# Gallery

Every kind of figure, made by `python docs/gallery.py` from real runs of the built-in models and of
SmolLM2. They share one palette (`sparse_tl/plots/page/palette.py`): readable for the colour-blind,
on a light and on a dark ground. Each figure saves itself as an interactive page, as SVG and as PNG:
`figure.save("figure.svg")`, `figure.save("figure.png", theme="dark")`. In a notebook it follows the
notebook's theme; `figure.light()` and `figure.dark()` do not. Pages follow the reader's system.
Pages of curves hold plotly's script, 5 MB, and those of attention patterns circuitsvis; they are
left out here.

In the code `runs` is the folder of the runs; `curves`, `measured_circuits` and
`ablation_curves`, in `docs/gallery.py`, read what they measured.
"""


@cache
def measured(runs: Path, run: str) -> str:
    """Settings and time of a run, in words."""
    if run in WITHOUT_RUN:
        return WITHOUT_RUN[run]
    said = read_json(runs / run / "run.json")
    left_out = ("command", "format", "model", "models", "sparse", "tasks")
    chosen = {k: v for k, v in said["settings"].items() if k not in left_out and v is not None}
    if run == "circuits":
        chosen["seeds"] = ", ".join(map(str, SEEDS))
    words = ", ".join(
        f"{name.replace('_', ' ').strip()} {str(value).removesuffix('.0')}"
        for name, value in chosen.items()
    )
    minutes = sum(said["seconds"].values()) / 60
    return (
        f"`sparse-tl {run}` with {words}; tasks {', '.join(said['settings']['tasks'])}. All of it "
        f"took {minutes:.0f} min on a busy core"
    )


def write(name: str, figure: Figure) -> list[str]:
    """The files of one figure, each as large as a repository should hold."""
    written = []
    for theme, place in (("light", f"{name}.png"), ("dark", f"{name}_dark.png")):
        for scale in (1.5, 1.25, 1.0):
            path = figure.save(OUT / place, scale=scale, theme=theme)
            few = Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE)
            few.save(path, optimize=True)  # half the size, and no colour off by what one can see
            if path.stat().st_size <= _MOST_PICTURE:
                break
        else:
            raise ValueError(f"expected {place} of at most {_MOST_PICTURE} bytes; draw less")
        written.append(path)
    for page in (OUT / f"{name}.svg", OUT / f"{name}.html"):
        if figure.save(page).stat().st_size <= _MOST_PAGE:
            written.append(page)
        else:
            page.unlink()
    return [path.name for path in written]


def section(name: str, make: Callable[[Path], Figure], runs: Path) -> Iterator[str]:
    """What the page says about one figure."""
    title, run = FIGURES[make]
    files = write(name, make(runs))
    said = escape(inspect.getdoc(make) or "")
    links = {"Interactive page": f"{name}.html", "SVG": f"{name}.svg"}
    shown = [f"[{text}]({file})" for text, file in links.items() if file in files]
    body = inspect.getsource(make).split('"""')[-1].replace("return ", "")
    yield f"## {title}\n\n{said}\n"
    # The dark picture stands where the reader's system is dark, here and on code-hosting pages.
    yield (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{name}_dark.png">'
        f'<img src="{name}.png" alt="{said}"></picture>\n'
    )
    yield f"```python\n{textwrap.dedent(body).strip()}\n```\n"
    yield f"{'; '.join(shown)}. Measured: {measured(runs, run)}.\n"


def main(
    runs: Annotated[Path, typer.Option(help="Folder of the runs; finished ones are reused.")] = (
        Path("runs/gallery")
    ),
    figure: Annotated[list[str] | None, typer.Option(help="Make only these figures.")] = None,
) -> None:
    """Make every figure of the gallery and its page, or some figures without the page."""
    by_name = {make.__name__: make for make in FIGURES}
    for name in figure or ():
        if name not in by_name:
            raise typer.BadParameter(f"expected one of {', '.join(by_name)}; got {name!r}")
        write(name, by_name[name](runs))
    if figure:
        return
    run_circuits(runs / "circuits", seeds=SEEDS)
    run_head_roles(runs / "head-roles", **HEAD_ROLES)
    OUT.mkdir(exist_ok=True)
    parts = [HEADING]
    for make in FIGURES:
        parts.extend(section(make.__name__, make, runs))
    (OUT / "index.md").write_text("\n".join(parts), encoding="utf-8")
    total = sum(path.stat().st_size for path in OUT.iterdir())
    if total > _MOST_ALL:
        raise ValueError(f"expected at most {_MOST_ALL} bytes in {OUT}; got {total}; draw less")
    typer.echo(f"{OUT}: {len(FIGURES)} figures, {total / 1e6:.1f} MB")


if __name__ == "__main__":
    typer.run(main)
