/* Reading bounded members of the manifest's part descriptions. */
#ifndef MODEL_PART_READER_H
#define MODEL_PART_READER_H

#include "base/json.h"
#include "nn/parts.h"

enum { MAX_DIM = 1 << 20, MAX_VOCAB = 1 << 24, MAX_HEADS = 4096, MAX_HEAD_DIM = 4096 };

hr_status need_float(const struct json *o, const char *key, double min, double max,
                     const char *where, float *out, hr_error *err);
/* A string that must be one of `words` (NULL-terminated); *out is its index. An unknown word is
 * HR_ERR_UNSUPPORTED: a newer converter may know it. */
hr_status need_word(const struct json *o, const char *key, const char *const *words,
                    const char *where, uint32_t *out, hr_error *err);

/* The same for members that may be absent: then the default (words: the first). */
hr_status optional_u32(const struct json *o, const char *key, uint32_t otherwise, int64_t min,
                       int64_t max, const char *where, uint32_t *out, hr_error *err);
hr_status optional_float(const struct json *o, const char *key, float otherwise, double min,
                         double max, const char *where, float *out, hr_error *err);
hr_status optional_bool(const struct json *o, const char *key, const char *where, bool *out,
                        hr_error *err);
hr_status optional_word(const struct json *o, const char *key, const char *const *words,
                        const char *where, uint32_t *out, hr_error *err);

/* "rope" and "rope_scale" for `rotary` dimensions; name is [64], "" without rotation. */
hr_status read_rope(const struct json *o, uint32_t rotary, const char *where,
                    struct rope_part *out, char name[64], hr_error *err);
hr_status read_activation(const struct json *o, const char *where, struct activation *out,
                          hr_error *err);
/* The model's "ngram" member; absent or null: out->order stays 0. */
hr_status ngram_read(const struct json *model, uint32_t layers, bool hyper, struct ngram_part *out,
                     hr_error *err);

#endif
