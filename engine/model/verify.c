#include "model/model.h"

/* Do the description, the index and the tokenizer make a model that opens? */
static hr_status check_model(const struct container *c, hr_error *err)
{
    struct architecture *arch = mem_alloc(NULL, sizeof *arch);
    void *data = NULL;
    size_t bytes = 0;
    if (!arch) return fail(err, HR_ERR_MEMORY, "no memory to verify");
    hr_status st = model_check(c, arch, err);
    if (st == HR_OK && c->has_tokenizer) {
        struct tokenizer *tokenizer = NULL;
        st = container_read(c, "tokenizer.bin", NULL, &data, &bytes, err);
        if (st == HR_OK)
            st = tokenizer_open(data, bytes, arch->vocab_size, NULL, &tokenizer, err);
        tokenizer_free(tokenizer);
        mem_free(NULL, data, bytes);
    }
    mem_free(NULL, arch, sizeof *arch);
    return st;
}

hr_status model_verify(const char *path, const char *const *drives, uint32_t count,
                       hr_verify_fn report, void *user, hr_error *err)
{
    struct container *c;
    hr_error e = {0};
    TRY(container_verify(path, drives, count, report, user, err));
    hr_status st = container_open_drives(path, drives, count, NULL, &c, &e);
    const uint64_t bytes = st == HR_OK ? c->total_bytes : 0;
    if (st == HR_OK) {
        st = check_model(c, &e);
        container_close(c);
    }
    if (st == HR_OK) return HR_OK;
    if (report && st == HR_ERR_FORMAT) (void)report(user, 1, e.detail, bytes, bytes);
    return fail(err, st, "%s", e.detail);
}
