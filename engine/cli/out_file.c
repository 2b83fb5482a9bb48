#include "cli/out_file.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool is_special(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && !S_ISREG(st.st_mode);
}

bool out_file_open(struct out_file *f, const char *path)
{
    *f = (struct out_file){.path = path};
    if (strcmp(path, "-") == 0) {
        f->file = stdout;
        return true;
    }
    if (!is_special(path)) {
        const size_t n = strlen(path) + sizeof ".partial";
        f->partial = malloc(n);
        if (!f->partial) return false;
        snprintf(f->partial, n, "%s.partial", path);
    }
    f->file = fopen(f->partial ? f->partial : path, "w");
    if (f->file) return true;
    const int code = errno;
    free(f->partial);
    errno = code;
    return false;
}

bool out_file_close(struct out_file *f, bool keep)
{
    if (f->file == stdout) return true;
    int code = 0;
    errno = 0;
    bool ok = fflush(f->file) == 0 && !ferror(f->file);
    if (ok && f->partial && fsync(fileno(f->file)) != 0 && errno != EINVAL) ok = false;
    if (!ok) code = errno;
    errno = 0;
    if (fclose(f->file) != 0 && ok) {
        ok = false;
        code = errno;
    }
    if (f->partial && keep && ok && rename(f->partial, f->path) != 0) {
        ok = false;
        code = errno;
    }
    if (f->partial && (!keep || !ok)) (void)unlink(f->partial);
    free(f->partial);
    errno = code;
    return ok;
}
