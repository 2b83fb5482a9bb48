"""The attention-only MoE containers of headrace-synth as a GGUF of the same geometry.

    PYTHONPATH=../../python:../../tools:GGUF_PY python to_gguf.py CONTAINER OUT.gguf --experts q4_0 --trunk q8_0

Trunk and router are the container's own weights, so that both engines choose nearly the same experts
for the same ids. Experts are random blocks of the wanted type: only their bytes and their small output matter.
GGUF_PY is the `gguf-py` folder of the peer's source package.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

import gguf
from headrace.quant import Quantizer

PLAIN = {"f32": np.float32, "f64": np.float64}
BLOCK = {"q8_0": (gguf.GGMLQuantizationType.Q8_0, 34), "q4_0": (gguf.GGMLQuantizationType.Q4_0, 18)}


class Container:
    """Trunk tensors of a container directory as float32."""

    def __init__(self, path: Path) -> None:
        self.manifest = json.loads((path / "manifest.json").read_text())
        self.trunk = np.memmap(path / "trunk.bin", np.uint8, "r")
        self.tensors = {t["name"]: t for t in self.manifest["trunk"]["tensors"]}

    def __call__(self, name: str) -> np.ndarray:
        t = self.tensors[name]
        blob = np.asarray(self.trunk[t["offset"]:t["offset"] + t["bytes"]])
        shape = t["shape"]
        if t["codec"] in PLAIN:
            return blob.view(PLAIN[t["codec"]])[:int(np.prod(shape))].astype(np.float32).reshape(shape)
        rows, cols = shape if len(shape) == 2 else (1, shape[0])
        return Quantizer(t["codec"]).decode(blob, rows, cols).reshape(shape)


def random_experts(shape: tuple[int, int, int], kind: str, deviation: float,
                   rng: np.random.Generator) -> np.ndarray:
    """Blocks of `kind` [experts, rows, bytes of a row]."""
    experts, rows, cols = shape
    _, size = BLOCK[kind]
    pool = rng.integers(0, 256, (rows, cols // 32, size), dtype=np.uint8)
    scale = np.float16(deviation / (73.6 if kind == "q8_0" else 4.6))
    pool[:, :, :2] = np.frombuffer(scale.tobytes(), np.uint8)
    one = pool.reshape(rows, -1)
    return np.stack([np.roll(one, e, axis=0) for e in range(experts)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("container", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--experts", choices=BLOCK, default="q4_0")
    parser.add_argument("--trunk", choices=BLOCK, default="q8_0")
    options = parser.parse_args()
    read = Container(options.container)
    model = read.manifest["model"]
    mixer, = (m for m in model["mixers"])
    ffn, = (f for f in model["ffns"])
    if mixer["kind"] != "attention" or ffn["kind"] != "moe" or not mixer["qk_norm"]:
        raise SystemExit("only attention with q/k norm and a MoE in every layer")
    w = gguf.GGUFWriter(options.out, "qwen3moe")
    layers, heads, head_dim = len(model["layers"]), mixer["heads"], mixer["head_dim"]
    frequency = read(mixer["rope"])
    w.add_block_count(layers)
    w.add_context_length(4096)
    w.add_embedding_length(model["hidden_size"])
    w.add_feed_forward_length(ffn["inner"])
    w.add_head_count(heads)
    w.add_head_count_kv(mixer["kv_heads"])
    w.add_key_length(head_dim)
    w.add_value_length(head_dim)
    w.add_rope_freq_base(float((frequency[0] / frequency[1]) ** (head_dim / 2)))
    w.add_layer_norm_rms_eps(float(model["norm_eps"]))
    w.add_expert_count(ffn["experts"])
    w.add_expert_used_count(ffn["top_k"])
    w.add_expert_feed_forward_length(ffn["inner"])
    w.add_vocab_size(model["vocab_size"])
    w.add_tokenizer_model("none")

    def quantised(name: str, x: np.ndarray, kind: str) -> None:
        w.add_tensor(name, gguf.quants.quantize(x, BLOCK[kind][0]), raw_dtype=BLOCK[kind][0])

    def plain(name: str, x: np.ndarray) -> None:
        w.add_tensor(name, np.ascontiguousarray(x, np.float32))

    quantised("token_embd.weight", read("embed"), options.trunk)
    plain("output_norm.weight", read("final_norm"))
    quantised("output.weight", read(model["head"]), options.trunk)
    rng = np.random.default_rng(1)
    inner, hidden, experts = ffn["inner"], model["hidden_size"], ffn["experts"]
    up = random_experts((experts, inner, hidden), options.experts, 0.02, rng)
    # All layers have the same blocks: what they add must be small, or it sums up to a direction that
    # every token shares, and later layers choose the same experts for all.
    down = random_experts((experts, hidden, inner), options.experts, 0.0005, rng)
    for i in range(layers):
        to, source = f"blk.{i}", f"layers.{i}"
        plain(f"{to}.attn_norm.weight", read(f"{source}.mixer_norm"))
        plain(f"{to}.ffn_norm.weight", read(f"{source}.ffn_norm"))
        for theirs, ours in (("attn_q", "q"), ("attn_k", "k"), ("attn_v", "v"), ("attn_output", "o")):
            quantised(f"{to}.{theirs}.weight", read(f"{source}.attn.{ours}"), options.trunk)
        plain(f"{to}.attn_q_norm.weight", read(f"{source}.attn.q_norm"))
        plain(f"{to}.attn_k_norm.weight", read(f"{source}.attn.k_norm"))
        plain(f"{to}.ffn_gate_inp.weight", read(f"{source}.moe.router"))
        for name, blocks in (("gate", up), ("up", up), ("down", down)):
            w.add_tensor(f"{to}.ffn_{name}_exps.weight", blocks, raw_dtype=BLOCK[options.experts][0])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file(progress=True)
    w.close()


if __name__ == "__main__":
    main()
