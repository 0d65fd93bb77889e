"""Weights of a HookedTransformer under the names and shapes of GPT-2, GPT-NeoX and Llama."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor


class Named:
    """Weights by HookedTransformer name, keeping track of which were read."""

    def __init__(self, said: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self._said, self._weights, self._read = said, weights, set[str]()

    def __call__(self, name: str, *axes: str) -> Tensor:
        """The weight with these axes; missing biases are zeros, missing norm weights ones."""
        shape = tuple(self._said[axis] for axis in axes)
        parent, _, leaf = name.rpartition(".")
        grouped = f"{parent}._{leaf}"  # k and v with fewer heads than queries
        name = grouped if grouped in self._weights else name
        self._read.add(name)
        found = self._weights.get(name)
        if found is None and (leaf == "w" or leaf.startswith("b")):
            return torch.full(shape, float(leaf == "w"))
        if found is None or tuple(found.shape) != shape:
            got = "none" if found is None else tuple(found.shape)
            raise ValueError(f"expected {name} to have the shape {shape}; got {got}")
        return found

    def check_read(self) -> None:
        """Check that no weight is left over."""
        left_over = sorted(set(self._weights) - self._read)
        if left_over:
            raise ValueError(f"expected weights of this architecture alone; got {left_over[:5]}")

    def slot(self, layer: int, slot: str) -> tuple[Tensor, Tensor]:
        """A projection ``[head, d_model, d_head]`` and its bias, in the order of `transformers`."""
        heads = "n_heads" if slot == "Q" else "n_key_value_heads"
        at = f"blocks.{layer}.attn"
        weight = self(f"{at}.W_{slot}", heads, "d_model", "d_head")
        bias = self(f"{at}.b_{slot}", heads, "d_head")
        rotary = self._said["positional_embedding_type"] == "rotary"
        if rotary and self._said["rotary_adjacent_pairs"] and slot != "V":
            # Pairs rotated together are (0, 1), (2, 3), .. in HookedTransformer, and (0, n/2),
            # (1, n/2+1), .. in transformers. The scores do not depend on the order.
            turned, rest = torch.arange(self._said["d_head"]).split(
                [self._said["rotary_dim"], self._said["d_head"] - self._said["rotary_dim"]]
            )
            order = torch.cat([turned[::2], turned[1::2], rest])
            weight, bias = weight[:, :, order], bias[:, order]
        return weight, bias

    def out(self, layer: int) -> tuple[Tensor, Tensor]:
        """The matrix from z of all heads to the residual stream, ``[z, d_model]``, and its bias."""
        weight = self(f"blocks.{layer}.attn.W_O", "n_heads", "d_head", "d_model")
        return weight.flatten(0, 1), self(f"blocks.{layer}.attn.b_O", "d_model")

    def mlp(self, layer: int, name: str) -> Tensor:
        """A weight or bias of the MLP."""
        axes = {"W_in": ("d_model", "d_mlp"), "W_gate": ("d_model", "d_mlp"), "b_in": ("d_mlp",)}
        rest = {"W_out": ("d_mlp", "d_model"), "b_out": ("d_model",)}
        return self(f"blocks.{layer}.mlp.{name}", *(axes | rest)[name])

    def norms(self, layer: int, attention: str, mlp: str) -> dict[str, Tensor]:
        """Weights and biases of a layer's LayerNorms, under the given names of the two norms."""
        return {
            f"{theirs}.{kind}": self(f"blocks.{layer}.{ours}.{kind[0]}", "d_model")
            for ours, theirs in (("ln1", attention), ("ln2", mlp))
            for kind in ("weight", "bias")
        }

    def around(self, embedding: str, norm: str) -> dict[str, Tensor]:
        """The parts around the layers: embedding, final norm and unembedding."""
        last, unembedding = self._ending()
        return {
            f"{embedding}.weight": self("embed.W_E", "d_vocab", "d_model"),
            **{f"{norm}.{kind}": tensor for kind, tensor in last.items()},
            "lm_head.weight": unembedding,
        }

    def _ending(self) -> tuple[dict[str, Tensor], Tensor]:
        """The final norm, and an unembedding ``[vocabulary, d_model]`` without a bias.

        A bias b_U is absorbed into both. LayerNorm's standardised x sums to 0, so adding a constant
        to a column of the unembedding changes nothing. With the norm's weight and bias set to 1,
        the logits are ``(x + 1) A``, which equals ``x (w W_U) + (b W_U + b_U)`` for
        ``A = w W_U - mean(w W_U) + (b W_U + b_U) / d_model``.
        """
        rms = self._said["normalization_type"] == "RMS"
        norm = {"weight": self("ln_final.w", "d_model")}
        norm |= {} if rms else {"bias": self("ln_final.b", "d_model")}
        weight = self("unembed.W_U", "d_model", "d_vocab")
        bias = self("unembed.b_U", "d_vocab")
        if not bias.any():
            return norm, weight.T
        if rms:
            raise ValueError(
                "expected an unembedding without a bias, since this version of transformer-lens "
                "has no HookedTransformer (3.9 has), and models of transformers with RMS norms "
                "have no place for one; got b_U"
            )
        scaled = norm["weight"].double()[:, None] * weight.double()
        constant = norm["bias"].double() @ weight.double() + bias.double()
        joint = scaled - scaled.mean(dim=0) + constant / len(weight)
        ones = torch.ones_like(norm["weight"])
        return {"weight": ones, "bias": ones.clone()}, joint.T.to(weight.dtype)


def _gpt2(said: dict[str, Any], named: Named) -> tuple[dict[str, Any], dict[str, Tensor]]:
    found = named.around("transformer.wte", "transformer.ln_f")
    found["transformer.wpe.weight"] = named("pos_embed.W_pos", "n_ctx", "d_model")
    for layer in range(said["n_layers"]):
        slots = [named.slot(layer, slot) for slot in "QKV"]
        weight, bias = named.out(layer)
        block = {
            "attn.c_attn.weight": torch.cat(
                [rearrange(w, "h m e -> m (h e)") for w, _ in slots], 1
            ),
            "attn.c_attn.bias": torch.cat([b.flatten() for _, b in slots]),
            "attn.c_proj.weight": weight,
            "attn.c_proj.bias": bias,
            "mlp.c_fc.weight": named.mlp(layer, "W_in"),
            "mlp.c_fc.bias": named.mlp(layer, "b_in"),
            "mlp.c_proj.weight": named.mlp(layer, "W_out"),
            "mlp.c_proj.bias": named.mlp(layer, "b_out"),
            **named.norms(layer, "ln_1", "ln_2"),
        }
        found |= {f"transformer.h.{layer}.{name}": tensor for name, tensor in block.items()}
    config = {
        "n_inner": said["d_mlp"],
        "activation_function": said["act_fn"],
        "layer_norm_epsilon": said["eps"],
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }
    return config, found


def _neox(said: dict[str, Any], named: Named) -> tuple[dict[str, Any], dict[str, Tensor]]:
    found = named.around("gpt_neox.embed_in", "gpt_neox.final_layer_norm")
    for layer in range(said["n_layers"]):
        slots = [named.slot(layer, slot) for slot in "QKV"]
        weight, bias = named.out(layer)
        joint = torch.stack([w for w, _ in slots], 1), torch.stack([b for _, b in slots], 1)
        block = {
            "attention.query_key_value.weight": rearrange(joint[0], "h s m e -> (h s e) m"),
            "attention.query_key_value.bias": joint[1].flatten(),
            "attention.dense.weight": weight.T,
            "attention.dense.bias": bias,
            "mlp.dense_h_to_4h.weight": named.mlp(layer, "W_in").T,
            "mlp.dense_h_to_4h.bias": named.mlp(layer, "b_in"),
            "mlp.dense_4h_to_h.weight": named.mlp(layer, "W_out").T,
            "mlp.dense_4h_to_h.bias": named.mlp(layer, "b_out"),
            **named.norms(layer, "input_layernorm", "post_attention_layernorm"),
        }
        found |= {f"gpt_neox.layers.{layer}.{name}": tensor for name, tensor in block.items()}
    config = {
        "intermediate_size": said["d_mlp"],
        "hidden_act": said["act_fn"],
        "layer_norm_eps": said["eps"],
        "use_parallel_residual": said["parallel_attn_mlp"],
        "rope_parameters": _rope(said, partial_rotary_factor=said["rotary_dim"] / said["d_head"]),
    }
    return config, found


def _llama(said: dict[str, Any], named: Named) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if said["rotary_dim"] != said["d_head"]:
        raise ValueError(f"expected rotary_dim to be d_head; got {said['rotary_dim']}")
    found = named.around("model.embed_tokens", "model.norm")
    for layer in range(said["n_layers"]):
        block: dict[str, Tensor] = {}
        for slot in "QKV":
            weight, bias = named.slot(layer, slot)
            block[f"self_attn.{slot.lower()}_proj.weight"] = rearrange(weight, "h m e -> (h e) m")
            block[f"self_attn.{slot.lower()}_proj.bias"] = bias.flatten()
        weight, bias = named.out(layer)
        block |= {"self_attn.o_proj.weight": weight.T, "self_attn.o_proj.bias": bias}
        for ours, theirs in (("in", "up"), ("out", "down"), ("gate", "gate")):
            block[f"mlp.{theirs}_proj.weight"] = named.mlp(layer, f"W_{ours}").T
        # HookedTransformer adds b_in after the product of both, not to the output of W_in.
        inner = named.mlp(layer, "b_in")
        block["mlp.down_proj.bias"] = named.mlp(layer, "b_out") + inner @ named.mlp(layer, "W_out")
        block |= dict.fromkeys(("mlp.up_proj.bias", "mlp.gate_proj.bias"), torch.zeros_like(inner))
        block["input_layernorm.weight"] = named(f"blocks.{layer}.ln1.w", "d_model")
        block["post_attention_layernorm.weight"] = named(f"blocks.{layer}.ln2.w", "d_model")
        found |= {f"model.layers.{layer}.{name}": tensor for name, tensor in block.items()}
    config: dict[str, Any] = {
        "intermediate_size": said["d_mlp"],
        "hidden_act": said["act_fn"],
        "rms_norm_eps": said["eps"],
        "num_key_value_heads": said["n_key_value_heads"],
        "head_dim": said["d_head"],
        "rope_parameters": _rope(said),
    }
    # Leave out biases that are all zero, as in the original checkpoints of such models.
    for part, field in (("self_attn", "attention_bias"), ("mlp", "mlp_bias")):
        biases = [name for name in found if f".{part}." in name and name.endswith(".bias")]
        config[field] = any(bool(found[name].any()) for name in biases)
        if not config[field]:
            found = {name: tensor for name, tensor in found.items() if name not in biases}
    return config, found


def _rope(said: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": float(said["rotary_base"]), **more}


FAMILIES = {"gpt2": _gpt2, "gpt_neox": _neox, "llama": _llama}
"""For each `transformers` family, a function that makes configuration fields and named weights."""
