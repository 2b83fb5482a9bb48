#include <stdio.h>

#include "cli/cli.h"

static void print_info(const hr_model_info *m)
{
    char bytes[32];
    printf("name            %s\n", m->name);
    printf("kernels         %s, %u threads\n", m->isa, m->threads);
    printf("reading         %s, %u at once", m->io_mode, m->io_threads);
    if (m->drives > 1) printf(" from each of %u drives", m->drives);
    printf("\n");
    printf("context         %u of %u tokens, chunk %u\n", m->ctx, m->max_position, m->chunk);
    printf("layers          %u, %u with experts (%u, %u for each token)\n", m->layers,
           m->moe_layers, m->experts, m->top_k);
    char codec[64];
    printf("codecs          trunk %s, experts %s\n", m->trunk_codec,
           format_codec(m->expert_codec, m->expert_activations, codec));
    printf("trunk           %s, %s\n", format_bytes(m->trunk_bytes, bytes),
           m->trunk_locked ? "locked in memory" : "not locked in memory");
    printf("container       %s\n", format_bytes(m->container_bytes, bytes));
    printf("sha256          %s\n", m->container_sha256);
}

/* Without a model: the version and what this CPU can run. With one: it is opened, and what it really uses is shown. */
int command_info(int argc, char **argv)
{
    struct model_options o;
    const char *path;
    const int parsed = model_command_parse(argc, argv, "info", true, &o, &path);
    if (parsed != EXIT_OK) return parsed;
    hr_model_info info = {.size = sizeof info};
    hr_model *model = NULL;
    if (path) {
        hr_error err = {0};
        hr_status status = hr_model_open(path, &o.params, &model, &err);
        if (status == HR_OK) status = hr_model_get_info(model, &info, &err);
        if (status != HR_OK) {
            hr_model_close(model);
            return finish_output(report_error(status, &err, o.json));
        }
    }
    if (o.json) {
        struct json_out j;
        json_out_init(&j, stdout);
        out_open(&j, NULL, '{');
        out_string(&j, "version", hr_version());
        out_open(&j, "isa", '[');
        for (uint32_t i = 0; hr_isa_name(i); i++) out_string(&j, NULL, hr_isa_name(i));
        out_close(&j, ']');
        if (path) {
            out_model(&j, &info);
            out_drives(&j, model);
        }
        out_close(&j, '}');
        json_out_end(&j);
    } else {
        printf("headrace %s\nthis CPU runs   ", hr_version());
        for (uint32_t i = 0; hr_isa_name(i); i++) printf(" %s", hr_isa_name(i));
        printf("\n");
        if (path) {
            print_info(&info);
            print_drives(model, stdout);
        }
    }
    hr_model_close(model);
    return finish_output(EXIT_OK);
}
