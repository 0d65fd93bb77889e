"""What every architecture can do or refuses, checked lightly: in seconds, on one small model each.

As in the other modules, the first paragraph of each docstring stands on the page.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from double_precision import DoublePrecision
from small_models import native, random_model
from torch import Tensor

from architecture_checks.gates import generation
from architecture_checks.subject import (
    ECHOES,
    FLOAT32,
    PAIRS,
    QUIET,
    READ,
    near,
    require,
)
from sparse_tl import (
    CircuitEdges,
    GatedRun,
    ShuffledStream,
    SparseTransformer,
    ablate_heads,
    attribute_circuit_edges,
    attribute_logits,
    logit_difference,
    post_train,
)
from sparse_tl.backend import adapt, boot, load_model, save_model
from sparse_tl.jobs import run_doctor
from sparse_tl.storage.files import write_json


class Small:
    """One architecture, by its name in TransformerLens, as a small random bridge."""

    kind = "TransformerBridge"

    def __init__(self, name: str) -> None:
        self.name = name

    def build(self, dtype: str = "float32") -> Any:
        """A fresh model, always of the same random weights.

        For a name that is no class of transformers, what comes of a folder that names it.
        """
        if self.name == "TransformerLensNative":
            return native()
        if not hasattr(transformers, self.name):
            return self._loaded()
        return boot(random_model(self.name).to(getattr(torch, dtype)), name=self.name)

    def _loaded(self) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            config = {"architectures": [self.name], "model_type": "llama"}
            write_json(Path(folder, "config.json"), config)
            Path(folder, "model.safetensors").touch()
            try:
                return load_model(folder)
            except ValueError as error:
                raise ValueError(str(error).replace(folder, "its folder")) from error

    def precise(self) -> tuple[Any, float]:
        """A model in float64 where transformers can run it, and how exact slopes are."""
        try:
            model = self.build("float64")
        except ValueError:
            model = self.build()
        exact = 1e-3 if adapt(model).dtype == torch.float64 else 2e-2
        return model.requires_grad_(False), exact


@torch.no_grad()
def gating(subject: Small) -> None:
    """Open gates leave the logits as they are, bit for bit. When all are closed, logits at the last
    token depend on no other token. Saved and loaded, the gated model gives the same logits."""
    model = subject.build()
    plain, sparse = model(PAIRS.clean), SparseTransformer(model)
    with sparse.opened():
        require(torch.equal(sparse(PAIRS.clean), plain), "open gates change the logits")
    others = torch.cat([PAIRS.clean.roll(1, 0)[:, :-1], PAIRS.clean[:, -1:]], dim=1)
    sparse.gates.bias.fill_(-1e4)
    ends = [sparse(tokens)[:, -1] for tokens in (PAIRS.clean, others)]
    near(ends[0], ends[1], FLOAT32, "the logits at the last token under closed gates")
    sparse.gates.bias.normal_(0, 1.5, generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as home:
        folder = sparse.save_pretrained(Path(home, "sparse"))
        again = SparseTransformer.from_pretrained(folder, device="cpu")
    near(again(PAIRS.clean), sparse(PAIRS.clean), FLOAT32, "the logits of what was loaded")


@torch.no_grad()
def copying(subject: Small) -> None:
    """A copy gives the same logits and shares no parameter; so does what was saved and loaded."""
    model = subject.build()
    copy, plain = adapt(model).copy(), model(PAIRS.clean)
    shared = set(map(id, model.parameters())) & set(map(id, copy.parameters()))
    require(not shared, "the copy shares parameters")
    near(copy(PAIRS.clean), plain, FLOAT32, "the copy's logits")
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, folder)
        again = load_model(folder, device="cpu")
    near(again(PAIRS.clean), plain, FLOAT32, "the logits of what was loaded")


def post_training(subject: Small) -> None:
    """Ten steps of post-training change the weights, and the expected number of open attention
    edges falls."""
    sparse = SparseTransformer(subject.build())
    weights = adapt(sparse).parameters("all")
    before = sparse.count_attention_edges(ECHOES.tokens).expected, [w.clone() for w in weights]
    rates = {"gates": 0.3, "all": 1e-3}
    options = {"validation": ECHOES, "steps": 10, "learning_rate": rates, **QUIET}
    post_train(sparse, ShuffledStream(ECHOES, 32), target_loss="+10", **options)
    after = sparse.count_attention_edges(ECHOES.tokens).expected
    require(bool(after.mean() < before[0].mean()), "no attention edge was removed")
    moved = [not torch.equal(*pair) for pair in zip(weights, before[1], strict=True)]
    require(any(moved), "no weight was trained")


def circuits(subject: Small) -> None:
    """EAP scores of twelve circuit edges equal the slope of the metric as each edge's gate closes,
    by finite differences. With all edges patched, logits are those of the corrupted prompts."""
    model, exact = subject.precise()
    graph = adapt(model).graph
    chosen = torch.randperm(graph.n_edges, generator=torch.Generator().manual_seed(0))[:12]
    edges = [graph.edges[int(index)] for index in chosen]
    with DoublePrecision():
        found = attribute_circuit_edges(model, PAIRS, logit_difference, method="eap", **QUIET)
        run = GatedRun(
            model, CircuitEdges(), PAIRS.clean, READ, "corrupted", reference=PAIRS.corrupted
        )
        step, shape = exact, (2 * len(edges) + 1, *graph.exists.shape)
        gates = torch.ones(shape, dtype=adapt(model).gate_dtype)
        for number, edge in enumerate(edges):
            gates[2 * number][graph.index(edge)] = 1 + step
            gates[2 * number + 1][graph.index(edge)] = 1 - step
        gates[-1] = 0
        with torch.no_grad():
            logits = run.logits(gates)
            values = torch.stack([logit_difference(some, PAIRS).mean() for some in logits[:-1]])
            corrupted = PAIRS.read(model(PAIRS.corrupted))
    near(logits[-1], corrupted, FLOAT32, "the logits with all circuit edges patched")
    slopes = (values[1::2] - values[::2]) / (2 * step)
    scores = torch.stack([found.values[graph.index(edge)] for edge in edges])
    near(scores, slopes, exact, "a circuit edge's score")


@torch.no_grad()
def head_ablation(subject: Small) -> None:
    """Ablating two heads gives the logits of a model whose output projections read zeros in their
    place."""
    model = subject.build()
    heads = [(0, 0), (1, adapt(model).n_heads - 1)]
    with ablate_heads(model, heads):
        found = model(PAIRS.clean)
    projections = [model.blocks[layer].attn.o.original_component for layer, _ in heads]

    def without(head: int, _module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        z = args[0].unflatten(-1, (adapt(model).n_heads, -1)).clone()
        z[..., head, :] = 0
        return (z.flatten(-2), *args[1:])

    handles = [
        projection.register_forward_pre_hook(partial(without, head))
        for projection, (_, head) in zip(projections, heads, strict=True)
    ]
    expected = model(PAIRS.clean)
    for handle in handles:
        handle.remove()
    require(not torch.equal(found, model(PAIRS.clean)), "ablation has no effect")
    near(found, expected, FLOAT32, "the logits without heads")


@torch.no_grad()
def logits_by_part(subject: Small) -> None:
    """Direct logit attribution of all components adds up to the logit difference."""
    model, _ = subject.precise()
    with DoublePrecision():
        found = attribute_logits(model, PAIRS, **QUIET)
        logits = PAIRS.read(model(PAIRS.clean))
    if (cap := _soft_cap(model)) is not None:
        logits = cap * (logits / cap).atanh()
    near(found.total, logit_difference(logits, PAIRS), FLOAT32, "the sum of all components")


def _soft_cap(model: Any) -> float | None:
    config = getattr(model.original_model, "config", None)
    text = None if config is None else config.get_text_config()
    caps = [getattr(text, name, None) for name in ("final_logit_softcapping", "logits_soft_cap")]
    return next(filter(None, caps), None)


CAPABILITIES: dict[str, Callable[[Small], None]] = {
    "gates": gating,
    "post-training": post_training,
    "generation": generation,
    "heads": head_ablation,
    "circuits": circuits,
    "logit attribution": logits_by_part,
    "copies": copying,
}
_IN_DOCTOR = {"gates": "gates", "circuits": "circuits", "copies": "saving"}
"""For some of them, the part that `run_doctor` reports."""


def refusals(name: str) -> dict[str, str]:
    """What an architecture does not do, by capability, and why; under "all" if there is no model.

    An error that is no refusal, and a doctor who says otherwise, are reported as such.
    """
    subject = Small(name)
    why = _why_not(subject.build)
    if why is not None:
        return {"all": why}
    tried = {title: _why_not(partial(check, subject)) for title, check in CAPABILITIES.items()}
    found = {title: why for title, why in tried.items() if why is not None}
    model = subject.build()
    checks = {check.name: check for check in run_doctor(model)}
    for title, part in _IN_DOCTOR.items():
        said = checks.get(f"model {model.cfg.model_name}: {part}")
        if said is not None and said.works == (title in found):
            found["doctor"] = f"says otherwise of {part}: {said.found}"
    return found


def _why_not(check: Callable[[], Any]) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check()
    except ImportError as error:
        return f"not run: {_in_a_line(error)}"
    except Exception as error:
        return f"{'' if isinstance(error, ValueError) else 'CRASH: '}{_in_a_line(error)}"
    return None


def _in_a_line(error: Exception) -> str:
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split())


def described(name: str) -> str:
    """What kind of model it is, unless a language model."""
    kind = getattr(transformers, name, None)
    if kind is None:
        own = name.startswith("TransformerLens")
        return "TransformerLens's own model" if own else "no class of transformers"
    if kind.config_class().is_encoder_decoder:
        return "an encoder and a decoder"
    if name.endswith("MaskedLM"):
        return "an encoder, which fills in masked tokens"
    inputs = {"pixel_values": "images", "input_values": "sounds"}
    if kind.main_input_name in inputs:
        return f"reads {inputs[kind.main_input_name]}"
    parts = {"vision_config": "images", "vq_config": "images", "audio_config": "sounds"}
    also = sorted({parts[part] for part in kind.config_class.sub_configs if part in parts})
    return f"reads {' and '.join(also)} too; run on text" if also else ""


def row(name: str, refused: dict[str, str]) -> str:
    """The line of an architecture in the table."""
    kind, by_reason = described(name), dict[str, list[str]]()
    for title, why in refused.items():
        by_reason.setdefault(why.replace("|", r"\|").replace("<", "&lt;"), []).append(title)
    works = [title for title in CAPABILITIES if title not in refused and "all" not in refused]
    said = "; ".join(f"**{', '.join(titles)}**: {why}" for why, titles in by_reason.items())
    shown = "all" if len(works) == len(CAPABILITIES) else ", ".join(works) or "nothing"
    return f"| `{name}`{f', {kind}' if kind else ''} | {shown} | {said} |"
