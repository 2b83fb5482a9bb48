#include "store/replay_time.h"

#include <math.h>

void replay_time_rest(struct replay_time *t)
{
    t->free = t->asked = t->now;
    t->ahead = 0;
}

void replay_time_layer(struct replay_time *t, uint32_t experts, uint32_t missed, const bool *used)
{
    const double depth = t->in_flight;
    double busy = t->free;
    t->now += t->layer;
    double landed = t->now;
    uint32_t left = missed;
    for (uint32_t i = 0; i < t->ahead; i++) {
        const double done = t->free + (i + 1) * t->read;
        if (fmax(t->asked, done - depth * t->read) > t->now) { /* not begun */
            t->cancelled += !used[i];
            continue;
        }
        busy = done;
        if (!used[i]) continue;
        landed = fmax(landed, done);
        left--;
    }
    if (left > 0) {
        busy = fmax(busy, t->now) + left * t->read;
        landed = busy;
    }
    const double all = t->now + experts * t->expert;
    const double end = landed > t->now ? fmax(landed + t->expert, all) : all;
    t->blocked += end - all;
    t->wanted += missed * t->read;
    t->free = fmax(busy, t->now);
    t->asked = t->now;
    t->ahead = 0;
    t->now = end;
}

void replay_time_ahead(struct replay_time *t, uint32_t records)
{
    t->ahead = records;
}
