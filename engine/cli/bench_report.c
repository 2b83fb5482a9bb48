#include <stdio.h>
#include <stdlib.h>

#include "cli/bench.h"

bool bench_proven(const struct bench_run *run)
{
    return run->physical_known && (double)run->physical_bytes >= 0.98 * (double)run->library_bytes;
}

struct summary {
    double median, low, high; /* tokens per second */
    double seconds, compute, waiting, other; /* of all repeats */
    double bytes_per_token, hit_rate;
    double read_seconds; /* the bytes over the rate they were read at */
    uint64_t hits, misses, bytes_read;
};

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double rate(const struct bench_phase *p, uint32_t tokens)
{
    return p->seconds > 0 ? tokens / p->seconds : 0;
}

static struct summary summarise(const struct bench_phase *phases, uint32_t repeats, uint32_t tokens)
{
    double rates[BENCH_REPEATS_MAX];
    struct summary s = {0};
    for (uint32_t i = 0; i < repeats; i++) {
        const struct bench_phase *p = &phases[i];
        rates[i] = rate(p, tokens);
        s.seconds += p->seconds;
        s.compute += p->compute;
        s.waiting += p->waiting;
        s.other += p->other;
        s.hits += p->hits;
        s.misses += p->misses;
        s.bytes_read += p->bytes_read;
        if (p->read_rate > 0) s.read_seconds += (double)p->bytes_read / p->read_rate;
    }
    qsort(rates, repeats, sizeof *rates, ascending);
    s.low = rates[0];
    s.high = rates[repeats - 1];
    s.median = 0.5 * (rates[(repeats - 1) / 2] + rates[repeats / 2]);
    s.bytes_per_token = (double)s.bytes_read / repeats / tokens;
    if (s.hits + s.misses > 0) s.hit_rate = (double)s.hits / (double)(s.hits + s.misses);
    return s;
}

static double read_rate(const struct summary *s)
{
    return s->read_seconds > 0 ? (double)s->bytes_read / s->read_seconds : 0;
}

static void print_phase(const char *name, const struct bench_phase *phases,
                        const struct bench_run *run, uint32_t tokens)
{
    if (tokens == 0) return;
    const struct summary s = summarise(phases, run->repeats, tokens);
    const double all = s.seconds > 0 ? s.seconds / 100 : 1;
    printf("%-8s %5u tokens  %8.2f tokens/s  (%.2f to %.2f, spread %.0f %%)\n", name, tokens,
           s.median, s.low, s.high, s.median > 0 ? 100 * (s.high - s.low) / s.median : 0);
    printf("         %.2f MB read for a token", s.bytes_per_token / 1e6);
    if (s.read_seconds > 0) printf(" at %.2f GB/s", read_rate(&s) / 1e9);
    printf(", %.1f %% of requests from the cache\n", 100 * s.hit_rate);
    printf("         %.1f %% computing, %.1f %% blocked on reads, %.1f %% other\n", s.compute / all,
           s.waiting / all, s.other / all);
}

void bench_print(const struct bench_run *run)
{
    const hr_model_info *m = &run->info;
    char a[32], b[32], c[32], codec[64];
    printf("%s: experts %s, trunk %s, %s; kernels %s, reads %s, %u + %u threads\n", m->name,
           format_codec(m->expert_codec, m->expert_activations, codec), m->trunk_codec,
           format_bytes(m->container_bytes, a), m->isa, m->io_mode, m->threads, m->io_threads);
    printf("memory %s of %s, cache %s: %.1f %% of the experts\n", format_bytes(run->stats.memory_peak, a),
           format_bytes(run->stats.memory_limit, b), format_bytes(run->stats.cache_bytes, c),
           m->expert_bytes > 0 ? 100.0 * (double)run->stats.cache_bytes / (double)m->expert_bytes : 0);
    printf("medians of %u %s repeats, ids %s\n", run->repeats, run->cold ? "cold" : "warm",
           run->ids != NULL ? run->ids : "pseudo-random");
    print_phase("prefill", run->prefilled, run, run->prefill);
    print_phase("decode", run->decoded, run, run->decode);
    if (!run->cold) return;
    format_bytes(run->library_bytes, a);
    format_bytes(run->physical_bytes, b);
    if (!run->physical_known)
        printf("cold: could not be proven, this system does not count physical reads\n");
    else if (bench_proven(run))
        printf("cold: proven, %s asked for and %s fetched from storage\n", a, b);
    else
        printf("cold: not proven, %s asked for and only %s fetched from storage\n", a, b);
}

static void out_phase(struct json_out *j, const char *key, const struct bench_phase *phases,
                      const struct bench_run *run, uint32_t tokens)
{
    if (tokens == 0) {
        out_null(j, key);
        return;
    }
    const struct summary s = summarise(phases, run->repeats, tokens);
    out_open(j, key, '{');
    out_u64(j, "tokens", tokens);
    out_f64(j, "tokens_per_second", s.median);
    out_f64(j, "lowest", s.low);
    out_f64(j, "highest", s.high);
    out_f64(j, "spread", s.median > 0 ? (s.high - s.low) / s.median : 0);
    out_f64(j, "bytes_per_token", s.bytes_per_token);
    out_f64(j, "hit_rate", s.hit_rate);
    out_u64(j, "hits", s.hits);
    out_u64(j, "misses", s.misses);
    out_u64(j, "bytes_read", s.bytes_read);
    out_f64(j, "bytes_per_second_reading", read_rate(&s));
    out_f64(j, "seconds", s.seconds);
    out_f64(j, "seconds_compute", s.compute);
    out_f64(j, "seconds_waiting", s.waiting);
    out_f64(j, "seconds_other", s.other);
    out_open(j, "repeats", '[');
    for (uint32_t i = 0; i < run->repeats; i++) out_f64(j, NULL, rate(&phases[i], tokens));
    out_close(j, ']');
    out_close(j, '}');
}

void bench_json(const struct bench_run *run)
{
    struct json_out j;
    json_out_init(&j, stdout);
    out_open(&j, NULL, '{');
    out_string(&j, "version", hr_version());
    out_model(&j, &run->info);
    if (run->ids != NULL) out_string(&j, "ids", run->ids);
    else out_null(&j, "ids");
    out_u64(&j, "repeats", run->repeats);
    out_phase(&j, "prefill", run->prefilled, run, run->prefill);
    out_phase(&j, "decode", run->decoded, run, run->decode);
    out_open(&j, "cold", '{');
    out_bool(&j, "asked", run->cold);
    out_bool(&j, "proven", run->cold && bench_proven(run));
    if (run->cold && run->physical_known) out_u64(&j, "physical_bytes", run->physical_bytes);
    else out_null(&j, "physical_bytes");
    out_u64(&j, "library_bytes", run->library_bytes);
    out_close(&j, '}');
    out_stats(&j, &run->stats);
    out_close(&j, '}');
    json_out_end(&j);
}
