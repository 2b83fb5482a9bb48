/* Every byte the engine allocates goes through a budget: the user's `ram` is a hard ceiling. */
#ifndef BASE_MEM_H
#define BASE_MEM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct mem_budget {
    _Atomic uint64_t used, peak;
    _Atomic uint64_t limit; /* 0 = no limit */
};

void mem_budget_init(struct mem_budget *b, uint64_t limit);

/* From so many bytes on a block asks for huge pages: they save more than they waste. */
#define MEM_HUGE_PAGES ((size_t)8 << 20)
/* Zeroed, aligned to 64 bytes (4096 when bytes >= 64 KiB: those come from mmap and go back
 * to the system when freed). NULL when the budget or the system refuses. b may be NULL. */
void *mem_alloc(struct mem_budget *b, size_t bytes);
/* bytes must be what was asked for. p may be NULL. */
void mem_free(struct mem_budget *b, void *p, size_t bytes);
/* What mem_alloc(bytes) really costs (rounding included): plans must use the same figure. */
uint64_t mem_cost(size_t bytes);

/* Gives the whole pages inside a part of a large block back to the system and takes them off the
 * account; they read as zeros. mem_retake charges them again before they are used, false when the
 * budget refuses. *returned counts the block's bytes: with them it is freed. */
void mem_return(struct mem_budget *b, void *part, size_t bytes, size_t *returned);
bool mem_retake(struct mem_budget *b, void *part, size_t bytes, size_t *returned);
void mem_free_returned(struct mem_budget *b, void *p, size_t bytes, size_t returned);

/* Keeps a block's pages in memory, all of them resident at once, until mem_unlock. 0, or the errno
 * of the refusal, after which nothing is locked. */
int mem_lock(void *p, size_t bytes);
void mem_unlock(void *p, size_t bytes);

/* Checked arithmetic for sizes that come from files: false on overflow. */
bool size_mul(size_t a, size_t b, size_t *out);
bool size_add(size_t a, size_t b, size_t *out);
size_t round_up(size_t n, size_t unit); /* unit a power of two; n + unit must not overflow */

#endif
