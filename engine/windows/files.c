#include <stdarg.h>
#include <stdlib.h>
#include <sys/file.h>

#include "windows/winapi.h"
#include <winternl.h>

enum { SHARE_ALL = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE };

static HANDLE handle_of(int fd)
{
    return (HANDLE)_get_osfhandle(fd);
}

static int descriptor_of(HANDLE handle, int flags)
{
    const int fd = _open_osfhandle((intptr_t)handle, (flags & O_RDWR) | O_BINARY | O_NOINHERIT);
    if (fd < 0) (void)CloseHandle(handle);
    return fd;
}

static DWORD access_of(int flags)
{
    if (flags & O_DIRECTORY) return FILE_LIST_DIRECTORY | FILE_TRAVERSE | FILE_READ_ATTRIBUTES;
    if (flags & O_RDWR) return GENERIC_READ | GENERIC_WRITE;
    return flags & O_WRONLY ? GENERIC_WRITE | FILE_READ_ATTRIBUTES : GENERIC_READ;
}

static DWORD disposition_of(int flags)
{
    if (flags & O_CREAT)
        return flags & O_EXCL ? CREATE_NEW : flags & O_TRUNC ? CREATE_ALWAYS : OPEN_ALWAYS;
    return flags & O_TRUNC ? TRUNCATE_EXISTING : OPEN_EXISTING;
}

static unsigned mode_of(DWORD attributes)
{
    if (attributes & FILE_ATTRIBUTE_REPARSE_POINT) return S_IFLNK;
    return attributes & FILE_ATTRIBUTE_DIRECTORY ? S_IFDIR : S_IFREG;
}

static int facts(HANDLE handle, struct posix_stat *out)
{
    BY_HANDLE_FILE_INFORMATION info;
    memset(out, 0, sizeof *out);
    if (GetFileType(handle) != FILE_TYPE_DISK) { /* a console, a pipe, a device */
        out->st_mode = S_IFCHR;
        return 0;
    }
    if (!GetFileInformationByHandle(handle, &info)) return failed();
    out->st_mode = mode_of(info.dwFileAttributes);
    out->st_size = (int64_t)((uint64_t)info.nFileSizeHigh << 32 | info.nFileSizeLow);
    out->st_dev = info.dwVolumeSerialNumber;
    out->st_ino = (uint64_t)info.nFileIndexHigh << 32 | info.nFileIndexLow;
    return 0;
}

/* A descriptor, unless what was opened is not what the flags ask for. */
static int checked(HANDLE handle, int flags)
{
    struct posix_stat st;
    int code = 0;
    if (facts(handle, &st) != 0)
        code = errno;
    else if ((flags & O_NOFOLLOW) && S_ISLNK(st.st_mode))
        code = ELOOP;
    else if ((flags & O_DIRECTORY) && !S_ISDIR(st.st_mode))
        code = ENOTDIR;
    if (code != 0) {
        (void)CloseHandle(handle);
        errno = code;
        return -1;
    }
    return descriptor_of(handle, flags);
}

int posix_open(const char *path, int flags, ...)
{
    wchar_t *wide = wide_path(path);
    if (wide == NULL) return -1;
    /* Without backup semantics a directory cannot be opened at all; with it, anything can. */
    const DWORD how = FILE_FLAG_BACKUP_SEMANTICS |
                      (flags & O_NOFOLLOW ? FILE_FLAG_OPEN_REPARSE_POINT : 0);
    const HANDLE handle =
        CreateFileW(wide, access_of(flags), SHARE_ALL, NULL, disposition_of(flags), how, NULL);
    free(wide);
    return handle == INVALID_HANDLE_VALUE ? failed() : checked(handle, flags);
}

/* One component: the name of a file in that directory and nothing else. The native call knows no
 * device names ("NUL", "COM1") and strips no dots or blanks. */
static int open_beneath(int directory, const char *name, ACCESS_MASK access, ULONG disposition,
                        ULONG options, HANDLE *out)
{
    OBJECT_ATTRIBUTES object;
    IO_STATUS_BLOCK done;
    UNICODE_STRING text;
    if (name[0] == '\0' || strpbrk(name, "/\\:") || strcmp(name, "..") == 0) {
        errno = EINVAL;
        return -1;
    }
    wchar_t *wide = wide_text(name);
    if (wide == NULL) return -1;
    const size_t bytes = wcslen(wide) * sizeof *wide;
    if (bytes > UINT16_MAX - sizeof *wide) {
        free(wide);
        errno = ENAMETOOLONG;
        return -1;
    }
    text.Buffer = wide;
    text.Length = (USHORT)bytes;
    text.MaximumLength = (USHORT)(bytes + sizeof *wide);
    InitializeObjectAttributes(&object, &text, OBJ_CASE_INSENSITIVE, handle_of(directory), NULL);
    const NTSTATUS status = NtCreateFile(out, access | SYNCHRONIZE, &object, &done, NULL,
                                         FILE_ATTRIBUTE_NORMAL, SHARE_ALL, disposition,
                                         options | FILE_OPEN_REPARSE_POINT, NULL, 0);
    free(wide);
    if (status >= 0) return 0;
    SetLastError(RtlNtStatusToDosError(status));
    return failed();
}

int posix_openat(int directory, const char *name, int flags, ...)
{
    const ULONG disposition =
        !(flags & O_CREAT) ? FILE_OPEN : flags & O_EXCL ? FILE_CREATE : FILE_OPEN_IF;
    HANDLE handle;
    if (open_beneath(directory, name, access_of(flags), disposition, 0, &handle) != 0) return -1;
    return checked(handle, flags | O_NOFOLLOW);
}

int posix_fstat(int fd, struct posix_stat *out)
{
    return facts(handle_of(fd), out);
}

int posix_fstatat(int directory, const char *name, struct posix_stat *out, int flags)
{
    HANDLE handle;
    (void)flags; /* links are never followed */
    if (open_beneath(directory, name, FILE_READ_ATTRIBUTES, FILE_OPEN, 0, &handle) != 0) return -1;
    const int status = facts(handle, out);
    (void)CloseHandle(handle);
    return status;
}

int posix_stat(const char *path, struct posix_stat *out)
{
    wchar_t *wide = wide_path(path);
    if (wide == NULL) return -1;
    const HANDLE handle = CreateFileW(wide, FILE_READ_ATTRIBUTES, SHARE_ALL, NULL, OPEN_EXISTING,
                                      FILE_FLAG_BACKUP_SEMANTICS, NULL);
    free(wide);
    if (handle == INVALID_HANDLE_VALUE) return failed();
    const int status = facts(handle, out);
    (void)CloseHandle(handle);
    return status;
}

/* A handle opened for overlapped use has no position, so that many reads may be under way; each
 * needs an event of its own to wait for. */
static int64_t transfer(int fd, void *buffer, size_t bytes, int64_t offset, int write)
{
    const HANDLE handle = handle_of(fd);
    const DWORD want = bytes < (size_t)1 << 30 ? (DWORD)bytes : (DWORD)1 << 30;
    OVERLAPPED at = {0};
    DWORD done = 0;
    at.Offset = (DWORD)((uint64_t)offset & 0xffffffffu);
    at.OffsetHigh = (DWORD)((uint64_t)offset >> 32);
    at.hEvent = CreateEventW(NULL, TRUE, FALSE, NULL);
    if (at.hEvent == NULL) return failed();
    BOOL ok = write ? WriteFile(handle, buffer, want, NULL, &at)
                    : ReadFile(handle, buffer, want, NULL, &at);
    if (ok || GetLastError() == ERROR_IO_PENDING) ok = GetOverlappedResult(handle, &at, &done, TRUE);
    const DWORD error = ok ? ERROR_SUCCESS : GetLastError();
    (void)CloseHandle(at.hEvent);
    if (ok) return (int64_t)done;
    if (!write && error == ERROR_HANDLE_EOF) return 0;
    SetLastError(error);
    return failed();
}

int64_t posix_pread(int fd, void *buffer, size_t bytes, int64_t offset)
{
    return transfer(fd, buffer, bytes, offset, 0);
}

int64_t posix_pwrite(int fd, const void *buffer, size_t bytes, int64_t offset)
{
    return transfer(fd, (void *)(uintptr_t)buffer, bytes, offset, 1);
}

int64_t posix_read(int fd, void *buffer, size_t bytes)
{
    return _read(fd, buffer, bytes < (size_t)1 << 30 ? (unsigned)bytes : 1u << 30);
}

int64_t posix_write(int fd, const void *buffer, size_t bytes)
{
    return _write(fd, buffer, bytes < (size_t)1 << 30 ? (unsigned)bytes : 1u << 30);
}

int posix_fsync(int fd)
{
    struct posix_stat st;
    if (posix_fstat(fd, &st) == 0 && S_ISDIR(st.st_mode)) {
        errno = EINVAL;
        return -1;
    }
    return FlushFileBuffers(handle_of(fd)) ? 0 : failed();
}

int flock(int fd, int how)
{
    OVERLAPPED first = {0};
    (void)how;
    return LockFileEx(handle_of(fd), LOCKFILE_EXCLUSIVE_LOCK, 0, MAXDWORD, MAXDWORD, &first) ? 0 : failed();
}

int posix_rename(const char *from, const char *to)
{
    wchar_t *source = wide_path(from), *target = wide_path(to);
    int status = -1;
    if (source != NULL && target != NULL)
        status = MoveFileExW(source, target, MOVEFILE_REPLACE_EXISTING | MOVEFILE_WRITE_THROUGH)
                     ? 0
                     : failed();
    free(source);
    free(target);
    return status;
}

int posix_unlink(const char *path)
{
    wchar_t *wide = wide_path(path);
    if (wide == NULL) return -1;
    const int status = DeleteFileW(wide) ? 0 : failed();
    free(wide);
    return status;
}

int posix_unlinkat(int directory, const char *name, int flags)
{
    HANDLE handle;
    (void)flags;
    if (open_beneath(directory, name, DELETE, FILE_OPEN, FILE_DELETE_ON_CLOSE, &handle) != 0)
        return -1;
    return CloseHandle(handle) ? 0 : failed();
}

FILE *posix_fopen(const char *path, const char *mode)
{
    const char *text = strchr(mode, 'w') ? "wb" : strchr(mode, 'a') ? "ab" : "rb";
    const int fd = posix_open(path, text[0] == 'r' ? O_RDONLY
                                    : O_WRONLY | O_CREAT | (text[0] == 'w' ? O_TRUNC : 0));
    if (fd < 0) return NULL;
    if (text[0] == 'a') (void)_lseeki64(fd, 0, SEEK_END);
    FILE *file = _fdopen(fd, text);
    if (file == NULL) (void)_close(fd);
    return file;
}

/* FILE_FLAG_NO_BUFFERING belongs to a file object: another one takes the descriptor's place. */
int posix_set_direct(int fd, int on)
{
    const HANDLE other = ReOpenFile(handle_of(fd), GENERIC_READ, SHARE_ALL,
                                    FILE_FLAG_OVERLAPPED | (on ? FILE_FLAG_NO_BUFFERING : 0));
    if (other == INVALID_HANDLE_VALUE) return failed();
    const int fresh = descriptor_of(other, O_RDONLY);
    if (fresh < 0) return -1;
    const int status = _dup2(fresh, fd);
    (void)_close(fresh);
    return status;
}
