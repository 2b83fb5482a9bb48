/* Which run-time checkers this build carries; they change what memory costs. */
#ifndef BASE_SANITIZER_H
#define BASE_SANITIZER_H

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HAVE_ADDRESS_SANITIZER 1
#endif
#if __has_feature(thread_sanitizer)
#define HAVE_THREAD_SANITIZER 1
#endif
#endif
#if !defined(HAVE_ADDRESS_SANITIZER)
#if defined(__SANITIZE_ADDRESS__)
#define HAVE_ADDRESS_SANITIZER 1
#else
#define HAVE_ADDRESS_SANITIZER 0
#endif
#endif
#if !defined(HAVE_THREAD_SANITIZER)
#if defined(__SANITIZE_THREAD__)
#define HAVE_THREAD_SANITIZER 1
#else
#define HAVE_THREAD_SANITIZER 0
#endif
#endif

#endif
