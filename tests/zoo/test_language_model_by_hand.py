"""Ablation, patching, attribution and evaluation of SmolLM2 against hand-written PyTorch.

The other side is the plain model of transformers with torch's own module hooks: nothing of this
package, nor of TransformerLens, takes part in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from sparse_tl import (
    Circuit,
    PromptPairs,
    ablate_heads,
    attribute_circuit_edges,
    evaluate,
    load_language_model,
    logit_difference,
    patch_exactly,
)
from sparse_tl.backend import adapt

pytestmark = pytest.mark.slow
D_HEAD = 64
HEADS = ((20, 0), (17, 4), (23, 3), (2, 5))
Edge = tuple[tuple[int, int], str, int, int]  # source head; what it enters: slot, layer, head
EDGES: dict[str, Edge] = {
    "a20.h0->a23.h1<q>": ((20, 0), "q", 23, 1),
    "a17.h4->a20.h0<q>": ((17, 4), "q", 20, 0),
    "a16.h0->a17.kv1<k>": ((16, 0), "k", 17, 1),
    "a17.h4->a20.kv0<v>": ((17, 4), "v", 20, 0),
    "a17.h4->m19": ((17, 4), "m", 19, 0),
    "a23.h3->logits": ((23, 3), "l", 30, 0),
}


class ByHand:
    """The plain model, with heads replaced and edges patched by module hooks."""

    def __init__(self, model: Any, clean: Tensor, corrupted: Tensor) -> None:
        self.model, self.layers = model.eval(), model.model.layers
        self.clean = clean
        self.z = self._record(clean), self._record(corrupted)

    @torch.no_grad()
    def _record(self, tokens: Tensor) -> list[Tensor]:
        """What every layer's heads hand to its o_proj."""
        z: list[Tensor] = []
        with ExitStack() as hooks:
            for layer in self.layers:
                point = layer.self_attn.o_proj
                hooks.enter_context(point.register_forward_pre_hook(lambda _, a: z.append(a[0])))
            self.model(tokens)
        return z

    def write(self, head: tuple[int, int], z: Tensor) -> Tensor:
        """What a head writes to the residual stream, from the input of its layer's o_proj."""
        layer, columns = self.layers[head[0]].self_attn, columns_of(head[1])
        return z[..., columns] @ layer.o_proj.weight[:, columns].T

    @contextmanager
    def replaced(self, head: tuple[int, int], z: Tensor | None) -> Iterator[None]:
        """A head's output is another one; zero without."""

        def replace(_: Any, args: tuple[Tensor]) -> tuple[Tensor]:
            new = args[0].clone()
            new[..., columns_of(head[1])] = 0 if z is None else z[..., columns_of(head[1])]
            return (new,)

        with self.layers[head[0]].self_attn.o_proj.register_forward_pre_hook(replace):
            yield

    @contextmanager
    def patched(self, edges: Sequence[Edge], leaf: Tensor | None = None) -> Iterator[None]:
        """Each edge's destination reads its source as in the corrupted run; or plus the leaf."""
        live: dict[tuple[int, int], Tensor] = {}

        def change(source: tuple[int, int]) -> Tensor:
            if leaf is not None:
                return leaf
            return self.write(source, self.z[1][source[0]]) - live[source]

        with ExitStack() as hooks:
            for source, slot, layer, head in edges:

                def keep(_: Any, args: tuple[Tensor], source: Any = source) -> None:
                    live[source] = self.write(source, args[0])

                point = self.layers[source[0]].self_attn.o_proj
                hooks.enter_context(point.register_forward_pre_hook(keep))
                self._enter(hooks, lambda source=source: change(source), slot, layer, head)
            yield

    def _enter(self, hooks: ExitStack, change: Any, slot: str, layer: int, head: int) -> None:
        """Add a change to what one destination reads, before the norm in front of it."""
        if slot == "l":
            norm = self.model.model.norm
            add = norm.register_forward_pre_hook(lambda _, args: (args[0] + change(),))
            hooks.enter_context(add)
            return
        block, seen = self.layers[layer], dict[str, Tensor]()
        norm = block.post_attention_layernorm if slot == "m" else block.input_layernorm

        def see(_: Any, args: tuple[Tensor]) -> None:
            seen["stream"] = args[0]

        hooks.enter_context(norm.register_forward_pre_hook(see))

        def read() -> Tensor:
            return norm.forward(seen["stream"] + change())

        if slot == "m":
            hooks.enter_context(block.mlp.register_forward_pre_hook(lambda _, args: (read(),)))
            return
        projection = getattr(block.self_attn, f"{slot}_proj")

        def project(module: Any, _: Any, output: Tensor) -> Tensor:
            columns = columns_of(head)
            new = output.clone()
            new[..., columns] = read() @ module.weight[columns].T
            return new

        hooks.enter_context(projection.register_forward_hook(project))

    def difference(self, pairs: PromptPairs) -> Tensor:
        logits = self.model(self.clean).logits[:, -1]
        rows = torch.arange(len(logits))
        return (logits[rows, pairs.answers[:, 0]] - logits[rows, pairs.wrong[:, 0]]).mean()


def columns_of(head: int) -> slice:
    return slice(head * D_HEAD, (head + 1) * D_HEAD)


@pytest.fixture(scope="module")
def both(smollm2: Path) -> tuple[Any, PromptPairs, ByHand]:
    model = load_language_model(device="cpu")
    story = "When Mary and John went to the store, {} gave a drink to"
    rows = [
        {
            "clean": story.format(wrong),
            "corrupted": story.format(answer),
            "answer": f" {answer}",
            "wrong": f" {wrong}",
        }
        for wrong, answer in (("John", "Mary"), ("Mary", "John"))
    ]
    pairs = PromptPairs.from_texts(model, rows)
    plain = AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model, pairs, ByHand(plain, pairs.clean, pairs.corrupted)


@torch.no_grad()
def test_heads(both: tuple[Any, PromptPairs, ByHand]) -> None:
    model, pairs, hand = both
    clean = hand.difference(pairs).item()
    found = patch_exactly(model, pairs, logit_difference, [f"a{i}.h{j}" for i, j in HEADS])
    for head, effect in zip(HEADS, found, strict=True):
        with ablate_heads(model, [head]):
            ablated = logit_difference(pairs.read(model(pairs.clean)), pairs).mean().item()
        with hand.replaced(head, None):
            assert ablated == pytest.approx(hand.difference(pairs).item(), abs=2e-4)
        with hand.replaced(head, hand.z[1][head[0]]):
            assert effect == pytest.approx(hand.difference(pairs).item() - clean, abs=2e-4)
    assert found.abs().max() > 1


@torch.no_grad()
def test_edges(both: tuple[Any, PromptPairs, ByHand]) -> None:
    model, pairs, hand = both
    clean = hand.difference(pairs).item()
    found = patch_exactly(model, pairs, logit_difference, list(EDGES))
    for name, edge in EDGES.items():
        with hand.patched([edge]):
            assert found[name] == pytest.approx(hand.difference(pairs).item() - clean, abs=2e-4)
    assert (found.abs() > 0.02).sum() >= 3


def test_attribution(both: tuple[Any, PromptPairs, ByHand]) -> None:
    model, pairs, hand = both
    scores = attribute_circuit_edges(model, pairs, logit_difference, method="eap").to_pandas()
    scores = scores.set_index("edge")["score"]
    for name, edge in EDGES.items():
        leaf = torch.zeros(*pairs.clean.shape, hand.model.config.hidden_size, requires_grad=True)
        with hand.patched([edge], leaf):
            (gradient,) = torch.autograd.grad(hand.difference(pairs), leaf)
        source = edge[0]
        clean, corrupted = (hand.write(source, z[source[0]]) for z in hand.z)
        assert scores[name] == pytest.approx(
            (gradient * (corrupted - clean)).sum().item(), abs=2e-4
        ), name


@torch.no_grad()
def test_evaluation(both: tuple[Any, PromptPairs, ByHand]) -> None:
    model, pairs, hand = both
    graph = adapt(model).graph
    first, second, _, third, _, last = EDGES
    left_out = [first, second], [third, last], [last]
    circuits = [Circuit(graph, graph.exists & ~Circuit.of(graph, names).mask) for names in left_out]
    found = evaluate(model, pairs, logit_difference, circuits)
    for at, names in enumerate(left_out):
        with hand.patched([EDGES[name] for name in names]):
            expected = hand.difference(pairs).item()
        assert found.values[at].mean().item() == pytest.approx(expected, abs=2e-4), names
