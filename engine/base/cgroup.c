#include "base/cgroup.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/text_file.h"

enum { LINE_MAX_BYTES = 16384 }; /* a line of mountinfo: two paths and the options */

/* Whether the comma-separated list holds the word. */
static bool list_has(const char *list, const char *word)
{
    const size_t n = strlen(word);
    for (const char *p = list; *p;) {
        const size_t item = strcspn(p, ",");
        if (item == n && memcmp(p, word, n) == 0) return true;
        p += item;
        if (*p == ',') p++;
    }
    return false;
}

/* /proc/self/cgroup: "id:controllers:path", the v2 hierarchy has no controllers. */
static bool own_path(const char *root, const char *controller, char *out, size_t capacity)
{
    struct text_file file;
    if (!text_file_open(&file, root, "/proc/self/cgroup")) return false;
    char line[LINE_MAX_BYTES];
    bool found = false;
    while (!found && text_file_line(&file, line, sizeof line)) {
        char *controllers = strchr(line, ':');
        char *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path) continue;
        controllers++;
        *path++ = '\0';
        const bool match =
            controller ? list_has(controllers, controller) : controllers[0] == '\0';
        if (match && strlen(path) < capacity) {
            memcpy(out, path, strlen(path) + 1);
            found = true;
        }
    }
    text_file_close(&file);
    return found;
}

/* mountinfo writes space, tab, newline and backslash as three octal digits. */
static void undo_escapes(char *text)
{
    char *to = text;
    for (const char *from = text; *from; to++) {
        if (from[0] == '\\' && from[1] >= '0' && from[1] <= '3' && from[2] >= '0' &&
            from[2] <= '7' && from[3] >= '0' && from[3] <= '7') {
            *to = (char)((from[1] - '0') * 64 + (from[2] - '0') * 8 + (from[3] - '0'));
            from += 4;
        } else {
            *to = *from++;
        }
    }
    *to = '\0';
}

/* Cuts the next space-separated field off *rest; NULL at the end. */
static char *next_field(char **rest)
{
    char *field = *rest;
    if (!field || !*field) return NULL;
    char *space = strchr(field, ' ');
    if (space) *space++ = '\0';
    *rest = space;
    return field;
}

struct mount {
    char *source; /* the directory of the hierarchy that is mounted */
    char *target; /* where */
};

/* A line of mountinfo: id parent device source target options [tags] - type device options. */
static bool parse_mount(char *line, const char *controller, struct mount *out)
{
    char *rest = line, *source = NULL, *target = NULL, *field = NULL;
    for (int i = 0; i < 6; i++) {
        field = next_field(&rest);
        if (i == 3) source = field;
        if (i == 4) target = field;
    }
    while ((field = next_field(&rest)) != NULL && strcmp(field, "-") != 0) {
    }
    const char *type = next_field(&rest);
    (void)next_field(&rest);
    const char *options = next_field(&rest);
    if (!source || !target || !type) return false;
    if (controller) {
        if (strcmp(type, "cgroup") != 0 || !options || !list_has(options, controller))
            return false;
    } else if (strcmp(type, "cgroup2") != 0) {
        return false;
    }
    undo_escapes(source);
    undo_escapes(target);
    out->source = source;
    out->target = target;
    return true;
}

/* What follows the mounted directory in the path; NULL when the mount does not show the path. */
static const char *below(const char *source, const char *path)
{
    const size_t n = strcmp(source, "/") == 0 ? 0 : strlen(source);
    if (strncmp(path, source, n) != 0 || (path[n] != '\0' && path[n] != '/')) return NULL;
    if (strcmp(path + n, "/") == 0) return "";
    /* A path outside the cgroup namespace is written with leading "..". */
    return strstr(path + n, "/..") ? NULL : path + n;
}

static bool is_directory(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

static bool place(const char *root, const char *target, const char *tail, struct cgroup_dir *out)
{
    const int top = snprintf(out->path, sizeof out->path, "%s%s", root, target);
    if (top <= 0 || (size_t)top >= sizeof out->path) return false;
    out->top = (size_t)top;
    const size_t n = strlen(tail);
    if (n >= sizeof out->path - out->top) return false;
    memcpy(out->path + out->top, tail, n + 1);
    return is_directory(out->path);
}

bool cgroup_find(const char *root, const char *controller, struct cgroup_dir *out)
{
    char path[CGROUP_PATH_MAX];
    if (!own_path(root, controller, path, sizeof path)) return false;
    struct text_file file;
    if (!text_file_open(&file, root, "/proc/self/mountinfo")) return false;

    /* The mount that shows the process's own group is better than one that does not. */
    char line[LINE_MAX_BYTES];
    bool found = false, exact = false;
    struct cgroup_dir candidate;
    while (!exact && text_file_line(&file, line, sizeof line)) {
        struct mount mount;
        if (!parse_mount(line, controller, &mount)) continue;
        const char *tail = below(mount.source, path);
        if (tail && place(root, mount.target, tail, &candidate)) {
            *out = candidate;
            found = exact = true;
        } else if (!found && place(root, mount.target, "", &candidate)) {
            *out = candidate;
            found = true;
        }
    }
    text_file_close(&file);
    return found;
}

bool cgroup_up(struct cgroup_dir *dir)
{
    size_t n = strlen(dir->path);
    if (n <= dir->top) return false;
    do n--;
    while (n > dir->top && dir->path[n] != '/');
    dir->path[n] = '\0';
    return true;
}

static bool open_in(const struct cgroup_dir *dir, const char *name, struct text_file *file)
{
    char tail[64];
    const int n = snprintf(tail, sizeof tail, "/%s", name);
    return n > 0 && (size_t)n < sizeof tail && text_file_open(file, dir->path, tail);
}

static bool parse_number(const char *text, uint64_t *out)
{
    if (strncmp(text, "max", 3) == 0 || strncmp(text, "-1", 2) == 0) {
        *out = UINT64_MAX;
        return true;
    }
    if (*text < '0' || *text > '9') return false;
    errno = 0;
    const unsigned long long value = strtoull(text, NULL, 10);
    *out = errno == ERANGE ? UINT64_MAX : (uint64_t)value;
    return true;
}

bool cgroup_line(const struct cgroup_dir *dir, const char *file, char *line, size_t capacity)
{
    struct text_file in;
    if (!open_in(dir, file, &in)) return false;
    const bool ok = text_file_line(&in, line, capacity);
    text_file_close(&in);
    return ok;
}

bool cgroup_number(const struct cgroup_dir *dir, const char *file, uint64_t *out)
{
    char line[64];
    return cgroup_line(dir, file, line, sizeof line) && parse_number(line, out);
}

bool cgroup_keyed(const struct cgroup_dir *dir, const char *file, const char *key, uint64_t *out)
{
    struct text_file in;
    if (!open_in(dir, file, &in)) return false;
    const size_t n = strlen(key);
    char line[256];
    bool found = false;
    while (!found && text_file_line(&in, line, sizeof line))
        found = strncmp(line, key, n) == 0 && line[n] == ' ' && parse_number(line + n + 1, out);
    text_file_close(&in);
    return found;
}
