#include "cli/args.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "headrace.h"

bool parse_u64(const char *text, uint64_t max, uint64_t *out)
{
    uint64_t value = 0;
    if (*text == '\0') return false;
    for (; *text != '\0'; text++) {
        if (*text < '0' || *text > '9') return false;
        const uint64_t digit = (uint64_t)(*text - '0');
        if (value > (UINT64_MAX - digit) / 10) return false;
        value = value * 10 + digit;
    }
    if (value > max) return false;
    *out = value;
    return true;
}

static bool size_unit(const char *text, uint64_t *unit)
{
    static const struct {
        const char *name;
        uint64_t bytes;
    } units[] = {{"", 1}, {"B", 1}, {"KiB", 1ull << 10}, {"MiB", 1ull << 20}, {"GiB", 1ull << 30},
                 {"TiB", 1ull << 40}};
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        if (strcasecmp(text, units[i].name) != 0) continue;
        *unit = units[i].bytes;
        return true;
    }
    return false;
}

bool parse_size(const char *text, uint64_t *out)
{
    char whole[24] = "";
    size_t n = 0;
    for (; isdigit((unsigned char)*text) && n < sizeof whole - 1; text++) whole[n++] = *text;
    uint64_t value, unit, numerator = 0, denominator = 1;
    if (!parse_u64(whole, UINT64_MAX, &value)) return false;
    if (*text == '.') {
        text++;
        if (!isdigit((unsigned char)*text)) return false;
        for (; isdigit((unsigned char)*text); text++) {
            if (denominator >= 1000000) continue; /* finer than a millionth does not matter */
            numerator = numerator * 10 + (uint64_t)(*text - '0');
            denominator *= 10;
        }
    }
    if (!size_unit(text, &unit) || (denominator > 1 && unit == 1)) return false;
    if (value > UINT64_MAX / unit) return false;
    const uint64_t part = unit / denominator * numerator + unit % denominator * numerator / denominator;
    if (value * unit > UINT64_MAX - part) return false;
    *out = value * unit + part;
    return true;
}

bool parse_real(const char *text, float *out)
{
    if (*text == '\0' || strspn(text, "0123456789+-.eE") != strlen(text)) return false;
    char *end;
    const float value = strtof(text, &end);
    if (*end != '\0' || !isfinite(value)) return false;
    *out = value;
    return true;
}

static bool parse_choice(const char *text, const char *choices, int32_t *out)
{
    const size_t n = strlen(text);
    int32_t index = 0;
    for (const char *at = choices; n > 0; index++) {
        const size_t length = strcspn(at, "|");
        if (length == n && memcmp(at, text, n) == 0) {
            *out = index;
            return true;
        }
        if (at[length] == '\0') return false;
        at += length + 1;
    }
    return false;
}

/* "auto|" and the kernels that can run here, for messages; true when `text` is one of them. */
static bool is_isa(const char *text, char names[128])
{
    bool known = strcmp(text, "auto") == 0;
    size_t used = (size_t)snprintf(names, 128, "auto");
    const char *name;
    for (uint32_t i = 0; (name = hr_isa_name(i)) != NULL; i++) {
        known |= strcmp(text, name) == 0;
        if (used + strlen(name) + 2 <= 128) used += (size_t)snprintf(names + used, 128 - used, "|%s", name);
    }
    return known;
}

static bool store(const struct cli_option *o, const char *text, char message[256])
{
    uint64_t number = 0;
    const char *want;
    char names[128];
    bool ok = true;
    switch (o->kind) {
    case OPTION_FLAG:
        *(bool *)o->value = true;
        return true;
    case OPTION_TEXT:
        *(const char **)o->value = text;
        return true;
    case OPTION_PATH:
        want = "the path of a file";
        ok = *text != '\0';
        *(const char **)o->value = text;
        break;
    case OPTION_LIST: {
        struct text_list *list = o->value;
        want = "at most 16 times";
        ok = list->count < TEXT_LIST_MAX;
        if (ok) list->item[list->count++] = text;
        break;
    }
    case OPTION_U32:
        want = "a whole number from 0 to 4294967295";
        ok = parse_u64(text, UINT32_MAX, &number);
        if (ok) *(uint32_t *)o->value = (uint32_t)number;
        break;
    case OPTION_U64:
        want = "a whole number from 0 to 18446744073709551615";
        ok = parse_u64(text, UINT64_MAX, o->value);
        break;
    case OPTION_SIZE:
        want = "a size such as 512MiB, 1.5GiB or a number of bytes";
        ok = parse_size(text, o->value);
        break;
    case OPTION_REAL:
        want = "a number";
        ok = parse_real(text, o->value);
        break;
    case OPTION_CHOICE:
        want = o->choices;
        ok = parse_choice(text, o->choices, o->value);
        break;
    case OPTION_ISA:
        want = names;
        ok = is_isa(text, names);
        if (ok) snprintf(o->value, 16, "%s", text);
        break;
    case OPTION_AHEAD: {
        int32_t *ahead = o->value;
        want = "auto, off or a number from 1 to 64";
        *ahead = strcmp(text, "off") == 0 ? 0 : -1;
        if (*ahead == 0 || strcmp(text, "auto") == 0) break;
        ok = parse_u64(text, 64, &number);
        *ahead = (int32_t)number;
        break;
    }
    default:
        return false;
    }
    if (!ok) snprintf(message, 256, "%s: '%.80s' is not valid: give %s", o->name, text, want);
    return ok;
}

static const struct cli_option *find(const struct cli_option *options, size_t n, const char *arg,
                                 size_t length)
{
    for (size_t i = 0; i < n; i++)
        if (strlen(options[i].name) == length && memcmp(options[i].name, arg, length) == 0)
            return &options[i];
    return NULL;
}

bool args_parse(int argc, char **argv, const struct cli_option *options, size_t option_count,
                const char **positional, size_t capacity, size_t *count, char message[256])
{
    bool only_positional = false;
    *count = 0;
    for (int i = 0; i < argc; i++) {
        const char *arg = argv[i];
        if (only_positional || arg[0] != '-' || arg[1] == '\0') {
            if (*count == capacity) {
                snprintf(message, 256, "'%.100s' is one argument too many", arg);
                return false;
            }
            positional[(*count)++] = arg;
            continue;
        }
        if (strcmp(arg, "--") == 0) {
            only_positional = true;
            continue;
        }
        const char *equals = arg[1] == '-' ? strchr(arg, '=') : NULL;
        const size_t length = equals != NULL ? (size_t)(equals - arg) : strlen(arg);
        const struct cli_option *o = find(options, option_count, arg, length);
        if (o == NULL) {
            snprintf(message, 256, "unknown option '%.100s'", arg);
            return false;
        }
        const char *value = equals != NULL ? equals + 1 : NULL;
        if (o->kind == OPTION_FLAG && value != NULL) {
            snprintf(message, 256, "%s takes no value", o->name);
            return false;
        }
        if (o->kind != OPTION_FLAG && value == NULL) {
            if (i + 1 == argc) {
                snprintf(message, 256, "%s needs a value", o->name);
                return false;
            }
            value = argv[++i];
        }
        if (!store(o, value, message)) return false;
        if (o->given != NULL) *o->given = true;
    }
    return true;
}
