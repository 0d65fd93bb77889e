"""Attribution graphs of features: published formats, and a model that is linearised by hand."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import plain_transformer
from safetensors.torch import save_file
from test_attribution_graph import ALL, TOKENS, FrozenModel, conserves

from sparse_tl.backend import adapt, boot
from sparse_tl.circuits.prompt.attribution_graph import attribution_graph
from sparse_tl.circuits.prompt.examples import find_examples, with_examples
from sparse_tl.circuits.prompt.graph_checks import check_graph, graph_effect
from sparse_tl.circuits.prompt.transcoders import Transcoders, load_transcoders, transcoders_of

pytestmark = [
    pytest.mark.usefixtures("double_precision"),
    pytest.mark.filterwarnings("ignore:at most positions"),  # features here are random
]

FEATURES = 24


def llama() -> Any:
    return boot(plain_transformer("llama", "float64"))


def tensors(seed: int, width: int, n_out: int | None = None) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    decoder = (FEATURES, width) if n_out is None else (FEATURES, n_out, width)
    return {
        "W_enc": torch.randn(FEATURES, width, dtype=torch.float32),
        "b_enc": torch.randn(FEATURES, dtype=torch.float32) / 2,
        "W_dec": torch.randn(decoder, dtype=torch.float32) / 20,
        "b_dec": torch.randn(width, dtype=torch.float32) / 20,
    }


def tracer_folder(folder: Path, model: Any, *, across: bool = False, **changed: Any) -> Path:
    """Transcoders in circuit-tracer's format."""
    n_layers, width = model.cfg.n_layers, model.cfg.d_model
    folder.mkdir(exist_ok=True)
    config = {
        "model_kind": "cross_layer_transcoder" if across else "transcoder_set",
        "feature_input_hook": "mlp.hook_in",
        "feature_output_hook": "mlp.hook_out",
        "model_name": "llama",
    } | changed
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    for layer in range(n_layers):
        if not across:
            save_file(tensors(layer, width), folder / f"layer_{layer}.safetensors")
            continue
        made = {f"{k}_{layer}": v for k, v in tensors(layer, width, n_layers - layer).items()}
        made[f"threshold_{layer}"] = torch.full((FEATURES,), 0.1, dtype=torch.float32)
        written = {f"W_dec_{layer}": made.pop(f"W_dec_{layer}")}
        save_file(made, folder / f"W_enc_{layer}.safetensors")
        save_file(written, folder / f"W_dec_{layer}.safetensors")
    return folder


def lens_folders(root: Path, model: Any) -> list[Path]:
    """The same per-layer transcoders in SAELens's format."""
    folders = []
    for layer in range(model.cfg.n_layers):
        folder = root / f"lens{layer}"
        folder.mkdir()
        hooks = {
            "hook_name": f"blocks.{layer}.mlp.hook_in",
            "hook_name_out": f"blocks.{layer}.mlp.hook_out",
        }
        config = {"architecture": "transcoder", "normalize_activations": "none", "metadata": hooks}
        (folder / "cfg.json").write_text(json.dumps(config))
        made = tensors(layer, model.cfg.d_model)
        made["W_enc"] = made["W_enc"].T.contiguous()
        save_file(made, folder / "sae_weights.safetensors")
        folders.append(folder)
    return folders


class FrozenFeatures(FrozenModel):
    """A frozen model whose MLPs write active features, linear in their input, and an error."""

    def __init__(self, model: Any, graph: Any, basis: Transcoders) -> None:
        super().__init__(model, graph)
        self.basis, self.made = transcoders_of(basis, adapt(model)), {}
        for layer, transcoder in enumerate(self.basis.layers):
            self.made[layer] = transcoder.activations(self.at[f"blocks.{layer}.mlp.hook_in"])
        self.active = {layer: made > 0 for layer, made in self.made.items()}
        self.error = {
            layer: self.at[f"blocks.{layer}.mlp.hook_out"]
            - self.basis.written(layer, self.upto(layer))
            for layer in self.made
        }
        self.removed: dict[str, Any] | None = None

    def upto(self, layer: int) -> dict[int, torch.Tensor]:
        return {source: made for source, made in self.made.items() if source <= layer}

    def without(self, node: dict[str, Any]) -> float:
        """The target without a feature or error."""
        self.removed = node
        return self.target({})

    def _frozen(self, name: str, edit: Any) -> Any:
        block, _, point = name.rpartition(".")
        node = self.removed or {"kind": "", "layer": -1}

        def read(x: torch.Tensor) -> None:
            layer = int(block.split(".")[1])
            transcoder = self.basis.layers[layer]
            made = (x @ transcoder.encoder.T + transcoder.encoder_bias) * self.active[layer]
            if node["kind"] == "feature" and node["layer"] == layer:
                made[0, node["position"], node["index"]] = 0
            self.made[layer] = made

        def write(_: torch.Tensor) -> torch.Tensor:
            layer = int(block.split(".")[1])
            error = self.error[layer].clone()
            if node["kind"] == "error" and node["layer"] == layer:
                error[0, node["position"]] = 0
            return self.basis.written(layer, self.upto(layer)) + error

        ours = {"mlp.hook_in": read, "mlp.hook_out": write}.get(name.partition(".")[2][2:])
        return super()._frozen(name, edit) if ours is None else ours


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.every_case
def test_features_and_errors_have_the_effect_of_a_frozen_model(
    across: bool, tmp_path: Path
) -> None:
    model = llama()
    basis = load_transcoders(tracer_folder(tmp_path / "t", model, across=across))
    graph = attribution_graph(model, TOKENS, basis=basis, max_nodes=ALL)
    conserves(graph)
    frozen = FrozenFeatures(model, graph, basis)
    assert frozen.target({}) == pytest.approx(graph.value, rel=1e-9)
    nodes = graph.nodes[graph.nodes["kind"].isin(["feature", "error"])]
    assert set(nodes["kind"]) == {"feature", "error"}
    for node in nodes.sample(20, random_state=0).to_dict("records"):
        lost = graph.value - frozen.without(node)
        assert lost == pytest.approx(node["flow"], rel=1e-6, abs=1e-9), node["name"]


def test_checks_run_features_in_the_model(tmp_path: Path) -> None:
    model = llama()
    basis = load_transcoders(tracer_folder(tmp_path / "t", model))
    graph = attribution_graph(model, TOKENS, basis=basis, max_nodes=ALL)
    # Features that only the corrupted prompt activates are no nodes, and have their values there.
    found = graph_effect(model, graph, TOKENS.flip(0), basis=basis)
    assert found == pytest.approx(1.0, abs=0.01) and found != 1.0
    check = check_graph(model, graph, basis=basis, n=12)
    double = transcoders_of(basis, adapt(model))

    def value(row: dict[str, Any] | None) -> float:
        def write(out: torch.Tensor, hook: Any) -> torch.Tensor:
            layer = int(hook.name.split(".")[1])
            if row is None or row["layer"] != layer or row["kind"] not in ("feature", "error"):
                return out
            transcoder, at = double.layers[layer], row["position"]
            made, new = transcoder.activations(seen[layer]), out.clone()
            if row["kind"] == "feature":
                new[0, at] -= made[0, at, row["index"]] * transcoder.decoder[row["index"], 0]
            else:
                new[0, at] = double.written(layer, {layer: made})[0, at]
            return new

        def edge(pattern: torch.Tensor, hook: Any) -> torch.Tensor:
            layer = int(hook.name.split(".")[1])
            if row is None or row["kind"] != "attention edge" or row["layer"] != layer:
                return pattern
            pattern = pattern.clone()
            pattern[0, row["index"], row["position"], row["source"]] = 0
            return pattern

        seen: dict[int, torch.Tensor] = {}
        hooks: list[Any] = []
        for layer in range(model.cfg.n_layers):
            name = f"blocks.{layer}"
            keep = lambda x, hook, layer=layer: seen.__setitem__(layer, x)  # noqa: E731
            hooks += [(f"{name}.mlp.hook_in", keep), (f"{name}.mlp.hook_out", write)]
            hooks.append((f"{name}.attn.hook_pattern", edge))
        logits = model.run_with_hooks(TOKENS[None], fwd_hooks=hooks)[0, -1]
        return (logits[graph.answers[0]] - logits.mean()).item()

    nodes, whole = graph.nodes.set_index("name", drop=False), value(None)
    for row in check.nodes.to_dict("records"):
        assert row["exact"] == pytest.approx(value(nodes.loc[row["name"]].to_dict()) - whole)
    with pytest.raises(ValueError, match="has features: .* basis"):
        check_graph(model, graph)
    with pytest.raises(ValueError, match="has neurons: .* basis"):
        check_graph(model, attribution_graph(model, TOKENS), basis=basis)


def test_examples_are_where_a_feature_is_most_active(tmp_path: Path) -> None:
    model = llama()
    basis = load_transcoders(tracer_folder(tmp_path / "t", model))
    graph = attribution_graph(model, TOKENS, basis=basis, max_nodes=60)
    texts = [TOKENS, TOKENS.flip(0), TOKENS[2:]]
    found = with_examples(
        model, graph, find_examples(model, texts, basis=basis, n=2, progress=False)
    )
    double = transcoders_of(basis, adapt(model))
    caches = [model.run_with_cache(text[None])[1] for text in texts]
    for row in found.nodes[found.nodes["kind"] == "feature"].to_dict("records"):
        transcoder, largest = double.layers[row["layer"]], list[float]()
        for cache in caches:
            read = cache[f"blocks.{row['layer']}.mlp.hook_in"]
            largest.append(transcoder.activations(read)[0, :, row["index"]].max().item())
        shown = [value for *_, value in row["examples"]]
        assert shown == pytest.approx(sorted(largest, reverse=True)[:2], rel=1e-4)
        (before, token, after, _) = row["examples"][0]
        assert f"{before}{token}{after}" in [" ".join(map(str, t.tolist())) for t in texts]
    neurons = with_examples(model, graph, find_examples(model, texts, progress=False))
    assert not any(neurons.nodes["examples"])


def test_transcoders_of_another_model_are_warned_of(tmp_path: Path) -> None:
    model = llama()
    random = load_transcoders(tracer_folder(tmp_path / "t", model))
    with pytest.warns(UserWarning, match="larger than what the MLP .*name 'llama'"):
        attribution_graph(model, TOKENS, basis=random)
    nothing = [
        replace(each, decoder=0 * each.decoder, bias=0 * each.bias) for each in random.layers
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attribution_graph(model, TOKENS, basis=replace(random, layers=nothing))


def test_both_formats_hold_the_same(tmp_path: Path) -> None:
    model = llama()
    one = load_transcoders(tracer_folder(tmp_path / "t", model))
    two = load_transcoders(lens_folders(tmp_path, model)[::-1])
    assert (one.input_hook, one.output_hook) == (two.input_hook, two.output_hook)
    for first, second in zip(one.layers, two.layers, strict=True):
        for name, tensor in vars(first).items():
            assert torch.equal(tensor, vars(second)[name])


def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path: Path) -> None:
    model, other = llama(), boot(plain_transformer("gpt2", "float64"))

    def refused(match: str, folder: Any, model: Any = model) -> None:
        with pytest.raises(ValueError, match=match):
            attribution_graph(model, TOKENS, basis=load_transcoders(folder))

    good = tracer_folder(tmp_path / "good", model)
    if other.cfg.d_model != model.cfg.d_model:
        refused("numbers, and mlp.hook_in", good, other)
    refused("hook point", tracer_folder(tmp_path / "hook", model, feature_input_hook="mlp.hook_x"))
    for name in ("feature_input_hook", "feature_output_hook"):
        changed = tracer_folder(tmp_path / name, model, **{name: "mlp.hook_pre"})
        refused("layer 0 .* 32 numbers, and mlp.hook_pre .* has 48", changed)
    normed = boot(plain_transformer("gemma2", "float64"))
    refused("norm or a gate", tracer_folder(tmp_path / "norm", normed), normed)
    fewer = tracer_folder(tmp_path / "fewer", model)
    (fewer / f"layer_{model.cfg.n_layers - 1}.safetensors").unlink()
    refused("layers", fewer)
    save_file(tensors(0, model.cfg.d_model + 2), good / "layer_1.safetensors")
    refused("layer 1 .* 34 numbers, and mlp.hook_in .* has 32", good)
    save_file(
        tensors(0, model.cfg.d_model) | {"b_dec": torch.zeros(5)}, good / "layer_1.safetensors"
    )
    refused("shapes in .*layer_1", good)
    nan = tracer_folder(tmp_path / "nan", model)
    broken = tensors(0, model.cfg.d_model)
    broken["W_dec"][3, 1] = torch.nan
    save_file(broken, nan / "layer_0.safetensors")
    refused("NaN", nan)
    save_file({"W_skip": broken["W_enc"]}, nan / "layer_0.safetensors")
    refused("skip", nan)
    save_file({"W_enc": broken["W_enc"]}, nan / "layer_0.safetensors")
    refused("lacks", nan)
    refused("neither a folder", str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    refused("holds no transcoders", tmp_path / "empty")
    folders = lens_folders(tmp_path, model)
    refused("give one of each layer", folders[1:])
    config = json.loads((folders[1] / "cfg.json").read_text()) | {"model_name": "another"}
    (folders[1] / "cfg.json").write_text(json.dumps(config))
    refused("of one model", folders)
