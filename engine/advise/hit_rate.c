#include "advise/hit_rate.h"

#include <math.h>
#include <stddef.h>

/* Hit rates of this engine's policy on recorded routes (docs/performance.md), by the cache's size in
 * working sets. A curve is for one number of experts to choose each from: the finer the experts, the
 * fewer come again. */
static const double SETS[] = {0, 0.25, 0.5, 1, 1.5, 2, 3, 4, 8};
enum { POINTS = sizeof SETS / sizeof SETS[0] };

static const struct {
    double choice; /* log2(experts / top_k) */
    double hits[POINTS];
} CURVES[] = {
    {3, {0, 0.177, 0.287, 0.440, 0.525, 0.607, 0.735, 0.829, 1}},
    {5, {0, 0.136, 0.223, 0.366, 0.410, 0.470, 0.558, 0.629, 0.770}},
    {5.8, {0, 0.10, 0.16, 0.31, 0.34, 0.37, 0.42, 0.45, 0.58}},
};
enum { CURVE_COUNT = sizeof CURVES / sizeof CURVES[0] };

static double between(double a, double b, double share)
{
    return a + (b - a) * share;
}

/* Beyond the last point the rest is reached when everything fits. */
static double on_curve(const double *hits, double sets, double all)
{
    for (size_t i = 1; i < POINTS; i++) {
        if (sets > SETS[i] || SETS[i] > all) continue;
        return between(hits[i - 1], hits[i], (sets - SETS[i - 1]) / (SETS[i] - SETS[i - 1]));
    }
    size_t last = POINTS - 1;
    while (last > 1 && SETS[last] > all) last--;
    if (sets >= all || all <= SETS[last]) return sets >= all ? 1 : hits[last];
    const double from = log2(fmax(sets, SETS[last]) / SETS[last]), to = log2(all / SETS[last]);
    return between(hits[last], 1, from / to);
}

double hit_rate_expected(uint64_t slots, uint32_t layers, uint32_t experts, uint32_t top_k)
{
    const double set = (double)layers * top_k, all = top_k ? (double)experts / top_k : 1;
    if (set <= 0 || all <= 1 || (double)slots >= (double)layers * experts) return 1;
    const double sets = (double)slots / set, choice = log2(all);
    if (choice <= CURVES[0].choice) return on_curve(CURVES[0].hits, sets, all);
    for (size_t i = 1; i < CURVE_COUNT; i++) {
        if (choice > CURVES[i].choice) continue;
        const double share = (choice - CURVES[i - 1].choice) /
                             (CURVES[i].choice - CURVES[i - 1].choice);
        return between(on_curve(CURVES[i - 1].hits, sets, all),
                       on_curve(CURVES[i].hits, sets, all), share);
    }
    return on_curve(CURVES[CURVE_COUNT - 1].hits, sets, all);
}
