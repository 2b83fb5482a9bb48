/* What the files of this folder share. */
#ifndef WINDOWS_WINAPI_H
#define WINDOWS_WINAPI_H

#define WIN32_LEAN_AND_MEAN
#include <stdbool.h>
#include <stddef.h>
#include <windows.h>

enum { WIDE_MOST = 32767 }; /* units of a path, its end not counted */

/* UTF-8 to UTF-16; NULL with errno set when it is not UTF-8, too long, or memory is short. Free it. */
wchar_t *wide_text(const char *text);
/* The same for a path: long ones get the prefix that lifts the limit of 260 units. */
wchar_t *wide_path(const char *path);
/* UTF-16 to UTF-8; unpaired surrogates become U+FFFD. Free it; NULL when memory is short. */
char *narrow_text(const wchar_t *text);
/* Sets errno from GetLastError(); returns -1. */
int failed(void);

#endif
