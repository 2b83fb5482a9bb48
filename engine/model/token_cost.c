#include "model/token_cost.h"

#include <string.h>

enum { CODECS = 16 };

static bool of_layers(const struct tensor_entry *t)
{
    return strncmp(t->name, "layers.", 7) == 0;
}

static enum codec most(const uint64_t bytes[CODECS])
{
    enum codec best = CODEC_NONE;
    for (uint32_t codec = 1; codec < CODECS; codec++)
        if (bytes[codec] > bytes[best]) best = (enum codec)codec;
    return best;
}

enum codec trunk_codec_of(const struct container *c)
{
    uint64_t bytes[CODECS] = {0};
    for (uint32_t i = 0; i < c->tensor_count; i++)
        if (of_layers(&c->tensors[i]) && (uint32_t)c->tensors[i].codec < CODECS)
            bytes[c->tensors[i].codec] += c->tensors[i].bytes;
    return most(bytes);
}

static void cost_of_mixer(const struct mixer_part *m, struct token_cost *out)
{
    const uint64_t each = sizeof(float);
    switch (m->kind) {
    case MIXER_ATTENTION:
        out->state_per_position += 2 * each * m->attention.kv_heads * m->attention.head_dim;
        break;
    case MIXER_MLA:
        out->state_per_position += each * (m->mla.kv_lora_rank + m->mla.rope_dim);
        break;
    case MIXER_DELTA:
        out->state += 2 * each * m->delta.value_heads * m->delta.key_dim * m->delta.value_dim;
        break;
    }
}

void token_cost_of(const struct container *c, const struct architecture *a, struct token_cost *out)
{
    uint64_t largest = 0, bytes[CODECS] = {0}, fine[CODECS] = {0};
    memset(out, 0, sizeof *out);
    out->trunk_codec = trunk_codec_of(c);
    for (uint32_t i = 0; i < c->tensor_count; i++) {
        const struct tensor_entry *t = &c->tensors[i];
        if (a->tied || strcmp(t->name, "embed") != 0) out->trunk += t->bytes;
        if (of_layers(t) && strstr(t->name, ".moe.shared.") != NULL) out->shared += t->bytes;
        if (!of_layers(t) || t->codec != out->trunk_codec || t->bytes / t->count <= largest) continue;
        largest = t->bytes / t->count;
        out->rows = t->rows;
        out->cols = t->cols;
    }
    for (uint32_t i = 0, bank = 0; i < a->layers; i++) {
        cost_of_mixer(layer_mixer(a, i), out);
        if (layer_ffn(a, i)->kind != FFN_MOE || bank == c->bank_count) continue;
        const struct bank_entry *b = &c->banks[bank++];
        out->experts += (uint64_t)layer_ffn(a, i)->moe.top_k * b->record.bytes;
        bytes[(uint32_t)b->codec % CODECS] += b->record.bytes;
        if (b->fine) fine[(uint32_t)b->codec % CODECS] += b->record.bytes;
        out->width = b->hidden;
        out->inner = b->inner;
    }
    out->expert_codec = most(bytes);
    out->fine = fine[out->expert_codec] > bytes[out->expert_codec] / 2;
}
