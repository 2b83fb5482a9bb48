/* Aligned reads that bypass the page cache where the file system really can. */
#ifndef STORE_DIRECT_IO_H
#define STORE_DIRECT_IO_H

#include <stdbool.h>
#include <stdint.h>

#include "base/mem.h"
#include "base/status.h"

enum { IO_ALIGN = 4096 };

struct direct_file {
    int fd;             /* direct or buffered descriptor in use */
    bool direct;        /* what a real transfer proved, not what open() said */
    uint64_t bytes;
    char name[132];     /* for errors */
};

/* Opens a regular file beneath dir_fd (closed by direct_file_close). Tries to make the descriptor
 * direct and proves it by one aligned transfer; falls back to buffered with read-ahead off. */
hr_status direct_file_open(int dir_fd, const char *name, bool want_direct, struct direct_file *out,
                           hr_error *err);
/* The same for a regular file of `bytes` that is open already; takes the descriptor over. */
void direct_file_adopt(int fd, uint64_t bytes, const char *name, bool want_direct,
                       struct direct_file *out);
void direct_file_close(struct direct_file *f);
/* offset and bytes multiples of IO_ALIGN, buffer aligned likewise. Repeats EINTR and short reads,
 * one EIO is retried twice; the error names file, offset and errno. *retries is added to. When
 * buffered, the pages are dropped behind. */
hr_status direct_read(struct direct_file *f, uint64_t offset, void *buffer, size_t bytes,
                      uint64_t *retries, hr_error *err);

/* Reads exactly `bytes` at `offset`, repeating EINTR, short reads and first EIOs. */
hr_status file_read_exact(int fd, const char *name, uint64_t offset, void *buffer, size_t bytes,
                          hr_error *err);

/* The whole of a file of 1..max bytes; *data is mem_alloc'ed from b. */
hr_status file_read_whole(int dir_fd, const char *name, uint64_t max, struct mem_budget *b,
                          void **data, size_t *bytes, hr_error *err);

/* Tests replace the system call: same contract as pread. NULL restores it. Not thread-safe. */
typedef int64_t (*pread_fn)(int fd, void *buffer, size_t bytes, int64_t offset);
void direct_io_set_pread(pread_fn fn);

#endif
