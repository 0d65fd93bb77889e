"""Every parameter of post-training does what its description says, on a model of two layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from short_runs import Build, Rows, short_run, weights
from tiny import keep_last_weights

from sparse_tl.backend import adapt, read_parameters
from sparse_tl.data import ShuffledStream
from sparse_tl.data.batches import TokenBatch
from sparse_tl.gates import BernoulliGate, SparseTransformer
from sparse_tl.training import PostTraining
from sparse_tl.training.post_train import GATE_LEARNING_RATE, SparsityObjective

LOOSE = 50.0
"""A target that is always met, so that the sparsest weights are kept."""


class Echo:
    """Runs on the same model and the same rows, other settings left as they are."""

    def __init__(self, build_echo: Build, rows: Rows) -> None:
        self.build, self.rows = build_echo, rows

    def sparse(self, bias: float = 0.5) -> SparseTransformer:
        return SparseTransformer(self.build(), initial_bias=bias)

    def __call__(
        self, sparse: SparseTransformer | None = None, **settings: Any
    ) -> tuple[PostTraining, SparseTransformer]:
        sparse = self.sparse() if sparse is None else sparse
        defaults = {"target_loss": LOOSE, "learning_rate": 5e-2}
        return short_run(sparse, self.rows, **{**defaults, **settings}), sparse


@pytest.fixture
def last_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_last_weights(monkeypatch)


@pytest.fixture
def echo(build_echo: Build, echo_rows: Rows) -> Echo:
    return Echo(build_echo, echo_rows)


def _losses(outcome: PostTraining) -> list[float]:
    return outcome.history["loss"].dropna().tolist()


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_a_stream_says_in_how_many_pieces_a_batch_is_run(
    echo: Echo, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    seen: list[int] = []
    measure = SparsityObjective.measure

    def noted(self: SparsityObjective, batch: TokenBatch, *rest: Any) -> Any:
        seen.append(len(batch))
        return measure(self, batch, *rest)

    monkeypatch.setattr(SparsityObjective, "measure", noted)
    echo(stream=ShuffledStream(echo.rows(), 24, accumulate=pieces), steps=2)
    assert seen == [24 // pieces] * pieces * 2


@pytest.mark.long
def test_a_looser_target_leaves_fewer_edges(echo: Echo) -> None:
    """And a tighter one raises lambda higher, although both end at the lower bound."""
    tight, loose = (
        echo(target_loss=target, steps=30, learning_rate=2e-2)[0] for target in ("+0.02", "+1")
    )
    assert loose.sparse.active_attention_edges < tight.sparse.active_attention_edges
    assert loose.history["lambda"].max() < tight.history["lambda"].max()


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        (0.1, {"gates.bias": GATE_LEARNING_RATE, "unembed": 0.1}),
        ({"gates": 0.2}, {"gates.bias": 0.2}),
        ({"gates": 0.2, "qk": 0.05}, {"gates.bias": 0.2, "q": 0.05}),
        ({"gates": 0.2, "all": 0.1}, {"gates.bias": 0.2, "unembed": 0.1, "q": 0.1}),
        ({"all": 0.1, "gates": 0.2}, {"gates.bias": 0.1, "unembed": 0.1, "q": 0.1}),
        ({"gates.*": 0.3, "*": 0.1}, {"gates.bias": 0.3, "unembed": 0.1, "q": 0.1}),
    ],
    ids=str,
)
def test_rates_are_those_of_the_first_name_that_fits(
    echo: Echo, last_kept: None, rates: Any, expected: dict[str, float]
) -> None:
    """Adam's first step is as large as the rate, whatever the gradient."""
    sparse = echo.sparse()
    queries = {id(p) for p in adapt(sparse).parameters("qk")}
    before = weights(sparse)
    echo(sparse, learning_rate=rates, steps=1)
    largest: dict[str, float] = {}
    for name, now in read_parameters(sparse).items():
        kind = "unembed" if "unembed" in name else "q" if id(now) in queries else name
        change = (now.detach() - before[name]).abs().max().item()
        largest[kind] = max(change, largest.get(kind, 0.0))
    for kind, rate in expected.items():
        assert largest[kind] == pytest.approx(rate, rel=1e-2), kind
    everything = not isinstance(rates, dict) or {"all", "*"} & set(rates)
    still = set() if everything else set(largest) - set(expected)
    assert all(largest[kind] == 0 for kind in still)
    assert everything or still


@pytest.mark.long
@pytest.mark.parametrize("dear", [0, 1])
def test_dear_edges_become_rarer(echo: Echo, dear: int) -> None:
    """Edges of one layer cost nothing, those of the other five each."""
    cost = torch.zeros(2, 1, 1, 1)
    cost[dear] = 5.0
    active = {}
    for name, edge_cost in (("equal", None), ("dear", cost)):
        _, sparse = echo(edge_cost=edge_cost, steps=16, learning_rate={"gates": 0.3})
        counts = sparse.count_attention_edges(echo.rows(seed=1).tokens)
        active[name] = counts.by_head().sum(dim=1)
    assert active["dear"][dear] < 0.8 * active["dear"][1 - dear]
    assert active["dear"][1 - dear] > active["equal"][1 - dear]


@pytest.mark.long
@pytest.mark.parametrize("head_cost", [0.0, 10.0])
def test_a_head_that_is_hardly_used_is_shut_where_heads_cost(
    echo: Echo, last_kept: None, head_cost: float
) -> None:
    """Its edges cost nothing, so that nothing else shuts it."""
    cost = torch.ones(2, 2, 1, 1)
    cost[1, 0] = 0.0
    sparse, tokens = echo.sparse(2.0), echo.rows(seed=1).tokens

    def expected() -> float:
        return sparse.count_attention_edges(tokens).expected[1, :, 0].mean().item()

    while (before := expected()) > 0.2:
        with torch.no_grad():
            sparse.gates.bias[1, 0] -= 0.1
    echo(sparse, edge_cost=cost, head_cost=head_cost, steps=12, learning_rate={"gates": 0.2})
    assert (expected() < 0.5 * before) == (head_cost > 0)
    assert (expected() > before) == (head_cost == 0), "the loss alone opens it"


def test_another_seed_draws_other_noise(echo: Echo) -> None:
    one, other = (_losses(echo(seed=seed, steps=2)[0]) for seed in (0, 1))
    assert one != other


def test_bf16_is_rougher_and_of_the_weights_nothing(echo: Echo) -> None:
    inside = []

    def noted(value: torch.Tensor, hook: Any) -> None:
        if torch.is_grad_enabled():
            inside.append(value.dtype)

    losses = {}
    for precision in ("float32", "bf16"):
        sparse = echo.sparse(4.0)
        sparse.model.add_hook("blocks.0.attn.hook_q", noted)
        outcome, _ = echo(sparse, precision=precision, steps=2)
        losses[precision] = _losses(outcome)
        assert {weight.dtype for weight in weights(sparse).values()} == {torch.float32}
    assert inside == [torch.float32] * 2 + [torch.bfloat16] * 2
    assert losses["bf16"] != losses["float32"]
    assert losses["bf16"][0] == pytest.approx(losses["float32"][0], abs=0.05)


def test_bf16_where_it_is_slow_is_said(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    with pytest.warns(UserWarning, match="this CPU is slow in bfloat16"):
        echo(precision="bf16", steps=1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target_loss": 40.0}, "target: '50' there, '40' here"),
        ({"edge_cost": torch.tensor([1.0, 2.0]).reshape(2, 1, 1, 1)}, "edge_cost: None there"),
        ({"learning_rate": {"gates": 0.05, "all": 0.025}}, "1.0 there, 0.5 here"),
    ],
    ids=str,
)
def test_other_settings_are_another_run(
    echo: Echo, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    echo(checkpoint=tmp_path / "c")
    with pytest.raises(ValueError, match=f"belongs to another run .*{message}"):
        echo(checkpoint=tmp_path / "c", **changed)


def test_another_distribution_is_another_run(echo: Echo, tmp_path: Path) -> None:
    echo(checkpoint=tmp_path / "c")
    other = SparseTransformer(echo.build(), initial_bias=0.5, distribution=BernoulliGate(0.5))
    with pytest.raises(ValueError, match="gates: .* there"):
        echo(other, checkpoint=tmp_path / "c")
