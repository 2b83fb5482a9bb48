#include "generate/sampler.h"

#include <float.h>
#include <math.h> /* isfinite is a macro: no libm function is called */
#include <string.h>

#include "base/cpu.h"
#include "generate/random.h"

/* exp is 0 far above this; keeps infinities out of the kernels. */
static const float LOWEST = -200.0f;

hr_status sampler_check(const struct sampler_params *p, hr_error *err)
{
    if (!isfinite(p->temperature) || p->temperature < 0)
        return fail(err, HR_ERR_USAGE, "temperature is %g: it must be a finite number, 0 or more",
                    (double)p->temperature);
    if (!(p->top_p > 0 && p->top_p <= 1))
        return fail(err, HR_ERR_USAGE, "top_p is %g: it must be above 0 and at most 1",
                    (double)p->top_p);
    if (!(p->min_p >= 0 && p->min_p < 1))
        return fail(err, HR_ERR_USAGE, "min_p is %g: it must be at least 0 and below 1",
                    (double)p->min_p);
    if (!isfinite(p->repetition_penalty) || !(p->repetition_penalty > 0))
        return fail(err, HR_ERR_USAGE,
                    "repetition_penalty is %g: it must be a finite number above 0",
                    (double)p->repetition_penalty);
    return HR_OK;
}

static size_t seen_words(uint32_t vocab) { return ((size_t)vocab + 31) / 32; }

void sampler_carve(struct carve *c, uint32_t vocab, struct sampler *s)
{
    s->work = carve_take(c, vocab * sizeof *s->work);
    s->order = carve_take(c, vocab * sizeof *s->order);
    s->penalised = carve_take(c, vocab * sizeof *s->penalised);
    s->seen = carve_take(c, seen_words(vocab) * sizeof *s->seen);
}

hr_status sampler_open(struct sampler *s, const struct sampler_params *p, uint32_t vocab,
                       const struct kernels *kernels, hr_error *err)
{
    TRY(sampler_check(p, err));
    if (vocab == 0 || vocab > INT32_MAX)
        return fail(err, HR_ERR_USAGE, "a vocabulary of %u tokens cannot be sampled", vocab);
    s->params = *p;
    s->kernels = kernels;
    s->vocab = vocab;
    memset(s->seen, 0, seen_words(vocab) * sizeof *s->seen);
    return HR_OK;
}

static bool penalises(const struct sampler *s) { return s->params.repetition_penalty != 1; }

void sampler_see(struct sampler *s, const int32_t *ids, size_t n)
{
    if (!penalises(s)) return;
    for (size_t i = 0; i < n; i++) s->seen[ids[i] / 32] |= 1u << (ids[i] % 32);
}

static float clamp_finite(float x)
{
    return x > FLT_MAX ? FLT_MAX : x < -FLT_MAX ? -FLT_MAX : x;
}

static const float *penalise(const struct sampler *s, const float *logits)
{
    if (!penalises(s)) return logits;
    float *l = s->penalised;
    memcpy(l, logits, s->vocab * sizeof *l);
    const float penalty = s->params.repetition_penalty;
    for (size_t w = 0; w < seen_words(s->vocab); w++) {
        for (uint32_t bits = s->seen[w], i = 0; bits != 0; bits >>= 1, i++) {
            float *v = &l[w * 32 + i];
            if (bits & 1) *v = clamp_finite(*v > 0 ? *v / penalty : *v * penalty);
        }
    }
    return l;
}

static uint32_t argmax(const float *l, uint32_t n)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        if (l[i] > l[best]) best = i;
    return best;
}

/* The total order of candidates: higher logit first, then lower id. */
static bool before(const float *l, uint32_t a, uint32_t b)
{
    return l[a] > l[b] || (l[a] == l[b] && a < b);
}

/* Heap whose root comes first (`first`) or last in the total order. */
static void sift_down(uint32_t *heap, size_t n, size_t i, const float *l, bool first)
{
    const uint32_t moved = heap[i];
    for (size_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && before(l, heap[child + 1], heap[child]) == first) child++;
        if (before(l, heap[child], moved) != first) break;
        heap[i] = heap[child];
    }
    heap[i] = moved;
}

static void heapify(uint32_t *heap, size_t n, const float *l, bool first)
{
    for (size_t i = n / 2; i-- > 0;) sift_down(heap, n, i, l, first);
}

/* order[0..k) = the first k of n ids in the total order, sorted. k < n. */
static void select_sorted(uint32_t *order, uint32_t k, const float *l, uint32_t n)
{
    for (uint32_t i = 0; i < k; i++) order[i] = i;
    heapify(order, k, l, false);
    for (uint32_t i = k; i < n; i++) {
        if (!before(l, i, order[0])) continue;
        order[0] = i;
        sift_down(order, k, 0, l, false);
    }
    for (uint32_t left = k; left > 1; left--) {
        const uint32_t last = order[0];
        order[0] = order[left - 1];
        order[left - 1] = last;
        sift_down(order, left - 1, 0, l, false);
    }
}

/* Candidates of a draw: candidate j is id order[j] (j when order is NULL) and has probability
 * p[j] (by_rank) or p[id]. */
struct candidates {
    const uint32_t *order;
    const float *p;
    size_t n;
    bool by_rank;
};

static uint32_t candidate_id(const struct candidates *c, size_t j)
{
    return c->order != NULL ? c->order[j] : (uint32_t)j;
}

static float candidate_p(const struct candidates *c, size_t j)
{
    return c->by_rank ? c->p[j] : c->p[candidate_id(c, j)];
}

/* Softmax of (l - max) / temperature over the top_k candidates in rank order, or over all in id
 * order. */
static struct candidates probabilities(const struct sampler *s, const float *l)
{
    const float max = s->kernels->max(l, s->vocab);
    const float temperature = s->params.temperature;
    const bool ranked = s->params.top_k > 0 && s->params.top_k < s->vocab;
    const struct candidates c = {.order = ranked ? s->order : NULL,
                                 .p = s->work,
                                 .n = ranked ? s->params.top_k : s->vocab,
                                 .by_rank = ranked};
    if (ranked) select_sorted(s->order, s->params.top_k, l, s->vocab);
    for (size_t j = 0; j < c.n; j++) {
        const float z = (l[candidate_id(&c, j)] - max) / temperature;
        s->work[j] = z > LOWEST ? z : LOWEST;
    }
    s->kernels->softmax(s->work, c.n);
    return c;
}

/* Sorts a prefix of the total order of heap[0..n) until its probabilities p[id] reach top_p or
 * nothing is left. The prefix ends up sorted at heap[n - kept..n). */
static size_t take_prefix(uint32_t *heap, size_t n, const float *l, const float *p, double top_p,
                          bool *reached)
{
    double sum = 0;
    size_t kept = 0;
    heapify(heap, n, l, true);
    while (kept < n && sum < top_p) {
        const size_t left = n - ++kept;
        const uint32_t id = heap[0];
        heap[0] = heap[left];
        heap[left] = id;
        sift_down(heap, left, 0, l, true);
        sum += (double)p[id];
    }
    *reached = sum >= top_p;
    for (size_t a = n - kept, b = n; a + 1 < b; a++) {
        const uint32_t swap = heap[a];
        heap[a] = heap[--b];
        heap[b] = swap;
    }
    return kept;
}

/* Keeps the shortest prefix of the total order whose probabilities reach top_p. */
static void keep_top_p(const struct sampler *s, const float *l, struct candidates *c)
{
    const double top_p = (double)s->params.top_p;
    if (c->by_rank) {
        double sum = 0;
        size_t kept = 0;
        while (kept < c->n && sum < top_p) sum += (double)c->p[kept++];
        c->n = kept;
        return;
    }
    /* Ids below `least` hold less than 1 - top_p together: the prefix is found without them, and
     * if rounding says otherwise, with them. */
    const double rare = log_exact((1 - top_p) / s->vocab);
    const float least = s->kernels->max(l, s->vocab) + s->params.temperature * (float)rare;
    size_t n = 0;
    for (uint32_t i = 0; i < s->vocab; i++)
        if (l[i] >= least) s->order[n++] = i;
    bool reached;
    size_t kept = take_prefix(s->order, n, l, c->p, top_p, &reached);
    if (!reached && n < s->vocab) {
        n = s->vocab;
        for (uint32_t i = 0; i < s->vocab; i++) s->order[i] = i;
        kept = take_prefix(s->order, n, l, c->p, top_p, &reached);
    }
    c->order = s->order + (n - kept);
    c->n = kept;
}

/* Walks the candidates in their order until the running sum passes uniform * total. */
static uint32_t draw(const struct sampler *s, const struct candidates *c, double uniform)
{
    const float top = c->order != NULL ? candidate_p(c, 0) : s->kernels->max(c->p, c->n);
    const float least = s->params.min_p * top;
    double total = 0;
    for (size_t j = 0; j < c->n; j++) {
        const float p = candidate_p(c, j);
        if (p >= least) total += (double)p;
    }
    const double target = uniform * total;
    double sum = 0;
    uint32_t last = 0;
    for (size_t j = 0; j < c->n; j++) {
        const float p = candidate_p(c, j);
        if (p < least || p <= 0) continue;
        last = candidate_id(c, j);
        sum += (double)p;
        if (sum > target) break;
    }
    return last;
}

static float log_probability(const struct sampler *s, const float *logits, uint32_t id)
{
    const float max = s->kernels->max(logits, s->vocab);
    for (uint32_t i = 0; i < s->vocab; i++) {
        const float z = logits[i] - max;
        s->work[i] = z > LOWEST ? z : LOWEST;
    }
    s->kernels->exp(s->work, s->work, s->vocab);
    const double sum = (double)s->kernels->sum(s->work, s->vocab);
    return (float)(((double)logits[id] - (double)max) - log_exact(sum));
}

hr_status sampler_next(const struct sampler *s, const float *logits, uint64_t index, int32_t *id,
                       float *logprob, hr_error *err)
{
    const uint64_t mode = float_mode_enter();
    hr_status status = HR_OK;
    if (!s->kernels->all_finite(logits, s->vocab)) {
        status = fail(err, HR_ERR_NUMERIC,
                      "a logit of generated token %llu is NaN or infinite: the model file may be "
                      "damaged; run verify on it",
                      (unsigned long long)index);
    } else {
        const float *l = penalise(s, logits);
        uint32_t chosen;
        if (s->params.temperature > 0) {
            struct candidates c = probabilities(s, l);
            if (s->params.top_p < 1) keep_top_p(s, l, &c);
            chosen = draw(s, &c, random_uniform(s->params.seed, index));
        } else {
            chosen = argmax(l, s->vocab);
        }
        *id = (int32_t)chosen;
        *logprob = log_probability(s, logits, chosen);
    }
    float_mode_leave(mode);
    return status;
}

double log_exact(double x)
{
    /* x = 2^exponent * m with m in [sqrt(1/2), sqrt(2)). */
    int exponent = 0;
    if (x < DBL_MIN) {
        x *= 0x1p54;
        exponent = -54;
    }
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    exponent += (int)(bits >> 52) - 1023;
    bits = (bits & 0x000FFFFFFFFFFFFFu) | 0x3FF0000000000000u;
    double m;
    memcpy(&m, &bits, sizeof m);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        exponent++;
    }
    /* log m = 2 atanh(t), t = (m - 1) / (m + 1), |t| < 0.1716: eleven terms reach 2^-56. */
    const double t = (m - 1) / (m + 1), t2 = t * t;
    double series = 0;
    for (int k = 21; k >= 3; k -= 2) series = t2 * (1.0 / k + series);
    const double log_m = 2 * t + 2 * t * series;
    /* log 2 in two parts: the first has 21 trailing zero bits, so exponent * high is exact. */
    const double high = 0x1.62e42feep-1, low = 0x1.a39ef35793c76p-33;
    return exponent * high + (exponent * low + log_m);
}
