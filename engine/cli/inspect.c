#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/manifest_scan.h"

enum { KINDS_MAX = 16 };

static uint64_t number(struct span object, const char *key)
{
    struct span value;
    uint64_t n = 0;
    return scan_member(object, key, &value) && scan_u64(value, &n) ? n : 0;
}

static struct span string(struct span object, const char *key)
{
    struct span value, text;
    const struct span none = {"?", 1};
    return scan_member(object, key, &value) && scan_string(value, &text) ? text : none;
}

static struct span member(struct span object, const char *key)
{
    struct span value = {"", 0};
    scan_member(object, key, &value);
    return value;
}

static struct span element(struct span array, uint64_t index)
{
    struct span value = {"", 0};
    size_t at = 0;
    for (uint64_t i = 0; scan_next(array, &at, &value); i++)
        if (i == index) return value;
    return (struct span){"", 0};
}

/* Adds one to the count of a name. */
struct tally {
    struct span name[KINDS_MAX];
    uint64_t count[KINDS_MAX], bytes[KINDS_MAX];
    size_t n;
};

static void tally_add(struct tally *t, struct span name, uint64_t bytes)
{
    size_t i = 0;
    while (i < t->n && (t->name[i].n != name.n || memcmp(t->name[i].p, name.p, name.n) != 0)) i++;
    if (i == KINDS_MAX) return;
    if (i == t->n) t->name[t->n++] = name;
    t->count[i]++;
    t->bytes[i] += bytes;
}

static void tally_print(const struct tally *t, const char *label, bool with_bytes)
{
    printf("%-15s ", label);
    for (size_t i = 0; i < t->n; i++) {
        char bytes[32];
        printf("%s%llu %.*s", i > 0 ? ", " : "", (unsigned long long)t->count[i],
               (int)t->name[i].n, t->name[i].p);
        if (with_bytes) printf(" (%s)", format_bytes(t->bytes[i], bytes));
    }
    printf("%s\n", t->n > 0 ? "" : "none");
}

static void print_parts(struct span model)
{
    const struct span mixers = member(model, "mixers"), ffns = member(model, "ffns");
    const struct span layers = member(model, "layers");
    struct tally mixer_kinds = {.n = 0}, ffn_kinds = {.n = 0};
    struct span layer, ffn;
    for (size_t at = 0; scan_next(layers, &at, &layer);) {
        tally_add(&mixer_kinds, string(element(mixers, number(layer, "mixer")), "kind"), 0);
        tally_add(&ffn_kinds, string(element(ffns, number(layer, "ffn")), "kind"), 0);
    }
    tally_print(&mixer_kinds, "mixers", false);
    tally_print(&ffn_kinds, "ffns", false);
    for (size_t at = 0; scan_next(ffns, &at, &ffn);) {
        const struct span kind = string(ffn, "kind");
        if (number(ffn, "experts") == 0) continue;
        printf("%-15.*s %llu experts, %llu for each token, width %llu, shared %llu\n", (int)kind.n,
               kind.p, (unsigned long long)number(ffn, "experts"),
               (unsigned long long)number(ffn, "top_k"), (unsigned long long)number(ffn, "inner"),
               (unsigned long long)number(ffn, "shared_inner"));
    }
}

/* What nobody checked must not reach a terminal as it is; a string's control characters are escaped
 * in JSON but for DEL and the C1 ones, which lie in C2 80 to C2 9F. */
static void print_free_text(const char *label, struct span text)
{
    printf("%-15s ", label);
    for (size_t i = 0; i < text.n; i++) {
        const unsigned char c = (unsigned char)text.p[i];
        const bool c1 = c == 0xC2 && i + 1 < text.n && (unsigned char)text.p[i + 1] < 0xA0;
        putchar(c == 0x7f || c1 ? '?' : c);
        i += c1;
    }
    putchar('\n');
}

static void print_human(struct span manifest, const hr_plan_result *plan, const char *sha256)
{
    const struct span model = member(manifest, "model"), trunk = member(manifest, "trunk");
    const struct span name = string(model, "name"), provenance = member(manifest, "provenance");
    const struct span family = string(provenance, "family");
    struct tally trunk_codecs = {.n = 0}, bank_codecs = {.n = 0};
    struct span item;
    uint64_t expert_bytes = 0;
    for (size_t at = 0; scan_next(member(trunk, "tensors"), &at, &item);)
        tally_add(&trunk_codecs, string(item, "codec"), number(item, "bytes"));
    for (size_t at = 0; scan_next(member(manifest, "experts"), &at, &item);) {
        const uint64_t bytes = number(item, "experts") * number(item, "record_bytes");
        tally_add(&bank_codecs, string(item, "codec"), bytes);
        expert_bytes += bytes;
    }
    char a[32], b[32];
    printf("name            %.*s\n", (int)name.n, name.p);
    print_free_text("family", family);
    printf("parameters      %llu\n", (unsigned long long)number(manifest, "parameters"));
    printf("vocabulary      %llu, hidden size %llu, positions up to %llu\n",
           (unsigned long long)number(model, "vocab_size"),
           (unsigned long long)number(model, "hidden_size"),
           (unsigned long long)number(model, "max_position"));
    print_parts(model);
    tally_print(&trunk_codecs, "trunk tensors", true);
    tally_print(&bank_codecs, "expert banks", true);
    printf("trunk           %s\n", format_bytes(number(trunk, "bytes"), a));
    printf("experts         %u records of %s, %s in all\n", plan->total_experts,
           format_bytes(plan->record_bytes, a), format_bytes(expert_bytes, b));
    const struct span tokenizer = member(manifest, "tokenizer");
    printf("tokenizer       %s\n", tokenizer.n > 0 && tokenizer.p[0] == '{'
                                       ? format_bytes(number(tokenizer, "bytes"), a)
                                       : "none (token ids only)");
    printf("working set     %s (the experts of one token)\n", format_bytes(plan->working_set, a));
    printf("ram             floor %s", format_bytes(plan->floor, a));
    printf(", recommended %s\n", format_bytes(plan->recommended, b));
    printf("sha256          %s\n", sha256);
}

static void print_json(const char *path, struct span manifest, const hr_plan_result *plan,
                       const char *sha256)
{
    struct json_out j;
    json_out_init(&j, stdout);
    out_open(&j, NULL, '{');
    out_string(&j, "path", path);
    out_string(&j, "container_sha256", sha256);
    out_plan(&j, "plan", plan);
    out_raw(&j, "manifest", manifest.p, manifest.n);
    out_close(&j, '}');
    json_out_end(&j);
}

static int read_manifest(const char *path, bool json, char **bytes, size_t *n)
{
    static const char name[] = "/manifest.json";
    const size_t length = strlen(path);
    char *file = malloc(length + sizeof name);
    if (file == NULL) return report_failure(HR_ERR_MEMORY, json, "inspect: no memory");
    memcpy(file, path, length);
    memcpy(file + length, name, sizeof name);
    const int code = read_input(file, json, bytes, n);
    free(file);
    return code;
}

int command_inspect(int argc, char **argv)
{
    struct model_options o;
    const char *path;
    const int parsed = model_command_parse(argc, argv, "inspect", false, &o, &path);
    if (parsed != EXIT_OK) return parsed;
    size_t n;
    char *bytes;
    hr_error err = {0};
    hr_plan_result plan = {.size = sizeof plan};
    const hr_status status = hr_plan(path, &o.params, &plan, &err);
    if (status != HR_OK) return finish_output(report_error(status, &err, o.json));
    const int code = read_manifest(path, o.json, &bytes, &n);
    if (code != EXIT_OK) return code;

    hr_sha256 hash;
    uint8_t digest[32];
    char hex[65];
    hr_sha256_init(&hash);
    hr_sha256_update(&hash, bytes, n);
    hr_sha256_final(&hash, digest);
    for (size_t i = 0; i < 32; i++) snprintf(hex + 2 * i, 3, "%02x", digest[i]);
    while (n > 0 && memchr(" \t\r\n", bytes[n - 1], 4) != NULL) n--;
    const struct span manifest = {bytes, n};
    if (o.json) print_json(path, manifest, &plan, hex);
    else print_human(manifest, &plan, hex);
    free(bytes);
    return finish_output(EXIT_OK);
}
