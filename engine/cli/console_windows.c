#include <stdlib.h>

#include "cli/cli.h"
#include "windows/winapi.h"
#include <shellapi.h>

bool console_prepare(int *argc, char ***argv)
{
    int count = 0;
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++) (void)_setmode(fd, O_BINARY);
    (void)SetConsoleOutputCP(CP_UTF8);
    /* What main() was given went through the code page of the system, which loses characters. */
    wchar_t **wide = CommandLineToArgvW(GetCommandLineW(), &count);
    if (wide == NULL) return false;
    char **narrow = calloc((size_t)count + 1, sizeof *narrow);
    bool ok = narrow != NULL;
    for (int i = 0; ok && i < count; i++) ok = (narrow[i] = narrow_text(wide[i])) != NULL;
    (void)LocalFree(wide);
    if (!ok) return false;
    *argc = count;
    *argv = narrow;
    return true;
}
