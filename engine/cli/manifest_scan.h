/* Looks values up in the text of a manifest without building a tree. Only for text that hr_plan has
 * accepted; on anything else the answers are wrong but stay inside the text. */
#ifndef CLI_MANIFEST_SCAN_H
#define CLI_MANIFEST_SCAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct span {
    const char *p;
    size_t n;
};

/* The value of a member; false when `object` is no object or lacks it. */
bool scan_member(struct span object, const char *key, struct span *value);
/* Steps through an array: *at starts at 0; false at the end. */
bool scan_next(struct span array, size_t *at, struct span *value);
/* The text between the quotes, escapes left as they are. */
bool scan_string(struct span value, struct span *text);
bool scan_u64(struct span value, uint64_t *number);

#endif
