/* libFuzzer target: a manifest that was edited, and what a container with it leads to.
 * Input: which container; how it is used (two bytes); an edit script. The script's end mark asks for
 * the container to be made consistent with the edits so far; edits behind it stay as they are. */
#include <stdio.h>
#include <stdlib.h>

#include "repair.h"

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct {
    unsigned long inputs, opened, repaired, evaluated;
} counts;

static void report(void)
{
    fprintf(stderr, "manifest: %lu inputs, %lu repaired, %lu opened, %lu evaluated\n", counts.inputs,
            counts.repaired, counts.opened, counts.evaluated);
}

/* Repairing follows the texts of errors: a base with a changed width and a lost tensor must run. */
static void self_check(void)
{
    for (uint8_t i = 0; i < base_count; i++) {
        struct base *b = base_choose(i);
        struct way way;
        struct outcome out;
        struct node *m = tree_copy(&scratch, b->manifest);
        struct node *tensors = node_get(node_get(m, "trunk"), "tensors");
        node_remove(tensors, node_at(tensors, 2));
        node_set_int(&scratch, node_get(m, "model"), "hidden_size", 40);
        way_of(0, &way);
        if (repair_container(b, m) && work_manifest(b, m)) work_run(b, &way, &out);
        if (out.eval == HR_OK) continue;
        fprintf(stderr, "%s: a changed manifest was not repaired (%d %d)\n", b->name, out.open, out.eval);
        exit(1);
    }
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    bases_open(*argc, *argv);
    self_check();
    atexit(report);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct outcome first, second;
    struct way way, other;
    if (size < 4) return 0;
    struct base *b = base_choose(data[0]);
    struct node *m = tree_copy(&scratch, b->manifest);
    const bool twice = data[1] != data[2];
    way_of(data[1], &way);
    way_of(data[2], &other);
    data += 3;
    size -= 3;
    counts.inputs++;
    const size_t used = tree_edit(&scratch, m, data, size);
    if (used > 0 && data[used - 1] % 16 == EDIT_STOP) {
        counts.repaired += repair_container(b, m);
        tree_edit(&scratch, m, data + used, size - used);
    }
    if (!work_manifest(b, m)) return 0;
    work_run(b, &way, &first);
    counts.opened += first.open == HR_OK;
    counts.evaluated += first.eval == HR_OK;
    if (first.open != HR_OK || !twice) return 0;
    work_run(b, &other, &second);
    outcomes_equal(&first, &second);
    return 0;
}
