/* One token timeline: state, position, the last logits. Belongs to one thread at a time. */
#ifndef MODEL_SESSION_H
#define MODEL_SESSION_H

#include <stdatomic.h>

#include "model/forward.h"
#include "model/model.h"
#include "model/read_ahead.h"

struct session {
    struct model *model;
    uint32_t lane, position;
    int32_t pending;    /* sampled and reported, not yet evaluated; -1 none */
    bool poisoned;      /* an eval failed half-way */
    bool has_logits;
    float *logits;      /* [vocab]: of the last evaluated token */
    void *workspace;    /* [plan_workspace]: of whoever generates */
    size_t workspace_bytes;
    struct state state;
    void *state_block, *scratch_block;
    size_t state_bytes, scratch_bytes;
    struct forward_scratch scratch;
    _Atomic int cancel;
    hr_moe_fn tap;      /* called after each MoE layer, or NULL */
    void *tap_user;
    hr_guess_fn tap_guess; /* called with what would be read ahead, or NULL */
    void *guess_user;
    struct guess_scratch told;
    void *told_block;   /* there while tap_guess is */
    size_t told_bytes;
    struct read_ahead ahead;
    uint32_t route_room;   /* tokens of a call whose routes can be kept; 0: none are */
    uint32_t route_tokens; /* whose routes are kept; 0 none */
    int32_t *route_ids;    /* [moe_layers][route_tokens][max_top_k] */
    float *route_weights;
};

hr_status session_create(struct model *m, struct session **out, hr_error *err);
void session_free(struct session *s);
void session_reset(struct session *s);
hr_status session_fork(const struct session *s, struct session **out, hr_error *err);

/* The contract of hr_eval, without the pending token. logits may be NULL: the last row is always
 * kept in s->logits unless which is HR_LOGITS_NONE. */
hr_status session_eval(struct session *s, const int32_t *ids, size_t n, int32_t which,
                       float *logits, hr_error *err);
/* Everything for which session_eval refuses a call and leaves the session untouched. */
hr_status session_check(const struct session *s, const int32_t *ids, size_t n, int32_t which,
                        const float *logits, hr_error *err);
hr_status session_record_routes(struct session *s, uint32_t tokens, hr_error *err);
hr_status session_tap_guesses(struct session *s, hr_guess_fn fn, void *user, hr_error *err);

/* model/session_file.c */
hr_status session_save(const struct session *s, const char *path, hr_error *err);
hr_status session_load(struct session *s, const char *path, hr_error *err);

/* What generation needs to know. */
uint32_t session_vocab(const struct session *s);
uint32_t session_ctx(const struct session *s);
uint32_t session_position(const struct session *s);
bool session_has_logits(const struct session *s);
const float *session_logits(const struct session *s);
bool session_cancelled(const struct session *s);
void session_cancel_clear(struct session *s);
int32_t session_pending(const struct session *s);
void session_set_pending(struct session *s, int32_t id);
void session_stats(const struct session *s, hr_stats *out);
const struct kernels *session_kernels(const struct session *s);
void *session_workspace(const struct session *s);
const struct tokenizer *session_tokenizer(const struct session *s);
const int32_t *session_stop_ids(const struct session *s, uint32_t *count);

#endif
