/* What the parts of the emulation share: one lock, reports, memory, streams. Private to tests/emu. */
#ifndef EMU_EMU_H
#define EMU_EMU_H

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_runtime.h"

namespace emu {

const int kMaxDevices = 16;

/* ---- one lock for everything: kernels, copies and collectives run under it, one at a time ---- */

extern std::recursive_mutex big_lock;
extern std::condition_variable_any changed; /* something completed or was posted */
extern unsigned long progress;              /* counts such changes */
typedef std::unique_lock<std::recursive_mutex> Lock;

void note_progress();

/* ---- settings and errors (control.cpp) ---- */

struct Settings {
    emu_order order;
    unsigned compared; /* EMU_COMPARE: launches of a kernel by a shape, then every 16th; 0: all */
    uint64_t seed;
    emu_streams streams;
    int devices;
    double hang_seconds;
    bool host_faults;
    bool peers; /* devices can access each other's memory */
    size_t quota[kMaxDevices];
};
extern Settings settings;
extern __thread int current_device;
extern __thread int comparable;

void report(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Each API function that can fail starts with this; a result other than cudaSuccess is to be returned at once: the injected
 * error at the n-th call, or a sticky error of this device. */
cudaError_t enter(cudaError_t injected);
/* True, after a report, while this thread is sealed. */
bool sealed(const char *function);
/* Counts the call; true when the fault injection hits it. */
bool injected_fault();
/* Stores the error for cudaGetLastError. */
cudaError_t remember(cudaError_t error);
void set_sticky(int device, cudaError_t error);
cudaError_t sticky_error(int device);

/* Handles that are alive, by kind; a process should end with none. */
enum Handle {
    kDeviceBlock,
    kPinnedBlock,
    kStream,
    kEvent,
    kGraph,
    kGraphExec,
    kCommunicator,
    kCublasLt,
    kCublasLtDescriptor,
    kHandleKinds
};
void count_handle(Handle kind, int change);

/* Whether kernels of a device may access memory of another one. */
bool may_access(int device, int owner);

/* ---- names for reports (symbol.cpp) ---- */

std::string kernel_name(const void *kernel);
std::string symbol_name(const void *function); /* mangled; empty when the program has no symbols */
/* "file:line" of an instruction; NULL for one inside the emulation. */
std::string source_of(const void *pc);

/* ---- memory (memory.cpp) ---- */

struct Block {
    char *base;
    size_t bytes;
    char *pages; /* the whole pages that contain it; the page after them is never mapped */
    size_t page_bytes;
    int device; /* -1: pinned host memory */
    bool registered;
    int file = -1;       /* the pages are those of this file, for other processes or of another one */
    bool opened = false; /* of another one */
};

extern char *device_range; /* reserved addresses of all devices */
extern size_t device_range_bytes;

inline bool in_device_range(const void *address) {
    return (size_t)(static_cast<const char *>(address) - device_range) < device_range_bytes;
}

Block *allocate_device(int device, size_t bytes); /* NULL beyond the quota */
bool free_device(void *base);                     /* false: no such block */
/* A block of another process, at an address of this one; takes over the file that holds its pages. */
Block *open_device(int device, size_t bytes, size_t page_bytes, int file);
/* The live block that contains the address; NULL when there is none. */
Block *find_block(const void *address);

/* Whether a range lies in page-locked memory of the host, which kernels and copies of both directions reach. */
bool is_pinned(const void *address, size_t bytes);
std::string describe(const void *address);
/* 0xFF is NaN in every floating-point type, and an unlikely integer. */
const unsigned char kFresh = 0xff;

/* While it is alive, this thread may access device memory on behalf of a device operation. */
struct DeviceAccess {
    DeviceAccess();
    ~DeviceAccess();
};

/* Copy-on-write of all device memory, for the comparison of orders. */
struct Chunk {
    char *address;
    size_t bytes;
    std::vector<char> before, first; /* at the start; after the first run */
};
void snapshot_begin();
void snapshot_keep_first(); /* records this result, then restores */
void snapshot_compare(const char *order,
                      const void *kernel); /* reports the first difference, then restores */
void snapshot_end();                       /* restores the first result */

/* ---- kernels (exec.cpp) ---- */

namespace ptx {
struct Function;
}

struct Launch {
    dim3 grid, block, cluster;
    size_t dynamic_bytes;
    int device;
    bool comparable;
    std::shared_ptr<emu_kernel_call> call; /* owns the arguments */
    ptx::Function *ptx = nullptr;          /* for tests of the interpreter: what runs instead */
};

/* Runs the grid; false after a failure that ends it. */
bool execute(const Launch &launch);

/* ---- streams (stream.cpp) ---- */

struct Stream;

struct Item {
    std::function<bool()> step; /* executes the item; false: not yet possible */
    std::vector<std::pair<std::shared_ptr<Stream>, uint64_t>> after;
    bool unlocked = false; /* a host function: runs without the lock */
};

/* The stream of a handle, the legacy stream for 0; NULL after a report. */
std::shared_ptr<Stream> resolve(cudaStream_t handle, const char *function);
int device_of(const Stream &stream);
/* Appends, or records while the stream is captured. The argument makes a new item for each replay. */
cudaError_t submit(const std::shared_ptr<Stream> &stream, std::function<bool()> step);
cudaError_t submit_fresh(const std::shared_ptr<Stream> &stream, std::function<std::function<bool()>()> make);
bool is_capturing(const Stream &stream);
/* True, after a report, when a capture forbids the call, which then invalidates it. */
bool breaks_capture(const char *function);
cudaError_t wait_stream(const std::shared_ptr<Stream> &stream, const char *function);
cudaError_t wait_device(int device, const char *function);
/* Drives streams until done(), or until a hang, which it reports. */
bool wait_until(Lock &lock, const std::function<bool()> &done, const char *what);
void drive();

/* ---- access checker (check.cpp); does nothing in other builds ---- */

void check_new_block(const Block &block);
void check_free_block(const Block &block);
void check_written(const void *address, size_t bytes);
void check_copied(void *to, const void *from, size_t bytes);

} // namespace emu

#endif
