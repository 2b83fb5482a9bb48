// Decode speed of the peer on given ids, one token a step, after a prefill of the first ones.
//   g++ -O2 decode.cpp -I PEER/include -I PEER/ggml/include ... (see README.md)
//   ./decode MODEL.gguf IDS.txt PREFILL DECODE THREADS [mapped]
// "mapped" keeps every weight in the mapped file; otherwise the peer may copy some into another layout.
// Prints: prefill tok/s, decode tok/s, MB read from the drive per decoded token.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <vector>

#include "llama.h"

static double now()
{
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static double physical_bytes()
{
    std::ifstream io("/proc/self/io");
    std::string key;
    double value, found = 0;
    while (io >> key >> value)
        if (key == "read_bytes:") found = value;
    return found;
}

static void quiet(ggml_log_level, const char *, void *) {}

int main(int argc, char **argv)
{
    if (argc < 6 || argc > 7) return std::fprintf(stderr, "decode MODEL IDS PREFILL DECODE THREADS [mapped]\n"), 2;
    const int prefill = std::atoi(argv[3]), decode = std::atoi(argv[4]), threads = std::atoi(argv[5]);
    std::vector<llama_token> ids;
    std::ifstream file(argv[2]);
    for (long id; file >> id;) ids.push_back((llama_token)id);
    if ((int)ids.size() < prefill + decode) return std::fprintf(stderr, "too few ids\n"), 2;
    llama_log_set(quiet, nullptr);
    llama_backend_init();
    llama_model_params how = llama_model_default_params();
    how.use_extra_bufts = argc == 6;
    llama_model *model = llama_model_load_from_file(argv[1], how);
    if (!model) return std::fprintf(stderr, "cannot load\n"), 1;
    llama_context_params params = llama_context_default_params();
    params.n_ctx = (uint32_t)(prefill + decode + 8);
    params.n_batch = params.n_ubatch = 512;
    params.n_threads = params.n_threads_batch = threads;
    llama_context *context = llama_init_from_model(model, params);
    if (!context) return std::fprintf(stderr, "no context\n"), 1;
    const double before = now();
    for (int at = 0; at < prefill;) {
        const int n = prefill - at < 512 ? prefill - at : 512;
        if (llama_decode(context, llama_batch_get_one(ids.data() + at, n))) return 1;
        at += n;
    }
    llama_synchronize(context);
    const double between = now(), read = physical_bytes();
    for (int i = 0; i < decode; i++)
        if (llama_decode(context, llama_batch_get_one(ids.data() + prefill + i, 1))) return 1;
    llama_synchronize(context);
    const double after = now();
    std::printf("prefill %.2f tok/s, decode %.3f tok/s, %.1f MB read per token\n",
                prefill / (between - before), decode / (after - between),
                (physical_bytes() - read) / 1e6 / (decode ? decode : 1));
    llama_free(context);
    llama_model_free(model);
}
