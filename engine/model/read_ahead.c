#include "model/read_ahead.h"

/* Tokens: how long a decision holds; layers: how many guesses show whether most are in vain. */
enum { HOLD_ON = 256, HOLD_OFF = 1024, WINDOW = 256 };
/* A pair's median time with guesses over that without, below which they stay on. */
#define PAYS 0.98f

static void begin_trial(struct read_ahead *r)
{
    r->trial = r->on = true;
    r->left = 2 * AHEAD_PAIRS;
}

static void decide(struct read_ahead *r, bool on)
{
    r->trial = false;
    r->on = on;
    r->left = on ? HOLD_ON : HOLD_OFF;
}

void read_ahead_init(struct read_ahead *r, uint32_t width, bool adaptive)
{
    *r = (struct read_ahead){.width = width, .adaptive = adaptive, .on = width > 0};
    if (adaptive && width > 0) begin_trial(r);
}

uint32_t read_ahead_width(const struct read_ahead *r)
{
    return r->on ? r->width : 0;
}

static float median(float *v, uint32_t n)
{
    for (uint32_t i = 1; i < n; i++) {
        const float x = v[i];
        uint32_t j = i;
        for (; j > 0 && v[j - 1] > x; j--) v[j] = v[j - 1];
        v[j] = x;
    }
    return v[n / 2];
}

/* Pairs are with-without, without-with in turns, so that a drift favours neither. */
static void learn_pair(struct read_ahead *r, double seconds)
{
    const uint32_t done = 2 * AHEAD_PAIRS - r->left; /* tokens of this trial before this one */
    *(r->on ? &r->with : &r->without) = seconds;
    if (done % 2 == 1) r->ratio[done / 2] = (float)(r->with / r->without);
    if (--r->left == 0)
        decide(r, median(r->ratio, AHEAD_PAIRS) < PAYS);
    else
        r->on = (done + 1) % 4 == 0 || (done + 1) % 4 == 3;
}

void read_ahead_learn(struct read_ahead *r, double seconds, uint32_t layers, uint64_t used,
                      uint64_t wasted)
{
    if (!r->adaptive || r->width == 0) return;
    r->layers += layers;
    if (r->layers >= WINDOW) {
        const bool vain = wasted - r->wasted > used - r->used;
        r->layers = 0;
        r->used = used;
        r->wasted = wasted;
        if (vain) {
            decide(r, false);
            return;
        }
    }
    if (r->trial)
        learn_pair(r, seconds);
    else if (--r->left == 0)
        begin_trial(r);
}
