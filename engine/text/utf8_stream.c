#include "text/utf8_stream.h"

#include <string.h>

#include "base/utf8.h"
#include "text/codepoint.h"

static const char replacement[3] = {(char)0xEF, (char)0xBF, (char)0xBD};

void utf8_stream_init(struct utf8_stream *s)
{
    memset(s, 0, sizeof *s);
}

static size_t put_replacement(char *out)
{
    memcpy(out, replacement, sizeof replacement);
    return sizeof replacement;
}

/* Appends one byte to the tail and writes what became decided. */
static size_t push_byte(struct utf8_stream *s, uint8_t byte, char *out)
{
    size_t written = 0;
    s->tail[s->tail_len++] = byte;
    while (s->tail_len > 0) {
        size_t done = utf8_sequence(s->tail, s->tail_len);
        if (done) {
            memcpy(out + written, s->tail, done);
            written += done;
        } else {
            bool open;
            done = ill_formed_bytes(s->tail, s->tail_len, &open);
            if (open) break;
            written += put_replacement(out + written);
        }
        s->tail_len -= (uint32_t)done;
        memmove(s->tail, s->tail + done, s->tail_len);
    }
    return written;
}

size_t utf8_stream_push(struct utf8_stream *s, const char *bytes, size_t n, char *out)
{
    size_t written = 0;
    for (size_t i = 0; i < n; i++) written += push_byte(s, (uint8_t)bytes[i], out + written);
    return written;
}

size_t utf8_stream_flush(struct utf8_stream *s, char *out)
{
    if (s->tail_len == 0) return 0;
    s->tail_len = 0;
    return put_replacement(out);
}
