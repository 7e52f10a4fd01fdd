/* Device memory: addresses that are never used twice, initially NaN, a guard page after each block; pinned memory; and the
 * copy-on-write with which runs of one launch are compared. */
#include "emu.h"

#include <algorithm>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include "exec.h"
#include "sanitizer.h"

namespace emu {

static const size_t kPage = 4096, kAlign = 256;
static const size_t kLarge = (size_t)4 << 20; /* holds whole huge pages, wherever it begins */
static const unsigned char kCanary = 0xa5;    /* in the bytes between a block's end and its guard page */

char *device_range;
size_t device_range_bytes;
static size_t device_range_used;
static size_t device_bytes[kMaxDevices];
static std::map<const char *, Block *> device_blocks, host_blocks; /* by base */
static int access_depth;

static void install_handler();

static void reserve() {
    if (device_range) return;
    const size_t bytes = (size_t)1 << 38; /* 256 GiB of addresses; only what is allocated uses memory */
    void *range = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) abort();
    device_range = static_cast<char *>(range);
    device_range_bytes = bytes;
    install_handler();
}

static size_t round_up(size_t value, size_t unit) {
    return (value + unit - 1) / unit * unit;
}

static Block *find_in(const std::map<const char *, Block *> &blocks, const void *address) {
    auto after = blocks.upper_bound(static_cast<const char *>(address));
    if (after == blocks.begin()) return nullptr;
    Block *block = std::prev(after)->second;
    return static_cast<const char *>(address) < block->base + block->bytes ? block : nullptr;
}

Block *find_block(const void *address) {
    return find_in(in_device_range(address) ? device_blocks : host_blocks, address);
}

bool is_pinned(const void *address, size_t bytes) {
    Lock lock(big_lock);
    const char *at = static_cast<const char *>(address);
    const Block *block = in_device_range(address) ? nullptr : find_in(host_blocks, address);
    return block && at + bytes <= block->base + block->bytes;
}

std::string describe(const void *address) {
    char text[200];
    const char *at = static_cast<const char *>(address);
    if (!in_device_range(address)) {
        snprintf(text, sizeof text, "host address %p", address);
        return text;
    }
    auto after = device_blocks.upper_bound(at);
    const Block *block = after == device_blocks.begin() ? nullptr : std::prev(after)->second;
    if (block && at < block->pages + block->page_bytes + kPage)
        snprintf(text, sizeof text, "byte %td of a block of %zu bytes on device %d", at - block->base,
                 block->bytes, block->device);
    else
        snprintf(text, sizeof text, "device address %p, in no live block (freed?)", address);
    return text;
}

Block *allocate_device(int device, size_t bytes) {
    reserve();
    const size_t padded = round_up(bytes, kAlign), page_bytes = round_up(padded, kPage);
    if (device_bytes[device] + padded > settings.quota[device]) return nullptr;
    if (device_range_used + page_bytes + 2 * kPage > device_range_bytes) return nullptr;
    char *pages = device_range + device_range_used;
    if (mprotect(pages, page_bytes, PROT_READ | PROT_WRITE)) return nullptr;
    if (page_bytes >= kLarge)
        madvise(pages, page_bytes, MADV_HUGEPAGE); /* 500 times fewer page faults for the fill */
    device_range_used += page_bytes + kPage;
    device_bytes[device] += padded;
    Block *block = new Block{ pages + page_bytes - padded, bytes, pages, page_bytes, device, false };
    memset(block->base, kFresh, bytes);
    memset(block->base + bytes, kCanary, padded - bytes);
    EMU_POISON(pages, page_bytes - padded);
    EMU_POISON(block->base + bytes, padded - bytes);
    device_blocks[block->base] = block;
    if (settings.host_faults && access_depth == 0) mprotect(pages, page_bytes, PROT_NONE);
    count_handle(kDeviceBlock, 1);
    check_new_block(*block);
    return block;
}

/* A process that has opened another one's block holds a lock on its file, which ends with the process. */
static struct flock lock_of(short kind) {
    struct flock lock;
    memset(&lock, 0, sizeof lock);
    lock.l_type = kind;
    lock.l_whence = SEEK_SET;
    return lock;
}

Block *open_device(int device, size_t bytes, size_t page_bytes, int file) {
    reserve();
    const size_t padded = round_up(bytes, kAlign);
    struct flock lock = lock_of(F_RDLCK);
    if (device_range_used + page_bytes + 2 * kPage > device_range_bytes) return nullptr;
    char *pages = device_range + device_range_used;
    if (fcntl(file, F_SETLK, &lock) ||
        mmap(pages, page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED)
        return nullptr;
    device_range_used += page_bytes + kPage;
    Block *block =
        new Block{ pages + page_bytes - padded, bytes, pages, page_bytes, device, false, file, true };
    EMU_POISON(pages, page_bytes - padded);
    EMU_POISON(block->base + bytes, padded - bytes);
    device_blocks[block->base] = block;
    if (settings.host_faults && access_depth == 0) mprotect(pages, page_bytes, PROT_NONE);
    count_handle(kDeviceBlock, 1);
    check_new_block(*block);
    check_written(block->base, bytes); /* by its owner, which is unknown here */
    return block;
}

/* The pages become those of a file, which other processes can open as long as this one has it open. */
static bool export_device(Block *block) {
    DeviceAccess access;
    const int file = memfd_create("emu", MFD_CLOEXEC);
    if (file < 0) return false;
    EMU_UNPOISON(block->pages, block->page_bytes);
    const bool moved = write(file, block->pages, block->page_bytes) == (ssize_t)block->page_bytes &&
                       mmap(block->pages, block->page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                            file, 0) != MAP_FAILED;
    EMU_POISON(block->pages, (size_t)(block->base - block->pages));
    EMU_POISON(block->base + block->bytes,
               (size_t)(block->pages + block->page_bytes - block->base) - block->bytes);
    if (moved) block->file = file;
    if (!moved) close(file);
    return moved;
}

static void close_file(const Block &block) {
    struct flock lock = lock_of(F_WRLCK);
    if (block.file < 0) return;
    if (!block.opened && fcntl(block.file, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK)
        report("cudaFree of memory that another process has open: %s", describe(block.base).c_str());
    close(block.file);
}

/* Finds writes after a block, within its last page, when it is freed. */
static void check_canary(const Block &block) {
    const size_t padded = round_up(block.bytes, kAlign);
    EMU_UNPOISON(block.base, padded);
    for (size_t i = block.bytes; i < padded; i++) {
        if (static_cast<unsigned char>(block.base[i]) == kCanary) continue;
        report("something wrote %s", describe(block.base + i).c_str());
        return;
    }
}

bool free_device(void *base) {
    auto found = device_blocks.find(static_cast<char *>(base));
    if (found == device_blocks.end()) return false;
    Block *block = found->second;
    {
        DeviceAccess access;
        check_canary(*block);
    }
    check_free_block(*block);
    close_file(*block);
    if (!block->opened) device_bytes[block->device] -= round_up(block->bytes, kAlign);
    EMU_UNPOISON(block->pages, block->page_bytes);
    mmap(block->pages, block->page_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
         -1, 0);
    device_blocks.erase(found);
    delete block;
    count_handle(kDeviceBlock, -1);
    return true;
}

static void protect_all(int protection) {
    for (auto &entry : device_blocks) mprotect(entry.second->pages, entry.second->page_bytes, protection);
}

DeviceAccess::DeviceAccess() {
    if (access_depth++ == 0 && settings.host_faults) protect_all(PROT_READ | PROT_WRITE);
}

DeviceAccess::~DeviceAccess() {
    if (--access_depth == 0 && settings.host_faults) protect_all(PROT_NONE);
}

/* ---- comparison of orders ---- */

static bool snapshot_active;
static std::map<char *, Chunk> chunks;
static const size_t kChunk = 16 * kPage; /* fewer faults than page by page */

void snapshot_begin() {
    snapshot_active = true;
    protect_all(PROT_READ);
}

static void restore(Chunk &chunk, const std::vector<char> &from) {
    memcpy(chunk.address, from.data(), chunk.bytes);
}

void snapshot_keep_first() {
    for (auto &entry : chunks) {
        Chunk &chunk = entry.second;
        chunk.first.assign(chunk.address, chunk.address + chunk.bytes);
        restore(chunk, chunk.before);
    }
}

void snapshot_compare(const char *order, const void *kernel) {
    bool named = false;
    for (auto &entry : chunks) {
        Chunk &chunk = entry.second;
        if (chunk.first.empty()) chunk.first = chunk.before; /* written only in this order */
        for (size_t i = 0; !named && i < chunk.bytes; i++) {
            if (chunk.address[i] == chunk.first[i]) continue;
            named = true;
            report("%s: the result depends on the order of threads: %s differs in %s order",
                   kernel_name(kernel).c_str(), describe(chunk.address + i).c_str(), order);
        }
        restore(chunk, chunk.before);
    }
}

void snapshot_end() {
    for (auto &entry : chunks) restore(entry.second, entry.second.first);
    chunks.clear();
    snapshot_active = false;
    protect_all(PROT_READ | PROT_WRITE);
}

/* ---- faults ---- */

#ifdef EMU_ASAN
static void install_handler() {
} /* ASan has its own; the comparison then sees no writes, hence no difference */
#else
/* A write to a protected block: saves the old contents and lets the write go on. */
static bool snapshot_fault(char *address) {
    if (!snapshot_active) return false;
    Block *block = find_block(address);
    if (!block) return false;
    const size_t index = (size_t)(address - block->pages) / kChunk;
    Chunk chunk;
    chunk.address = block->pages + index * kChunk;
    chunk.bytes = std::min(kChunk, block->page_bytes - index * kChunk);
    if (chunks.count(chunk.address)) return false;
    chunk.before.assign(chunk.address, chunk.address + chunk.bytes);
    mprotect(chunk.address, chunk.bytes, PROT_READ | PROT_WRITE);
    chunks.emplace(chunk.address, std::move(chunk));
    return true;
}

static void on_fault(int number, siginfo_t *information, void *) {
    char *address = static_cast<char *>(information->si_addr);
    if (device_range && in_device_range(address)) {
        if (running && snapshot_fault(address)) return;
        if (running) kernel_failed("touches %s", describe(address).c_str());
        fprintf(stderr, "emu: host code touches %s\n", describe(address).c_str());
    }
    if (running && !in_device_range(address)) kernel_failed("touches host address %p", (void *)address);
    signal(number, SIG_DFL); /* the access is repeated and ends the process */
}

static void install_handler() {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER; /* a failed kernel leaves the handler by switching stacks */
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
}
#endif

/* ---- calls ---- */

static cudaError_t allocate(void **pointer, size_t bytes, const char *function) {
    const cudaError_t entered = enter(cudaErrorMemoryAllocation);
    if (entered) return entered;
    if (sealed(function)) return remember(cudaErrorNotPermitted);
    if (breaks_capture(function)) return remember(cudaErrorStreamCaptureUnsupported);
    if (!pointer) return remember(cudaErrorInvalidValue);
    *pointer = nullptr;
    if (bytes == 0) return cudaSuccess;
    Lock lock(big_lock);
    Block *block = allocate_device(current_device, bytes);
    if (!block) return remember(cudaErrorMemoryAllocation);
    *pointer = block->base;
    return cudaSuccess;
}

/* No machine has more; address sanitizers stop a program that asks for it. */
static const size_t kMostPinned = (size_t)1 << 38;

static cudaError_t allocate_pinned(void **pointer, size_t bytes, const char *function) {
    const cudaError_t entered = enter(cudaErrorMemoryAllocation);
    if (entered) return entered;
    if (sealed(function)) return remember(cudaErrorNotPermitted);
    if (breaks_capture(function)) return remember(cudaErrorStreamCaptureUnsupported);
    if (!pointer) return remember(cudaErrorInvalidValue);
    *pointer = nullptr;
    if (bytes == 0) return cudaSuccess;
    if (bytes > kMostPinned) return remember(cudaErrorMemoryAllocation);
    Lock lock(big_lock);
    reserve();
    char *base = static_cast<char *>(aligned_alloc(kAlign, round_up(bytes, kAlign)));
    if (!base) return remember(cudaErrorMemoryAllocation);
    memset(base, kFresh, bytes);
    host_blocks[base] = new Block{ base, bytes, base, bytes, -1, false };
    count_handle(kPinnedBlock, 1);
    *pointer = base;
    return cudaSuccess;
}

static int device_of_block(const void *pointer) {
    Lock lock(big_lock);
    const Block *block = find_block(pointer);
    return block && block->device >= 0 ? block->device : current_device;
}

/* Forgets a pinned or registered block; NULL when the pointer is not one of this kind. */
static char *forget_host(void *pointer, bool registered) {
    auto found = host_blocks.find(static_cast<char *>(pointer));
    if (found == host_blocks.end() || found->second->registered != registered) return nullptr;
    char *base = found->second->base;
    delete found->second;
    host_blocks.erase(found);
    count_handle(kPinnedBlock, -1);
    return base;
}

} // namespace emu

using namespace emu;

void emu_set_host_faults(int on) {
    Lock lock(big_lock);
    settings.host_faults = on != 0;
    protect_all(on ? PROT_NONE : PROT_READ | PROT_WRITE);
}

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    return allocate(pointer, bytes, "cudaMalloc");
}

cudaError_t cudaFree(void *pointer) {
    if (sealed("cudaFree")) return remember(cudaErrorNotPermitted);
    if (breaks_capture("cudaFree")) return remember(cudaErrorStreamCaptureUnsupported);
    if (!pointer) return cudaSuccess;
    wait_device(device_of_block(pointer), "cudaFree"); /* implicitly, as CUDA does */
    Lock lock(big_lock);
    if (free_device(pointer)) return cudaSuccess;
    report("cudaFree of what cudaMalloc did not give: %s", describe(pointer).c_str());
    return remember(cudaErrorInvalidValue);
}

cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream) {
    (void)stream; /* addresses are never used twice, so the block may exist at once */
    return allocate(pointer, bytes, "cudaMallocAsync");
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t handle) {
    if (sealed("cudaFreeAsync")) return remember(cudaErrorNotPermitted);
    if (!pointer) return cudaSuccess;
    Lock lock(big_lock);
    const std::shared_ptr<Stream> stream = resolve(handle, "cudaFreeAsync");
    if (!stream) return remember(cudaErrorInvalidResourceHandle);
    return remember(submit(stream, [pointer] {
        if (!free_device(pointer))
            report("cudaFreeAsync of what is not allocated: %s", describe(pointer).c_str());
        return true;
    }));
}

cudaError_t cudaMallocHost(void **pointer, size_t bytes) {
    return allocate_pinned(pointer, bytes, "cudaMallocHost");
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    (void)flags;
    return allocate_pinned(pointer, bytes, "cudaHostAlloc");
}

cudaError_t cudaFreeHost(void *pointer) {
    if (sealed("cudaFreeHost")) return remember(cudaErrorNotPermitted);
    if (breaks_capture("cudaFreeHost")) return remember(cudaErrorStreamCaptureUnsupported);
    if (!pointer) return cudaSuccess;
    wait_device(current_device, "cudaFreeHost");
    Lock lock(big_lock);
    char *base = forget_host(pointer, false);
    free(base);
    return base ? cudaSuccess : remember(cudaErrorInvalidValue);
}

cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    (void)flags;
    const cudaError_t entered = enter(cudaErrorMemoryAllocation);
    if (entered) return entered;
    if (sealed("cudaHostRegister")) return remember(cudaErrorNotPermitted);
    Lock lock(big_lock);
    reserve();
    if (!pointer || !bytes || in_device_range(pointer)) return remember(cudaErrorInvalidValue);
    if (find_block(pointer)) return remember(cudaErrorHostMemoryAlreadyRegistered);
    char *base = static_cast<char *>(pointer);
    host_blocks[base] = new Block{ base, bytes, base, bytes, -1, true };
    count_handle(kPinnedBlock, 1);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *pointer) {
    Lock lock(big_lock);
    return forget_host(pointer, true) ? cudaSuccess : remember(cudaErrorHostMemoryNotRegistered);
}

/* The contents of a handle; the remaining bytes are zero. */
struct Name {
    pid_t process;
    int file, device;
    size_t bytes, page_bytes;
};

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) {
    const cudaError_t entered = enter(cudaErrorNotSupported);
    if (entered) return entered;
    if (sealed("cudaIpcGetMemHandle")) return remember(cudaErrorNotPermitted);
    Lock lock(big_lock);
    auto found = device_blocks.find(static_cast<char *>(pointer));
    if (!handle || found == device_blocks.end() || found->second->opened)
        return remember(cudaErrorInvalidValue);
    Block *block = found->second;
    if (block->file < 0 && !export_device(block)) return remember(cudaErrorNotSupported);
    const Name name = { getpid(), block->file, block->device, block->bytes, block->page_bytes };
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &name, sizeof name);
    return cudaSuccess;
}

/* The flag also lets the current device access the other device's memory. */
cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned flags) {
    const cudaError_t entered = enter(cudaErrorNotSupported);
    if (entered) return entered;
    if (sealed("cudaIpcOpenMemHandle")) return remember(cudaErrorNotPermitted);
    Name name;
    char path[64];
    memcpy(&name, &handle, sizeof name);
    if (!pointer || flags != cudaIpcMemLazyEnablePeerAccess) return remember(cudaErrorInvalidValue);
    if (name.process == getpid())
        return remember(cudaErrorNotSupported); /* its own memory: CUDA refuses too */
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)name.process, name.file);
    const int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return remember(cudaErrorNotSupported);
    if (name.device != current_device) {
        cudaDeviceEnablePeerAccess(name.device, 0);
        cudaGetLastError(); /* it was enabled already */
    }
    Lock lock(big_lock);
    const Block *block = open_device(name.device, name.bytes, name.page_bytes, file);
    if (!block) {
        close(file);
        return remember(cudaErrorMemoryAllocation);
    }
    *pointer = block->base;
    return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void *pointer) {
    wait_device(current_device, "cudaIpcCloseMemHandle");
    Lock lock(big_lock);
    auto found = device_blocks.find(static_cast<char *>(pointer));
    if (found != device_blocks.end() && found->second->opened && free_device(pointer)) return cudaSuccess;
    report("cudaIpcCloseMemHandle of what was not opened: %s", describe(pointer).c_str());
    return remember(cudaErrorInvalidValue);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    const cudaError_t entered = enter(cudaErrorUnknown);
    if (entered) return entered;
    Lock lock(big_lock);
    *total_bytes = settings.quota[current_device];
    *free_bytes = *total_bytes - std::min(*total_bytes, device_bytes[current_device]);
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer) {
    const cudaError_t entered = enter(cudaErrorUnknown);
    if (entered) return entered;
    Lock lock(big_lock);
    reserve();
    memset(attributes, 0, sizeof *attributes);
    const Block *block = find_block(pointer);
    const bool on_device = block && block->device >= 0;
    attributes->type = !block      ? cudaMemoryTypeUnregistered
                       : on_device ? cudaMemoryTypeDevice
                                   : cudaMemoryTypeHost;
    attributes->device = on_device ? block->device : block ? current_device : -2;
    if (block) attributes->devicePointer = const_cast<void *>(pointer);
    if (!on_device) attributes->hostPointer = const_cast<void *>(pointer);
    return cudaSuccess;
}
