/* Where kernels come from: EMU_PTX names the file with nvcc's PTX of the unit. With EMU_PTX_REQUIRE=1 a kernel that it lacks is
 * an error; else such a kernel runs from the program's own code. EMU_PTX_REPORT names a file that gets, when the process ends,
 * what each kernel has issued and moved. */
#include "ptx_flight.h"

#include <algorithm>
#include <stdlib.h>

#include "exec.h"

namespace emu {
namespace ptx {

struct Totals {
    uint64_t launches = 0, issued[kClasses] = {};
    Watched watched;
};
static std::map<std::pair<std::string, std::string>, Totals> totals; /* by section and kernel, as mangled */
static std::string section = "-";
static std::string report_path;

/* ---- the file ---- */

static bool read_file(const char *path, std::string *text) {
    char piece[65536];
    FILE *file = fopen(path, "r");
    if (!file) return false;
    for (size_t n; (n = fread(piece, 1, sizeof piece, file)) > 0;) text->append(piece, n);
    fclose(file);
    return true;
}

/* Never destroyed, as streams may outlive what static destructors end. */
static Module *load(const char *path) {
    std::string text;
    if (!read_file(path, &text)) {
        report("EMU_PTX: cannot read %s", path);
        return nullptr;
    }
    const char *slash = strrchr(path, '/');
    Module *module = new Module;
    if (read_module(module, slash ? slash + 1 : path, text)) return module;
    delete module;
    return nullptr;
}

static bool is_on(const char *name) {
    const char *value = getenv(name);
    return value && *value && strcmp(value, "0") != 0;
}

#ifdef EMU_CHECK
static const char *const refusal = "EMU_PTX: the checker watches compiled kernels only";
#else
static const char *const refusal = nullptr;
#endif

static Module *module_of_environment(bool *failed) {
    const char *path = getenv("EMU_PTX");
    static Module *module;
    static bool tried;
    if (!path || !*path) return nullptr;
    if (!tried && refusal) report("%s", refusal);
    if (!tried && !refusal) module = load(path);
    tried = true;
    if (!module) *failed = true;
    return module;
}

/* ---- launches ---- */

Function *kernel_of(const Launch &launch, bool *failed) {
    if (launch.ptx) return launch.ptx;
    Module *module = module_of_environment(failed);
    if (!module) return nullptr;
    const std::string symbol = symbol_name(launch.call->kernel);
    const std::string name = symbol.empty() ? kernel_name(launch.call->kernel) : title_of(symbol);
    const auto entry = module->entries.find(name);
    if (entry == module->entries.end()) {
        const bool required = is_on("EMU_PTX_REQUIRE");
        if (required) report("%s: %s has no such kernel", name.c_str(), module->path.c_str());
        *failed = required;
        return nullptr;
    }
    if (!entry->second->decoded && !prepare(module, entry->second)) *failed = true;
    return entry->second;
}

Function *kernel_of_text(const char *text, const char *name) {
    static std::vector<Module *> &kept = *new std::vector<Module *>;
    Module *module = new Module;
    kept.push_back(module);
    if (!read_module(module, "text", text)) return nullptr;
    const auto entry = module->entries.find(name);
    if (entry == module->entries.end()) {
        report("%s: no such kernel", name);
        return nullptr;
    }
    return prepare(module, entry->second) ? entry->second : nullptr;
}

struct Packing {
    const Function *kernel;
    size_t index;
    std::string wrong;
};

/* The arguments' places are those of the PTX, which must have the same sizes. */
static void pack_argument(void *user, const void *value, size_t bytes) {
    Packing *packing = static_cast<Packing *>(user);
    const std::vector<Variable> &parameters = packing->kernel->parameters;
    const size_t index = packing->index++;
    if (index < parameters.size() && parameters[index].bytes == bytes)
        memcpy(arguments + parameters[index].offset, value, bytes);
    else if (packing->wrong.empty())
        packing->wrong = "argument " + std::to_string(index) + " has " + std::to_string(bytes) +
                         " bytes, in the PTX " +
                         (index < parameters.size() ? std::to_string(parameters[index].bytes) : "none");
}

static size_t shared_bytes(const Function &kernel, const Launch &launch) {
    size_t bytes = launch.dynamic_bytes;
    for (const Variable &variable : kernel.shared) bytes += variable.bytes;
    return bytes;
}

bool begin_launch(const Function *kernel, const Launch &launch) {
    Packing packing = { kernel, 0, "" };
    launch.call->each_argument(launch.call->arguments, pack_argument, &packing);
    const unsigned threads = launch.block.x * launch.block.y * launch.block.z;
    const size_t shared = shared_bytes(*kernel, launch),
                 end = dynamic_offset(kernel) + launch.dynamic_bytes + kRedZone;
    if (packing.wrong.empty() && packing.index != kernel->parameters.size())
        packing.wrong = "has " + std::to_string(packing.index) + " arguments, in the PTX " +
                        std::to_string(kernel->parameters.size());
    if (!packing.wrong.empty())
        report("%s: %s", kernel->title.c_str(), packing.wrong.c_str());
    else if (threads > kernel->most_threads)
        report("%s: %u threads, its PTX allows %u", kernel->title.c_str(), threads, kernel->most_threads);
    else if (shared > kMaxShared || end > kArenaBytes)
        report("%s: no room for %zu bytes of shared memory", kernel->title.c_str(), shared);
    else
        return true;
    return false;
}

size_t dynamic_offset(const Function *kernel) {
    return (kernel->shared_end + 127) / 128 * 128;
}

void declare_shared(const Function *kernel, const Launch &launch) {
    for (const Variable &variable : kernel->shared)
        shared_declare(variable.offset, variable.bytes, variable.name.c_str());
    shared_declare(dynamic_offset(kernel), launch.dynamic_bytes, "dynamic");
}

/* ---- the report ---- */

static const char *const class_names[kClasses] = { "float",    "double",  "integer", "special", "convert",
                                                   "load",     "store",   "shared",  "local",   "atomic",
                                                   "exchange", "control", "move",    "element" };

/* A line for each kernel of a section, of words with tabs between them. */
static void write_report() {
    FILE *file = fopen(report_path.c_str(), "a");
    if (!file) return;
    fprintf(file, "section\tkernel\tlaunches\tblocks\twarps\tthreads\tdynamic\tloaded\tread\tagain\twritten\twaits\tflight\tbulk_waits"
                  "\tbulk_flight\twaited\tstalled\tcrossed\tpath");
    for (const char *name : class_names) fprintf(file, "\t%s", name);
    fprintf(file, "\n");
    for (const auto &entry : totals) {
        const Watched &w = entry.second.watched;
        fprintf(file, "%s\t%s\t%llu", entry.first.first.c_str(), entry.first.second.c_str(), (unsigned long long)entry.second.launches);
        for (const uint64_t n : { w.blocks, w.warps, w.threads, w.dynamic, w.loaded, w.read, w.again, w.written })
            fprintf(file, "\t%llu", (unsigned long long)n);
        for (const Waits &waits : { w.waits, w.bulk })
            fprintf(file, "\t%llu\t%.1f", (unsigned long long)waits.count, waits.bytes > 0 ? waits.squares / waits.bytes : 0.0);
        fprintf(file, "\t%.0f\t%.0f\t%.0f\t%.0f", w.waited, w.stalled, w.crossed, w.path);
        for (const uint64_t issued : entry.second.issued) fprintf(file, "\t%llu", (unsigned long long)issued);
        fprintf(file, "\n");
    }
    fclose(file);
}

static void add(Waits *sum, const Waits &waits) {
    sum->count += waits.count;
    sum->bytes += waits.bytes;
    sum->squares += waits.squares;
}

static void add(Watched *sum, const Watched &grid) {
    sum->blocks += grid.blocks;
    sum->warps += grid.warps;
    sum->threads = std::max(sum->threads, grid.threads);
    sum->dynamic = std::max(sum->dynamic, grid.dynamic);
    sum->loaded += grid.loaded;
    sum->read += grid.read;
    sum->again += grid.again;
    sum->written += grid.written;
    add(&sum->waits, grid.waits);
    add(&sum->bulk, grid.bulk);
    sum->waited += grid.waited;
    sum->stalled += grid.stalled;
    sum->crossed += grid.crossed;
    sum->path += grid.path;
}

void end_grid(const Function *kernel) {
    if (!flights_wanted()) return;
    if (report_path.empty()) atexit(write_report);
    report_path = getenv("EMU_PTX_REPORT");
    Totals &total = totals[{ section, kernel->name }];
    total.launches++;
    for (int i = 0; i < kClasses; i++) total.issued[i] += counts[i];
    add(&total.watched, flights_of_grid());
}

} // namespace ptx
} // namespace emu

void emu_ptx_section(const char *name) {
    emu::Lock lock(emu::big_lock);
    emu::ptx::section = name;
}
