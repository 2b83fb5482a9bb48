/* How parts read and write the residual stream: plain addition, attention over sealed block
 * snapshots, or several gated branches (formats/container.md, "Residuals"). */
#ifndef NN_RESIDUAL_H
#define NN_RESIDUAL_H

#include "nn/linear.h"
#include "nn/parts.h"

enum residual_kind { RESIDUAL_PLAIN, RESIDUAL_ATTN_RES, RESIDUAL_HYPER };

struct residual_part {
    enum residual_kind kind;
    float multiplier;        /* plain */
    uint32_t block;          /* attn_res: layers between snapshots */
    uint32_t count, lowrank; /* hyper */
    float norm_eps;
};

/* What one place of reading binds: before a mixer, before an ffn, before the head. */
struct residual_site {
    const float *norm;               /* [hidden], or [count * hidden] */
    const float *res;                /* attn_res: [hidden] */
    struct matrix down, up, inject;  /* hyper; the head has no inject */
};

struct residual_scratch {
    float *h;         /* [n][width]: the stream */
    float *snapshots; /* attn_res: [snapshots][n][hidden] */
    uint32_t sealed;
    float *normed;    /* hyper: [n][width] */
    float *low;       /* hyper: [n][lowrank] */
    float *mix;       /* hyper: [n][width] */
    float *inject;    /* hyper: [n][count] */
};

static inline uint32_t residual_width(const struct residual_part *p, uint32_t hidden)
{
    return p->kind == RESIDUAL_HYPER ? p->count * hidden : hidden;
}

void residual_carve(struct carve *c, const struct residual_part *p, uint32_t hidden,
                    uint32_t layers, uint32_t n, struct residual_scratch *s);

struct residual_call {
    const struct nn *nn;
    const struct residual_part *part;
    struct residual_scratch *s;
    uint32_t hidden, n;
};

/* The stream starts as the embeddings x[n][hidden]. */
void residual_begin(const struct residual_call *c, const float *x);
/* x[rows][hidden] = what the part at `site` reads, of tokens first .. first + rows - 1. With
 * `seal`, attn_res turns the stream into a snapshot afterwards (then rows must be all). */
void residual_read(const struct residual_call *c, const struct residual_site *site, bool seal,
                   uint32_t first, uint32_t rows, float *x);
/* Adds y[n][hidden]; false when some value is not finite. */
bool residual_write(const struct residual_call *c, const float *y);

#endif
