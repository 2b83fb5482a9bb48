#include "cli/cold.h"

#include <stdlib.h>

#include "windows/winapi.h"

/* Opening a file past the cache makes Windows drop what it holds of it, if nobody else has it open. */
static void drop(const wchar_t *directory, const wchar_t *name)
{
    wchar_t path[WIDE_MOST + 1];
    if (wcslen(directory) + wcslen(name) + 2 > WIDE_MOST) return;
    wcscpy(path, directory);
    wcscat(path, L"\\");
    wcscat(path, name);
    const HANDLE file = CreateFileW(path, GENERIC_READ, FILE_SHARE_READ, NULL, OPEN_EXISTING,
                                    FILE_FLAG_NO_BUFFERING | FILE_FLAG_OPEN_REPARSE_POINT, NULL);
    if (file != INVALID_HANDLE_VALUE) (void)CloseHandle(file);
}

void cold_drop(const char *directory)
{
    wchar_t *wide = wide_path(directory), pattern[WIDE_MOST + 1];
    WIN32_FIND_DATAW entry;
    if (wide == NULL || wcslen(wide) + 3 > WIDE_MOST) {
        free(wide);
        return;
    }
    wcscpy(pattern, wide);
    wcscat(pattern, L"\\*");
    const HANDLE search = FindFirstFileW(pattern, &entry);
    if (search != INVALID_HANDLE_VALUE) {
        do {
            if (!(entry.dwFileAttributes & FILE_ATTRIBUTE_DIRECTORY)) drop(wide, entry.cFileName);
        } while (FindNextFileW(search, &entry));
        (void)FindClose(search);
    }
    free(wide);
}

/* The counters of a process tell what it asked for, not what came from a drive. */
bool cold_physical_bytes(uint64_t *bytes)
{
    (void)bytes;
    return false;
}
