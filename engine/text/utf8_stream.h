/* Turns a stream of raw bytes into pieces that are valid UTF-8 at every boundary. */
#ifndef TEXT_UTF8_STREAM_H
#define TEXT_UTF8_STREAM_H

#include <stddef.h>
#include <stdint.h>

struct utf8_stream {
    uint8_t tail[4];
    uint32_t tail_len;
};

void utf8_stream_init(struct utf8_stream *s);
/* Appends n bytes; writes the text now complete to out (capacity >= 3 * (n + 4)) and returns its
 * length. Every maximal ill-formed sequence becomes U+FFFD (the WHATWG / Unicode rule), at once
 * when it can no longer become valid. */
size_t utf8_stream_push(struct utf8_stream *s, const char *bytes, size_t n, char *out);
/* The end: an incomplete tail becomes one U+FFFD. */
size_t utf8_stream_flush(struct utf8_stream *s, char *out);

#endif
