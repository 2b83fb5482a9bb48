/* The lock of a whole file, which ends when its descriptor is closed. */
#ifndef WINDOWS_SYS_FILE_H
#define WINDOWS_SYS_FILE_H

#define LOCK_EX 2

int flock(int fd, int how); /* waits */

#endif
