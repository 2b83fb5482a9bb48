/* Private anonymous memory over VirtualAlloc. */
#ifndef WINDOWS_SYS_MMAN_H
#define WINDOWS_SYS_MMAN_H

#include <stddef.h>
#include <stdint.h>

#define PROT_NONE 0
#define PROT_READ 1
#define PROT_WRITE 2
#define MAP_PRIVATE 2
#define MAP_FIXED 0x10
#define MAP_ANONYMOUS 0x20
#define MAP_FAILED ((void *)-1)

/* Zeroed pages. With MAP_FIXED: in place of pages that an earlier call gave. */
void *mmap(void *at, size_t bytes, int protection, int flags, int fd, int64_t offset);
/* The whole of what one call gave. */
int munmap(void *p, size_t bytes);
/* Raise the working set's minimum by as much as they lock, and lower it again. */
int mlock(const void *p, size_t bytes);
int munlock(const void *p, size_t bytes);
int mprotect(void *p, size_t bytes, int protection);

#endif
