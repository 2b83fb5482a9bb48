/* How many of the next MoE layer's experts are read before they are known: none, a fixed number, or
 * as many as the drive's answers show to pay. Only speed depends on it. */
#ifndef MODEL_READ_AHEAD_H
#define MODEL_READ_AHEAD_H

#include <stdbool.h>
#include <stdint.h>

enum { AHEAD_RANKS = 6, AHEAD_PAIRS = 12 };

struct read_ahead {
    uint32_t width;       /* ranks to guess for a token; 0 = never */
    bool adaptive;
    bool trial, on;       /* trial: tokens with and without take turns */
    uint32_t left;        /* tokens until the next decision */
    uint32_t layers;      /* guesses since used and wasted were looked at */
    uint64_t used, wasted;
    double with, without; /* seconds of this pair's tokens */
    float ratio[AHEAD_PAIRS];
};

void read_ahead_init(struct read_ahead *r, uint32_t width, bool adaptive);
/* Ranks to guess for the token that begins now. */
uint32_t read_ahead_width(const struct read_ahead *r);
/* The token took so long; `layers` guesses were made for it; used and wasted are totals. */
void read_ahead_learn(struct read_ahead *r, double seconds, uint32_t layers, uint64_t used,
                      uint64_t wasted);

#endif
