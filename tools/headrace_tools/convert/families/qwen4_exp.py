"""Qwen3.8-Flash-Next (`qwen4_exp`): gated residual branches, sparse attention, n-gram rows.

The gated delta rule and the experts of Qwen3.5-MoE; four residual branches with their own
mixers instead of layer norms; attention over blocks that an indexer selects; and before one layer
an embedding of token n-grams whose table stays on disk. Vision tower and draft module are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..safetensors_source import TensorEntry
from . import ConfigReader, Family, ModelPlan, Piece, RowTableSpec, TensorSpec, common, whole
from .common import Attention, Sizes
from .gated_delta import hybrid_layers, read_delta
from .qwen35 import HARMLESS, read_moe, refuse_other_maths
from .quantised import Codings
from .rope import read_rope

_FULL = (
    "full_attention",
    "indexed_attention",
    "hybrid_indexed",
    "qwen_sparse_attention",
    "deepseek_sparse_attention",
)
_HARMLESS = HARMLESS | frozenset({"mtp", "ple_embedding_dtype"})
_GATES = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}
_MAX_SITES = 4
_SPARSE = ("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio")


def _sparse(text: ConfigReader, rotary: int) -> dict[str, int] | None:
    """The indexer, or None when the config has none."""
    if all(text.raw(f"indexer_{key}") is None for key in _SPARSE):
        return None
    heads = text.integer("indexer_n_heads", 1, 4096)
    text.integer("indexer_kv_heads", 1, 1)
    dim = text.integer("indexer_head_dim", 1, 4096)
    block = text.integer("indexer_compress_ratio", 1, 256)
    budget = text.integer("indexer_budget", block, 1 << 20)
    if rotary > dim:
        text.fault(f"{rotary} rotary dimensions do not fit indexer_head_dim {dim}")
    if budget % block:
        text.fault(
            f"indexer_budget {budget} is not a multiple of indexer_compress_ratio {block}"
        )
    return {"heads": heads, "dim": dim, "budget": budget, "block": block}


@dataclass(frozen=True)
class _Ngram:
    """The n-gram embeddings before some layers: one hash and one run of rows for each."""

    layers: tuple[int, ...]
    order: int
    heads: int
    dim: int
    taps: int
    eos: int
    rows: tuple[int, ...]
    parts: int

    @property
    def tables(self) -> int:
        return (self.order - 1) * self.heads

    def part(self) -> dict[str, object]:
        return {
            "order": self.order,
            "heads": self.heads,
            "dim": self.dim,
            "rows": sum(self.rows),
            "conv_taps": self.taps,
            "dilation": self.order,
            "eos": self.eos,
            "sites": [{"layer": layer} for layer in self.layers],
        }


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def _table_rows(base: int, sites: int, count: int, divisor: int) -> tuple[int, ...]:
    """Rows of each site: the next `count` primes from `base` on, padded to a multiple."""
    out: list[int] = []
    n = max(base, 2)
    for _ in range(sites):
        total, found = 0, 0
        while found < count:
            if _is_prime(n):
                total += n
                found += 1
            n += 1
        out.append(-(-total // divisor) * divisor)
    return tuple(out)


def _read_ngram(text: ConfigReader, size: Sizes) -> _Ngram | None:
    """None without n-gram layers. Layer ids in the config begin with 1."""
    listed = text.raw("ple_layer_ids", [])
    order = text.integer("ngram_size", 2, 8, 3)
    heads = text.integer("heads_per_ngram", 1, 128 // (order - 1), 8)
    total = text.integer("ple_embed_dim", 1, common.DIM_MAX, size.hidden)
    taps = text.integer("ple_conv_kernel_size", 1, 8, 4)
    base = text.integer("ngram_vocab_size_base", 1, 1 << 36, 20_000_000)
    divisor = text.integer("make_ngram_vocab_size_divisible_by", 1, 1 << 20, 128)
    parts = text.integer("split_ngram_parts", 1, 1 << 16, 512)
    text.raw("seed")  # the hash's numbers are read from the checkpoint
    if listed == []:
        return None
    if not isinstance(listed, list) or not all(
        isinstance(i, int) and not isinstance(i, bool) and 1 <= i <= size.layers for i in listed
    ):
        text.fault(f"ple_layer_ids is {listed!r}, must list layers from 1 to {size.layers}")
        return None
    layers = tuple(i - 1 for i in sorted(set(listed)))
    if len(layers) > _MAX_SITES:
        text.fault(f"ple_layer_ids names {len(layers)} layers, at most {_MAX_SITES} are supported")
    tables = (order - 1) * heads
    if total % tables:
        text.fault(
            f"ple_embed_dim {total} is not a multiple of (ngram_size - 1) x heads_per_ngram, "
            f"{tables}"
        )
    if total // tables > 1000:
        text.fault(
            f"ple_embed_dim {total} gives rows of {total // tables}, at most 1000 fit a page"
        )
    eos = text.raw("eos_token_id")
    first = eos[0] if isinstance(eos, list) and eos else eos
    if not isinstance(first, int) or isinstance(first, bool) or not 0 <= first < size.vocab:
        text.fault(f"eos_token_id is {eos!r}, the n-gram embedding needs a token id")
        first = 0
    rows = _table_rows(base, len(layers), tables, divisor)
    return _Ngram(layers, order, heads, max(1, total // tables), taps, first, rows, parts)


def _add_ngram(
    out: ModelPlan, names: Mapping[str, TensorEntry], g: _Ngram, site: int, prefix: str,
    hidden: int, width: int,
) -> None:
    """Tensors and rows of one site; rows of the sites follow one another in the file."""
    p = f"{prefix}layers.{g.layers[site]}.ple."
    n, wanted = f"layers.{g.layers[site]}.ngram.", g.rows[site]
    table, wide = f"{p}ple_embedding.", g.tables * g.dim
    stems = [f"{table}ngram_embedding.shard_{i}.weight" for i in range(g.parts)]
    single = f"{table}ngram_embedding.weight"
    if single in names:
        stems = [single]
    even = -(-wanted // len(stems))
    pieces: list[Piece] = []
    for stem in stems:
        entry = names.get(stem)
        rows = entry.shape[0] if entry is not None and len(entry.shape) == 2 else even
        pieces += whole(stem, (rows, g.dim), g.dim)
    found = sum(piece.rows for piece in pieces)
    if found != wanted:
        out.tensor_faults.append(
            f"the {len(stems)} tensors {stems[0]!r}... hold {found} rows, config.json makes "
            f"{wanted}"
        )
    numbers = {
        "multipliers": (f"{table}layer_multipliers", g.order),
        "primes": (f"{table}ngram_heads_vocab_sizes", g.tables),
        "offsets": (f"{table}ngram_heads_offsets", g.tables),
    }
    before = out.ngram or RowTableSpec(0, g.dim, (), [])
    out.ngram = RowTableSpec(
        before.rows + wanted,
        g.dim,
        before.pieces + tuple(pieces),
        [*before.sites, (before.rows, wanted, numbers)],
    )
    conv = whole(f"{p}conv1d.weight", (width, 1, g.taps))
    out.tensors += [
        common.matrix(f"{n}key", f"{p}key_proj.weight", width, wide),
        common.matrix(f"{n}value", f"{p}value_proj.weight", hidden, wide),
        *(
            common.vector(f"{n}{part}", f"{p}{part}.weight", width, "add_one")
            for part in ("norm_key", "norm_query", "norm_conv")
        ),
        TensorSpec(f"{n}conv", g.taps, width, "f32", conv, "transpose"),
    ]


def _branches(p: str, n: str, count: int, low: int, width: int, inject: bool) -> list[TensorSpec]:
    """A mixer of the residual branches: sources p + name, canonical n + name."""
    out = [
        common.vector(f"{n}norm", f"{p}hc_norm.weight", width, "add_one"),
        common.matrix(f"{n}down", f"{p}input_mix_weight_down.weight", low, width, "exact"),
        common.matrix(f"{n}up", f"{p}input_mix_weight_up.weight", width, low, "exact"),
    ]
    if inject:
        source = f"{p}block_inject_weight.weight"
        out.append(common.matrix(f"{n}inject", source, count, width, "exact"))
    return out


def _indexer(p: str, n: str, hidden: int, sparse: Mapping[str, int]) -> list[TensorSpec]:
    """index_qk_proj holds the query heads' rows, then the key's."""
    heads, dim = sparse["heads"], sparse["dim"]
    source, shape = f"{p}index_qk_proj.weight", ((heads + 1) * dim, hidden)
    q = Piece(source, shape, hidden, 0, heads * dim)
    k = Piece(source, shape, hidden, heads * dim, dim)
    return [
        TensorSpec(f"{n}index_q", heads * dim, hidden, "exact", (q,)),
        TensorSpec(f"{n}index_k", dim, hidden, "exact", (k,)),
        common.vector(f"{n}index_q_norm", f"{p}q_layernorm.weight", dim, "add_one"),
        common.vector(f"{n}index_k_norm", f"{p}k_layernorm.weight", dim, "add_one"),
    ]


def plan(config: Mapping[str, object], names: Mapping[str, TensorEntry]) -> ModelPlan:
    """See `families.Family`."""
    out = ModelPlan("qwen4_exp")
    readers = common.open_config(config, out, ("qwen4_exp_text",))
    if readers is None:
        return out
    text = readers.text
    size = common.read_sizes(text)
    h = size.hidden
    heads = common.read_heads(text, h, explicit=True)
    rope = read_rope(text, heads.head_dim, size.max_position)
    count = text.integer("hc_count", 1, 16, 4)
    low = text.integer("hc_lowrank", 1, common.DIM_MAX, 320)
    width = count * h
    attention = Attention(
        h, heads.heads, heads.kv_heads, heads.head_dim, rope,
        qk_norm="head", gated=text.flag("attn_output_gate", True), norm_transform="add_one",
    )  # fmt: skip
    if sparse := _sparse(text, rope.rotary):
        attention.extra["sparse"] = sparse
    gate = text.raw("output_gate_type", "silu")
    if gate not in _GATES:
        text.fault(f"output_gate_type is {gate!r}, supported are {', '.join(sorted(_GATES))}")
    delta = read_delta(text, h, size.eps, gate=_GATES.get(str(gate), "silu"))
    moe = read_moe(text, h)
    full = hybrid_layers(text, size.layers, _FULL)
    ngram = _read_ngram(text, size)
    text.raw("intermediate_size")
    text.only("mlp_only_layers", ([],), "dense layers are not part of this family")
    text.only("decoder_sparse_step", (1,), "dense layers are not part of this family")
    refuse_other_maths(text)
    codings = Codings.read(readers)
    tied, head_name = common.tied_head(readers, names, out)
    common.close_config(readers, out, _HARMLESS)
    common.skip_prefixed(out, names)
    if not common.possible(out, text.where, size.layers, moe.experts, names):
        return out
    prefix = common.find_prefix(out, names, common.PREFIXES[0 if readers.nested else 2])

    common.add_outside(
        out, names, prefix, size.vocab, h, tied, head_name, final_norm=None
    )
    final = f"{prefix}hyper_connection_mixer."
    out.tensors += _branches(final, "final_hc.", count, low, width, False)
    unused = f"{final}block_inject_weight.weight"  # some files carry one that nothing reads
    out.skipped["final_inject"] = [unused] if unused in names else []
    if any(full):
        common.add_rope(out, rope)
    layers = []
    for layer, is_full in enumerate(full):
        p, n = f"{prefix}layers.{layer}.", f"layers.{layer}."
        for site, source in (("mixer_hc.", "attn"), ("ffn_hc.", "mlp")):
            q = f"{p}{source}_hyper_connection."
            out.tensors += _branches(q, n + site, count, low, width, True)
        if ngram is not None and layer in ngram.layers:
            _add_ngram(out, names, ngram, ngram.layers.index(layer), prefix, h, width)
        mixer = attention if is_full else delta
        out.tensors += mixer.tensors(p + ("self_attn." if is_full else "linear_attn."), n)
        if is_full and sparse:
            out.tensors += _indexer(f"{p}self_attn.indexer.", f"{n}attn.", h, sparse)
        out.tensors += moe.tensors(f"{p}mlp.", n)
        out.banks.append(
            common.either_bank(f"{p}mlp.experts.", layer, moe.experts, h, moe.inner, names)
        )
        layers.append((mixer.part(), moe.part()))
    codings.apply(out, names)
    out.model = common.model_object(
        vocab=size.vocab, hidden=h, max_position=size.max_position, eps=size.eps, tied=tied,
        layers=layers, residual={"kind": "hyper", "count": count, "lowrank": low},
        **({} if ngram is None else {"ngram": ngram.part()}),
    )  # fmt: skip
    return out


FAMILIES = (
    Family(
        "qwen4_exp",
        ("qwen4_exp", "qwen4_exp_text"),
        ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"),
        plan,
    ),
)
