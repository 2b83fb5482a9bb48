"""Routing with realistic locality, and the token sequences that show it.

Every token belongs to one of TOPICS topics (id modulo TOPICS). Its embedding is

    a * common + b * topic direction + c * its own direction       (a^2 + b^2 + c^2 = 1)

with random directions, and routers are random matrices. A router row therefore scores a token by
a popularity that all tokens share (some experts are chosen far more often than others), a part
that its topic shares and a part of its own. Layers add little to the residual stream, so every
layer's choice follows the token, each layer with its own popular and topical experts.

A sequence is a topic chain: it stays in a topic with probability STAY, else draws a topic by Zipf's
law with exponent TOPIC_ZIPF; tokens of a topic are drawn by Zipf's law with exponent TOKEN_ZIPF.
docs/synth.md gives the hit rates that these constants were fitted to.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

TOPICS = 32
COMMON, TOPIC, OWN = 0.72, 1.05, 1.3
"""Before normalisation: what all tokens, a topic's tokens, and one token alone share."""
STAY, TOPIC_ZIPF, TOKEN_ZIPF = 0.96, 1.0, 1.2
ROUTER_SCALE = 2.0
"""Standard deviation of router logits: how unequal mixing weights are."""


def topic_rows(rows: int, variants: int, hidden: int, own_part: float,
               rng: np.random.Generator) -> np.ndarray:
    """Embeddings float32 [rows, variants, hidden], each with its own direction, of tokens whose topics are
    0, 1, ...; their mean square is 1.

    own_part: OWN, or what `own_share` makes of it.
    """  # fmt: skip
    norm = np.float32(np.sqrt(COMMON**2 + TOPIC**2 + own_part**2))
    common = rng.standard_normal(hidden, np.float32) * np.float32(COMMON)
    topics = rng.standard_normal((TOPICS, hidden), np.float32) * np.float32(TOPIC)
    values = rng.standard_normal((rows, variants, hidden), np.float32)
    values *= np.float32(own_part) / norm
    values += ((topics + common) / norm)[np.arange(rows) % TOPICS, None, :]
    return values


def own_share(experts: int, top_k: int) -> float:
    """OWN for this many experts. A token uses a smaller share of finer experts, and in real models
    the same part of that share comes back with the next token; without this it would be less."""
    return OWN * min(1.0, np.sqrt(top_k / experts * 16))


def router(experts: int, hidden: int, rng: np.random.Generator) -> np.ndarray:
    """float32 [experts, hidden] for inputs of mean square 1."""
    scale = np.float32(ROUTER_SCALE / np.sqrt(hidden))
    return rng.standard_normal((experts, hidden), np.float32) * scale


def _zipf(count: int, exponent: float) -> np.ndarray:
    """Cumulative probabilities of ranks 1..count."""
    weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
    return np.cumsum(weights) / weights.sum()


def topic_chain(vocab: int, seed: int = 0) -> Iterator[int]:
    """An endless sequence of token ids below `vocab`."""
    rng = np.random.default_rng([seed, 0x746F6B])
    topics = min(TOPICS, vocab)
    of_topic = _zipf(topics, TOPIC_ZIPF)
    of_token = _zipf(vocab // topics, TOKEN_ZIPF)
    topic = int(np.searchsorted(of_topic, rng.random()))
    while True:
        if rng.random() > STAY:
            topic = int(np.searchsorted(of_topic, rng.random()))
        yield int(np.searchsorted(of_token, rng.random())) * topics + topic
