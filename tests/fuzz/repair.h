/* Makes an edited manifest consistent again: whatever dimensions and kinds the model has now, the
 * tensors, banks and files get the shapes it needs. So that a mutation does not end at the first
 * check but goes on into a forward pass through a model nobody ever converted. */
#ifndef FUZZ_REPAIR_H
#define FUZZ_REPAIR_H

#include "work_container.h"

/* Changes the tree and stores every data file that follows from it. False when the model cannot be
 * (a kind that is not known, a dimension that is refused, more than a few MiB): then nothing is
 * stored. */
bool repair_container(struct base *b, struct node *manifest);

#endif
