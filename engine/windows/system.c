#include <errno.h>
#include <malloc.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/statvfs.h>

#include "windows/winapi.h"

static DWORD protection_of(int protection)
{
    return protection & PROT_WRITE ? PAGE_READWRITE : protection & PROT_READ ? PAGE_READONLY
                                                                             : PAGE_NOACCESS;
}

void *mmap(void *at, size_t bytes, int protection, int flags, int fd, int64_t offset)
{
    (void)fd, (void)offset;
    if (flags & MAP_FIXED) {
        /* Decommitted pages lose their content and their place in memory; they return as zeros. */
        if (!VirtualFree(at, bytes, MEM_DECOMMIT) ||
            VirtualAlloc(at, bytes, MEM_COMMIT, protection_of(protection)) == NULL) {
            (void)failed();
            return MAP_FAILED;
        }
        return at;
    }
    void *p = VirtualAlloc(NULL, bytes, MEM_RESERVE | MEM_COMMIT, protection_of(protection));
    if (p != NULL) return p;
    (void)failed();
    return MAP_FAILED;
}

int munmap(void *p, size_t bytes)
{
    (void)bytes;
    return VirtualFree(p, 0, MEM_RELEASE) ? 0 : failed();
}

int mprotect(void *p, size_t bytes, int protection)
{
    DWORD before;
    return VirtualProtect(p, bytes, protection_of(protection), &before) ? 0 : failed();
}

/* What is locked counts against the minimum, which stays well above what the process needs besides. */
static bool grow_working_set(int64_t bytes)
{
    SIZE_T least, most;
    const HANDLE self = GetCurrentProcess();
    if (!GetProcessWorkingSetSize(self, &least, &most)) return false;
    if (bytes < 0 && least < (uint64_t)-bytes) return false;
    least += (SIZE_T)bytes;
    most += (SIZE_T)bytes;
    return SetProcessWorkingSetSize(self, least, most);
}

int mlock(const void *p, size_t bytes)
{
    if (!grow_working_set((int64_t)bytes)) return failed();
    if (VirtualLock((void *)(uintptr_t)p, bytes)) return 0;
    const int result = failed();
    (void)grow_working_set(-(int64_t)bytes);
    return result;
}

int munlock(const void *p, size_t bytes)
{
    if (!VirtualUnlock((void *)(uintptr_t)p, bytes)) return failed();
    (void)grow_working_set(-(int64_t)bytes);
    return 0;
}

int fstatvfs(int fd, struct statvfs *out)
{
    wchar_t path[WIDE_MOST + 1];
    ULARGE_INTEGER room;
    const DWORD n = GetFinalPathNameByHandleW((HANDLE)_get_osfhandle(fd), path, WIDE_MOST,
                                              VOLUME_NAME_DOS);
    if (n == 0 || n > WIDE_MOST) return failed();
    wchar_t *slash = wcsrchr(path, L'\\');
    if (slash != NULL) slash[1] = L'\0'; /* the directory that holds the file */
    if (!GetDiskFreeSpaceExW(path, &room, NULL, NULL)) return failed();
    *out = (struct statvfs){.f_bavail = room.QuadPart, .f_frsize = 1};
    return 0;
}

long posix_sysconf(int name)
{
    SYSTEM_INFO info;
    if (name != _SC_PAGESIZE) {
        errno = EINVAL;
        return -1;
    }
    GetSystemInfo(&info);
    return (long)info.dwPageSize;
}

int posix_memalign(void **out, size_t alignment, size_t bytes)
{
    *out = _aligned_malloc(bytes, alignment);
    return *out != NULL ? 0 : ENOMEM;
}

void posix_aligned_free(void *p)
{
    _aligned_free(p);
}

int strerror_r(int code, char *text, size_t capacity)
{
    return strerror_s(text, capacity, code);
}
