"""An independent forward pass of the DeepSeek and Kimi families in NumPy float64.

Latent attention in its expanded form, the per-channel delta rule token by token, grouped
routers, attention residuals, latent experts. Reads a Hugging Face checkpoint directly and shares
nothing with the converter.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from oracle.reference_model import Trace, sigmoid, silu

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def load_tensors(directory: Path) -> dict[str, np.ndarray]:
    """BF16, F16, F32 and packed MXFP4 tensors as float64, without `language_model.`."""
    raw: dict[str, np.ndarray] = {}
    for path in sorted(directory.glob("*.safetensors")):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        for name, spec in json.loads(data[8 : 8 + length]).items():
            if name == "__metadata__":
                continue
            begin, end = (8 + length + offset for offset in spec["data_offsets"])
            part = data[begin:end]
            if spec["dtype"] == "BF16":
                values = (np.frombuffer(part, "<u2").astype(np.uint32) << 16).view(np.float32)
            else:
                kinds = {"F16": "<f2", "F32": "<f4", "U8": "u1"}
                values = np.frombuffer(part, kinds[spec["dtype"]])
            raw[name.removeprefix("language_model.")] = values.reshape(spec["shape"])
    out = {}
    for name, values in raw.items():
        if name.endswith(".weight_packed"):
            scales = raw[name.removesuffix("packed") + "scale"].astype(np.int32)
            pairs = np.stack([values & 15, values >> 4], axis=-1)
            codes = pairs.reshape(values.shape[0], -1)
            numbers = np.where(codes & 8, -_E2M1[codes & 7], _E2M1[codes & 7])
            factor = np.repeat(2.0 ** (scales - 127), 32, axis=1)[:, : numbers.shape[1]]
            out[name.removesuffix("_packed")] = numbers * factor
        elif not name.endswith(".weight_scale"):
            out[name] = values.astype(np.float64)
    return out


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


class LatentModel:
    """One model; every layer is latent attention unless `linear_attn_config` says otherwise."""

    def __init__(self, directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        self.c = c = config.get("text_config", config)
        self.w = load_tensors(directory)
        self.kimi = "linear_attn_config" in c
        self.eps = c["rms_norm_eps"]
        self.heads, self.rank = c["num_attention_heads"], c["kv_lora_rank"]
        self.dn, self.dr, self.dv = (
            c[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        self.scale = (self.dn + self.dr) ** -0.5
        self.frequencies, self.rope_scale = self._rope()

    def _rope(self) -> tuple[np.ndarray | None, float]:
        """(frequencies, factor of cosine and sine); sets the factor of the scores."""
        c, dr = self.c, self.dr
        if self.kimi:
            return None, 1.0
        base = float(c.get("rope_theta") or c["rope_parameters"]["rope_theta"])
        plain = base ** (-np.arange(0, dr, 2) / dr)
        y = c.get("rope_scaling") or c.get("rope_parameters") or {}
        if (y.get("type") or y.get("rope_type")) != "yarn":
            return plain, 1.0
        factor, original = y["factor"], y["original_max_position_embeddings"]

        def term(m: float) -> float:
            return 0.1 * m * math.log(factor) + 1

        def corrected(turns: float) -> float:
            return dr * math.log(original / (2 * math.pi * turns)) / (2 * math.log(base))

        low = max(math.floor(corrected(y.get("beta_fast", 32))), 0)
        high = min(math.ceil(corrected(y.get("beta_slow", 1))), dr - 1)
        ramp = np.clip((np.arange(dr // 2) - low) / (high - low or 0.001), 0, 1)
        m, all_dim = y.get("mscale"), y.get("mscale_all_dim")
        if all_dim:
            self.scale *= term(all_dim) ** 2
        attention = term(m) / term(all_dim) if m and all_dim else term(1)
        return ramp * plain / factor + (1 - ramp) * plain, attention

    def rotate(self, x: np.ndarray) -> np.ndarray:
        """x [T, heads, rope_dim] at positions 0..T."""
        if self.frequencies is None:
            return x
        angle = np.arange(len(x))[:, None] * self.frequencies
        cos, sin = (f(angle)[:, None] * self.rope_scale for f in (np.cos, np.sin))
        if self.c.get("rope_interleave", True):
            first, second = x[..., ::2], x[..., 1::2]
        else:
            first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def latent(self, p: str, x: np.ndarray) -> np.ndarray:
        w, steps, heads = self.w, len(x), self.heads
        if self.c.get("q_lora_rank"):
            q = rms(x @ w[f"{p}q_a_proj.weight"].T, w[f"{p}q_a_layernorm.weight"], 1e-6)
            q = q @ w[f"{p}q_b_proj.weight"].T
        else:
            q = x @ w[f"{p}q_proj.weight"].T
        q = q.reshape(steps, heads, self.dn + self.dr)
        kv = x @ w[f"{p}kv_a_proj_with_mqa.weight"].T
        c = rms(kv[:, : self.rank], w[f"{p}kv_a_layernorm.weight"], 1e-6)
        wide = (c @ w[f"{p}kv_b_proj.weight"].T).reshape(steps, heads, self.dn + self.dv)
        q_pe, k_pe = self.rotate(q[..., self.dn :]), self.rotate(kv[:, None, self.rank :])
        score = np.einsum("thd,shd->hts", q[..., : self.dn], wide[..., : self.dn])
        score = (score + np.einsum("thd,sd->hts", q_pe, k_pe[:, 0])) * self.scale
        score = np.where(np.tril(np.ones((steps, steps), bool)), score, -np.inf)
        prob = np.exp(score - score.max(-1, keepdims=True))
        prob /= prob.sum(-1, keepdims=True)
        out = np.einsum("hts,shd->thd", prob, wide[..., self.dn :]).reshape(steps, -1)
        if self.c.get("mla_use_output_gate"):
            out = out * sigmoid(x @ w[f"{p}g_proj.weight"].T)
        return out @ w[f"{p}o_proj.weight"].T

    def delta(self, p: str, x: np.ndarray) -> np.ndarray:
        w, steps, linear = self.w, len(x), self.c["linear_attn_config"]
        heads, dim = linear["num_heads"], linear["head_dim"]

        def mixed(part: str) -> np.ndarray:
            raw = x @ w[f"{p}{part}_proj.weight"].T
            taps = w[f"{p}{part}_conv1d.weight"][:, 0]
            count = taps.shape[1]
            padded = np.concatenate([np.zeros((count - 1, raw.shape[1])), raw])
            total = sum(padded[j : j + steps] * taps[:, j] for j in range(count))
            return silu(total).reshape(steps, heads, dim)

        def unit(v: np.ndarray) -> np.ndarray:
            return v / np.sqrt((v * v).sum(-1, keepdims=True) + 1e-6)

        q, k, v = unit(mixed("q")) / math.sqrt(dim), unit(mixed("k")), mixed("v")
        f = x @ w[f"{p}f_a_proj.weight"].T @ w[f"{p}f_b_proj.weight"].T + w[f"{p}dt_bias"]
        f = f.reshape(steps, heads, dim)
        strength = np.exp(w[f"{p}A_log"].reshape(-1)[:heads])[:, None]
        bound = linear.get("gate_lower_bound")
        if bound is None:
            log_decay = -strength * np.logaddexp(0, f)
        else:
            log_decay = bound * sigmoid(strength * f)
        beta = sigmoid(x @ w[f"{p}b_proj.weight"].T)
        state, out = np.zeros((heads, dim, dim)), np.empty((steps, heads, dim))
        for t in range(steps):
            state *= np.exp(log_decay[t])[:, :, None]
            change = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], state))
            state += k[t][:, :, None] * change[:, None]
            out[t] = np.einsum("hk,hkv->hv", q[t], state)
        if linear.get("use_full_rank_gate"):
            gate = x @ w[f"{p}g_proj.weight"].T
        else:
            gate = x @ w[f"{p}g_a_proj.weight"].T @ w[f"{p}g_b_proj.weight"].T
        out = rms(out, w[f"{p}o_norm.weight"], self.eps) * sigmoid(gate.reshape(out.shape))
        return out.reshape(steps, -1) @ w[f"{p}o_proj.weight"].T

    def activate(self, g: np.ndarray, u: np.ndarray) -> np.ndarray:
        if self.c["hidden_act"] != "situ":
            return silu(g) * u
        beta, linear = self.c["activation_situ_beta"], self.c["activation_situ_linear_beta"]
        u = u if linear is None else linear * np.tanh(u / linear)
        return beta * np.tanh(g / beta) * sigmoid(g) * u

    def glu(self, p: str, x: np.ndarray, parts: str = "gate_proj up_proj down_proj") -> np.ndarray:
        gate, up, down = (self.w[f"{p}{part}.weight"] for part in parts.split())
        return self.activate(x @ gate.T, x @ up.T) @ down.T

    def route(self, p: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ids [T, k] ascending, weights)."""
        c = self.c
        logits = x @ self.w[f"{p}gate.weight"].T
        if self.kimi:
            top_k, renormalize = c["num_experts_per_token"], c["moe_renormalize"]
            groups = c["num_expert_group"] if c["use_grouped_topk"] else 1
        else:
            top_k, renormalize = c["num_experts_per_tok"], c["norm_topk_prob"]
            groups = 1 if c["topk_method"] == "greedy" else c["n_group"]
        if c.get("scoring_func") == "softmax":
            score = np.exp(logits - logits.max(-1, keepdims=True))
            score /= score.sum(-1, keepdims=True)
            choice, best = score, 1
        else:
            score = sigmoid(logits)
            choice, best = score + self.w[f"{p}gate.e_score_correction_bias"], 2
        if groups > 1:
            grouped = choice.reshape(len(x), groups, -1)
            value = np.sort(grouped, -1)[..., -best:].sum(-1)
            kept = np.argsort(-value, -1, kind="stable")[:, : c["topk_group"]]
            allowed = np.zeros(value.shape, bool)
            np.put_along_axis(allowed, kept, True, -1)
            choice = np.where(allowed[..., None], grouped, -np.inf).reshape(choice.shape)
        ids = np.sort(np.argsort(-choice, -1, kind="stable")[:, :top_k], -1)
        weights = np.take_along_axis(score, ids, -1)
        if renormalize:
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        return ids, weights * c["routed_scaling_factor"]

    def moe(self, p: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        c = self.c
        ids, weights = self.route(p, x)
        z = x
        if c.get("routed_expert_hidden_size"):
            z = x @ self.w[f"{p}routed_expert_down_proj.weight"].T
        out = np.zeros_like(z)
        parts = "w1 w3 w2" if self.kimi else "gate_proj up_proj down_proj"
        for expert in np.unique(ids):
            rows, ranks = np.nonzero(ids == expert)
            y = self.glu(f"{p}experts.{expert}.", z[rows], parts)
            out[rows] += weights[rows, ranks][:, None] * y
        if c.get("routed_expert_hidden_size"):
            if c["latent_moe_use_norm"]:
                out = rms(out, self.w[f"{p}routed_expert_norm.weight"], self.eps)
            out = out @ self.w[f"{p}routed_expert_up_proj.weight"].T
        if f"{p}shared_experts.gate_proj.weight" in self.w:
            out = out + self.glu(f"{p}shared_experts.", x)
        return out, ids, weights

    def mixed(self, sources: list[np.ndarray], name: str) -> np.ndarray:
        """Attention residual of a site over its sources, each [T, H]."""
        vector = self.w[f"{name}_norm.weight"] * self.w[f"{name}_proj.weight"][0]
        score = np.stack([rms(s, vector, self.eps).sum(-1) for s in sources])
        prob = np.exp(score - score.max(0))
        return np.einsum("st,sth->th", prob / prob.sum(0), np.stack(sources))

    def forward(self, ids: np.ndarray) -> Trace:
        c, w = self.c, self.w
        x = w["model.embed_tokens.weight"][np.asarray(ids)]
        block, blocks = c.get("attn_res_block_size"), []
        outputs, router_ids, router_weights = [], [], []
        for layer in range(c["num_hidden_layers"]):
            p = f"model.layers.{layer}."
            h = self.mixed([*blocks, x], f"{p}self_attention_res") if blocks else x
            if block and layer % block == 0:
                blocks.append(x)
                x = np.zeros_like(x)
            linear = self.kimi and layer + 1 in c["linear_attn_config"]["kda_layers"]
            mixer = self.delta if linear else self.latent
            x = x + mixer(f"{p}self_attn.", rms(h, w[f"{p}input_layernorm.weight"], self.eps))
            h = self.mixed([*blocks, x], f"{p}mlp_res") if blocks else x
            h = rms(h, w[f"{p}post_attention_layernorm.weight"], self.eps)
            moe = f"{p}block_sparse_moe." if self.kimi else f"{p}mlp."
            if f"{moe}gate.weight" in w:
                y, chosen, weights = self.moe(moe, h)
                router_ids.append(chosen)
                router_weights.append(weights)
            else:
                dense = moe if f"{moe}gate_proj.weight" in w else f"{p}mlp."
                y = self.glu(dense, h)
            x = x + y
            outputs.append(x)
        if blocks:
            x = self.mixed([*blocks, x], "model.output_attn_res")
        head = w["model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"]
        logits = rms(x, w["model.norm.weight"], self.eps) @ head.T
        routes = np.array(router_ids), np.array(router_weights)
        return Trace(logits, np.stack(outputs), *routes)
