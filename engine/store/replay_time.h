/* The time of a token whose reads are known: one drive, one computation, and what they do at once. */
#ifndef STORE_REPLAY_TIME_H
#define STORE_REPLAY_TIME_H

#include <stdbool.h>
#include <stdint.h>

/* A layer takes `layer`, then its experts: what is there computes while the others are read, the last
 * to land computes alone. The drive gives a record every `read`, in the order asked for, and works on
 * `in_flight` of them: what is read ahead begins behind what is waited for, and cannot be taken back
 * once it has begun. */
struct replay_time {
    double read, layer, expert;
    uint32_t in_flight;
    double now;
    double free;     /* when the drive is through with what is waited for */
    double asked;    /* when the reads ahead were asked for */
    uint32_t ahead;  /* how many of them */
    double blocked, wanted; /* seconds: of waiting; of reading all that was missed */
    uint64_t cancelled;     /* reads ahead that were taken back */
};

/* The drive has nothing left to do. */
void replay_time_rest(struct replay_time *t);
/* A layer of one token asks for `experts`, `missed` of which are not in the cache; used[i] says which of
 * the reads ahead are among these. */
void replay_time_layer(struct replay_time *t, uint32_t experts, uint32_t missed, const bool *used);
/* The layer has so many records read ahead for the next. */
void replay_time_ahead(struct replay_time *t, uint32_t records);

#endif
