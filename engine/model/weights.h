/* One layer's weights, bound into the trunk's memory. */
#ifndef MODEL_WEIGHTS_H
#define MODEL_WEIGHTS_H

#include "nn/parts.h"
#include "nn/residual.h"

struct layer_weights {
    struct residual_site mixer_site, ffn_site;
    uint32_t bank; /* index into container->banks (FFN_MOE) */
    union {
        struct attention_weights attention;
        struct mla_weights mla;
        struct delta_weights delta;
    };
    union {
        struct dense_weights dense;
        struct moe_weights moe;
    };
};

#endif
