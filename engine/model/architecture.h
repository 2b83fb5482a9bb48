/* The manifest's "model" object, read and bounded. */
#ifndef MODEL_ARCHITECTURE_H
#define MODEL_ARCHITECTURE_H

#include "base/json.h"
#include "base/mem.h"
#include "nn/parts.h"
#include "nn/residual.h"
#include "store/container.h"

enum mixer_kind { MIXER_ATTENTION, MIXER_MLA, MIXER_DELTA };
enum ffn_kind { FFN_DENSE, FFN_MOE };

struct mixer_part {
    enum mixer_kind kind;
    char rope[64]; /* tensor of rotary frequencies, "" without rotation */
    union {
        struct attention_part attention;
        struct mla_part mla;
        struct delta_part delta;
    };
};

struct ffn_part {
    enum ffn_kind kind;
    union {
        struct dense_part dense;
        struct moe_part moe;
    };
};

enum { MAX_PARTS = 64, MAX_LAYERS = 1024 };

struct architecture {
    char name[64];
    uint32_t vocab_size, hidden, max_position, layers, moe_layers;
    float norm_eps, embed_scale, logit_scale;
    struct residual_part residual;
    struct ngram_part ngram;
    bool tied; /* the head is the embedding */
    uint32_t mixer_count, ffn_count;
    struct mixer_part mixers[MAX_PARTS];
    struct ffn_part ffns[MAX_PARTS];
    struct {
        uint8_t mixer, ffn;
    } layer[MAX_LAYERS];
    uint32_t max_experts, max_top_k;
    bool fine; /* some bank's products take 22-bit activations */
};

/* Floats of one token in the residual stream. */
static inline uint32_t stream_width(const struct architecture *a)
{
    return residual_width(&a->residual, a->hidden);
}

/* Matrices that latent attention binds head by head, in the whole model. */
size_t architecture_stacks(const struct architecture *a);

/* Every number is bounded and every unknown key or kind refused, so that later size arithmetic on
 * 64-bit integers cannot overflow. */
hr_status architecture_read(const struct container *c, struct architecture *out, hr_error *err);

static inline const struct mixer_part *layer_mixer(const struct architecture *a, uint32_t i)
{
    return &a->mixers[a->layer[i].mixer];
}

static inline const struct ffn_part *layer_ffn(const struct architecture *a, uint32_t i)
{
    return &a->ffns[a->layer[i].ffn];
}

#endif
