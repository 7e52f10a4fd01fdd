/* Shared memory: one arena per block. Each declaration gets its address at the first use in a launch, the same in every block,
 * between red zones. Everything is NaN when a block begins. */
#include "exec.h"
#include "sanitizer.h"

#include <sys/mman.h>

namespace emu {

char *arenas;

struct Variable {
    size_t offset, bytes;
    const char *name;
};

static const unsigned char kZone = 0xfb;  /* the contents of red zones */
static std::vector<Variable> variables;   /* of the running launch, by offset */
static size_t used, static_bytes, dynamic_bytes;
static unsigned serial; /* of the launch, as the sites remember it */

void shared_map() {
    if (arenas) return;
    void *mapping = mmap(nullptr, kMaxClusterBlocks * kArenaBytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) abort();
    arenas = static_cast<char *>(mapping);
}

/* In every block of the cluster: fills the variable with NaN and makes what follows it a red zone. */
static void add_variable(size_t offset, size_t bytes, const char *name, size_t zone_end) {
    variables.push_back({ offset, bytes, name });
    for (size_t b = 0; b < team.blocks.size(); b++) {
        char *arena = arenas + b * kArenaBytes;
        EMU_UNPOISON(arena + offset, bytes);
        memset(arena + offset, kFresh, bytes);
        EMU_UNPOISON(arena + offset + bytes, zone_end - offset - bytes);
        memset(arena + offset + bytes, kZone, zone_end - offset - bytes);
        EMU_POISON(arena + offset + bytes, zone_end - offset - bytes);
    }
    used = zone_end;
}

static size_t align_up(size_t value, size_t alignment) {
    return (value + alignment - 1) / alignment * alignment;
}

void shared_begin_launch(size_t bytes) {
    serial++;
    variables.clear();
    dynamic_bytes = bytes;
    used = static_bytes = 0;
    for (size_t b = 0; b < team.blocks.size(); b++) {
        EMU_UNPOISON(arenas + b * kArenaBytes, kArenaBytes);
        memset(arenas + b * kArenaBytes, kZone, kDynamicOffset);
        EMU_POISON(arenas + b * kArenaBytes, kArenaBytes);
    }
    add_variable(kDynamicOffset, bytes, "dynamic", align_up(kDynamicOffset + bytes, 16) + kRedZone);
}

void shared_declare(size_t offset, size_t bytes, const char *name) {
    for (size_t b = 0; b < team.blocks.size(); b++) {
        char *gap = arenas + b * kArenaBytes + used;
        EMU_UNPOISON(gap, offset - used);
        memset(gap, kZone, offset - used);
        EMU_POISON(gap, offset - used);
    }
    add_variable(offset, bytes, name, align_up(offset + bytes, 16) + kRedZone);
}

void shared_begin_block(unsigned rank) {
    char *arena = arenas + rank * kArenaBytes;
    for (const Variable &variable : variables) memset(arena + variable.offset, kFresh, variable.bytes);
}

/* Reports the first byte of [begin, end) that has changed. */
static bool check_zone(const char *arena, size_t begin, size_t end, const char *after) {
    for (size_t i = begin; i < end; i++) {
        if (static_cast<unsigned char>(arena[i]) == kZone) continue;
        report("%s: shared memory was written %zu bytes past the end of %s",
               running_kernel().c_str(), i - begin, after);
        return false;
    }
    return true;
}

void shared_end_block(unsigned rank) {
    char *arena = arenas + rank * kArenaBytes;
    EMU_UNPOISON(arena, used);
    bool intact = check_zone(arena, 0, kDynamicOffset, "the arena's beginning");
    for (size_t v = 0; intact && v < variables.size(); v++) {
        const size_t end = v + 1 < variables.size() ? variables[v + 1].offset : used;
        intact = check_zone(arena, variables[v].offset + variables[v].bytes, end, variables[v].name);
    }
    if (!intact) team.failed = true;
#ifdef EMU_ASAN
    size_t begin = 0;
    for (const Variable &variable : variables) {
        EMU_POISON(arena + begin, variable.offset - begin);
        begin = variable.offset + variable.bytes;
    }
    EMU_POISON(arena + begin, used - begin);
#endif
}

void shared_end_launch() {
    for (size_t b = 0; b < team.blocks.size(); b++) EMU_UNPOISON(arenas + b * kArenaBytes, kArenaBytes);
}

bool shared_range(const void *address, const char **begin, size_t *bytes) {
    const char *at = static_cast<const char *>(address);
    const size_t offset = (size_t)(at - arenas) % kArenaBytes;
    if ((size_t)(at - arenas) / kArenaBytes >= team.blocks.size()) return false;
    for (const Variable &variable : variables) {
        if (offset < variable.offset || offset >= variable.offset + variable.bytes) continue;
        *begin = at - offset + variable.offset;
        *bytes = variable.bytes;
        return true;
    }
    return false;
}

bool shared_holds(const void *address, size_t bytes) {
    const size_t offset = (size_t)(static_cast<const char *>(address) - arenas) % kArenaBytes;
    for (const Variable &variable : variables)
        if (offset >= variable.offset && offset + bytes <= variable.offset + variable.bytes) return true;
    return false;
}

std::string shared_describe(const void *address) {
    const size_t offset = (size_t)(static_cast<const char *>(address) - arenas) % kArenaBytes;
    const Variable *nearest = nullptr;
    for (const Variable &variable : variables)
        if (variable.offset <= offset) nearest = &variable;
    if (!nearest) return "shared memory before the first variable";
    return "byte " + std::to_string(offset - nearest->offset) + " of shared " + nearest->name + " (" +
           std::to_string(nearest->bytes) + " bytes)";
}

} // namespace emu

using namespace emu;

void *emu_shared(emu_shared_site *site, size_t bytes, size_t alignment, const char *name) {
    if (site->launch != serial) {
        const size_t offset = align_up(used, alignment < 16 ? 16 : alignment);
        const size_t end = align_up(offset + bytes, 16) + kRedZone;
        static_bytes += bytes;
        if (static_bytes > kDefaultShared || static_bytes + dynamic_bytes > kMaxShared || end > kArenaBytes)
            kernel_failed("no room for shared %s: %zu static and %zu dynamic bytes", name, static_bytes,
                          dynamic_bytes);
        shared_declare(offset, bytes, name);
        site->launch = serial;
        site->offset = (unsigned)offset;
    }
    return running->warp->block->arena + site->offset;
}

void *emu_dynamic_shared(size_t alignment) {
    (void)alignment; /* at most 128 */
    return running->warp->block->arena + kDynamicOffset;
}
