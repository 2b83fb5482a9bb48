/* Between raw token bytes and the text a caller may see: valid UTF-8 only, nothing that might begin
 * a stop string, nothing from a stop string on. */
#ifndef GENERATE_TEXT_GATE_H
#define GENERATE_TEXT_GATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/carve.h"
#include "base/status.h"
#include "text/utf8_stream.h"

enum { STOP_STRINGS_MAX = 16, STOP_BYTES_MAX = 256 };

struct text_gate {
    struct utf8_stream stream;
    const char *const *stop;
    size_t stop_length[STOP_STRINGS_MAX];
    size_t stop_count, stop_longest;
    char *text; /* text[0..ready) may be shown, text[ready..length) is held back */
    size_t capacity, length, ready;
};

/* Room for what may be held back and a token of at most `longest` bytes. */
void text_gate_carve(struct carve *c, size_t longest, struct text_gate *g);
/* g has been carved; `stop` must outlive the gate. HR_ERR_USAGE for too many, too long, empty or
 * ill-formed strings. */
hr_status text_gate_open(struct text_gate *g, const char *const *stop, size_t stop_count,
                         hr_error *err);

/* Appends the bytes of a token, what was ready having been taken; `end`: nothing follows, so that everything becomes ready. *stopped
 * is the index of the stop string now complete, or -1. Of several, the one that is complete
 * first counts, then the longest, then the lowest index: the same for every tokenisation. */
hr_status text_gate_push(struct text_gate *g, const char *bytes, size_t n, bool end,
                         int32_t *stopped, hr_error *err);
/* Forgets the text that was ready. */
void text_gate_take(struct text_gate *g);

#endif
