#include <stdio.h>
#include <string.h>

#include "cli/cli.h"

static const char HELP[] =
    "usage: headrace COMMAND MODEL [options]\n"
    "\n"
    "commands\n"
    "  run MODEL        generate text (streamed to standard output)\n"
    "    -p TEXT | -f FILE | - | --ids \"1 2 3\"   the prompt; - reads standard input\n"
    "    -n, --max-tokens N   at most N tokens (default 256; 0 = until the context is full)\n"
    "    --temp, --temperature T   0 = always the likeliest token (default); 0.8 is a usual value\n"
    "    --top-k N  --top-p P  --min-p P  --repeat-penalty R\n"
    "    --seed N         same seed, same text, on every machine (default 0)\n"
    "    --stop TEXT      end before this text; may be given 16 times\n"
    "    --special        recognise control tokens in the prompt\n"
    "  score MODEL -f FILE   perplexity: windows of N inputs, each from a fresh state,\n"
    "                        next-token loss at every position\n"
    "    --window N       inputs for each window (default 512)\n"
    "    --hash           SHA-256 of all logits (little-endian float32)\n"
    "    --end TEXT       control token(s) that follow the file, such as an end-of-text mark\n"
    "    --no-special     control tokens spelled in the file are plain text\n"
    "                     (recognised by default: --special)\n"
    "    --ids            FILE holds token ids\n"
    "  inspect MODEL    what a container holds\n"
    "  verify MODEL     read and check every byte;  --drive DIR  of the copies there too\n"
    "  plan MODEL       what it needs and what fits (exit code 4 when it does not)\n"
    "  doctor MODEL     will it run well here: measures the drive (two seconds) and the processor,\n"
    "                   forecasts tokens per second, says what limits them and what would help\n"
    "    --seconds S    of reading;  --position N   tokens of context (default 512)\n"
    "    --trace FILE   of the kind of text that will be run: its hits instead of other models'\n"
    "  info [MODEL]     version; with a model, the kernels and reading mode in use\n"
    "  bench MODEL      speed of prefill and decode, bytes read, what the time went to\n"
    "    --prefill N (default 128)  --decode N (32)  --repeats R (5)\n"
    "    --ids FILE       token ids to evaluate (default: pseudo-random)\n"
    "    --cold           open anew for every repeat, from storage, and prove it\n"
    "  bench --kernels  speed of one core's kernels, beside a plain memory read and the peak of\n"
    "                   its dot products; takes no MODEL\n"
    "    --isa NAME  --seconds S (default 20)  --rows R  --cols K\n"
    "    --pool SIZE      weights walked through (default: 4 times the cache, at least 256MiB)\n"
    "  trace MODEL      which experts a text uses, one JSON line for each token (for\n"
    "                   headrace-simulate and doctor)\n"
    "    -f FILE | --ids FILE   the text, or its token ids; - reads standard input\n"
    "    -o FILE          default: standard output\n"
    "    --tokens N       the first N tokens only;  --no-special as for score\n"
    "    --read-ahead N   also the first N experts of each layer as the layer before would guess them\n"
    "  version          the version alone\n"
    "\n"
    "options of every command\n"
    "  --json           one JSON object on standard output\n"
    "options of all but verify (which takes --drive) and bench --kernels\n"
    "  --ram SIZE       hard ceiling on memory, such as 8GiB (default: 3/4 of what is available)\n"
    "  --ctx N          tokens of context (default 4096; score: the window)\n"
    "  --threads N  --io-threads N  --chunk N\n"
    "  --isa auto|NAME  kernels, of those that info names\n"
    "  --cache auto|lru|lfu\n"
    "  --verify first|always|off    when expert records are checksummed\n"
    "  --usage FILE     how often each expert was used in earlier runs: what was used most begins as warm.\n"
    "                   run, score and trace make the file where it is missing and write it at their end\n"
    "  --lock auto|on|off           keep the resident weights from being paged out (auto: where allowed)\n"
    "  --no-direct      read through the page cache\n"
    "  --read-ahead auto|off|N      experts of the next layer read before they are known (ranks of a token)\n"
    "  --drive DIR      a directory on another drive with copies of experts-*.bin, or with some\n"
    "                   that MODEL lacks; up to 7 times\n"
    "\n"
    "exit codes: 0 ok, 2 usage, 3 bad input file, 4 not enough memory, 5 input/output,\n"
    "130 interrupted (a second Ctrl-C ends at once)\n";

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
} COMMANDS[] = {
    {"run", command_run},       {"score", command_score}, {"inspect", command_inspect},
    {"verify", command_verify}, {"plan", command_plan},   {"info", command_info},
    {"bench", command_bench},   {"trace", command_trace},
    {"doctor", command_doctor},
};

int main(int argc, char **argv)
{
#if defined(_WIN32)
    if (!console_prepare(&argc, &argv)) return EXIT_MEMORY;
#endif
    interrupt_install();
    if (argc < 2) {
        fputs(HELP, stderr);
        return EXIT_USAGE;
    }
    const char *name = argv[1];
    if (strcmp(name, "help") == 0 || strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
        fputs(HELP, stdout);
        return finish_output(EXIT_OK);
    }
    if (strcmp(name, "version") == 0 || strcmp(name, "--version") == 0) {
        printf("headrace %s\n", hr_version());
        return finish_output(EXIT_OK);
    }
    for (size_t i = 0; i < sizeof COMMANDS / sizeof *COMMANDS; i++) {
        if (strcmp(name, COMMANDS[i].name) != 0) continue;
        if (argc == 3 && (strcmp(argv[2], "--help") == 0 || strcmp(argv[2], "-h") == 0)) {
            fputs(HELP, stdout);
            return finish_output(EXIT_OK);
        }
        return COMMANDS[i].run(argc - 2, argv + 2);
    }
    return report_failure(HR_ERR_USAGE, false, "unknown command '%.100s' (see headrace help)",
                          name);
}
