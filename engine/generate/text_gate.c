#include "generate/text_gate.h"

#include <string.h>

#include "base/utf8.h"

/* A byte becomes at most the three of U+FFFD; the stream itself holds an unfinished character. */
enum { WORST = 3, UNFINISHED = 8 };

void text_gate_carve(struct carve *c, size_t longest, struct text_gate *g)
{
    g->capacity = STOP_BYTES_MAX + WORST * (longest + UNFINISHED);
    g->text = carve_take(c, g->capacity);
}

static bool is_utf8(const char *bytes, size_t n)
{
    for (size_t at = 0, length; at < n; at += length) {
        length = utf8_sequence((const uint8_t *)bytes + at, n - at);
        if (length == 0) return false;
    }
    return true;
}

hr_status text_gate_open(struct text_gate *g, const char *const *stop, size_t stop_count,
                         hr_error *err)
{
    g->length = g->ready = g->stop_longest = 0;
    utf8_stream_init(&g->stream);
    if (stop_count > STOP_STRINGS_MAX)
        return fail(err, HR_ERR_USAGE, "%zu stop strings were given: at most %d are allowed",
                    stop_count, STOP_STRINGS_MAX);
    if (stop_count > 0 && stop == NULL)
        return fail(err, HR_ERR_USAGE, "stop is NULL but stop_count is %zu", stop_count);
    for (size_t i = 0; i < stop_count; i++) {
        if (stop[i] == NULL) return fail(err, HR_ERR_USAGE, "stop string %zu is NULL", i);
        const size_t n = strnlen(stop[i], STOP_BYTES_MAX + 1);
        if (n == 0 || n > STOP_BYTES_MAX)
            return fail(err, HR_ERR_USAGE, "stop string %zu is %s: 1 to %d bytes are allowed", i,
                        n == 0 ? "empty" : "too long", STOP_BYTES_MAX);
        if (!is_utf8(stop[i], n))
            return fail(err, HR_ERR_USAGE, "stop string %zu is not valid UTF-8", i);
        g->stop_length[i] = n;
        if (n > g->stop_longest) g->stop_longest = n;
    }
    g->stop = stop;
    g->stop_count = stop_count;
    return HR_OK;
}

/* The stop string that ends first beyond `from`; cuts it and what follows off. */
static int32_t find_stop(struct text_gate *g, size_t from)
{
    for (size_t end = from + 1; end <= g->length; end++) {
        int32_t found = -1;
        for (size_t i = 0; i < g->stop_count; i++) {
            const size_t n = g->stop_length[i];
            if (n > end || memcmp(g->text + end - n, g->stop[i], n) != 0) continue;
            if (found < 0 || n > g->stop_length[found]) found = (int32_t)i;
        }
        if (found >= 0) {
            g->length = end - g->stop_length[found];
            return found;
        }
    }
    return -1;
}

/* Start of the longest tail that is a proper prefix of a stop string. */
static size_t held_from(const struct text_gate *g)
{
    const size_t reach = g->stop_longest > 0 ? g->stop_longest - 1 : 0;
    for (size_t at = g->length > reach ? g->length - reach : 0; at < g->length; at++) {
        const size_t tail = g->length - at;
        for (size_t i = 0; i < g->stop_count; i++)
            if (tail < g->stop_length[i] && memcmp(g->text + at, g->stop[i], tail) == 0) return at;
    }
    return g->length;
}

hr_status text_gate_push(struct text_gate *g, const char *bytes, size_t n, bool end,
                         int32_t *stopped, hr_error *err)
{
    const size_t room = (g->capacity - g->length) / WORST;
    if (room < UNFINISHED || n > room - UNFINISHED)
        return fail(err, HR_ERR_FORMAT, "a token of %zu bytes is longer than its vocabulary's longest", n);
    const size_t from = g->length;
    g->length += utf8_stream_push(&g->stream, bytes, n, g->text + g->length);
    if (end) g->length += utf8_stream_flush(&g->stream, g->text + g->length);
    *stopped = find_stop(g, from);
    g->ready = *stopped >= 0 || end ? g->length : held_from(g);
    return HR_OK;
}

void text_gate_take(struct text_gate *g)
{
    memmove(g->text, g->text + g->ready, g->length - g->ready);
    g->length -= g->ready;
    g->ready = 0;
}
