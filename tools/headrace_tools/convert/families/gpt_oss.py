"""gpt-oss: biases everywhere, attention sinks, alternating windows, clamped GLU, MXFP4 experts.

The release stores the experts as MXFP4 blocks whose gate and up rows alternate.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..decoders import Mxfp4Blocks
from ..safetensors_source import TensorEntry
from . import BankSpec, ConfigReader, Family, ModelPlan, Piece, common
from .common import Attention
from .quantised import Codings
from .rope import read_rope

_ALPHA = 1.702


def _kinds(text: ConfigReader, layers: int) -> list[bool]:
    """Which layers see a window only: `layer_types`, or every even one."""
    listed = text.raw("layer_types")
    if listed is None:
        return [i % 2 == 0 for i in range(layers)]
    known = ("sliding_attention", "full_attention")
    if not isinstance(listed, list) or len(listed) != layers:
        count = len(listed) if isinstance(listed, list) else "no"
        text.fault(f"layer_types has {count} entries, num_hidden_layers is {layers}")
        return []
    for index, kind in enumerate(listed):
        if kind not in known:
            text.fault(f"layer_types[{index}] is {kind!r}, must be {' or '.join(known)}")
            return []
    return [kind == known[0] for kind in listed]


def _bank(p: str, layer: int, experts: int, hidden: int, inner: int) -> BankSpec:
    """p: source prefix ending in `experts.`; stacked [experts, rows, cols], gate and up rows
    interleaved."""
    both, down = (experts, 2 * inner, hidden), (experts, hidden, inner)
    coding = Mxfp4Blocks()

    def rows(expert: int, odd: int) -> Piece:
        first = expert * 2 * inner + odd
        source = f"{p}gate_up_proj_blocks"
        return Piece(source, both, hidden, first, 1, inner, 2, coding=coding)

    def parts(expert: int) -> tuple[Piece, Piece, Piece]:
        source = f"{p}down_proj_blocks"
        third = Piece(source, down, inner, expert * hidden, hidden, coding=coding)
        return rows(expert, 0), rows(expert, 1), third

    def biases(expert: int) -> tuple[Piece, Piece, Piece]:
        source, shape = f"{p}gate_up_proj_bias", (experts, 2 * inner)
        gate, up = (
            Piece(source, shape, 1, expert * 2 * inner + odd, 1, inner, 2) for odd in (0, 1)
        )
        third = Piece(f"{p}down_proj_bias", (experts, hidden), 1, expert * hidden, hidden)
        return gate, up, third

    return BankSpec(layer, experts, hidden, inner, True, parts, biases)


def plan(config: Mapping[str, object], names: Mapping[str, TensorEntry]) -> ModelPlan:
    """See `families.Family`."""
    out = ModelPlan("gpt_oss")
    readers = common.open_config(config, out)
    assert readers is not None
    text = readers.text
    size = common.read_sizes(text)
    h = size.hidden
    heads = common.read_heads(text, h)
    rope = read_rope(text, heads.head_dim, size.max_position)
    bias = text.flag("attention_bias", True)
    attention = Attention(
        h, heads.heads, heads.kv_heads, heads.head_dim, rope,
        bias=bias, output_bias=bias, extra={"sinks": True},
    )  # fmt: skip
    kinds = _kinds(text, size.layers)
    window = text.integer("sliding_window", 1, 1 << 27, 128)
    experts = text.integer("num_local_experts", 1, 1 << 16)
    top_k = text.integer("num_experts_per_tok", 1, experts)
    text.only("experts_per_token", (top_k,), f"num_experts_per_tok is {top_k}")
    inner = text.integer("intermediate_size", 1, common.DIM_MAX)
    limit = text.real("swiglu_limit", 0.0, 1e6, 7.0)
    text.raw("initial_context_length")  # repeats original_max_position_embeddings
    for key, value in (("hidden_size", h), ("intermediate_size", inner)):
        if value % 32:
            text.fault(f"{key} {value} is not a multiple of 32, the group of MXFP4")
    common.refuse_other_maths(text)
    codings = Codings.read(readers)
    if codings.blocks is None:
        text.fault(
            "quantization_config does not say mxfp4: take the released checkpoint, whose experts "
            "are MXFP4 blocks"
        )
    tied, head_name = common.tied_head(readers, names, out)
    common.close_config(readers, out)
    common.skip_prefixed(out, names)
    if not common.possible(out, text.where, size.layers, 1, names):
        return out
    prefix = common.find_prefix(out, names)
    common.add_outside(out, names, prefix, size.vocab, h, tied, head_name)
    common.add_rope(out, rope)
    part = common.moe_part(
        experts, top_k, inner, router="softmax_chosen", renormalize=False,
        router_bias=True, expert_bias=True,
    )  # fmt: skip
    part |= {"activation": "clamped_glu", "alpha": _ALPHA, "limit": limit}
    layers = []
    for layer, windowed in enumerate(kinds):
        p, n = f"{prefix}layers.{layer}.", f"layers.{layer}."
        out.tensors += common.layer_norms(p, n, h)
        out.tensors += attention.tensors(f"{p}self_attn.", n)
        sinks = common.vector(f"{n}attn.sinks", f"{p}self_attn.sinks", heads.heads)
        out.tensors.append(sinks)
        router = f"{p}mlp.router."
        out.tensors.append(
            common.matrix(f"{n}moe.router", f"{router}weight", experts, h, "exact")
        )
        out.tensors.append(common.vector(f"{n}moe.router_bias", f"{router}bias", experts))
        out.banks.append(_bank(f"{p}mlp.experts.", layer, experts, h, inner))
        mixer = attention.part() | ({"window": window} if windowed else {})
        layers.append((mixer, part))
    out.model = common.model_object(
        vocab=size.vocab, hidden=h, max_position=size.max_position, eps=size.eps,
        tied=tied, layers=layers,
    )  # fmt: skip
    return out


FAMILIES = (Family("gpt_oss", ("gpt_oss",), ("GptOssForCausalLM",), plan),)
