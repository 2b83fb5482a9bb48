"""A checkpoint's quantization_config: which source tensors are coded, and how.

Families describe plain tensors; `Codings.apply` replaces the pieces whose tensors the checkpoint
stores quantised. Which tensors those are is decided by their names and dtypes; how they are
decoded is read from the config and never guessed from shapes. A config that is not understood
is a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..decoders import MX_GROUP, Coding, Fp8Blocks, Int4Packed, Mxfp4Blocks, Mxfp4Packed
from ..safetensors_source import TensorEntry
from . import BankSpec, ConfigReader, ModelPlan, Piece, TensorSpec

if TYPE_CHECKING:
    from .common import Readers

_KEY = "quantization_config"

# What was left alone says the checkpoint itself; how it was calibrated and packed says nothing.
_HARMLESS = frozenset(
    """
    dequantize global_compression_ratio ignore ignored_layers modules_to_not_convert
    quant_method quantization_status scale_fmt sparsity_config version weight_only
    """.split()
)
_HARMLESS_WEIGHTS = frozenset({"observer", "observer_kwargs", "block_structure"})


@dataclass
class Codings:
    """How quantised tensors are stored: `fp8` by dtype; `packed` and `blocks` by their names."""

    fp8: Coding | None = None
    packed: Coding | None = None
    blocks: Coding | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, readers: Readers) -> Codings:
        """From the config or its text part. Faults go to the readers."""
        self = cls()
        found = [(r, r.raw(_KEY)) for r in readers.all()]
        found = [(reader, value) for reader, value in found if value is not None]
        if len(found) == 2 and found[0][1] != found[1][1]:
            found[1][0].fault(f"{_KEY} differs from the one outside text_config")
        if not found:
            return self
        reader, value = found[0]
        if not isinstance(value, Mapping):
            reader.fault(f"{_KEY} must be an object")
            return self
        quant = ConfigReader(value, f"{reader.where}: {_KEY}", reader.faults)
        method = quant.raw("quant_method")
        if method == "fp8":
            self._read_fp8(quant)
        elif method == "mxfp4":
            self.blocks = Mxfp4Blocks()
        elif method == "compressed-tensors":
            self._read_compressed(quant)
        else:
            quant.fault(
                f"quant_method is {method!r}; fp8, mxfp4 and compressed-tensors are supported: "
                "take another copy of the checkpoint"
            )
            return self
        quant.refuse_unknown(_HARMLESS)
        return self

    def _read_fp8(self, quant: ConfigReader) -> None:
        quant.only("fmt", ("e4m3", "float8_e4m3fn"), "the 8-bit numbers are others")
        quant.only("activation_scheme", ("dynamic",), "static scales of activations are unknown")
        self._activations("dynamic FP8 activations")
        size = quant.raw("weight_block_size")
        if (
            not isinstance(size, list)
            or len(size) != 2
            or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in size)
        ):
            quant.fault(
                f"weight_block_size is {size!r}, must be two positive integers (scales for whole "
                "tensors or channels are not supported)"
            )
            return
        self.fp8 = Fp8Blocks(size[0], size[1])

    def _read_compressed(self, quant: ConfigReader) -> None:
        if quant.raw("kv_cache_scheme") is not None:
            self._activations("a quantised KV cache")
        if quant.raw("transform_config"):
            quant.fault("transform_config is given: rotated weights are not supported")
        groups = quant.raw("config_groups")
        if not isinstance(groups, Mapping) or len(groups) != 1:
            count = len(groups) if isinstance(groups, Mapping) else "no"
            quant.fault(f"config_groups has {count} entries, exactly one is supported")
            return
        name, values = next(iter(groups.items()))
        if not isinstance(values, Mapping):
            quant.fault(f"config_groups.{name} must be an object")
            return
        group = ConfigReader(values, f"{quant.where}: config_groups.{name}", quant.faults)
        packing = quant.raw("format")
        group.only("format", (packing,), "the groups' packing contradicts the whole's")
        group.raw("targets")
        for key, what in (
            ("input_activations", "quantised activations"),
            ("output_activations", "quantised outputs"),
        ):
            if group.raw(key) is not None:
                self._activations(what)
        weights = group.raw("weights")
        group.refuse_unknown(frozenset())
        if not isinstance(weights, Mapping):
            group.fault("weights must be an object")
            return
        self._read_packing(
            packing, ConfigReader(weights, f"{group.where}.weights", group.faults), quant
        )

    def _read_packing(self, packing: object, w: ConfigReader, quant: ConfigReader) -> None:
        why = "this packing of weights is not supported"
        w.only("num_bits", (4,), why)
        w.only("symmetric", (True,), "zero points are not supported")
        w.only("dynamic", (False,), why)
        w.only("actorder", (False, "static", "weight"), "permuted columns are not supported")
        for key in ("num_bits", "type", "strategy"):
            if w.raw(key) is None:
                w.fault(f"{key} is missing")
        w.raw("zp_dtype")  # of zero points, which symmetric weights do not have
        if packing == "mxfp4-pack-quantized":
            w.only("type", ("float",), why)
            w.only("strategy", ("group", "tensor_group"), why)
            w.only("scale_dtype", ("torch.uint8", "uint8"), why)
            w.integer("group_size", MX_GROUP, MX_GROUP)
            self.packed = Mxfp4Packed()
        elif packing == "pack-quantized":
            w.only("type", ("int",), why)
            w.only("strategy", ("group",), why)
            if w.raw("symmetric") is None:
                w.fault("symmetric is missing")
            w.raw("scale_dtype")  # the tensors' own dtype counts
            self.packed = Int4Packed(w.integer("group_size", 1, 1 << 20))
        else:
            quant.fault(
                f"format is {packing!r}; mxfp4-pack-quantized and pack-quantized are supported"
            )
        w.refuse_unknown(_HARMLESS_WEIGHTS)

    def _activations(self, what: str) -> None:
        self.notes.append(f"{_KEY} asks for {what}: here they stay unquantised")

    def __bool__(self) -> bool:
        return bool(self.fp8 or self.packed or self.blocks)

    # -- application ---------------------------------------------------------------------------

    def piece(self, piece: Piece, names: Mapping[str, TensorEntry]) -> Piece:
        """The piece as the checkpoint stores it."""
        if piece.coding is not None or len(piece.shape) < 2 or piece.cols != piece.shape[-1]:
            return piece
        source = piece.source
        entry = names.get(source)
        if self.fp8 is not None and entry is not None and entry.dtype == "F8_E4M3":
            return _coded(piece, source, self.fp8)
        if self.packed is not None and source.endswith(".weight"):
            if f"{source}_packed" in names:
                return _coded(piece, f"{source}_packed", self.packed)
        if self.blocks is not None and f"{source}_blocks" in names:
            return _coded(piece, f"{source}_blocks", self.blocks)
        return piece

    def apply(self, out: ModelPlan, names: Mapping[str, TensorEntry]) -> None:
        """Replaces the pieces of all tensors and experts, and adds the notes."""
        out.notes += self.notes
        if not self:
            return

        def all_of(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
            return tuple(self.piece(piece, names) for piece in pieces)

        out.tensors[:] = [_respec(spec, all_of) for spec in out.tensors]
        out.banks[:] = [self._bank(bank, all_of) for bank in out.banks]

    @staticmethod
    def _bank(
        bank: BankSpec, all_of: Callable[[tuple[Piece, ...]], tuple[Piece, ...]]
    ) -> BankSpec:
        plain = bank.parts

        def parts(expert: int) -> tuple[Piece, Piece, Piece]:
            return all_of(plain(expert))  # type: ignore[return-value]

        return replace(bank, parts=parts)


def _coded(piece: Piece, source: str, coding: Coding) -> Piece:
    return Piece(
        source, piece.shape, piece.cols, piece.first_row, piece.rows, piece.groups, piece.stride,
        piece.order, coding,
    )  # fmt: skip


def _respec(
    spec: TensorSpec, all_of: Callable[[tuple[Piece, ...]], tuple[Piece, ...]]
) -> TensorSpec:
    pieces, same_as = all_of(spec.pieces), all_of(spec.same_as)
    if pieces == spec.pieces and same_as == spec.same_as:
        return spec
    return replace(spec, pieces=pieces, same_as=same_as)
