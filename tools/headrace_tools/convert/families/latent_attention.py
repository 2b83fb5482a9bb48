"""Multi-head latent attention: its sizes, rotation and tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

from . import ConfigReader, Piece, TensorSpec, whole
from .common import DIM_MAX, matrix, vector
from .rope import (
    Rope,
    merged_rope,
    read_yarn,
    rope_frequencies,
    yarn_attention_factor,
    yarn_frequencies,
)

INNER_EPS = 1e-6
"""Of the norms inside the projections, whatever rms_norm_eps is."""


@dataclass(frozen=True)
class Latent:
    """A latent attention part and where its tensors come from.

    q_rank 0: one query projection. rope None: the rope_dim dimensions are scored unrotated.
    interleaved: the checkpoint pairs dimensions 2i and 2i + 1, the container i and i + half.
    """

    hidden: int
    heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    rope: Rope | None
    scale: float
    interleaved: bool = False
    gated: bool = False

    def part(self) -> dict[str, object]:
        out: dict[str, object] = {
            "kind": "mla",
            "heads": self.heads,
            "q_lora_rank": self.q_rank,
            "kv_lora_rank": self.kv_rank,
            "nope_dim": self.nope_dim,
            "rope_dim": self.rope_dim,
            "v_dim": self.v_dim,
            "rope": "rope.0" if self.rope is not None and self.rope_dim else None,
            "scale": self.scale,
            "output_gate": self.gated,
            "inner_eps": INNER_EPS,
        }
        if self.rope is not None and self.rope.scale != 1.0:
            out["rope_scale"] = self.rope.scale
        return out

    def _rotary(self, before: int) -> tuple[int, ...]:
        """Source rows of one run [before unrotated | rope_dim], in the container's order."""
        if self.rope is None or not self.interleaved:
            return ()
        rotary = range(before, before + self.rope_dim)
        return (*range(before), *rotary[::2], *rotary[1::2])

    def tensors(self, p: str, n: str) -> list[TensorSpec]:
        """p: source prefix ending in `self_attn.`; n: `layers.I.`."""
        n += "mla."
        h, r, heads = self.hidden, self.kv_rank, self.heads
        q_dim, kv_dim = self.nope_dim + self.rope_dim, self.nope_dim + self.v_dim
        out = []
        if self.q_rank:
            out.append(matrix(f"{n}q_a", f"{p}q_a_proj.weight", self.q_rank, h))
            out.append(vector(f"{n}q_a_norm", f"{p}q_a_layernorm.weight", self.q_rank))
        name, source, cols = ("q_b", "q_b_proj", self.q_rank) if self.q_rank else ("q", "q_proj", h)
        order = self._rotary(self.nope_dim)
        shape = (heads * q_dim, cols)
        q = Piece(f"{p}{source}.weight", shape, cols, 0, q_dim, heads, q_dim, order)
        out.append(TensorSpec(f"{n}{name}", *shape, "matrix", (q,)))
        kv_a = Piece(
            f"{p}kv_a_proj_with_mqa.weight", (r + self.rope_dim, h), h, 0, r + self.rope_dim,
            order=self._rotary(r),
        )  # fmt: skip
        out.append(TensorSpec(f"{n}kv_a", r + self.rope_dim, h, "matrix", (kv_a,)))
        out.append(vector(f"{n}kv_a_norm", f"{p}kv_a_layernorm.weight", r))
        # Each head's rows of kv_b are [key without rotation | value].
        kv_b, both = f"{p}kv_b_proj.weight", (heads * kv_dim, r)
        key = Piece(kv_b, both, r, 0, self.nope_dim, heads, kv_dim)
        value = Piece(kv_b, both, r, self.nope_dim, self.v_dim, heads, kv_dim)
        out.append(
            TensorSpec(f"{n}k_b", r, self.nope_dim, "matrix", (key,), "transpose", count=heads)
        )
        out.append(TensorSpec(f"{n}v_b", self.v_dim, r, "matrix", (value,), count=heads))
        if self.gated:
            out.append(matrix(f"{n}gate", f"{p}g_proj.weight", heads * self.v_dim, h))
        out.append(
            TensorSpec(
                f"{n}o", h, heads * self.v_dim, "matrix",
                whole(f"{p}o_proj.weight", (h, heads * self.v_dim)),
            )
        )  # fmt: skip
        return out


def read_latent(
    text: ConfigReader,
    hidden: int,
    max_position: int,
    *,
    rotated: bool,
    gated: bool = False,
    theta: float | None = None,
) -> Latent:
    """The part that a config describes; `theta`: the family's default base of the rotation."""
    heads = text.integer("num_attention_heads", 1, 1 << 16)
    kv_heads = text.integer("num_key_value_heads", 1, 1 << 16, heads)
    if kv_heads != heads:
        text.fault(
            f"num_key_value_heads {kv_heads} and num_attention_heads {heads} differ: latent "
            "attention has one key and value for each head"
        )
    text.only("attention_bias", (False,), "projections with bias are another model")
    q_rank = text.integer("q_lora_rank", 0, DIM_MAX, 0)
    kv_rank = text.integer("kv_lora_rank", 1, DIM_MAX)
    nope_dim = text.integer("qk_nope_head_dim", 1, DIM_MAX)
    rope_dim = text.integer("qk_rope_head_dim", 0, DIM_MAX)
    v_dim = text.integer("v_head_dim", 1, DIM_MAX)
    stated = text.raw("qk_head_dim")
    if stated is not None and stated != nope_dim + rope_dim:
        text.fault(
            f"qk_head_dim is {stated!r}, qk_nope_head_dim + qk_rope_head_dim {nope_dim + rope_dim}"
        )
    scale = 1.0 / math.sqrt(nope_dim + rope_dim)
    rope, interleaved = None, False
    if rotated:
        if rope_dim % 2:
            text.fault(f"qk_rope_head_dim {rope_dim} must be even")
            rope_dim -= 1
        rope, factor = _read_rotation(text, rope_dim, max_position, theta)
        scale *= factor
        interleaved = text.flag("rope_interleave", True)
    return Latent(
        hidden, heads, q_rank, kv_rank, nope_dim, rope_dim, v_dim, rope, scale, interleaved, gated
    )


def _read_rotation(
    text: ConfigReader, rope_dim: int, max_position: int, default_theta: float | None
) -> tuple[Rope, float]:
    """(rotation, factor on the scores). YaRN multiplies the scores by (0.1 mscale_all_dim
    ln(factor) + 1)^2, and cosine and sine by the ratio of that term for mscale to it."""
    rope = merged_rope(text, True)
    theta = rope.real("rope_theta", 1.0, 1e30, default_theta)
    rope.only("partial_rotary_factor", (1, 1.0), "the rotated dimensions are qk_rope_head_dim")
    if "yarn" not in (rope.values.get("rope_type"), rope.values.get("type")):
        rope.refuse_unknown(frozenset())
        return Rope(rope_dim, rope_frequencies(theta, rope_dim)), 1.0
    yarn = read_yarn(rope, max_position)
    mscale = rope.real("mscale", -1e-9, 1e3, 0.0)
    mscale_all = rope.real("mscale_all_dim", -1e-9, 1e3, 0.0)
    on_scores = yarn_attention_factor(yarn.factor, mscale_all) if mscale_all > 0 else 1.0
    if mscale > 0 and mscale_all > 0:
        attention = yarn_attention_factor(yarn.factor, mscale) / on_scores
    else:
        attention = yarn_attention_factor(yarn.factor)
    attention = rope.real("attention_factor", 0.0, 1e3, attention)
    rope.refuse_unknown(frozenset())
    return Rope(rope_dim, yarn_frequencies(theta, rope_dim, yarn), attention), on_scores**2
