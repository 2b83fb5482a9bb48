#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <wchar.h>

#include "windows/winapi.h"

/* Not in every version of the headers. */
#ifndef ERROR_STOPPED_ON_SYMLINK
#define ERROR_STOPPED_ON_SYMLINK 681L
#endif
#ifndef ERROR_DISK_QUOTA_EXCEEDED
#define ERROR_DISK_QUOTA_EXCEEDED 1295L
#endif

enum { PLAIN_PATH_MOST = 240 }; /* directories must leave room for a name of the old kind */

wchar_t *wide_text(const char *text)
{
    const int units = MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, text, -1, NULL, 0);
    if (units <= 0 || units > WIDE_MOST) {
        errno = units <= 0 ? EILSEQ : ENAMETOOLONG;
        return NULL;
    }
    wchar_t *wide = malloc((size_t)units * sizeof *wide);
    if (wide == NULL) {
        errno = ENOMEM;
        return NULL;
    }
    (void)MultiByteToWideChar(CP_UTF8, MB_ERR_INVALID_CHARS, text, -1, wide, units);
    return wide;
}

char *narrow_text(const wchar_t *text)
{
    const int bytes = WideCharToMultiByte(CP_UTF8, 0, text, -1, NULL, 0, NULL, NULL);
    char *narrow = bytes > 0 ? malloc((size_t)bytes) : NULL;
    if (narrow != NULL) (void)WideCharToMultiByte(CP_UTF8, 0, text, -1, narrow, bytes, NULL, NULL);
    return narrow;
}

/* "\\?\C:\..." and "\\?\UNC\server\share\...": taken literally, so the path must be absolute. */
static wchar_t *extended(const wchar_t *path)
{
    static const wchar_t drive[] = L"\\\\?\\", share[] = L"\\\\?\\UNC\\";
    const DWORD room = GetFullPathNameW(path, 0, NULL, NULL);
    if (room == 0 || room > WIDE_MOST) {
        errno = room == 0 ? EINVAL : ENAMETOOLONG;
        return NULL;
    }
    const size_t most = sizeof share / sizeof *share;
    wchar_t *out = malloc((room + most) * sizeof *out);
    wchar_t *full = malloc(room * sizeof *full);
    const DWORD n = full != NULL ? GetFullPathNameW(path, room, full, NULL) : 0;
    if (out == NULL || n == 0 || n >= room) {
        free(out);
        free(full);
        errno = ENOMEM;
        return NULL;
    }
    const int is_share = full[0] == L'\\' && full[1] == L'\\';
    wcscpy(out, is_share ? share : drive);
    wcscat(out, is_share ? full + 2 : full);
    free(full);
    return out;
}

wchar_t *wide_path(const char *path)
{
    wchar_t *wide = wide_text(path);
    if (wide == NULL || wcslen(wide) < PLAIN_PATH_MOST || wcsncmp(wide, L"\\\\?\\", 4) == 0)
        return wide;
    wchar_t *full = extended(wide);
    free(wide);
    return full;
}

int failed(void)
{
    static const struct {
        DWORD windows;
        int code;
    } same[] = {
        {ERROR_FILE_NOT_FOUND, ENOENT},     {ERROR_PATH_NOT_FOUND, ENOENT},
        {ERROR_INVALID_NAME, ENOENT},       {ERROR_BAD_PATHNAME, ENOENT},
        {ERROR_DIRECTORY, ENOTDIR},         {ERROR_ACCESS_DENIED, EACCES},
        {ERROR_SHARING_VIOLATION, EBUSY},   {ERROR_LOCK_VIOLATION, EBUSY},
        {ERROR_DELETE_PENDING, EBUSY},      {ERROR_ALREADY_EXISTS, EEXIST},
        {ERROR_FILE_EXISTS, EEXIST},        {ERROR_DISK_FULL, ENOSPC},
        {ERROR_HANDLE_DISK_FULL, ENOSPC},   {ERROR_DISK_QUOTA_EXCEEDED, ENOSPC},
        {ERROR_FILE_TOO_LARGE, EFBIG},      {ERROR_WRITE_PROTECT, EROFS},
        {ERROR_NOT_ENOUGH_MEMORY, ENOMEM},  {ERROR_OUTOFMEMORY, ENOMEM},
        {ERROR_COMMITMENT_LIMIT, ENOMEM},   {ERROR_NO_SYSTEM_RESOURCES, ENOMEM},
        {ERROR_TOO_MANY_OPEN_FILES, EMFILE}, {ERROR_INVALID_HANDLE, EBADF},
        {ERROR_INVALID_PARAMETER, EINVAL},  {ERROR_NOT_SUPPORTED, EINVAL},
        {ERROR_INVALID_FUNCTION, EINVAL},   {ERROR_CANT_ACCESS_FILE, ELOOP},
        {ERROR_STOPPED_ON_SYMLINK, ELOOP},  {ERROR_NOT_SAME_DEVICE, EXDEV},
        {ERROR_DEV_NOT_EXIST, ENODEV},      {ERROR_DEVICE_NOT_CONNECTED, ENODEV},
        {ERROR_FILENAME_EXCED_RANGE, ENAMETOOLONG},
    };
    const DWORD error = GetLastError();
    errno = EIO;
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        if (same[i].windows == error) errno = same[i].code;
    return -1;
}
