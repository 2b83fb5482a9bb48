/* An opened model: container, weights bound to parts, threads, expert cache. Immutable but for
 * the cache and counters; shared by sessions. */
#ifndef MODEL_MODEL_H
#define MODEL_MODEL_H

#include <pthread.h>

#include "model/architecture.h"
#include "model/plan.h"
#include "model/weights.h"
#include "nn/linear.h"
#include "store/container.h"
#include "store/expert_cache.h"
#include "store/row_table.h"
#include "text/tokenizer.h"

struct model {
    struct mem_budget mem;
    struct container *c;
    struct architecture arch;
    struct plan plan;
    hr_model_params params;
    uint8_t *trunk;
    uint64_t trunk_read; /* bytes */
    bool trunk_locked;
    struct matrix embed, head;
    struct residual_site final_site;
    struct layer_weights *layers;
    struct ngram_weights ngram[MAX_NGRAM_SITES];
    struct row_table *ngram_rows;
    struct matrix *stacks; /* the heads' own matrices of latent attention */
    size_t stack_count;
    struct tokenizer *tokenizer; /* NULL: ids only */
    void *tokenizer_data;
    size_t tokenizer_bytes;
    struct pool *pool;
    struct nn nn;
    struct expert_cache *cache;
    pthread_mutex_t lock; /* lanes and totals */
    uint64_t lanes;       /* bit i: lane i is taken */
    struct {
        uint64_t prefilled, decoded;
        double seconds_prefill, seconds_decode, seconds_waiting, seconds_compute, seconds_other;
    } totals;
};

hr_status model_open(const char *path, const hr_model_params *params, struct model **out,
                     hr_error *err);
void model_close(struct model *m);
hr_status model_set_ram(struct model *m, uint64_t ram, hr_error *err);
void model_stats(struct model *m, hr_stats *out);

/* Reads the architecture of an opened container and checks every tensor against it, without
 * loading any. */
hr_status model_check(const struct container *c, struct architecture *arch, hr_error *err);

/* The body of hr_verify_drives: every byte of every file, then what model_check and the tokenizer say. */
hr_status model_verify(const char *path, const char *const *drives, uint32_t count,
                       hr_verify_fn report, void *user, hr_error *err);

/* Checks every tensor against the architecture and binds it into the trunk's memory; in
 * model/bind.c. With trunk NULL it only checks. */
hr_status model_bind(struct model *m, hr_error *err);

#endif
