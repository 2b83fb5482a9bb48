#include <stdio.h>

#include "cli/cli.h"

const char *format_bytes(uint64_t bytes, char out[32])
{
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB"};
    if (bytes < 1024) {
        snprintf(out, 32, "%llu B", (unsigned long long)bytes);
        return out;
    }
    size_t unit = 0;
    double value = (double)bytes / 1024;
    for (; value >= 1024 && unit < 3; unit++) value /= 1024;
    snprintf(out, 32, "%.2f %s", value, units[unit]);
    return out;
}

const char *format_codec(const char *codec, uint32_t activations, char out[64])
{
    if (activations == 0 || activations == 8) return codec;
    snprintf(out, 64, "%s, %u-bit activations", codec, activations);
    return out;
}

static double per_second(uint64_t count, double seconds)
{
    return seconds > 0 ? (double)count / seconds : 0;
}

void print_stats(const hr_stats *s)
{
    char a[32], b[32], c[32];
    fprintf(stderr, "prefill  %llu tokens in %.2f s (%.1f tokens/s)\n",
            (unsigned long long)s->tokens_prefilled, s->seconds_prefill,
            per_second(s->tokens_prefilled, s->seconds_prefill));
    fprintf(stderr, "decode   %llu tokens in %.2f s (%.1f tokens/s)\n",
            (unsigned long long)s->tokens_decoded, s->seconds_decode,
            per_second(s->tokens_decoded, s->seconds_decode));
    const uint64_t requests = s->hits + s->misses;
    fprintf(stderr, "experts  %llu of %llu from the cache (%.1f %%), %s read, %.2f s waiting\n",
            (unsigned long long)s->hits, (unsigned long long)requests,
            requests > 0 ? 100.0 * (double)s->hits / (double)requests : 0.0,
            format_bytes(s->bytes_read, a), s->seconds_waiting);
    if (s->read_ahead_issued > 0)
        fprintf(stderr, "ahead    %llu experts read before they were known: %llu used, %llu in vain (%s in all), %llu taken back\n",
                (unsigned long long)s->read_ahead_issued, (unsigned long long)s->read_ahead_used,
                (unsigned long long)s->read_ahead_wasted, format_bytes(s->read_ahead_bytes, a),
                (unsigned long long)s->read_ahead_cancelled);
    fprintf(stderr, "memory   %s used, %s at most, limit %s\n", format_bytes(s->memory_used, a),
            format_bytes(s->memory_peak, b), format_bytes(s->memory_limit, c));
}

void out_stats(struct json_out *j, const hr_stats *s)
{
    out_open(j, "stats", '{');
    out_u64(j, "tokens_prefilled", s->tokens_prefilled);
    out_u64(j, "tokens_decoded", s->tokens_decoded);
    out_u64(j, "hits", s->hits);
    out_u64(j, "misses", s->misses);
    out_u64(j, "reads", s->reads);
    out_u64(j, "bytes_read", s->bytes_read);
    out_u64(j, "trunk_bytes_read", s->trunk_bytes_read);
    out_u64(j, "read_retries", s->read_retries);
    out_u64(j, "records_verified", s->records_verified);
    out_u64(j, "evictions", s->evictions);
    out_u64(j, "transient_reads", s->transient_reads);
    out_u64(j, "leases", s->leases);
    out_u64(j, "cache_slots", s->cache_slots);
    out_u64(j, "cache_used", s->cache_used);
    out_u64(j, "cache_bytes", s->cache_bytes);
    out_u64(j, "memory_used", s->memory_used);
    out_u64(j, "memory_peak", s->memory_peak);
    out_u64(j, "memory_limit", s->memory_limit);
    out_f64(j, "seconds_prefill", s->seconds_prefill);
    out_f64(j, "seconds_decode", s->seconds_decode);
    out_f64(j, "seconds_waiting", s->seconds_waiting);
    out_f64(j, "seconds_compute", s->seconds_compute);
    out_f64(j, "seconds_other", s->seconds_other);
    out_u64(j, "read_fallbacks", s->read_fallbacks);
    out_u64(j, "read_ahead_issued", s->read_ahead_issued);
    out_u64(j, "read_ahead_used", s->read_ahead_used);
    out_u64(j, "read_ahead_wasted", s->read_ahead_wasted);
    out_u64(j, "read_ahead_cancelled", s->read_ahead_cancelled);
    out_u64(j, "read_ahead_bytes", s->read_ahead_bytes);
    out_close(j, '}');
}

void out_model(struct json_out *j, const hr_model_info *info)
{
    out_open(j, "model", '{');
    out_string(j, "name", info->name);
    out_string(j, "container_sha256", info->container_sha256);
    out_string(j, "isa", info->isa);
    out_string(j, "io_mode", info->io_mode);
    out_string(j, "trunk_codec", info->trunk_codec);
    out_string(j, "expert_codec", info->expert_codec);
    out_u64(j, "expert_activations", info->expert_activations);
    out_u64(j, "vocab_size", info->vocab_size);
    out_u64(j, "hidden_size", info->hidden_size);
    out_u64(j, "layers", info->layers);
    out_u64(j, "moe_layers", info->moe_layers);
    out_u64(j, "experts", info->experts);
    out_u64(j, "top_k", info->top_k);
    out_u64(j, "ctx", info->ctx);
    out_u64(j, "max_position", info->max_position);
    out_u64(j, "threads", info->threads);
    out_u64(j, "io_threads", info->io_threads);
    out_u64(j, "chunk", info->chunk);
    out_bool(j, "tokenizer", info->has_tokenizer != 0);
    out_open(j, "stop_ids", '[');
    for (uint32_t i = 0; i < info->stop_count && i < 16; i++) out_i64(j, NULL, info->stop_ids[i]);
    out_close(j, ']');
    out_u64(j, "parameters", info->parameters);
    out_u64(j, "trunk_bytes", info->trunk_bytes);
    out_bool(j, "trunk_locked", info->trunk_locked != 0);
    out_u64(j, "expert_bytes", info->expert_bytes);
    out_u64(j, "record_bytes", info->record_bytes);
    out_u64(j, "container_bytes", info->container_bytes);
    out_close(j, '}');
}

void out_drives(struct json_out *j, const hr_model *model)
{
    hr_drive_info d = {.size = sizeof d};
    out_open(j, "drives", '[');
    for (uint32_t i = 0; hr_get_drive(model, i, &d, NULL) == HR_OK; i++) {
        out_open(j, NULL, '{');
        out_string(j, "path", d.path);
        out_string(j, "io_mode", d.io_mode);
        out_u64(j, "banks", d.banks);
        out_u64(j, "in_flight", d.in_flight);
        out_u64(j, "reads", d.reads);
        out_u64(j, "bytes_read", d.bytes_read);
        out_u64(j, "failures", d.failures);
        out_bool(j, "left_out", d.left_out != 0);
        out_f64(j, "seconds_reading", d.seconds_reading);
        out_f64(j, "probed_bytes_per_second", d.probed);
        out_close(j, '}');
    }
    out_close(j, ']');
}

static void print_rate(FILE *to, const char *what, double bytes_per_second)
{
    char bytes[32];
    if (bytes_per_second > 0)
        fprintf(to, ", %s %s/s", what, format_bytes((uint64_t)bytes_per_second, bytes));
}

void print_drives(const hr_model *model, FILE *to)
{
    hr_drive_info d = {.size = sizeof d};
    for (uint32_t i = 0; hr_get_drive(model, i, &d, NULL) == HR_OK; i++) {
        fprintf(to, "drive %-9u %s: %u banks, %s, %u at once", i, d.path, d.banks, d.io_mode,
                d.in_flight);
        print_rate(to, "measured", d.probed);
        print_rate(to, "gave", d.reads > 0 ? per_second(d.bytes_read, d.seconds_reading) : 0);
        if (d.failures > 0)
            fprintf(to, ", %llu reads failed%s", (unsigned long long)d.failures,
                    d.left_out ? ", left out" : "");
        fputc('\n', to);
    }
}
