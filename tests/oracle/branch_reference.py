"""A NumPy forward pass, float64, of Qwen3.8-Flash-Next (`qwen4_exp`).

Residual branches with their own mixers, block-sparse attention, n-gram rows; the delta rule and
the experts are those of `reference_model`. Nothing is shared with the converter.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from oracle.plain_reference import attend
from oracle.reference_model import ReferenceModel, Trace, sigmoid, silu

INTEGERS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")


def load_integers(directory: Path) -> dict[str, np.ndarray]:
    """The I64 tensors, by name without the model's prefix."""
    out = {}
    for path in sorted(directory.glob("*.safetensors")):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        for name, spec in json.loads(raw[8 : 8 + length]).items():
            if isinstance(spec, dict) and spec.get("dtype") == "I64":
                begin, end = (8 + length + o for o in spec["data_offsets"])
                key = name.removeprefix("model.").removeprefix("language_model.")
                out[key] = np.frombuffer(raw[begin:end], "<i8")
    return out


class BranchModel(ReferenceModel):
    """One checkpoint; `forward` takes one sequence from an empty state."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.integers = load_integers(directory)
        self.count, self.hidden = self.config["hc_count"], self.config["hidden_size"]
        self.gate = sigmoid if self.config.get("output_gate_type") == "sigmoid" else silu

    def branch_norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Each branch of x [T, count * hidden] by itself."""
        split = x.reshape(len(x), self.count, self.hidden)
        return self.norm(split, weight.reshape(self.count, self.hidden))

    def mix(self, prefix: str, r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(what the part reads [T, H], the factors its output is written with [T, count])."""
        x = self.branch_norm(r, self.weights[f"{prefix}hc_norm.weight"])
        flat = x.reshape(len(r), -1)
        low = silu(flat @ self.weights[f"{prefix}input_mix_weight_down.weight"].T / self.count)
        a = sigmoid(low @ self.weights[f"{prefix}input_mix_weight_up.weight"].T).reshape(x.shape)
        inject = self.weights.get(f"{prefix}block_inject_weight.weight")
        factors = 0 if inject is None else 2 * sigmoid(flat @ inject.T / self.count)
        return (a * x).mean(1), factors

    def attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        c, steps = self.config, len(x)
        heads, kv, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        both = (x @ self.w(layer, "self_attn.q_proj.weight").T).reshape(steps, heads, 2 * dim)
        q, gate = both[..., :dim], both[..., dim:]
        k, v = (
            (x @ self.w(layer, f"self_attn.{n}_proj.weight").T).reshape(steps, kv, dim) for n in "kv"
        )
        q = self.rotate(self.norm(q, self.w(layer, "self_attn.q_norm.weight")))
        k = self.rotate(self.norm(k, self.w(layer, "self_attn.k_norm.weight")))
        mixed = attend(q, k, v, dim**-0.5, self.selected(layer, x))
        mixed *= sigmoid(gate).reshape(steps, -1)
        return mixed @ self.w(layer, "self_attn.o_proj.weight").T

    def selected(self, layer: int, x: np.ndarray) -> np.ndarray:
        """bool [T, T]: which keys each token attends."""
        c, steps = self.config, len(x)
        seen = np.tril(np.ones((steps, steps), bool))
        if c.get("indexer_n_heads") is None:
            return seen
        heads, dim, block = c["indexer_n_heads"], c["indexer_head_dim"], c["indexer_compress_ratio"]
        p = "self_attn.indexer."
        both = x @ self.w(layer, f"{p}index_qk_proj.weight").T
        q = both[:, : heads * dim].reshape(steps, heads, dim)
        q = self.rotate(self.norm(q, self.w(layer, f"{p}q_layernorm.weight")))
        blocks = steps // block
        pooled = both[: blocks * block, heads * dim :].reshape(blocks, block, dim).mean(1)
        key = self.norm(pooled, self.w(layer, f"{p}k_layernorm.weight"))
        spread = np.zeros((steps, 1, dim))
        spread[: blocks * block : block, 0] = key
        key = self.rotate(spread)[: blocks * block : block, 0]
        score = np.maximum(np.einsum("thd,bd->thb", q, key), 0).sum(1) / np.sqrt(dim)
        for t in range(steps):
            whole = (t + 1) // block
            best = np.argsort(-score[t, :whole], kind="stable")[: c["indexer_budget"] // block]
            for b in set(range(whole)) - set(best.tolist()):
                seen[t, b * block : (b + 1) * block] = False
        return seen

    def rows(self, layer: int, ids: np.ndarray) -> np.ndarray:
        """The concatenated n-gram rows [T, embed]."""
        c, p = self.config, f"layers.{layer}.ple.ple_embedding."
        order, heads = c.get("ngram_size", 3), c.get("heads_per_ngram", 8)
        eos = c["eos_token_id"] if isinstance(c["eos_token_id"], int) else c["eos_token_id"][0]
        multipliers, primes, offsets = (self.integers[p + n].tolist() for n in INTEGERS)
        shards = c.get("split_ngram_parts", 512)
        table = np.concatenate(
            [self.weights[f"{p}ngram_embedding.shard_{i}.weight"] for i in range(shards)]
        )
        out = []
        for t in range(len(ids)):
            window, cut = [int(ids[t])], False
            for back in range(1, order):
                cut = cut or t < back or int(ids[t - back]) == eos
                window.append(eos if cut else int(ids[t - back]))
            row, mixed = [], window[0] * multipliers[0]
            for n in range(1, order):
                mixed ^= window[n] * multipliers[n]
                for i in range((n - 1) * heads, n * heads):
                    row.append(table[offsets[i] + mixed % primes[i]])
            out.append(np.concatenate(row))
        return np.stack(out)

    def ngram(self, layer: int, r: np.ndarray, ids: np.ndarray) -> np.ndarray:
        p = f"layers.{layer}.ple."
        e, w = self.rows(layer, ids), self.weights
        k = self.branch_norm(e @ w[f"{p}key_proj.weight"].T, w[f"{p}norm_key.weight"])
        v = e @ w[f"{p}value_proj.weight"].T
        q = self.branch_norm(r, w[f"{p}norm_query.weight"])
        g = (k * q).sum(-1) / np.sqrt(self.hidden)
        g = np.sign(g) * np.sqrt(np.maximum(np.abs(g), 1e-6))
        gated = (sigmoid(g)[..., None] * v[:, None]).reshape(len(r), -1)
        normed = self.branch_norm(gated, w[f"{p}norm_conv.weight"]).reshape(len(r), -1)
        conv, dilation = w[f"{p}conv1d.weight"][:, 0], self.config.get("ngram_size", 3)
        taps = conv.shape[1]
        total = np.zeros_like(r)
        for j in range(taps):
            moved = np.zeros_like(normed)
            moved[j * dilation :] = normed[: max(0, len(r) - j * dilation)]
            total += moved * conv[:, taps - 1 - j]
        return r + gated + silu(total)

    def forward(self, ids: np.ndarray) -> Trace:
        ids = np.asarray(ids)
        r = np.tile(self.weights["embed_tokens.weight"][ids], (1, self.count))
        sites = [i - 1 for i in self.config.get("ple_layer_ids") or []]
        outputs, router_ids, router_weights = [], [], []
        for layer, kind in enumerate(self.layer_kinds()):
            if layer in sites:
                r = self.ngram(layer, r, ids)
            u, s = self.mix(f"layers.{layer}.attn_hyper_connection.", r)
            y = (self.delta if kind == "linear_attention" else self.attention)(layer, u)
            r = r + (s[..., None] * y[:, None]).reshape(r.shape)
            u, s = self.mix(f"layers.{layer}.mlp_hyper_connection.", r)
            y, chosen, weights = self.moe(layer, u)
            r = r + (s[..., None] * y[:, None]).reshape(r.shape)
            outputs.append(r)
            router_ids.append(chosen)
            router_weights.append(weights)
        logits = self.mix("hyper_connection_mixer.", r)[0] @ self.weights["lm_head.weight"].T
        return Trace(logits, np.stack(outputs), np.stack(router_ids), np.stack(router_weights))
