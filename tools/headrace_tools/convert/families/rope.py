"""Rotary frequencies and their scaling, from a config to float64 numbers.

Everything is computed with decimals of 60 digits and rounded once, so that the tensor
in the container does not depend on the machine's mathematical library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

from . import ConfigReader

_CONTEXT = Context(prec=60)
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
_HARMLESS = frozenset({"mrope_section", "mrope_interleaved"})
"""With text alone the three position axes are equal: the sections change nothing."""


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv 2309.00071): which frequencies are divided by `factor`, which are kept."""

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class Rope:
    """`frequencies` of rotary / 2 angles per position; `scale` multiplies cosine and sine."""

    rotary: int
    frequencies: tuple[float, ...]
    scale: float = 1.0


def _powers(theta: float, rotary: int) -> list[Decimal]:
    """theta^(-2i/rotary) for i in 0..rotary/2."""
    c = _CONTEXT
    log_theta = c.ln(Decimal(theta))
    return [
        c.exp(c.divide(c.multiply(Decimal(-2 * i), log_theta), Decimal(rotary)))
        for i in range(rotary // 2)
    ]


def rope_frequencies(theta: float, rotary: int) -> tuple[float, ...]:
    """theta^(-2i/rotary) for i in 0..rotary/2, each correctly rounded to float64."""
    return tuple(float(value) for value in _powers(theta, rotary))


def yarn_frequencies(theta: float, rotary: int, yarn: Yarn) -> tuple[float, ...]:
    """Frequencies between the plain ones (fast dimensions) and plain / factor (slow ones)."""
    c = _CONTEXT

    def dimension(rotations: float) -> Decimal:
        """The (fractional) dimension that turns `rotations` times over the original context."""
        turns = c.divide(
            Decimal(yarn.original), c.multiply(Decimal(rotations), c.multiply(Decimal(2), _PI))
        )
        return c.divide(
            c.multiply(Decimal(rotary), c.ln(turns)), c.multiply(Decimal(2), c.ln(Decimal(theta)))
        )

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low = low.to_integral_value(ROUND_FLOOR)
        high = high.to_integral_value(ROUND_CEILING)
    low, high = max(low, Decimal(0)), min(high, Decimal(rotary - 1))
    if low == high:
        high += Decimal("0.001")
    out = []
    for i, plain in enumerate(_powers(theta, rotary)):
        ramp = c.divide(c.subtract(Decimal(i), low), c.subtract(high, low))
        ramp = min(max(ramp, Decimal(0)), Decimal(1))
        slow = c.divide(plain, Decimal(yarn.factor))
        mixed = c.add(c.multiply(plain, c.subtract(Decimal(1), ramp)), c.multiply(slow, ramp))
        out.append(float(mixed))
    return tuple(out)


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """0.1 mscale ln(factor) + 1, correctly rounded; 1 for factors up to 1."""
    if factor <= 1:
        return 1.0
    c = _CONTEXT
    scaled = c.multiply(c.multiply(Decimal("0.1"), Decimal(mscale)), c.ln(Decimal(factor)))
    return float(c.add(scaled, Decimal(1)))


def merged_rope(text: ConfigReader, scaled: bool) -> ConfigReader:
    """`rope_parameters`, the older `rope_scaling` and the oldest flat keys as one object."""
    merged: dict[str, object] = {}
    for key in ("rope_theta", "partial_rotary_factor"):
        if (value := text.raw(key)) is not None:
            merged[key] = value
    for key in ("rope_scaling", "rope_parameters"):
        value = text.raw(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            text.fault(f"{key} must be an object")
            continue
        merged.update({k: v for k, v in value.items() if v is not None})
    rope = ConfigReader(merged, f"{text.where}: rope_parameters", text.faults)
    allowed = ("default", "yarn") if scaled else ("default",)
    for key in ("rope_type", "type"):
        rope.only(key, allowed, "this scaling of rotary positions is not supported")
    return rope


def read_yarn(rope: ConfigReader, max_position: int) -> Yarn:
    """The keys of YaRN but the attention factor's."""
    return Yarn(
        factor=rope.real("factor", 0.0, 1e6),
        original=rope.integer("original_max_position_embeddings", 1, 1 << 30, max_position),
        beta_fast=rope.real("beta_fast", 0.0, 1e6, 32.0),
        beta_slow=rope.real("beta_slow", 0.0, 1e6, 1.0),
        truncate=rope.flag("truncate", True),
    )


def read_rope(
    text: ConfigReader,
    head_dim: int,
    max_position: int,
    *,
    partial: float = 1.0,
    scaled: bool = True,
    rotary: int | None = None,
) -> Rope:
    """The rotation of a head of `head_dim`; `partial` is the family's default share of it.

    `rotary`: the number of rotated dimensions where the family gives it directly.
    """
    rope = merged_rope(text, scaled)
    theta = rope.real("rope_theta", 1.0, 1e30)
    share = rope.real("partial_rotary_factor", 0.0, 1.0, partial)
    if rotary is None:
        rotary = int(head_dim * share)
    if rotary % 2:
        text.fault(
            f"head_dim {head_dim} x partial_rotary_factor {share} gives {rotary} rotary "
            "dimensions, must be even"
        )
        rotary -= 1
    if "yarn" not in (rope.values.get("rope_type"), rope.values.get("type")):
        rope.refuse_unknown(_HARMLESS)
        return Rope(rotary, rope_frequencies(theta, rotary))
    yarn = read_yarn(rope, max_position)
    mscale = rope.real("mscale", 0.0, 1e3, 1.0)
    mscale_all = rope.real("mscale_all_dim", 0.0, 1e3, 1.0)
    default = yarn_attention_factor(yarn.factor)
    if "mscale" in rope.values and "mscale_all_dim" in rope.values:
        default = yarn_attention_factor(yarn.factor, mscale) / yarn_attention_factor(
            yarn.factor, mscale_all
        )
    scale = rope.real("attention_factor", 0.0, 1e3, default)
    rope.refuse_unknown(_HARMLESS)
    return Rope(rotary, yarn_frequencies(theta, rotary, yarn), scale)
