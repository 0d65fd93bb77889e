"""Every public figure, as a reader sees it: nothing is cut off, and all text can be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pandas as pd
import pytest
import torch
from component_examples import ablation_of, head_roles_of, neurons_of
from legibility import problems_of
from plotly.offline import get_plotlyjs
from test_layer_map import attribution, lens, patching

from sparse_tl import load_addition_models, plots
from sparse_tl.circuits import (
    KINDS,
    AttributionGraph,
    EffectCurve,
    Evaluation,
    FoundCircuit,
    HeadBehaviour,
    ScoreCheck,
    Scores,
    SeedCurves,
    attribution_graph,
)
from sparse_tl.graph import HeadGrid
from sparse_tl.head_roles import AblationCurve
from sparse_tl.plots import Figure, GridFigure
from sparse_tl.plots.by_result import DRAWN
from sparse_tl.plots.page.rendering import html_page
from sparse_tl.tasks import SkillComparison
from sparse_tl.tasks.skill_battery import numbers

pytestmark = pytest.mark.every_case


def _effects(name: str, half: float, seed: float = 1.0) -> EffectCurve:
    sizes = [0, *sorted({round(10 ** (place / 4)) for place in range(19)}), 32_491]
    mean = [1 / (1 + (half * seed / size) ** 1.5) if size else 0.0 for size in sizes]
    return EffectCurve(name, sizes, mean, [e - 0.05 for e in mean], [e + 0.05 for e in mean])


def _seeds(name: str, half: float) -> SeedCurves:
    return SeedCurves((0, 1, 2), [_effects(name, half, seed) for seed in (0.5, 1, 2)])


def _ablation(role: str, slope: float, in_role: int) -> AblationCurve:
    steps = torch.arange(51.0).repeat(2, 1) * torch.tensor([[0.9], [1.1]])
    return ablation_of(role, slope * steps, in_role)


def _checked(method: str) -> ScoreCheck:
    exact = torch.linspace(-3, 1, 40)
    table = pd.DataFrame({"score": exact + exact**2 / 9, "exact": exact})
    table["drawn"] = ["strongest"] * 20 + ["random"] * 20
    table["part"] = [f"a{i}.h0->m{i}" for i in range(40)]
    return ScoreCheck(method, "circuit edges", 8, table)


def _evaluation() -> Evaluation:
    effect, clean = torch.tensor([0.0, 0.2, 0.7, 0.95, 1.0]), torch.tensor([3.0, 4.0, 5.0])
    return Evaluation((0, 10, 100, 1000, 10_000), 32_491, effect[:, None] * clean, clean, 0 * clean)


def _found() -> FoundCircuit:
    scores = Scores(HeadGrid(12, 12), torch.rand(12, 12), "eap-ig")
    run = evaluation = _evaluation()
    slower = replace(evaluation, sizes=(0, 20, 300, 4000, 32_491))
    evaluations = {"eap-ig": slower, "selection": evaluation}
    seconds = dict.fromkeys(evaluations, 1.0)
    return FoundCircuit(scores.top(9), "selection", 0.9, run, run, evaluations, seconds, scores)


def behaviour_of(n_layers: int, n_heads: int) -> HeadBehaviour:
    """One with heads of every kind, and many sinks."""
    generator = torch.Generator().manual_seed(0)
    names = list(dict.fromkeys(kind.by for kind in KINDS.values()))
    main = torch.randint(2 * len(names), (n_layers, n_heads), generator=generator)
    sign = torch.randint(2, (n_layers, n_heads), generator=generator) * 2.0 - 1
    signed = ("mover", "copying")
    return HeadBehaviour(
        {
            name: (main == place) * (0.9 * sign if name in signed else 0.9)
            + (main >= len(names)) * 0.5 * (name == "sink")
            for place, name in enumerate(names)
        }
    )


def _skills() -> SkillComparison:
    rows: list[dict[str, Any]] = [{"family": "units", "title": "Units", "outcome": "left out"}]
    for place, title in enumerate(["Opposites", "Agreement across a Phrase", "W" * 50]):
        above = torch.arange(40) < torch.tensor([[40 - place], [40 - 9 * place]])
        row = numbers(0.25, above, above, (place + 1) * torch.linspace(0, 1, 40), torch.ones(3, 40))
        rows.append({"family": title, "title": title, **row})
    return SkillComparison(pd.DataFrame(rows))


def _attention() -> dict[str, Any]:
    attention = torch.rand(5, 11, 11, generator=torch.Generator().manual_seed(0)).tril()
    attention[2] = 0
    shares = attention / attention.sum(dim=-1, keepdim=True).clamp(min=1e-9)
    heads = [f"a{index}.h{index}" for index in range(5)]
    return {"attention": shares, "tokens": list("36+28=?????"), "heads": heads}


def _scores() -> list[Scores]:
    values = torch.randn(2, 12, 12, generator=torch.Generator().manual_seed(0)) ** 3
    return [Scores(HeadGrid(12, 12), each, "eap-ig") for each in values]


ABLATIONS = [
    _ablation("facilitation", -0.06, 17),
    _ablation("irrelevance", -0.001, 51),
    _ablation("interference", -0.02, 0),
]


@cache
def _graphs() -> dict[str, AttributionGraph]:
    return {
        name: attribution_graph(model, "36+28=", max_nodes=60)
        for name, model in zip(("Dense", "Sparse"), load_addition_models(), strict=True)
    }


GATES = torch.rand(3, 2, 7, 12, 8, generator=torch.Generator().manual_seed(0))
MODELS = [_seeds("Task Model", 1500), _seeds("Sparse Task Model", 60)]
TASKS = [f"Task {number}" for number in range(1, 5)]
FIGURES: dict[str, Callable[[], Figure]] = {
    "effect_figure": lambda: plots.effect_figure(dict.fromkeys(TASKS, MODELS), parts="heads"),
    "two_pairs": lambda: plots.effect_figure(
        {"A": MODELS, "B": [_effects("Task Model", 1500), _effects("Sparse", 60)]}, parts="heads"
    ),
    "ablation_grid": lambda: plots.ablation_grid(
        dict.fromkeys(TASKS, dict.fromkeys(TASKS, ABLATIONS))
    ),
    "attention_view": lambda: plots.attention_maps(**_attention()),
    "gate_trajectories": lambda: plots.gate_trajectories(head_roles_of(GATES)),
    "head_map": lambda: plots.head_map(dict(zip(TASKS, _scores(), strict=False))),
    "score_figure": lambda: plots.score_figure({m: _checked(m) for m in ("eap", "eap-ig")}),
    "ScoreCheck": lambda: _checked("eap").figure(),
    "EffectCurve": lambda: _effects("Task Model", 1500).figure(),
    "SeedCurves": lambda: MODELS[0].figure(),
    "Evaluation": lambda: _evaluation().figure(),
    "FoundCircuit": lambda: _found().figure(),
    "Scores": lambda: _scores()[0].figure(),
    "HeadBehaviour": lambda: behaviour_of(12, 12).figure(),
    "AblationCurve": lambda: ABLATIONS[0].figure(),
    "HeadRoles": lambda: head_roles_of(GATES).figure(),
    "ActivationPatching": lambda: patching(12, 6).figure(),
    "LogitLens": lambda: lens(("word",) * 6).figure(),
    "LogitAttribution": lambda: attribution().figure(),
    "NeuronEffects": lambda: neurons_of("m20", n=20).figure(),
    "SkillComparison": lambda: _skills().figure(),
}
DIAGRAMS = (
    *("circuit_diagram", "component_diagram", "attribution_diagram"),
    *("AttentionGraph", "AttributionGraph", "Circuit"),
)
"""Of the fixtures' circuits."""


@pytest.fixture(scope="module")
def figure_of(two_panels: Any, make_random_circuit: Any) -> Callable[[str], Figure]:
    """The figure of a name."""
    circuits = {f"Model {seed}": make_random_circuit(seed=seed).circuit for seed in range(2)}
    diagrams = {
        "circuit_diagram": lambda: plots.attention_diagram(two_panels),
        "component_diagram": lambda: plots.component_diagram(circuits),
        "attribution_diagram": lambda: plots.attribution_diagram(_graphs()),
        "AttentionGraph": lambda: two_panels["Base Model"].figure(),
        "AttributionGraph": lambda: _graphs()["Dense"].figure(),
        "Circuit": lambda: circuits["Model 0"].figure(),
    }
    return lambda name: (FIGURES | diagrams)[name]()


def test_every_result_that_draws_itself_is_looked_at() -> None:
    results = {kind.__name__ for kind in DRAWN}
    assert results <= {*FIGURES, *DIAGRAMS}


# ---- on screen ---------------------------------------------------------------------------------

SHOW = """([html, margin]) => {
  document.body.style.margin = `${margin}px`;
  // Runs the scripts in it.
  document.body.replaceChildren(document.createRange().createContextualFragment(html));
  return new Promise((shown) => {
    requestAnimationFrame(() => requestAnimationFrame(shown));
    setTimeout(shown, 2000);
  });
}"""


@pytest.fixture(scope="module")
def saved_page(open_page: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A page as figures are saved in, for one figure after another. It has plotly's script of 5 MB
    for what notebooks show."""
    script = f"<script>{get_plotlyjs()}</script>"
    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(html_page("A figure", script, margin=0), encoding="utf-8")
    with open_page() as page:
        page.goto(file.as_uri())
        yield page


def _problems(page: Any, html: str, margin: int = 0) -> str:
    """What cannot be read of a piece of HTML."""
    page.evaluate(SHOW, [html, margin])
    return problems_of(page)


@pytest.mark.long
@pytest.mark.parametrize("name", [*FIGURES, *DIAGRAMS])
def test_a_page_can_be_read(name: str, figure_of: Any, saved_page: Any) -> None:
    figure = figure_of(name)
    # Its own page would load plotly's script again.
    is_grid = isinstance(figure, GridFigure)
    html = by_plotly(figure.plotly) if is_grid else figure.light_html
    problems = _problems(saved_page, html, figure.page_margin)
    assert not problems, problems


def by_plotly(drawn: Any) -> str:
    """What a notebook shows."""
    config = {"displayModeBar": False}
    return drawn.to_html(full_html=False, include_plotlyjs=False, config=config)
