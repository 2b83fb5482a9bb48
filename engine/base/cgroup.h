/* Where this process stands in the control group hierarchies of Linux. */
#ifndef BASE_CGROUP_H
#define BASE_CGROUP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { CGROUP_PATH_MAX = 4096 };

/* The directory of one group; cgroup_up climbs it to the top of what is mounted. */
struct cgroup_dir {
    char path[CGROUP_PATH_MAX];
    size_t top; /* length of the mount point, which is the last directory of the climb */
};

/* The group of this process in the v1 hierarchy of `controller` ("memory", "cpu"), or in the
 * unified v2 hierarchy when controller is NULL; false when there is none. A group that the mount
 * does not show (a container's view) yields the mount point. `root` prefixes every path. */
bool cgroup_find(const char *root, const char *controller, struct cgroup_dir *out);
/* To the parent; false at the top. */
bool cgroup_up(struct cgroup_dir *dir);

/* The unsigned number a file of the group begins with; "max" and "-1" read as UINT64_MAX. */
bool cgroup_number(const struct cgroup_dir *dir, const char *file, uint64_t *out);
/* The number behind `key` in a file of lines "key number". */
bool cgroup_keyed(const struct cgroup_dir *dir, const char *file, const char *key, uint64_t *out);
/* The first line of a file of the group, without its newline. */
bool cgroup_line(const struct cgroup_dir *dir, const char *file, char *line, size_t capacity);

#endif
