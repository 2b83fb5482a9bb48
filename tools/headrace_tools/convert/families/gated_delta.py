"""The gated delta rule mixer, and the layer plan of the hybrid families that use it."""

from __future__ import annotations

from dataclasses import dataclass

from . import ConfigReader, Piece, TensorSpec, whole
from .common import matrix, vector

QK_NORM_EPS = 1e-6


@dataclass(frozen=True)
class Delta:
    """A gated delta part. fused: `in_proj_qkvz` and `in_proj_ba` interleaved by key head."""

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    eps: float
    gate: str = "silu"
    fused: bool = False

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def part(self) -> dict[str, object]:
        return {
            "kind": "delta",
            "key_heads": self.key_heads,
            "value_heads": self.value_heads,
            "key_dim": self.key_dim,
            "value_dim": self.value_dim,
            "conv_taps": self.taps,
            "decay": "head",
            "gate": self.gate,
            "qk_norm_eps": QK_NORM_EPS,
            "norm_eps": self.eps,
        }

    def _projections(self, p: str, n: str) -> list[TensorSpec]:
        h, c, hv = self.hidden, self.channels, self.value_heads
        vd = hv * self.value_dim
        if not self.fused:
            return [
                matrix(f"{n}qkv", f"{p}in_proj_qkv.weight", c, h),
                matrix(f"{n}z", f"{p}in_proj_z.weight", vd, h),
                matrix(f"{n}a", f"{p}in_proj_a.weight", hv, h, "exact"),
                matrix(f"{n}b", f"{p}in_proj_b.weight", hv, h, "exact"),
            ]
        # Each key head's rows are [q | k | v of its value heads | z of its value heads].
        per_key = hv // self.key_heads
        wide = per_key * self.value_dim
        stride = 2 * self.key_dim + 2 * wide

        def rows(source: str, total: int, first: int, count: int, step: int) -> Piece:
            return Piece(f"{p}{source}.weight", (total, h), h, first, count, self.key_heads, step)

        def qkvz(first: int, count: int) -> Piece:
            return rows("in_proj_qkvz", c + vd, first, count, stride)

        qkv = (
            qkvz(0, self.key_dim),
            qkvz(self.key_dim, self.key_dim),
            qkvz(2 * self.key_dim, wide),
        )
        z = (qkvz(2 * self.key_dim + wide, wide),)
        b = (rows("in_proj_ba", 2 * hv, 0, per_key, 2 * per_key),)
        a = (rows("in_proj_ba", 2 * hv, per_key, per_key, 2 * per_key),)
        return [
            TensorSpec(f"{n}qkv", c, h, "matrix", qkv),
            TensorSpec(f"{n}z", vd, h, "matrix", z),
            TensorSpec(f"{n}a", hv, h, "exact", a),
            TensorSpec(f"{n}b", hv, h, "exact", b),
        ]

    def tensors(self, p: str, n: str) -> list[TensorSpec]:
        """p: source prefix ending in `linear_attn.`; n: `layers.I.`."""
        n += "delta."
        c, hv = self.channels, self.value_heads
        conv = whole(f"{p}conv1d.weight", (c, 1, self.taps))
        return self._projections(p, n) + [
            TensorSpec(f"{n}conv", self.taps, c, "f32", conv, "transpose"),
            vector(f"{n}a_log", f"{p}A_log", hv),
            vector(f"{n}dt_bias", f"{p}dt_bias", hv),
            vector(f"{n}norm", f"{p}norm.weight", self.value_dim),
            matrix(f"{n}out", f"{p}out_proj.weight", self.hidden, hv * self.value_dim),
        ]


def read_delta(
    text: ConfigReader, hidden: int, eps: float, *, gate: str = "silu", fused: bool = False
) -> Delta:
    key_heads = text.integer("linear_num_key_heads", 1, 1 << 16)
    value_heads = text.integer("linear_num_value_heads", 1, 1 << 16)
    if value_heads % key_heads:
        text.fault(
            f"linear_num_value_heads {value_heads} is not a multiple of "
            f"linear_num_key_heads {key_heads}"
        )
    return Delta(
        hidden,
        key_heads,
        value_heads,
        text.integer("linear_key_head_dim", 1, 1 << 16),
        text.integer("linear_value_head_dim", 1, 1 << 16),
        text.integer("linear_conv_kernel_dim", 1, 8),
        eps,
        gate,
        fused,
    )


def hybrid_layers(
    text: ConfigReader, layers: int, full: tuple[str, ...] = ("full_attention",)
) -> list[bool]:
    """Which layers are attention (the others are the delta rule); empty after a fault."""
    interval = text.integer("full_attention_interval", 1, 1 << 16, 4)
    listed = text.raw("layer_types")
    if listed is None:
        return [(i + 1) % interval == 0 for i in range(layers)]
    if not isinstance(listed, list) or len(listed) != layers:
        count = len(listed) if isinstance(listed, list) else "no"
        text.fault(f"layer_types has {count} entries, num_hidden_layers is {layers}")
        return []
    for index, kind in enumerate(listed):
        if kind != "linear_attention" and kind not in full:
            text.fault(
                f"layer_types[{index}] is {kind!r}, must be linear_attention or "
                f"{' or '.join(full)}"
            )
            return []
    return [kind in full for kind in listed]
