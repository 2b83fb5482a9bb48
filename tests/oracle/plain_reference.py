"""A NumPy forward pass, float64, of the families with plain attention and routed experts.

Qwen3-MoE, OLMoE, Mixtral, Granite-MoE, GLM-4.x-MoE and MiniMax-M2, straight from a Hugging Face
checkpoint; nothing is shared with the converter. Equations: the families' published configs and
reference classes; checked against the oracle fixtures where there are some.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from oracle.reference_model import Trace, load_tensors, sigmoid, silu


def frequencies(config: dict, rotary: int) -> tuple[np.ndarray, float]:
    """(angles per position [rotary / 2], factor on cosine and sine)."""
    rope = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {})}
    rope |= config.get("rope_parameters") or {}
    theta = float(rope["rope_theta"])
    plain = theta ** -(np.arange(0, rotary, 2) / rotary)
    if rope.get("rope_type", "default") == "default":
        return plain, 1.0
    factor, original = rope["factor"], rope["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return rotary * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(rope.get("beta_fast", 32)), dimension(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary - 1)
    ramp = np.clip((np.arange(rotary // 2) - low) / ((high - low) or 0.001), 0, 1)
    scale = rope.get("attention_factor") or 0.1 * math.log(factor) + 1
    return plain * (1 - ramp) + plain / factor * ramp, scale


def rotate(x: np.ndarray, angles: np.ndarray, scale: float) -> np.ndarray:
    """Half-split rotation of x [T, heads, dim], position = row."""
    half = len(angles)
    turn = np.arange(len(x))[:, None] * angles
    cos, sin = scale * np.cos(turn)[:, None], scale * np.sin(turn)[:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, seen: np.ndarray) -> np.ndarray:
    """q [T, heads, d], k and v [S, kv_heads, d], seen bool [T, S] -> [T, heads * d]."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    score = np.einsum("thd,shd->hts", q, k) * scale
    score = np.where(seen, score, -np.inf)
    p = np.exp(score - score.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", p / p.sum(-1, keepdims=True), v).reshape(len(q), -1)


class PlainModel:
    """One checkpoint; `forward` takes one sequence from an empty state."""

    def __init__(self, directory: Path) -> None:
        self.c = json.loads((directory / "config.json").read_text())
        self.weights = {k: v.astype(np.float64) for k, v in load_tensors(directory).items()}
        self.kind = self.c["model_type"]
        self.hidden, self.heads = self.c["hidden_size"], self.c["num_attention_heads"]
        self.kv_heads = self.c.get("num_key_value_heads", self.heads)
        self.dim = self.c.get("head_dim") or self.hidden // self.heads
        share = self.c.get("partial_rotary_factor", 0.5 if self.kind == "glm4_moe" else 1.0)
        self.angles, self.rope_scale = frequencies(
            self.c, self.c.get("rotary_dim", int(self.dim * share))
        )

    def w(self, layer: int, name: str) -> np.ndarray:
        return self.weights[f"layers.{layer}.{name}"]

    def norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c["rms_norm_eps"]) * weight

    def project(self, layer: int, name: str, x: np.ndarray) -> np.ndarray:
        y = x @ self.w(layer, f"self_attn.{name}.weight").T
        return y + self.weights.get(f"layers.{layer}.self_attn.{name}.bias", 0)

    def attention(self, layer: int, x: np.ndarray) -> np.ndarray:
        steps = len(x)
        q, k, v = (self.project(layer, f"{n}_proj", x) for n in "qkv")
        norms = [self.weights.get(f"layers.{layer}.self_attn.{n}_norm.weight") for n in "qk"]
        whole = norms[0] is not None and self.kind in ("olmoe", "minimax_m2")
        if whole:
            q, k = self.norm(q, norms[0]), self.norm(k, norms[1])
        q = q.reshape(steps, self.heads, self.dim)
        k, v = (t.reshape(steps, self.kv_heads, self.dim) for t in (k, v))
        if norms[0] is not None and not whole:
            q, k = self.norm(q, norms[0]), self.norm(k, norms[1])
        q, k = (rotate(t, self.angles, self.rope_scale) for t in (q, k))
        ago = np.arange(steps)[:, None] - np.arange(steps)
        window = self.c.get("sliding_window") if self.kind == "mixtral" else None
        seen = (ago >= 0) & (ago < (window or steps))
        mixed = attend(q, k, v, self.c.get("attention_multiplier", self.dim**-0.5), seen)
        return self.project(layer, "o_proj", mixed)

    def expert(self, layer: int, expert: int) -> tuple[np.ndarray, ...]:
        if self.kind == "granitemoe":
            both = self.w(layer, "block_sparse_moe.input_linear.weight")[expert]
            down = self.w(layer, "block_sparse_moe.output_linear.weight")[expert]
            return both[: len(both) // 2], both[len(both) // 2 :], down
        if self.kind in ("mixtral", "minimax_m2"):
            names = [f"block_sparse_moe.experts.{expert}.{n}.weight" for n in ("w1", "w3", "w2")]
        else:
            names = [f"mlp.experts.{expert}.{n}_proj.weight" for n in ("gate", "up", "down")]
        return tuple(self.w(layer, name) for name in names)

    def route(self, layer: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ids [T, k] ascending, weights)."""
        c, k = self.c, self.c["num_experts_per_tok"]
        block = "mlp." if f"layers.{layer}.mlp.gate.weight" in self.weights else "block_sparse_moe."
        name = "router.layer.weight" if self.kind == "granitemoe" else "gate.weight"
        logits = x @ self.w(layer, block + name).T
        key = logits
        if self.kind in ("glm4_moe", "minimax_m2"):
            scores = sigmoid(logits)
            bias = "mlp.gate." if self.kind == "glm4_moe" else "block_sparse_moe."
            key = scores + self.w(layer, f"{bias}e_score_correction_bias")
            groups, kept = c.get("n_group", 1), c.get("topk_group", 1)
            if groups > 1:
                split = key.reshape(len(x), groups, -1)
                best = np.sort(split, -1)[..., -2:].sum(-1)
                order = np.argsort(-best, -1, kind="stable")[:, kept:]
                for row, dropped in zip(split, order, strict=True):
                    row[dropped] = -np.inf
                key = split.reshape(len(x), -1)
        else:
            scores = np.exp(logits - logits.max(-1, keepdims=True))
            scores /= scores.sum(-1, keepdims=True)
        ids = np.sort(np.argsort(-key, -1, kind="stable")[:, :k], -1)
        weights = np.take_along_axis(scores, ids, -1)
        default = self.kind in ("mixtral", "granitemoe", "glm4_moe", "minimax_m2")
        if c.get("norm_topk_prob", default):
            weights = weights / weights.sum(-1, keepdims=True)
        return ids, weights * c.get("routed_scaling_factor", 1)

    def moe(self, layer: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids, weights = self.route(layer, x)
        out = np.zeros_like(x)
        for row, (chosen, factor) in enumerate(zip(ids, weights, strict=True)):
            for expert, f in zip(chosen, factor, strict=True):
                out[row] += f * glu(x[row], *self.expert(layer, int(expert)))
        if f"layers.{layer}.mlp.shared_experts.up_proj.weight" in self.weights:
            out += self.dense(layer, x, "mlp.shared_experts.")
        return out, ids, weights

    def dense(self, layer: int, x: np.ndarray, base: str = "mlp.") -> np.ndarray:
        parts = (self.w(layer, f"{base}{n}_proj.weight") for n in ("gate", "up", "down"))
        return glu(x, *parts)

    def forward(self, ids: np.ndarray) -> Trace:
        c = self.c
        h = self.weights["embed_tokens.weight"][np.asarray(ids)] * c.get("embedding_multiplier", 1)
        scale = c.get("residual_multiplier", 1)
        outputs, router_ids, router_weights = [], [], []
        for layer in range(c["num_hidden_layers"]):
            h = h + scale * self.attention(layer, self.norm(h, self.w(layer, "input_layernorm.weight")))
            x = self.norm(h, self.w(layer, "post_attention_layernorm.weight"))
            if f"layers.{layer}.mlp.up_proj.weight" in self.weights:
                y = self.dense(layer, x)
            else:
                y, chosen, weights = self.moe(layer, x)
                router_ids.append(chosen)
                router_weights.append(weights)
            h = h + scale * y
            outputs.append(h)
        tied = c.get("tie_word_embeddings", False)
        head = self.weights["embed_tokens.weight" if tied else "lm_head.weight"]
        logits = self.norm(h, self.weights["norm.weight"]) @ head.T / c.get("logits_scaling", 1)
        return Trace(logits, np.stack(outputs), np.stack(router_ids), np.stack(router_weights))


def glu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T
