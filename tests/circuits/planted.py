"""Models with a circuit planted in them: which edges carry the effect is known exactly.

Every planted part reads and writes directions of its own. All other heads and MLPs are
*distractors*: they attend, read what planted parts write, and write other things on clean than on
corrupted prompts, but into directions that no planted part reads and the unembedding ignores.
Attention is of finite sharpness everywhere, so that gradients exist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from oracle import mask_of
from torch import Tensor
from wiring import (
    attend,
    blank_model,
    carry,
    centred_directions,
    distract,
    embed,
    move,
    normalise,
    plant_sign,
    spaces,
)

from sparse_tl.backend import Model, adapt
from sparse_tl.data.pairs import PromptPairs
from sparse_tl.graph import CircuitGraph
from sparse_tl.metrics import Metric, logit_difference


@dataclass(frozen=True, eq=False)
class Planted:
    """A model and the circuit in it.

    Args:
        name: of the circuit.
        model: float64.
        pairs: prompts.
        edges: those, and only those, whose patching changes the metric, alone or with others.
        metric: in logits.
    """

    name: str
    model: Model
    pairs: PromptPairs
    edges: frozenset[str]
    metric: Metric = logit_difference

    @property
    def graph(self) -> CircuitGraph:
        """The graph of the model."""
        return adapt(self.model).graph

    @property
    def mask(self) -> Tensor:
        """``[source, destination]``, true at the planted edges."""
        return mask_of(self.graph, self.edges)


def induction(length: int = 6) -> Planted:
    """``x a b y z a`` is continued by b: a previous-token head feeds an induction head's keys.

    Two layers of three heads and an MLP. ``a0.h0`` copies to each place the token before it;
    ``a1.h0`` looks for places whose previous token is the present one, and copies what stands
    there to the output. Corrupted prompts have the same form with other tokens, so that no edge
    can do without the others: a patched query or key finds no match, a patched value is wrong.
    """
    vocab = 10
    space = spaces(token=vocab, place=length, before=vocab, output=vocab, unread=9)
    model = blank_model(
        n_layers=2,
        n_heads=3,
        d_model=space["unread"].stop,
        d_head=space["unread"].stop // 3,
        d_mlp=12,
        d_vocab=vocab,
        n_ctx=length,
    )
    with torch.no_grad():
        distract(model, space["unread"])
        embed(model, space)
        one_back = torch.diag(torch.ones(length - 1), -1)
        attend(model, 0, 0, space["place"], space["place"], 4 * one_back)
        move(model, 0, 0, space["token"], space["before"])
        attend(model, 1, 0, space["token"], space["before"], 3 * torch.eye(vocab))
        move(model, 1, 0, space["token"], space["output"], gain=4)
    edges = {
        "input->a0.h0<v>",
        "a0.h0->a1.h0<k>",
        "input->a1.h0<q>",
        "input->a1.h0<v>",
        "a1.h0->logits",
    }
    return Planted("induction", model, _repetitions(vocab), frozenset(edges))


def _repetitions(vocab: int) -> PromptPairs:
    """``x a b y z a`` with ``a b`` at three places; clean and corrupted share no token."""
    generator = torch.Generator().manual_seed(1)
    prompts, answers, wrong = [], [], []
    # Not at the very start: what has no token before it is its own predecessor.
    for place in (1, 2, 3):
        for tokens in torch.randperm(vocab, generator=generator).split(vocab // 2):
            a, b, *others = tokens.tolist()
            prompts.append([*others[:place], a, b, *others[place:], a])
            answers.append([b])
            wrong.append([others[0]])
    tokens = torch.tensor(prompts)
    return PromptPairs(
        tokens[::2],
        tokens[1::2],
        torch.tensor(answers[::2]),
        torch.tensor(wrong[::2]),
        torch.full((3,), tokens.shape[1] - 1),
    )


def inhibition(length: int = 4) -> Planted:
    """``A B A ;`` is continued by B, the name that is not repeated, whichever came first.

    Three layers of three heads and an MLP. ``a0.h0``, at the third place, looks for the earlier
    same name and writes *where* that is; ``a1.h0``, at the last place, fetches it from the third
    (v-composition); ``a2.h0`` attends to names, but not to where it is told (q-composition), and
    copies one to the output. Corrupted prompts have other names in the other order.

    Args:
        length: context of the model; prompts have four tokens.
    """
    names = 6
    space = spaces(
        token=names + 1, place=length, first=length, avoid=length, output=names + 1, unread=10
    )
    model = blank_model(
        n_layers=3,
        n_heads=3,
        d_model=space["unread"].stop,
        d_head=space["unread"].stop // 3,
        d_mlp=12,
        act_fn="gelu",
        d_vocab=names + 1,
        n_ctx=length,
    )
    with torch.no_grad():
        distract(model, space["unread"])
        embed(model, space)
        place, token = space["place"], space["token"]
        not_itself = _table(length, {(2, 2): -6})
        attend(model, 0, 0, token, token, 3 * torch.eye(names + 1))
        attend(model, 0, 0, place, place, not_itself, start=names + 1)
        move(model, 0, 0, place, space["first"])
        attend(model, 1, 0, place, place, _table(length, {(3, 2): 4}))
        move(model, 1, 0, space["first"], space["avoid"])
        attend(model, 2, 0, place, place, _table(length, {(3, 0): 4, (3, 1): 4}))
        attend(model, 2, 0, space["avoid"], place, -3 * torch.eye(length))
        move(model, 2, 0, token, space["output"], gain=4)
    edges = {
        "input->a0.h0<q>",
        "input->a0.h0<k>",
        "a0.h0->a1.h0<v>",
        "a1.h0->a2.h0<q>",
        "input->a2.h0<v>",
        "a2.h0->logits",
    }
    return Planted("inhibition", model, _repeated_names(names), frozenset(edges))


def _table(length: int, scores: dict[tuple[int, int], float]) -> Tensor:
    """Attention scores by place of query and key; 0 but for these."""
    table = torch.zeros(length, length)
    for places, score in scores.items():
        table[places] = score
    return table


def _repeated_names(names: int) -> PromptPairs:
    """``A B A ;`` against ``C D D ;``, and ``A B B ;`` against ``C D C ;``."""
    generator = torch.Generator().manual_seed(2)
    clean, corrupted, answers, wrong = [], [], [], []
    for repeated in (0, 1, 0, 1):
        a, b, c, d, *_ = torch.randperm(names, generator=generator).tolist()
        clean.append([a, b, (a, b)[repeated], names])
        corrupted.append([c, d, (d, c)[repeated], names])
        answers.append([(b, a)[repeated]])
        wrong.append([(a, b)[repeated]])
    return PromptPairs(
        torch.tensor(clean),
        torch.tensor(corrupted),
        torch.tensor(answers),
        torch.tensor(wrong),
        torch.full((4,), 3),
    )


def lock() -> Planted:
    """Two keys open a lock: an MLP's AND of what two heads bring, under LayerNorm.

    Prompts are ``x y ;``, each of x and y right (+1) or wrong (-1). ``a0.h0`` and ``a0.h1`` bring
    one of them each to the last place, ``m0`` is their AND there, ``m1`` translates it for the
    output. Clean prompts have both keys, corrupted ones lack either or both.

    A normalisation lets every part of the residual stream act on every other, through its scale.
    Here that scale depends on the place alone, so the truth is exact all the same: directions are
    orthogonal and of mean 0, and every source writes, at each place, a number of fixed size along
    its own; only the sign depends on the prompt, whatever is patched.
    """
    edges = {
        "input->a0.h0<v>",
        "input->a0.h1<v>",
        "a0.h0->m0",
        "a0.h1->m0",
        "m0->m1",
        "m1->logits",
    }
    clean = torch.tensor([[0, 2, 4]]).repeat(3, 1)
    corrupted = torch.tensor([[1, 3, 4], [1, 2, 4], [0, 3, 4]])
    answers, wrong = torch.full((3, 1), 5), torch.full((3, 1), 6)
    pairs = PromptPairs(clean, corrupted, answers, wrong, torch.full((3,), 2))
    return Planted("lock", _lock_model(clean), pairs, frozenset(edges))


def _lock_model(clean: Tensor) -> Model:
    """Tokens: x right and wrong, y right and wrong, the end; the answers open and shut."""
    names = ["anchor", "end", "x", "y", "x_there", "y_there", "both", "open"]
    # Two more directions that nobody writes make the residual stream as wide as all heads together.
    along = dict(zip(names + [*"abcdef"], centred_directions(len(names) + 6), strict=True))
    model = blank_model(
        n_layers=2,
        n_heads=3,
        d_model=len(along) + 1,
        d_head=(len(along) + 1) // 3,
        d_vocab=7,
        n_ctx=3,
        normalization_type="LN",
    )
    with torch.no_grad():
        normalise(model)
        meanings = [along["x"], -along["x"], along["y"], -along["y"], along["end"]]
        # The anchor holds the scale: without it a normalised +1 would have no slope towards -1.
        model.embed.W_E[:5] = torch.stack(meanings) + 4 * along["anchor"]
        model.unembed.W_U[:, 5:] = 4 * torch.stack([along["open"], -along["open"]], dim=1)
        # Attention is uniform over three places, of which one holds the key: three times its mean.
        carry(model, 0, 0, along["x"], 3 * along["x_there"])
        carry(model, 0, 1, along["y"], 3 * along["y_there"])
        # Distractors attend, less to the last place than to others.
        for layer, head, read, write in (
            (0, 2, "x", "a"),
            (1, 0, "a", "b"),
            (1, 1, "x_there", "c"),
            (1, 2, "y_there", "d"),
        ):
            carry(model, layer, head, along[read], along[write])
            model.blocks[layer].attn.W_Q[head, :, 0] = (
                model.blocks[layer].attn.W_Q.shape[2] ** 0.5 * along["end"]
            )
            model.blocks[layer].attn.W_K[head, :, 0] = -along["end"]
        # Either key alone is not enough at the end, nor are larger numbers at other places.
        both = along["x_there"] + along["y_there"] + 4 * along["end"] - 1.2 * along["anchor"]
        plant_sign(model, 0, both, along["both"], clean)
        plant_sign(model, 1, along["both"], along["open"], clean)
    return model


PLANTED: dict[str, Callable[[], Planted]] = {
    "induction": induction,
    "inhibition": inhibition,
    "lock": lock,
}
