"""Analyses give the same numbers in training mode, and where a notebook switched gradients off."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from analyses import call, check_same, of_prompts
from architectures import VOCABULARY, plain_transformer
from tiny import tokenizer_of
from torch import Tensor, nn

import sparse_tl as st
from sparse_tl.backend import boot
from sparse_tl.data import PromptPairs, TokenBatch
from sparse_tl.metrics import logit_difference as metric

DROPPED = {"attn_pdrop": 0.3, "embd_pdrop": 0.3, "resid_pdrop": 0.3}
Q: dict[str, Any] = {"progress": False}


def drawn(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(len(shape)))


ENDS = torch.full((3,), 4)
ANSWERS = drawn(3, 1)
WRONG = (ANSWERS + 1) % VOCABULARY
PAIRS = PromptPairs(drawn(3, 5), drawn(3, 5).flip(0), ANSWERS, WRONG, ENDS)
ROWS = TokenBatch.next_token(drawn(8, 6))
READ = torch.zeros(3, 5, dtype=torch.bool)
READ[:, -1] = True


def inside(block: AbstractContextManager[None], model: Any) -> Tensor:
    with block:
        return model(PAIRS.clean).detach()


def run(model: Any, site: Any) -> st.GatedRun:
    return st.GatedRun(model, site, PAIRS.clean, READ, "corrupted", reference=PAIRS.corrupted)


def gated_run(model: Any) -> Tensor:
    one = run(model, st.Heads())
    gates = torch.ones(3, 4)
    gates[1, 2] = 0
    return torch.stack([one.clean_logits, one.start_from(None), one.logits(gates)]).detach()


def gated(model: Any) -> Tensor:
    reference = {"reference": PAIRS.corrupted}
    return inside(st.gated(model, st.Heads(), torch.zeros(3, 4), "mean", **reference), model)


def explored(model: Any) -> Tensor:
    opened = st.explore(model, PAIRS.clean[0])
    (shown,) = opened.exploration.models.values()
    shown.toggle_head(1, 2)
    effects = shown.head_effects()["effect"].to_numpy()
    return torch.cat([shown.now.graph.attention.flatten(), torch.from_numpy(effects)])


def skills(model: Any) -> Any:
    sparse = st.SparseTransformer(model, initial_bias=0.0)
    try:
        found = st.compare_skills(sparse, sparse, [st.InductionTask()], n=4, **Q)
    finally:
        sparse.unwrap()
    return found.table[["divergence", "edges", "above_dense"]]


MEASURED: dict[str, Callable[[Any], Any]] = {
    name: partial(call, function, pairs=PAIRS)
    for name, function in of_prompts().items()
    if hasattr(st, name)
} | {
    "attribution_graph": lambda m: st.attribution_graph(m, PAIRS.clean[0]).nodes["flow"],
    "continuations": lambda m: st.continuations(m, PAIRS, 3, **Q).tokens,
    "find_circuit": lambda m: st.find_circuit(m, PAIRS, metric, at=0.6, **Q).circuit.mask,
    "logit_lens": lambda m: st.logit_lens(m, PAIRS.clean[0], answer=3).probability,
    "trace_attention": lambda m: (
        st.trace_attention(m, PAIRS.clean[0], attribution=True, max_effects=999).effect
    ),
    "attention_view": lambda m: st.attention_view(m, PAIRS.clean[0], layer=0)._repr_html_(),
    "circuit_diagram": lambda m: st.circuit_diagram(m, PAIRS.clean[0])._repr_html_(),
    "explore": explored,
    "GatedRun": gated_run,
    "gated": gated,
    "ablate_heads": lambda m: inside(st.ablate_heads(m, [(1, 2)]), m),
    "ablate_attention_edges": lambda m: inside(st.ablate_attention_edges(m, [(1, 2, 3, 0)]), m),
    "intervene": lambda m: inside(
        st.intervene(m, st.Intervention("blocks.1.hook_resid_pre", PAIRS.corrupted)), m
    ),
    "steer": lambda m: inside(st.steer(m, "blocks.1.hook_resid_pre", torch.ones(32)), m),
    "evaluate_held_out": lambda m: st.evaluate_held_out(m, ROWS).loss,
    "task_report": lambda m: st.task_report(m, ["induction"], n=4).skills["induction"].clean,
    "compare_skills": skills,
    "sampled_windows": lambda m: st.sampled_windows(m, 4, 12, beginnings=["w3"], **Q).tokens,
}
UNAFFECTED = {
    "SparseTransformer",  # called like the model, in the mode that the user sets; see below
    "add_lora",
    "checkpointed_activations",
    "load_model",
    "merge_lora",
    "save_mib",  # d_model is a size
    "save_model",
    "shard_model",
    "to_eap_ig",
}


def test_every_public_name_that_takes_a_model_is_here() -> None:
    found = {"compare_skills"}  # takes a dense and a sparse one
    for name in dir(st):
        some = getattr(st, name)
        if callable(some) and not name.startswith("_"):
            found |= {name for key in inspect.signature(some).parameters if "model" in key}
    assert found == set(MEASURED) | UNAFFECTED - {"load_model"}


def modes(model: Any) -> list[bool]:
    parts: list[nn.Module] = [*model.modules(), *model.original_model.modules()]
    return [part.training for part in parts]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    words = [f"w{number}" for number in range(VOCABULARY)]
    tokenizer = tokenizer_of(words, tmp_path_factory.mktemp("tokenizer"))
    found = boot(plain_transformer("gpt2", **DROPPED), tokenizer)
    found(PAIRS.clean)  # the first pass attaches TransformerLens's own hooks
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(MEASURED))
def test_training_mode_changes_no_number(model: Any, name: str) -> None:
    model.eval()
    expected = MEASURED[name](model)
    model.train()
    model.blocks[1].mlp.eval()  # each part gets its own mode back
    before = modes(model)
    assert not torch.allclose(model(PAIRS.clean), model(PAIRS.clean))
    for _ in range(2):
        check_same(MEASURED[name](model), expected)
        assert modes(model) == before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(MEASURED))
def test_gradients_may_be_switched_off(model: Any, name: str) -> None:
    model.eval()
    expected = MEASURED[name](model)
    with torch.no_grad():
        check_same(MEASURED[name](model), expected)
        assert not torch.is_grad_enabled()


def test_a_sparse_model_counts_in_evaluation_mode(model: Any) -> None:
    model.train()
    sparse = st.SparseTransformer(model, initial_bias=0.0)
    try:
        expected = [sparse.eval().count_attention_edges(ROWS.tokens)]
        shares = sparse.open_attention_edges(ROWS.tokens)
        sparse.train()
        for _ in range(2):
            expected.append(sparse.count_attention_edges(ROWS.tokens))
            assert shares.equals(sparse.open_attention_edges(ROWS.tokens))
        assert len({counts.active_per_prompt for counts in expected}) == 1
        assert all(part.training for part in sparse.model.modules())
    finally:
        sparse.unwrap()
