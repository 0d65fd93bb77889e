"""Results: saved, read again, and shown as tables in notebooks."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from architectures import plain_transformer

from sparse_tl.backend import boot
from sparse_tl.circuits import (
    Acdc,
    ActivationPatching,
    Circuit,
    CircuitSizes,
    DrivingToken,
    EffectCurve,
    Evaluation,
    FoundCircuit,
    HeadBehaviour,
    LogitAttribution,
    LogitLens,
    MIBEvaluation,
    NeuronEffects,
    Overlap,
    Pruning,
    Roc,
    ScoreCheck,
    Scores,
    SeedCurves,
    attribution_graph,
    check_graph,
    find_examples,
)
from sparse_tl.circuits.methods.pruning import SearchResult
from sparse_tl.circuits.prompt.attention import AttentionGraph
from sparse_tl.circuits.task_skill import Skill
from sparse_tl.gates import AttentionEdgeCounts, SparseTransformer
from sparse_tl.graph import AttentionGrid, CircuitGraph
from sparse_tl.head_roles import AblationCurve, ContrastiveGates, HeadRoles
from sparse_tl.jobs import Comparison, SparseRun
from sparse_tl.results import OfPrompts, Result, table_html
from sparse_tl.tasks import SkillComparison, TaskReport
from sparse_tl.tasks.generation import Continuations
from sparse_tl.training import DenseAndSparse, HeldOut, PostTraining
from sparse_tl.training.constraint import Target
from sparse_tl.zoo import build_addition_model

FILES = ["result.json", "result.safetensors"]
GRAPH = CircuitGraph(2, 2, 2)
NUMBERS = torch.arange(GRAPH.exists.numel()).view(GRAPH.exists.shape) / 7
SCORES = Scores(GRAPH, GRAPH.exists * NUMBERS, "eap", prompt_start="<s>")
HEADS = Scores(GRAPH.heads, torch.tensor([[0.5, -2.0], [1.0, 0.0]]), "eap-ig")
HISTORY = pd.DataFrame({"part": ["a1.h0->logits", "m0->m1"], "moved": [0.25, -1.0]})
DENSE = HeldOut(0.25, 0.5, 12.0, 3.0, 24.0, 2, group_losses={0: 0.25, 1: 0.5})
STEPS = pd.DataFrame({"step": [1, 2], "loss": [0.5, 0.25], "validation_loss": [None, 0.25]})
COUNTS = torch.ones(2, 3, 2, dtype=torch.long)
PAIR = torch.tensor([2.0, 4.0]).double()
SEEDS = torch.rand(2, 2, 2)
RUN = Evaluation((5,), 2, PAIR[None] / 2, PAIR, 0 * PAIR)
MIB = Evaluation((0,) * 10, 2, torch.ones(10, 2).double(), PAIR, 0 * PAIR)
SKILL = Skill(0.5, torch.tensor([True, False]), 0.5, PAIR, 0 * PAIR, prompt_start="<s>")
LLAMA = boot(plain_transformer("llama"))
GRAPH = attribution_graph(LLAMA, torch.arange(1, 5), max_nodes=9)
RESULTS: dict[str, Any] = {
    "edge scores": SCORES,
    "head scores": HEADS,
    "attention edges": Scores(AttentionGrid(1, 2, 3), torch.rand(2, 1, 2, 3, 3), "eap"),
    "attention edges in a window": Scores(
        AttentionGrid(1, 2, 3, True, torch.eye(3, dtype=torch.bool)[None]),
        torch.rand(2, 1, 2, 3, 3),
        "eap",
    ),
    "circuit": SCORES.top(5),
    "heads": HEADS.top(2),
    "activation patching": ActivationPatching(
        "resid_pre", "clean", ("a", "b"), torch.rand(2, 2, 2), PAIR, 0 * PAIR
    ),
    "logit lens": LogitLens(
        ("a", "b"), "c", torch.rand(2, 2), (("b", "c"), ("c", "a")), torch.rand(2, 2)
    ),
    "head behaviour": HeadBehaviour({"sink": torch.rand(2, 2), "copying": torch.rand(2, 2)}),
    "logit attribution": LogitAttribution(
        ("input", "a0.h0", "a0.h1", "a0.b", "m0", "bias"), torch.rand(6, 2), 2
    ),
    "attribution graph": GRAPH,
    "examples": find_examples(LLAMA, [torch.tensor([1, 2, 3]), torch.tensor([4])], progress=False),
    "checked graph": check_graph(LLAMA, GRAPH, n=3),
    "checked scores": ScoreCheck(
        *("eap", "heads", 2),
        pd.DataFrame(
            {"part": ["a0.h0", "a1.h0"], "drawn": ["strongest", "random"], "score": [0.5, 1.0]}
        ).assign(exact=[0.5, -1.0], miss=[0.0, 2.0]),
    ),
    "neurons": NeuronEffects(
        "m0",
        ("m1", "logits"),
        2,
        torch.tensor([0.5, -0.25]).double(),
        *torch.rand(3, 2).double(),
        {"m0.n0": (DrivingToken(1, 3, "12+", "3", "4=", 0.5, -0.25, 0.125),)},
        {"m0.n0": ("1", "2")},
        {"m0.n0": ()},
        prompt_start="<s>",
    ),
    "acdc on edges": Acdc(SCORES.top(5), 6, RUN, HISTORY, 0.1),
    "acdc on heads": Acdc(HEADS.top(2), 2, RUN, HISTORY, 0.1),
    "found circuit": FoundCircuit(
        HEADS.top(2), "exact", 0.9, RUN, RUN, {"exact": MIB}, {"exact": 1.5}, HEADS
    ),
    "pruning": Pruning(SCORES.top(5), 6, RUN, HISTORY, SCORES),
    "faithfulness": RUN,
    "evaluation": Evaluation((0, 2), 2, torch.stack([0 * PAIR, PAIR]), PAIR, 0 * PAIR),
    "evaluation at MIB's sizes": MIBEvaluation(MIB, MIB),
    "curve": EffectCurve("dense", (0, 2), (0.0, 1.0), (0.0, 1.0), (0.0, 1.0)),
    "curves of seeds": SeedCurves((0, 3), [EffectCurve("dense", (0, 2), *[(0.0, 1.0)] * 3)] * 2),
    "sizes of prompts": CircuitSizes(torch.tensor([3.5, torch.inf]).double(), 0.9, 20),
    "roc": Roc(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]), 0.5),
    "overlap": Overlap(0.5, 0.75, 0.6),
    "attention graph": AttentionGraph(
        torch.rand(1, 2, 2, 2).tril(),
        torch.ones(1, 2, 2, 2, dtype=torch.bool).tril(),
        ("a", "b"),
        ("b", "c"),
        ((1, 1),),
        effect=-torch.rand(1, 1, 2, 2, 2).tril(),
        mlps=torch.tensor([[True, False]]),
    ),
    "counts": AttentionEdgeCounts(COUNTS, COUNTS * 0.5, COUNTS * 3, torch.tensor([3, 3, 3])),
    "held out": DENSE,
    "post-training": PostTraining(DENSE, DENSE, True, Target(0.1, "increase"), 5, STEPS),
    "post-training on several texts": PostTraining(
        DENSE,
        DENSE,
        True,
        Target(0.1, "divergence"),
        5,
        STEPS,
        {"own": DenseAndSparse(DENSE, DENSE)},
        {"other": DenseAndSparse(DENSE, DENSE)},
    ),
    "roles": HeadRoles(
        seeds=(3, 4),
        lambda_=0.1,
        trajectories=torch.rand(3, 2, 2, 2, 2),
        recorded_at=(0, 9),
        losses=torch.rand(3, 2),
        dense_loss=0.5,
        fitted=torch.tensor([True, False]),
        removed=torch.rand(2, 2),
        removed_together=torch.rand(2, 3, 2),
    ),
    "ablation": AblationCurve("irrelevance", (0, 1, 4), torch.rand(2, 3), (2, 0), torch.rand(2, 3)),
    "ablation without control": AblationCurve("random", (0, 1, 2), torch.rand(2, 3), (2, 2)),
    "skill": SKILL,
    "compared skills": SkillComparison(
        pd.DataFrame(
            {"family": ["units", "facts"], "outcome": ["kept", "left out"], "change": [0.0, None]}
        )
    ),
    "continuations": Continuations(
        ("a", "b c"), (" d", ""), torch.tensor([[3, -1], [-1, -1]]), torch.tensor([False, True])
    ),
    "report of tasks": TaskReport({"ioi": SKILL}, {"ioi": "", "capitals": "expected more words"}),
    "contrastive": ContrastiveGates((0, 7), -0.1, SEEDS, torch.rand(2), torch.rand(2), 0.1, 0.25),
}


def _leaves(result: Any, name: str = "") -> dict[str, Any]:
    """Everything a result holds, down to what can be compared; a list is read as a tuple."""
    if isinstance(result, list | tuple):
        result = dict(enumerate(result))
    if isinstance(result, dict):
        return {
            key: leaf for k, v in result.items() for key, leaf in _leaves(v, f"{name}.{k}").items()
        }
    if not is_dataclass(result):
        return {name: result}
    found = {f"{name}:": type(result)}
    for field in fields(result):
        found |= _leaves(getattr(result, field.name), f"{name}.{field.name}")
    return found


def test_every_result_of_the_package_is_tried_here() -> None:
    def below(kind: type) -> set[type]:
        every = {kind}.union(*(below(some) for some in kind.__subclasses__()))
        return every - {Result, OfPrompts, SearchResult}

    mine = {
        kind
        for kind in below(Result)
        if kind.__module__.startswith("sparse_tl") and not kind.__name__.startswith("_")
    }
    assert {type(result) for result in RESULTS.values()} == mine


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_read_as_it_was_saved(name: str, tmp_path: Path) -> None:
    result = RESULTS[name]
    folder = result.save(tmp_path / "result")
    assert result.save(folder) == folder, "an earlier result of the same kind is replaced"
    assert sorted(path.name for path in folder.iterdir()) == FILES
    before, after = _leaves(result), _leaves(type(result).load(folder))
    assert before.keys() == after.keys()
    for key, value in before.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, after[key]) and value.dtype == after[key].dtype, key
        elif isinstance(value, pd.DataFrame):
            pd.testing.assert_frame_equal(value, after[key])
        else:
            assert repr(value) == repr(after[key]) and type(value) is type(after[key]), key


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_shows_itself_and_its_table(name: str) -> None:
    result = RESULTS[name]
    shown = result._repr_html_()
    assert "<table" in shown or "<svg" in shown
    assert len(result.to_pandas())


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.parametrize("damage", ["cut", "no tensors", "no field", "wrong type", "no fields"])
def test_a_damaged_result_is_refused_by_name(name: str, damage: str, tmp_path: Path) -> None:
    folder = RESULTS[name].save(tmp_path / "result")
    words, tensors = folder / "result.json", folder / "result.safetensors"
    said = json.loads(words.read_text())
    first = next(iter(said["fields"]))
    if damage == "cut":
        tensors.write_bytes(b"cut")
    elif damage == "no tensors":
        tensors.unlink()
    elif damage == "no field":
        del said["fields"][first]
    elif damage == "wrong type":
        said["fields"][first] = {"what": 1}
    else:
        del said["fields"]
    words.write_text(json.dumps(said))
    expected = rf"the {type(RESULTS[name]).__name__} in .* is damaged|expected a safetensors file"
    with pytest.raises(ValueError, match=expected):
        type(RESULTS[name]).load(folder)


def test_another_kind_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    folder = SCORES.save(tmp_path / "result")
    with pytest.raises(ValueError, match="no saved Circuit .* but Scores"):
        Circuit.load(folder)
    with pytest.raises(ValueError, match="but Scores"):
        HEADS.top(1).save(folder)
    with pytest.raises(ValueError, match=r"there is no result\.json"):
        Scores.load(tmp_path)
    (folder / "notes.md").write_text("mine")
    with pytest.raises(ValueError, match=r"holds \['notes.md'\], which would be deleted"):
        SCORES.save(folder)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    with pytest.raises(ValueError, match="which would be deleted"):
        SCORES.save(tmp_path / "thesis")


@dataclass(frozen=True)
class Unmeasured(Result):
    finite = False
    most: float
    effect: float


def test_numbers_that_json_lacks(tmp_path: Path) -> None:
    found = Unmeasured(float("inf"), float("nan"))
    again = Unmeasured.load(found.save(tmp_path / "result"))
    assert again.most == float("inf") and again.effect != again.effect


@pytest.mark.parametrize(
    ("result", "field"),
    [(RESULTS["roles"], "removed"), (RESULTS["roles"], "dense_loss"), (DENSE, "loss")],
)
def test_nan_is_no_result(result: Any, field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} of .* NaN"):
        replace(result, **{field: getattr(result, field) * float("nan")})


ENDS = ("", "_low", "_high")
ATTACK = "<img src=x onerror=alert(1)>"


def cells(html: str) -> list[list[str]]:
    """The rows of a fragment's table, the first one its headings."""
    rows = ElementTree.fromstring(f"<div>{html}</div>").iter("tr")
    return [[cell.text or "" for cell in row] for row in rows]


def test_words_and_cells_are_escaped():
    html = table_html(pd.DataFrame({ATTACK: [ATTACK]}, index=[ATTACK]), ATTACK)
    assert "<img" not in html and html.count("&lt;img") == 4


def test_a_run_shows_both_models():
    metrics = {"verdict": "Met.", "dense": asdict(DENSE), "sparse": asdict(DENSE)}
    run = SparseRun(metrics, SparseTransformer(build_addition_model()))
    assert repr(run) == "SparseRun(Met.)"
    shown = cells(run._repr_html_())
    assert shown[:2] == [["", "dense", "sparse"], ["loss", "0.25", "0.25"]]


def test_a_comparison_has_a_row_per_task_and_kind_of_part():
    effects = {f"{name}_effect{end}": 0.5 for name in ("shown", "circuit") for end in ENDS}
    side = {"heads_at_0.9": 4.0, "circuit_edges_at_0.9": None, "shown": 1, "circuit": 3}
    side["drawn"] = 2
    side |= {**effects, "heads": {"mover": ["a1.h0"]}}
    said = {
        "dense": side,
        "sparse": side,
        "multiplier_heads": 1.0,
        "multiplier_circuit_edges": None,
    }
    run = Comparison({"ioi": {**said, "seeds": {"0": said}}})
    assert cells(run._repr_html_().partition("</p>")[2]) == [
        ["task", "parts", "dense", "sparse", "multiplier"],
        ["ioi", "heads", "4", "4", "1"],
        ["ioi", "circuit_edges", "NaN", "NaN", "NaN"],
        ["ioi", "circuit_edges, searched", "3", "3", "NaN"],
    ]
    found = run.findings[0]
    assert "all 3 edges explain 0.50 (0.50 to 0.50) of the effect" in found
    assert "the 1 shown first 0.50" in found and "only the 2 whose scores" in found
    assert found.endswith(" Mover: a1.h0.")
