"""An independent forward pass of the gated-delta / gated-attention MoE family in NumPy.

Reads a Hugging Face checkpoint directly (own safetensors reader, nothing shared with the
converter) and works token by token in float64 or float32. For tests and for finding the
first layer where another implementation departs: `forward` returns every layer's output.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np


def load_tensors(directory: Path) -> dict[str, np.ndarray]:
    """Every BF16, F16 or F32 tensor of a checkpoint as float32, without `model.` prefixes."""
    out: dict[str, np.ndarray] = {}
    for path in sorted(directory.glob("*.safetensors")):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        for name, spec in json.loads(raw[8 : 8 + length]).items():
            if name == "__metadata__":
                continue
            begin, end = (8 + length + offset for offset in spec["data_offsets"])
            data = raw[begin:end]
            if spec["dtype"] == "BF16":
                values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
            elif spec["dtype"] in ("F16", "F32"):
                values = np.frombuffer(data, "<f2" if spec["dtype"] == "F16" else "<f4").astype(
                    np.float32
                )
            else:
                continue
            key = name.removeprefix("model.").removeprefix("language_model.")
            out[key] = values.reshape(spec["shape"])
    return out


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


@dataclass
class Trace:
    """logits [T, V]; layer_out [L, T, H]; router_ids [L, T, k] ascending, router_weights alike."""

    logits: np.ndarray
    layer_out: np.ndarray
    router_ids: np.ndarray
    router_weights: np.ndarray


class ReferenceModel:
    """The whole model in one dtype; `weights` as `load_tensors` gives them."""

    gate = staticmethod(silu)
    """What the delta rule's output gate goes through."""

    def __init__(self, directory: Path, dtype: type = np.float64) -> None:
        config = json.loads((directory / "config.json").read_text())
        tied = config.get("tie_word_embeddings", False)
        self.config = config = config.get("text_config", config)
        self.dtype = dtype
        self.weights = {k: v.astype(dtype) for k, v in load_tensors(directory).items()}
        if tied or config.get("tie_word_embeddings"):
            self.weights["lm_head.weight"] = self.weights["embed_tokens.weight"]
        rope = config["rope_parameters"]
        self.eps = dtype(config["rms_norm_eps"])
        self.rotary = int(config["head_dim"] * rope.get("partial_rotary_factor", 0.25))
        index = np.arange(0, self.rotary, 2, dtype=np.float64) / self.rotary
        self.frequencies = np.float64(rope["rope_theta"]) ** -index

    def w(self, layer: int, name: str) -> np.ndarray:
        return self.weights[f"layers.{layer}.{name}"]

    def norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """RMS norm over the last axis; the stored weight is the factor minus 1."""
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * (1 + weight)

    def delta(self, layer: int, x: np.ndarray) -> np.ndarray:
        """Gated delta rule over x [T, H] from a zero state."""
        c = self.config
        kh, vh = c["linear_num_key_heads"], c["linear_num_value_heads"]
        kd, vd = c["linear_key_head_dim"], c["linear_value_head_dim"]
        steps = x.shape[0]
        raw = x @ self.w(layer, "linear_attn.in_proj_qkv.weight").T
        conv = self.w(layer, "linear_attn.conv1d.weight")[:, 0, :]
        taps = conv.shape[1]
        padded = np.concatenate([np.zeros((taps - 1, raw.shape[1]), self.dtype), raw])
        mixed = silu(sum(padded[j : j + steps] * conv[:, j] for j in range(taps)))
        q = mixed[:, : kh * kd].reshape(steps, kh, kd)
        k = mixed[:, kh * kd : 2 * kh * kd].reshape(steps, kh, kd)
        v = mixed[:, 2 * kh * kd :].reshape(steps, vh, vd)
        q = q / np.sqrt((q * q).sum(-1, keepdims=True) + self.dtype(1e-6)) / self.dtype(np.sqrt(kd))
        k = k / np.sqrt((k * k).sum(-1, keepdims=True) + self.dtype(1e-6))
        q, k = (np.repeat(t, vh // kh, axis=1) for t in (q, k))
        beta = sigmoid(x @ self.w(layer, "linear_attn.in_proj_b.weight").T)
        a = x @ self.w(layer, "linear_attn.in_proj_a.weight").T + self.w(
            layer, "linear_attn.dt_bias"
        )
        decay = np.exp(-np.exp(self.w(layer, "linear_attn.A_log")) * np.logaddexp(self.dtype(0), a))
        state = np.zeros((vh, kd, vd), self.dtype)
        out = np.empty((steps, vh, vd), self.dtype)
        for t in range(steps):
            state *= decay[t][:, None, None]
            predicted = np.einsum("hkv,hk->hv", state, k[t])
            state += k[t][:, :, None] * (beta[t][:, None] * (v[t] - predicted))[:, None, :]
            out[t] = np.einsum("hkv,hk->hv", state, q[t])
        z = (x @ self.w(layer, "linear_attn.in_proj_z.weight").T).reshape(steps, vh, vd)
        out = out / np.sqrt((out * out).mean(-1, keepdims=True) + self.eps)
        out = out * self.w(layer, "linear_attn.norm.weight") * self.gate(z)
        return out.reshape(steps, -1) @ self.w(layer, "linear_attn.out_proj.weight").T

    def rotate(self, x: np.ndarray) -> np.ndarray:
        """Half-split rotation of the first `rotary` dimensions of x [T, heads, head_dim]."""
        half = self.rotary // 2
        angle = np.arange(x.shape[0])[:, None] * self.frequencies
        cos, sin = (f(angle).astype(self.dtype)[:, None, :] for f in (np.cos, np.sin))
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate(
            [first * cos - second * sin, second * cos + first * sin, rest], axis=-1
        )

    def attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        c = self.config
        heads, kv_heads, dim, steps = (
            c["num_attention_heads"],
            c["num_key_value_heads"],
            c["head_dim"],
            len(x),
        )
        both = (x @ self.w(layer, "self_attn.q_proj.weight").T).reshape(steps, heads, 2 * dim)
        q, gate = both[..., :dim], both[..., dim:]
        k = (x @ self.w(layer, "self_attn.k_proj.weight").T).reshape(steps, kv_heads, dim)
        v = (x @ self.w(layer, "self_attn.v_proj.weight").T).reshape(steps, kv_heads, dim)
        q = self.rotate(self.norm(q, self.w(layer, "self_attn.q_norm.weight")))
        k = self.rotate(self.norm(k, self.w(layer, "self_attn.k_norm.weight")))
        k, v = (np.repeat(t, heads // kv_heads, axis=1) for t in (k, v))
        score = np.einsum("thd,shd->hts", q, k) / self.dtype(np.sqrt(dim))
        score = np.where(np.tril(np.ones((steps, steps), bool)), score, self.dtype(-np.inf))
        p = np.exp(score - score.max(-1, keepdims=True))
        mixed = np.einsum("hts,shd->thd", p / p.sum(-1, keepdims=True), v) * sigmoid(gate)
        return mixed.reshape(steps, -1) @ self.w(layer, "self_attn.o_proj.weight").T

    def expert(self, layer: int, expert: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(gate [I, H], up [I, H], down [H, I]) from the fused or the per-expert layout."""
        base = f"layers.{layer}.mlp.experts."
        if base + "gate_up_proj" in self.weights:
            both = self.weights[base + "gate_up_proj"][expert]
            inner = both.shape[0] // 2
            return both[:inner], both[inner:], self.weights[base + "down_proj"][expert]
        parts = (self.weights[f"{base}{expert}.{n}_proj.weight"] for n in ("gate", "up", "down"))
        return tuple(parts)  # type: ignore[return-value]

    def moe(self, layer: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(output [T, H], expert ids [T, k] ascending, their weights)."""
        top_k = self.config["num_experts_per_tok"]
        logits = x @ self.w(layer, "mlp.gate.weight").T
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        ids = np.sort(np.argsort(-p, axis=-1, kind="stable")[:, :top_k], axis=-1)
        weights = np.take_along_axis(p, ids, axis=-1)
        if self.config.get("norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdims=True)
        out = np.zeros_like(x)
        for expert in np.unique(ids):
            rows, ranks = np.nonzero(ids == expert)
            gate, up, down = self.expert(layer, int(expert))
            y = (silu(x[rows] @ gate.T) * (x[rows] @ up.T)) @ down.T
            out[rows] += weights[rows, ranks][:, None] * y
        shared = {
            n: self.w(layer, f"mlp.shared_expert.{n}_proj.weight") for n in ("gate", "up", "down")
        }
        y = (silu(x @ shared["gate"].T) * (x @ shared["up"].T)) @ shared["down"].T
        out += sigmoid(x @ self.w(layer, "mlp.shared_expert_gate.weight").T) * y
        return out, ids, weights

    def layer_kinds(self) -> list[str]:
        count, interval = (
            self.config["num_hidden_layers"],
            self.config.get("full_attention_interval", 4),
        )
        default = [
            "linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)
        ]
        return self.config.get("layer_types") or default

    def forward(self, ids: np.ndarray) -> Trace:
        """One sequence from an empty state."""
        h = self.weights["embed_tokens.weight"][np.asarray(ids)]
        outputs, router_ids, router_weights = [], [], []
        for layer, kind in enumerate(self.layer_kinds()):
            x = self.norm(h, self.w(layer, "input_layernorm.weight"))
            h = h + (self.delta if kind == "linear_attention" else self.attention)(layer, x)
            x = self.norm(h, self.w(layer, "post_attention_layernorm.weight"))
            y, chosen, weights = self.moe(layer, x)
            h = h + y
            outputs.append(h)
            router_ids.append(chosen)
            router_weights.append(weights)
        logits = self.norm(h, self.weights["norm.weight"]) @ self.weights["lm_head.weight"].T
        return Trace(logits, np.stack(outputs), np.stack(router_ids), np.stack(router_weights))
