/* An interpreter of nvcc's PTX: kernels run from the text that nvcc makes of a unit, instead of the C++ compiler's code.
 * Private to tests/emu.
 *
 * A module is read once. A kernel, and what it calls, is decoded at its first launch: each instruction becomes a struct with
 * the function that executes it. A warp executes an instruction for all of its lanes that stand there; of lanes that stand
 * apart, those in the innermost call go first, and then those at the lowest instruction.
 *
 * ptx.cpp: the environment, launches, counts        ptx_run.cpp: lanes, branches, calls, barriers, exchange in a warp
 * ptx_parse.cpp: words, the outline of a module     ptx_body.cpp: functions as instructions
 * ptx_integer.cpp, ptx_float.cpp: arithmetic        ptx_compare.cpp: comparison, choice, logic of predicates
 * ptx_convert.cpp: conversions and moves            ptx_memory.cpp: loads, stores, atomics, bulk copies
 * ptx_flight.cpp: what is on its way from memory    ptx_map.h: handlers over lanes
 * ptx_text.h: what the readers of text share */
#ifndef EMU_PTX_H
#define EMU_PTX_H

#include <set>
#include <string.h>

#include "emu.h"

namespace emu {

struct BlockState;

namespace ptx {

const unsigned kWarp = 32;
const unsigned kEveryLane = 0xffffffffu;
const int kMostCalls = 16; /* one inside the other */

enum Type {
    kNoType,
    kPredicate,
    kB8,
    kB16,
    kB32,
    kB64,
    kU8,
    kU16,
    kU32,
    kU64,
    kS8,
    kS16,
    kS32,
    kS64,
    kF16,
    kBf16,
    kF16x2,
    kBf16x2,
    kF32,
    kF64
};
Type type_named(const std::string &name); /* kNoType for another word */
unsigned bytes_of(Type type);

enum Space { kGeneric, kGlobal, kConstant, kParameter, kShared, kLocal };

/* What the report counts apart. */
enum Class {
    kFloatClass,
    kDoubleClass,
    kIntegerClass,
    kSpecialClass,
    kConversionClass,
    kLoadClass,
    kStoreClass,
    kSharedClass,
    kLocalClass,
    kAtomicClass,
    kExchangeClass, /* barriers, votes, shuffles */
    kControlClass,
    kMoveClass,
    kElementClass, /* moves between a register and its parts */
    kClasses
};

/* A row of 32 values, one for each lane: registers of a warp, or a constant. The upper bits of a narrow value are unspecified.
 * A predicate is a mask of lanes, in the first value of its row. */
struct Operand {
    uint32_t row = 0;
    uint32_t constant = 0;
};

/* The first rows of registers hold what a lane can ask for about itself. */
enum SpecialRow {
    kTidX,
    kTidY,
    kTidZ,
    kBlockX,
    kBlockY,
    kBlockZ,
    kBlockDimX,
    kBlockDimY,
    kBlockDimZ,
    kGridX,
    kGridY,
    kGridZ,
    kLane,
    kWarpIndex,
    kMaskEq,
    kMaskLt,
    kMaskLe,
    kMaskGt,
    kMaskGe,
    kClusterRank,
    kClusterSize,
    kDynamicBytes,
    kZero,
    kSharedBase,  /* of the block's shared memory */
    kDynamicBase, /* of its dynamic part */
    kSink,        /* for results that nobody wants */
    kSpecialRows
};

/* What an instruction does to memory, which is global where the address says so. */
enum Traffic { kNoTraffic, kReads, kWrites, kUpdates };

struct Lanes;
struct Instruction;
struct Flight; /* ptx_flight.h */
typedef void (*Handler)(const Instruction &, Lanes &, unsigned active);

/* The range of valid memory that an instruction has touched last. */
struct Seen {
    uint64_t begin, end, launch;
};

struct Instruction {
    Handler handler = nullptr;
    Handler inner = nullptr; /* what the handler calls, where it adds something */
    Operand to[4], from[5];
    int64_t offset = 0;             /* added to the address in from[0] */
    uint32_t guard = 0;             /* the row of its predicate; 0: none */
    bool guard_negated = false;     /* it runs where the predicate is false */
    bool jumps = false;             /* the handler sets where lanes go on */
    bool negated = false;           /* the predicate among the operands is negated */
    bool saturates = false;         /* to [0, 1] */
    bool counted = true;            /* the text has it */
    uint8_t results = 0, count = 1; /* operands in `to`; elements of a vector */
    uint8_t mode = 0;               /* what the handler makes of it */
    uint8_t traffic = kNoTraffic;
    uint8_t bytes = 0;              /* of a lane's load or store */
    int rounding = 0;               /* of <fenv.h>, for handlers with `inner` */
    Class kind = kIntegerClass;
    int target = -1; /* of a branch, or the first instruction of a call */
    int line = 0;
    const char *name = nullptr; /* as written */
    mutable Seen seen = { 0, 0, 0 };
};

/* A warp. The lanes of `mask` run together at `pc`; the other ones stand at their own. */
struct Lanes {
    uint64_t *rows[2]; /* registers, constants */
    char *frames;      /* local memory and arguments of calls: frame_bytes for each lane */
    size_t frame_bytes;
    BlockState *block;
    unsigned first;      /* its first thread, in the team */
    unsigned index;      /* in the block */
    int pc, stop, depth; /* lanes that stand at `stop` join; none do before */
    unsigned mask, alive, runnable;
    unsigned looking; /* lanes that look at their barriers again when the warp runs next */
    bool yields;      /* the other warps run first */
    int lane_pc[kWarp], lane_depth[kWarp];
    int returns[kMostCalls][kWarp];
    unsigned cluster_phase[kWarp]; /* at the arrival */
    Flight *flight;                /* NULL unless a report is asked for */

    uint64_t *row(const Operand &operand) const {
        return rows[operand.constant] + (size_t)operand.row * kWarp;
    }
};

inline unsigned predicate_of(const Lanes &lanes, const Operand &operand) {
    return (unsigned)*lanes.row(operand);
}

inline void set_predicate(Lanes &lanes, const Operand &operand, unsigned active, unsigned mask) {
    uint64_t *row = lanes.row(operand);
    *row = ((unsigned)*row & ~active) | (mask & active);
}

/* The mask of the operand that may be written with a "!". */
inline unsigned maybe_negated(const Instruction &in, const Lanes &lanes, const Operand &operand) {
    const unsigned mask = predicate_of(lanes, operand);
    return in.negated ? ~mask : mask;
}

template <typename Function> inline void each(unsigned active, Function function) {
    if (active == kEveryLane)
        for (unsigned lane = 0; lane < kWarp; lane++) function(lane);
    else
        for (; active; active &= active - 1) function((unsigned)__builtin_ctz(active));
}

template <typename T> inline T value_of(uint64_t bits) {
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

template <typename T> inline uint64_t bits_of(T value) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}

/* ---- modules (ptx_parse.cpp) ---- */

struct Variable {
    std::string name;
    size_t bytes = 0, alignment = 1, offset = 0; /* an offset in its space */
};

struct Module;

struct Function {
    Module *module = nullptr;
    std::string name, title; /* as mangled; as people write it */
    bool entry = false, decoded = false, decoding = false;
    std::string header; /* from the parameters on */
    const char *begin = nullptr, *end = nullptr;
    int line = 0, first = -1; /* its first instruction */
    unsigned most_threads = 1024;
    std::vector<Variable> results, parameters;
    std::vector<Variable> shared; /* what it and its callees declare, by offset */
    uint32_t rows = 0;            /* of registers, with those of its callees */
    size_t frame_bytes = 0, shared_end = 0;
};

struct Data { /* a variable of the module in global or constant memory */
    std::vector<uint64_t> words;
    size_t bytes;
    std::string wrong; /* why it cannot be used */
};

struct Module {
    std::string path, text;
    std::map<std::string, Function> functions; /* by mangled name */
    std::map<std::string, Function *> entries; /* by the title */
    std::map<std::string, Variable> shared;    /* of all functions */
    std::map<std::string, Data> data;
    std::string dynamic_name;
    size_t shared_end = 0;
    std::vector<Instruction> code;
    std::vector<uint64_t> constants; /* rows */
    std::map<uint64_t, uint32_t> constant_rows;
    std::set<std::string> names; /* of instructions */
};

/* As people write it: without parameters and return type, and without what nvcc puts before the names of static kernels. */
std::string title_of(const std::string &name);
/* Reads the outlines of a module; false after a report. */
bool read_module(Module *module, const std::string &path, const std::string &text);
/* Decodes the kernel and what it calls; false after a report of what is unknown. */
bool prepare(Module *module, Function *kernel);
/* The kernel's arguments; PTX knows their addresses. */
const size_t kMostArguments = 32764;
extern char arguments[kMostArguments + 4];

/* ---- statements, for the decoders ---- */

struct Argument {
    enum Kind { kValue, kAddress, kVector, kPair } kind = kValue;
    Operand operand;    /* or the base of an address */
    int64_t offset = 0; /* of an address */
    bool negated = false;
    std::vector<Operand> parts;
};

struct Statement {
    std::string opcode;
    std::vector<std::string> suffixes; /* those that a decoder takes are removed */
    std::vector<Argument> arguments;
    bool in_frame = false; /* its parameters are those of a call, not the kernel's */

    bool take(const char *suffix);
    bool has(const char *suffix) const;
    Type first_type() const;
    Type take_type(); /* kNoType when there is none */
    Space take_space();
    int take_rounding(); /* of <fenv.h>; to nearest when there is none */
    /* The operands of an instruction with that many results. */
    void operands(Instruction *in, unsigned results) const;
    const Argument &argument(size_t index, Argument::Kind kind) const;
};

/* Thrown by decoders: what the statement has that is unknown. */
struct Unknown {
    std::string text;
};

/* Each returns false for an opcode of another file. */
bool decode_comparison(Statement &statement, Instruction *in);
bool decode_float(Statement &statement, Instruction *in);
bool decode_integer(Statement &statement, Instruction *in);
bool decode_conversion(Statement &statement, Instruction *in);
bool decode_memory(Statement &statement, Instruction *in);
bool decode_control(Statement &statement, Instruction *in);
/* A handler that sets the rounding and saturates around the inner one, where the instruction says so. */
void adjust(Instruction *in, int rounding, bool saturates);
uint16_t half_of(double value, bool is_bf16, bool toward_zero);
float half_value(uint16_t bits, bool is_bf16);
/* The sum of a register or constant and a number: the parser's own, for addresses. */
void set_sum(Instruction *in, const Operand &to, const Operand &base, const Operand &number);
void branch(const Instruction &in, Lanes &lanes, unsigned active);
void call(const Instruction &in, Lanes &lanes, unsigned active);

/* ---- running ---- */

extern Module *running_module;
extern uint64_t counts[kClasses];

/* Stops the kernel, with a report that names the instruction and the lane's thread. */
[[noreturn]] void fail(const Instruction &in, Lanes &lanes, unsigned lane, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* The lane's thread becomes the running one, for functions that ask. */
void become(Lanes &lanes, unsigned lane);
/* Says that something happened that may wake a thread. */
void note_event();
/* These lanes execute their instruction again when the warp runs next. */
void look_again(const Instruction &in, Lanes &lanes, unsigned active);

/* What the executor calls. */
Function *kernel_of(const Launch &launch, bool *failed);         /* NULL: the program's own code */
bool begin_launch(const Function *kernel, const Launch &launch); /* false after a report */
void begin_grid(const Function *kernel, const Launch &launch);
void run_team(); /* on a fiber; returns when no thread can go on */
void end_grid(const Function *kernel);
void declare_shared(const Function *kernel, const Launch &launch);
size_t dynamic_offset(const Function *kernel); /* of dynamic shared memory, in the block's */
/* For tests: a kernel of a text, or NULL after a report. */
Function *kernel_of_text(const char *text, const char *name);

} // namespace ptx
} // namespace emu

#endif
