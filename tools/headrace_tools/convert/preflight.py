"""Checks a checkpoint from headers alone and lays out the container, before a byte is written."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from . import codebooks, families, paths
from .decoders import SourceTensor
from .errors import EXIT_BAD_INPUT, EXIT_USAGE, ConvertError, as_fault
from .families import BankSpec, ModelPlan, Piece, TensorSpec
from .native import native_codec_of_all
from .options import RVQ_CODECS, Options
from .quantise import FOUR_BIT, RVQ_BITS, encode_block, matrix_bytes, round_up
from .row_table import RowTable
from .safetensors_source import Checkpoint, TensorEntry, read_json_object

PAGE = 4096
TRUNK_CHUNK = 1 << 20
RECORD_HEADER = 64
MAX_STOP_IDS = 16
MAX_COLS = 1 << 20
MAX_TRANSPOSED = 1 << 26
BLOCK_BYTES = 4 << 20
"""Float32 bytes of the block of rows that is encoded at a time."""

DISK_BYTES_PER_SECOND = 400e6
REPACKED_WEIGHTS_PER_SECOND = 30e6
"""Assumed for reading the source, writing, and reading back for the check, each."""

_WIDTHS = {"mxfp4": 0.5, "int4": 0.5, "nl4": 0.5, "int8": 1, "bf16": 2, "f32": 4, "f64": 8,
           **{codec: bits / 8 for codec, bits in RVQ_BITS.items()}}
"""Bytes of a weight without scales and padding."""

_BASE_RAM = 160 << 20
"""Interpreter, numpy, headers and checksum tables of a 70 GB checkpoint, measured."""


@dataclass(frozen=True)
class TrunkTensor:
    """A resident tensor in trunk.bin: offset and length in bytes."""

    spec: TensorSpec
    codec: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Bank:
    """experts-NNNN.bin: offsets of gate, up, down and of the biases (0 without) in a record; bits of
    the activations that products with mxfp4 take."""

    spec: BankSpec
    file: str
    codec: str
    parts: tuple[int, int, int]
    bias: int
    record_bytes: int
    native: str | None = None
    """The codec of a 4-bit source that this one quantises once more."""
    native_record: int = 0
    activations: int = 8

    @property
    def described(self) -> str:
        """The codec, for people."""
        return self.codec + (f", {self.activations}-bit activations" if self.activations != 8 else "")

    @property
    def nbytes(self) -> int:
        return self.record_bytes * self.spec.experts

    @property
    def native_bytes(self) -> int:
        return self.native_record * self.spec.experts


@dataclass
class Preflight:
    """Everything that is known before the conversion starts."""

    source: Path
    name: str
    options: Options
    checkpoint: Checkpoint
    plan: ModelPlan
    identity: dict[str, object]
    trunk: list[TrunkTensor] = field(default_factory=list)
    trunk_bytes: int = 0
    banks: list[Bank] = field(default_factory=list)
    ngram: RowTable | None = None
    tokenizer: bytes | None = None
    stop_ids: list[int] = field(default_factory=list)
    parameters: int = 0
    source_bytes: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, object] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    books: dict[int, codebooks.Books] = field(default_factory=dict)
    """Of the layers that need some, once codebooks.bin is there."""
    rewrite: Callable[[Bank, int, np.ndarray], np.ndarray] | None = None
    """Of a measurement: bank, kind and rows of an expert matrix -> what is encoded in their place."""
    feedback: Callable[[Preflight, Bank, int], tuple[np.ndarray, np.ndarray]] | None = None
    """Bank and expert -> the moments of the inputs of gate and up, and of down."""
    feedback_ram: int = 0
    """Bytes that it takes."""

    def files(self) -> dict[str, int]:
        """File name -> bytes, of all data files."""
        out = {"trunk.bin": self.trunk_bytes}
        if size := codebooks.file_bytes(bank.codec for bank in self.banks):
            out[codebooks.FILE] = size
        out.update({bank.file: bank.nbytes for bank in self.banks})
        if self.ngram is not None:
            out[self.ngram.file] = self.ngram.nbytes
        if self.tokenizer is not None:
            out["tokenizer.bin"] = len(self.tokenizer)
        return out

    def bank_codecs(self) -> list[tuple[BankSpec, str]]:
        return [(bank.spec, bank.codec) for bank in self.banks]

    def manifest_estimate(self) -> int:
        checksums = self.trunk_bytes // TRUNK_CHUNK + sum(b.spec.experts for b in self.banks)
        return 8192 + 16 * checksums + 400 * (len(self.trunk) + len(self.banks))

    def output_bytes(self) -> int:
        return sum(self.files().values()) + self.manifest_estimate()

    def workers(self) -> int:
        """Experts encoded at a time: bounded by the CPUs and by 256 MiB of records."""
        record = max((bank.record_bytes for bank in self.banks), default=1)
        return max(1, min(os.cpu_count() or 1, 4, (256 << 20) // record))

    def peak_ram(self) -> int:
        """Bytes: base, records and their blocks in flight, the tokenizer twice."""
        record = max((bank.record_bytes for bank in self.banks), default=0)
        widest = max((t.spec.cols for t in self.trunk), default=0)
        used = {t.codec for t in self.trunk} | {b.codec for b in self.banks}
        block = (10 if used & FOUR_BIT else 6) * max(BLOCK_BYTES, 64 * 4 * widest)
        fixed = _BASE_RAM + self.feedback_ram + 2 * len(self.tokenizer or b"")
        return fixed + self.workers() * (record + block)

    def seconds(self) -> float:
        """Estimated duration: encoding at the rate measured here, and three passes of the disk."""
        seconds = 0.0
        used = {t.codec for t in self.trunk} | {b.codec for b in self.banks}
        for codec in sorted(used - {"f64"}):
            weights = sum(t.spec.weights for t in self.trunk if t.codec == codec)
            experts = sum(
                3 * b.spec.experts * b.spec.hidden * b.spec.inner
                for b in self.banks
                if b.codec == codec
            )
            if weights or experts:
                seconds += (weights + experts / self.workers()) / _encode_rate(codec)
        moved = sum(self.source_bytes.get(kind, 0) for kind in ("text", "experts", "ngram"))
        return seconds + (moved + 2 * self.output_bytes()) / DISK_BYTES_PER_SECOND

    def raise_faults(self) -> None:
        if self.faults:
            raise faults_error(self.source, self.faults)


def _encode_rate(codec: str) -> float:
    """Weights a second of one thread, measured on 1 M weights."""
    try:
        return codebooks.encode_rate(codec) if codec in RVQ_BITS else _measured_rate(codec)
    except ConvertError:  # no library: only numbers that are in this codec already can be written
        return REPACKED_WEIGHTS_PER_SECOND


def _measured_rate(codec: str) -> float:
    sample = np.linspace(-1, 1, 512 * 2048, dtype=np.float32).reshape(512, 2048)
    best = 1e9
    for _ in range(2):
        start = time.perf_counter()
        for _part in encode_block(codec, sample, 0, 512, 1):
            pass
        best = min(best, time.perf_counter() - start)
    return 0.6 * sample.size / max(best, 1e-6)  # reading, widening and checksums cost the rest


def record_layout(
    codec: str, hidden: int, inner: int, biased: bool = False
) -> tuple[tuple[int, int, int], int, int]:
    """((gate, up, down) offsets, offset of the biases or 0, bytes) of formats/container.md."""
    matrix = matrix_bytes(codec, inner, hidden)
    gate = RECORD_HEADER
    up = round_up(gate + matrix, 64)
    down = round_up(up + matrix, 64)
    end = round_up(down + matrix_bytes(codec, hidden, inner), 64)
    if not biased:
        return (gate, up, down), 0, round_up(end, PAGE)
    biases = 2 * round_up(4 * inner, 64) + round_up(4 * hidden, 64)
    return (gate, up, down), end, round_up(end + biases, PAGE)


def tensor_bytes(codec: str, spec: TensorSpec) -> int:
    """Bytes of a resident tensor; the matrices of a stack each take a multiple of 64."""
    one = matrix_bytes(codec, max(1, spec.rows), spec.cols)
    return spec.count * round_up(one, 64) if spec.count > 1 else one


def source_name(source: Path) -> str:
    """The directory's own name; for a hub cache snapshot, the repository's name."""
    path = Path(os.path.abspath(source))
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        name = path.parent.parent.name.split("--")[-1]
    else:
        name = path.name
    printable = "".join("?" if unicodedata.category(c) == "Cc" else c for c in name)
    raw = (printable or "model").encode("utf-8", "replace")[:63]
    return raw.decode("utf-8", "ignore")


def _stop_ids(pre: Preflight, generation: dict[str, object] | None) -> None:
    """Union of generation_config's and config's eos ids, in that order."""
    values = [generation.get("eos_token_id")] if generation is not None else []
    for value in values + pre.plan.eos:
        for one in value if isinstance(value, list) else [value]:
            if one is None or one in pre.stop_ids:
                continue
            if (
                not isinstance(one, int)
                or isinstance(one, bool)
                or not 0 <= one < pre.plan.vocab_size
            ):
                pre.faults.append(
                    f"eos_token_id {one!r} is no id below vocab_size {pre.plan.vocab_size}"
                )
            else:
                pre.stop_ids.append(one)
    if len(pre.stop_ids) > MAX_STOP_IDS:
        pre.faults.append(f"{len(pre.stop_ids)} eos ids, at most {MAX_STOP_IDS} are supported")
    if not pre.stop_ids:
        pre.notes.append(
            "no eos_token_id in generation_config.json or config.json: nothing ends generation"
        )


def _expected(plan: ModelPlan, faults: list[str]) -> dict[str, tuple[str, SourceTensor]]:
    """Stored tensor -> (group, what it must be)."""
    out: dict[str, tuple[str, SourceTensor]] = {}

    def add(group: str, pieces: tuple[Piece, ...]) -> None:
        for piece in pieces:
            for one in piece.sources():
                other = out.setdefault(one.name, (group, one))[1]
                if other.shape != one.shape:
                    faults.append(
                        f"tensor {one.name!r} is asked for as {list(other.shape)} and as "
                        f"{list(one.shape)}"
                    )

    for spec in plan.tensors:
        add("text", spec.all_pieces)
    for bank in plan.banks:
        for expert in range(1 if bank.fused else bank.experts):
            add("experts", bank.all_pieces(expert))
    if plan.ngram is not None:
        add("ngram", plan.ngram.pieces)
        for _, _, numbers in plan.ngram.sites:
            for name, count in numbers.values():
                out[name] = ("ngram", SourceTensor(name, (count,), ("I64",)))
    return out


def _compare_tensors(pre: Preflight) -> None:
    """Missing and unexpected tensors, shapes and dtypes; what is skipped is listed."""
    tensors, plan = pre.checkpoint.tensors, pre.plan
    expected = _expected(plan, pre.faults)
    totals = {"text": 0, "experts": 0}
    if plan.ngram is not None:
        totals["ngram"] = 0
    for name, (group, wanted) in expected.items():
        entry = tensors.get(name)
        if entry is None:
            if not wanted.optional:
                pre.faults.append(f"tensor {name!r} is missing")
            continue
        totals[group] += entry.nbytes
        if entry.shape != wanted.shape:
            pre.faults.append(
                f"{entry.shard}: tensor {name!r} has shape {list(entry.shape)}, "
                f"config.json asks for {list(wanted.shape)}"
            )
        if entry.dtype not in wanted.dtypes:
            pre.faults.append(
                f"{entry.shard}: tensor {name!r} has dtype {entry.dtype}, "
                f"supported are {', '.join(wanted.dtypes)}"
            )
    skipped = {name for names in plan.skipped.values() for name in names}
    modules = {name.rsplit(".", 1)[0] for name in expected if name.endswith(".weight")}
    others: list[TensorEntry] = []
    for name, entry in sorted(tensors.items()):
        if name in expected or name in skipped:
            continue
        harmless = entry.elements == 0 or (
            (
                entry.shape == ()
                or entry.dtype in ("BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64")
            )
            and name.rsplit(".", 1)[0] not in modules
        )
        if harmless:
            others.append(entry)
            pre.notes.append(
                f"tensor {name!r} ({entry.dtype} {list(entry.shape)}) is not used, skipped"
            )
        else:
            pre.faults.append(
                f"{entry.shard}: tensor {name!r} ({entry.dtype} {list(entry.shape)}) is "
                "unexpected: this converter does not know what it does"
            )
    pre.source_bytes = totals
    for kind, names in plan.skipped.items():
        size = sum(tensors[name].nbytes for name in names)
        pre.source_bytes[kind] = size
        if names:
            pre.skipped[kind] = {"tensors": len(names), "bytes": size}
    if others:
        pre.skipped["unused"] = [entry.name for entry in others]


def _trunk_codec(pre: Preflight, spec: TensorSpec) -> str:
    if spec.kind == "matrix":
        if pre.options.trunk in FOUR_BIT and spec.name in ("embed", "head"):
            return "int8"  # four bits are too few for what every token passes through
        return _lossless(pre, pre.options.trunk, spec.pieces)
    if spec.kind == "exact":
        return "bf16" if all(_is_bf16(pre, piece) for piece in spec.pieces) else "f32"
    return spec.kind


def _lossless(pre: Preflight, codec: str, pieces: Iterable[Piece]) -> str:
    """bf16 is the reference codec and rounds nothing: what it cannot hold becomes f32."""
    if codec != "bf16" or pre.options.allow_rounding:
        return codec
    return "bf16" if all(_is_bf16(pre, piece) for piece in pieces) else "f32"


def _expert_codec(pre: Preflight, bank: BankSpec, asked: str) -> tuple[str, str | None]:
    """(codec, the source's own 4-bit codec if it has one)."""
    every = [piece for expert in range(bank.experts) for piece in bank.parts(expert)]
    native = native_codec_of_all(pre.checkpoint, every)
    asked = RVQ_CODECS.get(asked, asked)
    if asked == "auto":
        return native or "int8", native
    if native is not None and asked in FOUR_BIT | {"int8", *RVQ_BITS} and asked != native:
        note = (
            f"the routed experts are {native} in the source and are quantised once more, as "
            f"{asked}: the conversion ends with what that costs; --experts auto keeps them as "
            "they are, without loss"
        )
        if note not in pre.notes:
            pre.notes.append(note)
    return _lossless(pre, asked, every), native


def _is_bf16(pre: Preflight, piece: Piece) -> bool:
    if piece.coding is not None:
        return piece.coding.exact_bf16
    entry = pre.checkpoint.tensors.get(piece.source)
    return entry is None or entry.dtype == "BF16"


def lay_out(pre: Preflight) -> None:
    """Codec, offset and length of every tensor and bank of the plan."""
    offset = 0
    for spec in pre.plan.tensors:
        if spec.cols > MAX_COLS or (
            spec.transform == "transpose" and spec.rows * spec.cols > MAX_TRANSPOSED
        ):
            pre.faults.append(f"tensor {spec.name!r} is too wide: {spec.shape}")
        codec = _trunk_codec(pre, spec)
        nbytes = tensor_bytes(codec, spec)
        pre.trunk.append(TrunkTensor(spec, codec, offset, nbytes))
        offset = round_up(offset + nbytes, PAGE)
        if codec != "f64":
            pre.parameters += spec.weights
    pre.trunk_bytes = offset
    for bank in pre.plan.banks:
        pre.banks.append(make_bank(pre, bank, pre.options.experts))
        pre.parameters += bank.experts * bank.weights
    if (table := pre.plan.ngram) is not None:
        exact = all(_is_bf16(pre, piece) for piece in table.pieces)
        pre.ngram = RowTable(table, "bf16" if exact else "f32")
        pre.parameters += table.rows * table.dim
    _note_widths(pre)


def make_bank(pre: Preflight, spec: BankSpec, asked: str) -> Bank:
    """The layout of a layer's experts for a choice of --experts."""
    codec, native = _expert_codec(pre, spec, asked)
    biased = spec.biases is not None
    parts, bias, record = record_layout(codec, spec.hidden, spec.inner, biased)
    activations = 8
    if codec == "mxfp4":  # a native source is worth all that its products can give
        activations = pre.options.activations or (22 if native == codec else 8)
    if codec in ("bf16", "f32", native):
        native = None
    kept = record_layout(native, spec.hidden, spec.inner, biased)[2] if native else 0
    return Bank(spec, f"experts-{spec.layer:04d}.bin", codec, parts, bias, record, native, kept,
                activations)


def part_of(pre: Preflight, layer: int) -> dict[str, object]:
    """The manifest's description of a layer's ffn."""
    model = pre.plan.model
    return model["ffns"][model["layers"][layer]["ffn"]]  # type: ignore[index]


def candidate_banks(pre: Preflight, spec: BankSpec, codecs: Iterable[str]) -> list[Bank]:
    """The different banks that these choices of --experts would make of a layer."""
    notes = list(pre.notes)
    found = {bank.codec: bank for bank in (make_bank(pre, spec, codec) for codec in codecs)}
    pre.notes[:] = notes  # what is only considered is not worth a note
    return list(found.values())


def _note_widths(pre: Preflight) -> None:
    """Says what became of tensors that bf16 cannot hold, when bf16 was asked for."""
    rounds = pre.options.allow_rounding
    fate = "rounded" if rounds else "stored as f32 (--allow-rounding makes them bf16)"
    wide = [t for t in pre.trunk if t.spec.kind == "matrix" and pre.options.trunk == "bf16"
            and not all(_is_bf16(pre, piece) for piece in t.spec.pieces)]
    if wide:
        pre.notes.append(
            f"{len(wide)} trunk tensors are wider than bf16 in the source and are {fate}")
    if pre.options.experts == "bf16" and any(
        b.codec == "f32" or not all(_is_bf16(pre, piece) for piece in b.spec.parts(0))
        for b in pre.banks
    ):
        pre.notes.append(f"routed experts are wider than bf16 in the source and are {fate}")


def _tokenizer(pre: Preflight) -> None:
    path = pre.source / "tokenizer.json"
    if not pre.options.tokenizer:
        pre.notes.append("converted without tokenizer: token ids only")
        return
    ranks = pre.source / "tiktoken.model"
    if not paths.is_listed(path) and not paths.is_file(ranks):
        pre.faults.append(
            f"{path}: is missing (--no-tokenizer makes a container for token ids only)"
        )
        return
    from .tokenizer import compile_tokenizer

    try:
        build = compile_tokenizer(pre.source, pre.plan.vocab_size)
    except ConvertError as error:
        pre.faults.append(as_fault(error))
        return
    pre.tokenizer = bytes(build.data)
    pre.notes += build.notes


def _side_files(pre: Preflight) -> None:
    """Notes what a chat needs and the checkpoint lacks."""
    generation = None
    if paths.exists(pre.source / "generation_config.json"):
        try:
            generation = read_json_object(pre.source / "generation_config.json")
        except ConvertError as error:
            pre.faults.append(as_fault(error))
    else:
        pre.notes.append("generation_config.json is missing: stop ids come from config.json alone")
    _stop_ids(pre, generation)
    has_template = any(
        paths.exists(pre.source / n) for n in ("chat_template.jinja", "chat_template.json")
    )
    if not has_template and paths.exists(pre.source / "tokenizer_config.json"):
        try:
            has_template = bool(
                read_json_object(pre.source / "tokenizer_config.json").get("chat_template")
            )
        except ConvertError as error:
            pre.faults.append(as_fault(error))
    if not has_template:
        pre.notes.append("chat template is missing: the model can complete text, not chat")


def _identity(pre_source: Path, checkpoint: Checkpoint) -> dict[str, object]:
    """What a resumed conversion compares: names, sizes and header hashes, and the small files."""
    small = {}
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tiktoken.model",
        "chat_template.jinja",
        "chat_template.json",
    ):
        path = pre_source / name
        if paths.is_file(path):
            small[name] = hashlib.sha256(paths.read_bytes(path)).hexdigest()
    shards = [
        {"name": s.name, "bytes": s.nbytes, "header_sha256": s.header_sha256}
        for s in checkpoint.shards
    ]
    return {"shards": shards, "files": small}


def faults_error(source: Path, faults: list[str]) -> ConvertError:
    """All faults in one error: on one line when there is one."""
    if len(faults) == 1:
        fault = faults[0]
        text = fault if fault.startswith(str(source)) else f"{source}: {fault}"
    else:
        text = "\n  ".join([f"{source}: cannot be converted, {len(faults)} faults:", *faults])
    return ConvertError(text, EXIT_BAD_INPUT, tuple(faults))


def preflight(source: Path, options: Options) -> Preflight:
    """Reads headers and configs only. Raises ConvertError when there is nothing to plan from;
    other findings are in `faults`, all of them."""
    checkpoint = Checkpoint.open(source)
    try:
        config = read_json_object(source / "config.json")
        family = families.detect(config, str(source / "config.json"))
    except ConvertError as error:
        raise faults_error(source, [*checkpoint.faults, as_fault(error)]) from None
    plan = family.plan(config, checkpoint.tensors)
    pre = Preflight(
        source, source_name(source), options, checkpoint, plan, _identity(source, checkpoint)
    )
    pre.faults += checkpoint.faults + plan.faults
    if not checkpoint.faults:
        pre.faults += plan.tensor_faults
    pre.notes += checkpoint.notes + plan.notes
    if not plan.tensors:
        return pre
    if not checkpoint.faults:
        _compare_tensors(pre)
    lay_out(pre)
    _side_files(pre)
    _tokenizer(pre)
    return pre


def free_bytes(target: Path) -> int:
    """Free bytes of the file system that holds (or will hold) `target`."""
    path = Path(os.path.abspath(target))
    while not paths.exists(path) and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def check_places(source: Path, target: Path) -> None:
    """The container must not lie in the checkpoint. Raises ConvertError (usage)."""
    real_source, real_target = Path(os.path.realpath(source)), Path(os.path.realpath(target))
    if real_target == real_source or real_source in real_target.parents:
        raise ConvertError(f"{target}: must not be the source directory or inside it", EXIT_USAGE)
    if paths.is_listed(target) and not paths.is_directory(target):
        raise ConvertError(f"{target}: exists and is not a directory", EXIT_USAGE)


def plan_report(pre: Preflight, target: Path) -> dict[str, object]:
    """The `--plan` object."""
    files = pre.files()
    weights = pre.parameters
    unpadded = sum(int(t.spec.weights * _WIDTHS[t.codec]) for t in pre.trunk)
    for bank in pre.banks:
        numbers = 3 * bank.spec.experts * bank.spec.hidden * bank.spec.inner
        unpadded += int(numbers * _WIDTHS[bank.codec])
    data = pre.trunk_bytes + sum(bank.nbytes for bank in pre.banks)
    if pre.ngram is not None:
        unpadded += pre.ngram.spec.rows * pre.ngram.row_bytes
        data += pre.ngram.nbytes
    free = free_bytes(target)
    return {
        "source": pre.name,
        "family": pre.plan.family,
        "options": pre.options.as_dict(),
        "parameters": weights,
        "source_bytes": pre.source_bytes,
        "source_tensors": len(pre.checkpoint.tensors),
        "skipped": pre.skipped,
        "files": files,
        "output_bytes": pre.output_bytes(),
        "overhead_share": round(1 - unpadded / data, 6) if data else 0,
        "record_bytes": max((bank.record_bytes for bank in pre.banks), default=0),
        "peak_ram_bytes": pre.peak_ram(),
        "seconds": round(pre.seconds(), 1),
        "free_bytes": free,
        "fits": free >= pre.output_bytes(),
        "stop_ids": pre.stop_ids,
        "notes": pre.notes,
        "faults": pre.faults,
    }

