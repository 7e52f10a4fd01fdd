/* dcp_pickle.h - reads pickles of PyTorch's checkpoints as data. A pickle is a program for a machine with a stack; this machine
 * has only the instructions that write numbers, texts, tuples, lists and dicts, and a class is a name from a closed list, of
 * which an object is its arguments and its state. Nothing is imported, called or executed; whatever else is in the bytes is
 * refused, with its name and its offset. Time and memory are bounded by a multiple of the bytes. */
#ifndef DCP_PICKLE_H
#define DCP_PICKLE_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* ---- what comes out ---- */

typedef enum pickle_kind {
    PICKLE_NONE = 0,
    PICKLE_BOOL,
    PICKLE_INTEGER,
    PICKLE_FLOAT,
    PICKLE_TEXT,
    PICKLE_TUPLE,
    PICKLE_LIST,
    PICKLE_DICT,   /* keys and values in turn */
    PICKLE_CLASS,  /* a name of the closed list */
    PICKLE_OBJECT, /* of such a class: its arguments, and its state when there is one */
    PICKLE_STORAGE /* what a tensor's pickle says about the file of its elements: one tuple */
} pickle_kind;

enum {
    PICKLE_NOTHING = -1, /* instead of the number of a value, an item or a class */
    PICKLE_STACK_MOST =
        1 << 20, /* values that wait on the stack: those of one tuple, or a thousand of a list */
    PICKLE_VALUES_MOST = 8 << 20 /* values of a pickle, of about 40 bytes each */
};

/* A value; values refer to one another by their numbers. */
typedef struct pickle_value {
    pickle_kind kind;
    int32_t class;       /* of pickle_classes */
    int32_t first, last; /* of the items of a tuple, a list, a dict; of an object: its arguments, its state */
    int64_t integer;     /* also a bool; how many items; how long a text is */
    size_t at;           /* a text's first byte; of the others, where the value was made */
    double real;
} pickle_value;

typedef struct pickle_item {
    int32_t value, next;
} pickle_item;

/* ---- the closed list ---- */

/* What is read: which classes there may be depends on it. */
enum { PICKLE_METADATA = 1, PICKLE_TENSOR = 2, PICKLE_FILE = 4 /* of torch.save, with PICKLE_TENSOR */ };

/* How an object of a class is made. */
enum { PICKLE_NEW = 1 /* without arguments, and then a state */, PICKLE_CALL = 2, PICKLE_NAME = 0 };

typedef struct pickle_class {
    const char *module, *name;
    int where, makes;
} pickle_class;

#define PICKLE_PACKAGE "torch.distributed.checkpoint."

static const pickle_class pickle_classes[] = {
    { PICKLE_PACKAGE "metadata", "Metadata", PICKLE_METADATA, PICKLE_NEW },
    { PICKLE_PACKAGE "metadata", "MetadataIndex", PICKLE_METADATA, PICKLE_NEW },
    { PICKLE_PACKAGE "metadata", "TensorStorageMetadata", PICKLE_METADATA, PICKLE_NEW },
    { PICKLE_PACKAGE "metadata", "BytesStorageMetadata", PICKLE_METADATA, PICKLE_NEW },
    { PICKLE_PACKAGE "metadata", "ChunkStorageMetadata", PICKLE_METADATA, PICKLE_NEW },
    { PICKLE_PACKAGE "metadata", "TensorProperties", PICKLE_METADATA, PICKLE_NEW },
    { PICKLE_PACKAGE "metadata", "StorageMeta", PICKLE_METADATA, PICKLE_NEW },
    { PICKLE_PACKAGE "metadata", "_MEM_FORMAT_ENCODING", PICKLE_METADATA, PICKLE_CALL },
    { PICKLE_PACKAGE "filesystem", "_StorageInfo", PICKLE_METADATA, PICKLE_NEW },
    { "torch.serialization", "_get_layout", PICKLE_METADATA, PICKLE_CALL },
    { "pathlib", "PosixPath", PICKLE_METADATA, PICKLE_CALL },
    { "pathlib", "WindowsPath", PICKLE_METADATA, PICKLE_CALL },
    { "pathlib._local", "PosixPath", PICKLE_METADATA, PICKLE_CALL },
    { "pathlib._local", "WindowsPath", PICKLE_METADATA, PICKLE_CALL },
    { "torch", "Size", PICKLE_METADATA | PICKLE_TENSOR, PICKLE_CALL },
    { "collections", "OrderedDict", PICKLE_METADATA | PICKLE_TENSOR, PICKLE_CALL },
    { "torch._utils", "_rebuild_tensor_v2", PICKLE_TENSOR, PICKLE_CALL },
    { "torch._utils", "_rebuild_tensor_v3", PICKLE_TENSOR, PICKLE_CALL },
    { "torch._utils", "_rebuild_parameter", PICKLE_FILE, PICKLE_CALL },
    { "torch", "BoolStorage", PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "ByteStorage", PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "CharStorage", PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "ShortStorage", PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "IntStorage", PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "LongStorage", PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "HalfStorage", PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "BFloat16Storage", PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "FloatStorage", PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "DoubleStorage", PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "ComplexFloatStorage", PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "ComplexDoubleStorage", PICKLE_TENSOR, PICKLE_NAME },
    { "torch.storage", "UntypedStorage", PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "bool", PICKLE_METADATA | PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "uint8", PICKLE_METADATA | PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "int8", PICKLE_METADATA | PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "int16", PICKLE_METADATA | PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "uint16", PICKLE_METADATA | PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "int32", PICKLE_METADATA | PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "uint32", PICKLE_METADATA | PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "int64", PICKLE_METADATA | PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "uint64", PICKLE_METADATA | PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "float16", PICKLE_METADATA | PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "bfloat16", PICKLE_METADATA | PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "float32", PICKLE_METADATA | PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "float64", PICKLE_METADATA | PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "float8_e4m3fn", PICKLE_METADATA | PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "float8_e5m2", PICKLE_METADATA | PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "float8_e4m3fnuz", PICKLE_METADATA | PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "float8_e5m2fnuz", PICKLE_METADATA | PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "float8_e8m0fnu", PICKLE_METADATA | PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "float4_e2m1fn_x2", PICKLE_METADATA | PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "complex32", PICKLE_METADATA | PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "complex64", PICKLE_METADATA | PICKLE_TENSOR, PICKLE_NAME },
    { "torch", "complex128", PICKLE_METADATA | PICKLE_TENSOR, PICKLE_NAME },
};

/* ---- the machine ---- */

/* Memory that grows; its elements have numbers of 31 bits. */
typedef struct pickle_array {
    void *data;
    size_t count, room, size; /* elements; bytes of one */
} pickle_array;

typedef struct pickle {
    xd_ctx *ctx;
    const char *label; /* in messages: which pickle it is */
    const unsigned char *bytes;
    size_t length, at, opcode; /* what comes next; where the current instruction began */
    size_t begin;              /* where the pickle begins */
    int where;                 /* which classes there may be */
    bool stream;               /* bytes follow its end */
    pickle_array values, items, stack, marks, memo;
    int32_t root;
} pickle;

#define PICKLE_REQUIRE(p, condition, ...) PICKLE_REQUIRE_AT(p, (p)->opcode, condition, __VA_ARGS__)
#define PICKLE_REQUIRE_AT(p, offset, condition, ...)                                   \
    do {                                                                               \
        if (!(condition)) {                                                            \
            char text_[400];                                                           \
            snprintf(text_, sizeof text_, __VA_ARGS__);                                \
            return XD_FAIL((p)->ctx, XD_ERROR_FORMAT, "%s, byte %llu: %s", (p)->label, \
                           (unsigned long long)(offset), text_);                       \
        }                                                                              \
    } while (0)

/* A text for a message: at most 79 bytes, none that a terminal would obey, and '?' for a NUL. The text is overwritten by the fourth
 * call from here. */
static const char *pickle_show(const void *data, size_t bytes) {
    static char shown[4][80];
    static int at;
    char text[sizeof shown[0]];
    const size_t length = bytes < sizeof text - 1 ? bytes : sizeof text - 1;
    at = (at + 1) % 4;
    if (length) memcpy(text, data, length);
    for (size_t i = 0; i < length; i++)
        if (!text[i]) text[i] = '?';
    text[length] = '\0';
    return xd_text_escape(text, shown[at], sizeof shown[at]);
}

/* Room for one more element, zero-filled; *out is its number. */
static xd_result pickle_push(pickle *p, pickle_array *a, int32_t *out) {
    PICKLE_REQUIRE(p, a->count < INT32_MAX, "more than %d values", INT32_MAX);
    if (a->count == a->room) {
        const size_t room = a->room ? a->room * 2 : 64;
        void *data = xd_allocate(p->ctx, room * a->size);
        XD_REQUIRE(p->ctx, data, XD_ERROR_MEMORY, "%s: no room for %llu values", p->label,
                   (unsigned long long)room);
        if (a->count) memcpy(data, a->data, a->count * a->size);
        xd_release(p->ctx, a->data);
        a->data = data;
        a->room = room;
    }
    *out = (int32_t)a->count++;
    memset((unsigned char *)a->data + (size_t)*out * a->size, 0, a->size);
    return XD_OK;
}

static pickle_value *pickle_at(const pickle *p, int32_t value) {
    return (pickle_value *)p->values.data + value;
}

static pickle_item *pickle_item_at(const pickle *p, int32_t item) {
    return (pickle_item *)p->items.data + item;
}

static int32_t *pickle_stack_at(const pickle *p, size_t index) {
    return (int32_t *)p->stack.data + index;
}

static xd_result pickle_push_number(pickle *p, pickle_array *a, int32_t number) {
    int32_t at;
    XD_TRY(pickle_push(p, a, &at));
    ((int32_t *)a->data)[at] = number;
    return XD_OK;
}

/* A new value on the stack. */
static xd_result pickle_make(pickle *p, pickle_kind kind, pickle_value **out) {
    int32_t at;
    PICKLE_REQUIRE(p, p->values.count < PICKLE_VALUES_MOST, "more than %d values", PICKLE_VALUES_MOST);
    PICKLE_REQUIRE(p, p->stack.count < PICKLE_STACK_MOST, "more than %d values wait to become one",
                   PICKLE_STACK_MOST);
    XD_TRY(pickle_push(p, &p->values, &at));
    XD_TRY(pickle_push_number(p, &p->stack, at));
    *out = pickle_at(p, at);
    (*out)->kind = kind;
    (*out)->first = (*out)->last = PICKLE_NOTHING;
    (*out)->class = PICKLE_NOTHING;
    (*out)->at = p->opcode;
    return XD_OK;
}

/* How many values lie above the last mark: only those can be taken. */
static size_t pickle_height(const pickle *p) {
    return p->stack.count - (p->marks.count ? (size_t)((int32_t *)p->marks.data)[p->marks.count - 1] : 0);
}

static xd_result pickle_pop(pickle *p, int32_t *out) {
    PICKLE_REQUIRE(p, pickle_height(p) > 0, "an instruction takes a value that is not on the stack");
    *out = *pickle_stack_at(p, --p->stack.count);
    return XD_OK;
}

/* The value below the `above` topmost. */
static xd_result pickle_peek(const pickle *p, size_t above, int32_t *out) {
    PICKLE_REQUIRE(p, pickle_height(p) > above, "an instruction changes a value that is not on the stack");
    *out = *pickle_stack_at(p, p->stack.count - 1 - above);
    return XD_OK;
}

static xd_result pickle_append(pickle *p, int32_t to, int32_t value) {
    int32_t at;
    XD_TRY(pickle_push(p, &p->items, &at));
    pickle_item_at(p, at)->value = value;
    pickle_item_at(p, at)->next = PICKLE_NOTHING;
    pickle_value *list = pickle_at(p, to);
    if (list->integer == 0)
        list->first = at;
    else
        pickle_item_at(p, list->last)->next = at;
    list->last = at;
    list->integer++;
    return XD_OK;
}

/* ---- bytes ---- */

static xd_result pickle_take(pickle *p, uint64_t bytes, const unsigned char **out) {
    PICKLE_REQUIRE(p, bytes <= p->length - p->at, "an instruction takes %llu bytes, and %llu are left",
                   (unsigned long long)bytes, (unsigned long long)(p->length - p->at));
    *out = p->bytes + p->at;
    p->at += (size_t)bytes;
    return XD_OK;
}

/* An unsigned number of `bytes` bytes, little-endian. */
static xd_result pickle_number(pickle *p, int bytes, uint64_t *out) {
    const unsigned char *data;
    XD_TRY(pickle_take(p, (uint64_t)bytes, &data));
    *out = 0;
    for (int i = bytes; i-- > 0;) *out = *out << 8 | data[i];
    return XD_OK;
}

/* The rest of a line, without its end. */
static xd_result pickle_line(pickle *p, const unsigned char **line, size_t *bytes) {
    const unsigned char *begin = p->bytes + p->at;
    const unsigned char *end =
        p->at < p->length ? (const unsigned char *)memchr(begin, '\n', p->length - p->at) : NULL;
    PICKLE_REQUIRE(p, end, "a name that does not end");
    *line = begin;
    *bytes = (size_t)(end - begin);
    p->at += *bytes + 1;
    return XD_OK;
}

/* ---- instructions ---- */

static xd_result pickle_push_integer(pickle *p, pickle_kind kind, int64_t integer) {
    pickle_value *value;
    XD_TRY(pickle_make(p, kind, &value));
    value->integer = integer;
    return XD_OK;
}

static xd_result pickle_push_long(pickle *p) {
    uint64_t bytes, number = 0;
    const unsigned char *data;
    XD_TRY(pickle_number(p, 1, &bytes));
    PICKLE_REQUIRE(p, bytes <= 8, "an integer of %llu bytes", (unsigned long long)bytes);
    XD_TRY(pickle_take(p, bytes, &data));
    for (int i = (int)bytes; i-- > 0;) number = number << 8 | data[i];
    if (bytes > 0 && bytes < 8 && data[bytes - 1] >= 0x80) number |= ~UINT64_C(0) << (8 * bytes);
    return pickle_push_integer(p, PICKLE_INTEGER, (int64_t)number);
}

static xd_result pickle_push_float(pickle *p) {
    const unsigned char *data;
    uint64_t bits = 0;
    pickle_value *value;
    XD_TRY(pickle_take(p, 8, &data));
    for (int i = 0; i < 8; i++) bits = bits << 8 | data[i];
    XD_TRY(pickle_make(p, PICKLE_FLOAT, &value));
    memcpy(&value->real, &bits, sizeof bits);
    return XD_OK;
}

/* `length`: bytes of the number before the text. */
static xd_result pickle_push_text(pickle *p, int length) {
    uint64_t bytes;
    const unsigned char *data;
    pickle_value *value;
    XD_TRY(pickle_number(p, length, &bytes));
    XD_TRY(pickle_take(p, bytes, &data));
    XD_TRY(pickle_make(p, PICKLE_TEXT, &value));
    value->at = (size_t)(data - p->bytes);
    value->integer = (int64_t)bytes;
    return XD_OK;
}

static xd_result pickle_push_class(pickle *p, const unsigned char *module, size_t module_bytes,
                                   const unsigned char *name, size_t name_bytes) {
    pickle_value *value;
    int32_t found = PICKLE_NOTHING;
    for (int32_t i = 0; i < (int32_t)(sizeof pickle_classes / sizeof *pickle_classes); i++) {
        const pickle_class *c = &pickle_classes[i];
        if ((c->where & p->where) && strlen(c->module) == module_bytes && strlen(c->name) == name_bytes &&
            memcmp(c->module, module, module_bytes) == 0 && memcmp(c->name, name, name_bytes) == 0)
            found = i;
    }
    PICKLE_REQUIRE(p, found >= 0, "\"%s.%s\" is not in the list of classes",
                   pickle_show(module, module_bytes), pickle_show(name, name_bytes));
    XD_TRY(pickle_make(p, PICKLE_CLASS, &value));
    value->class = found;
    return XD_OK;
}

static xd_result pickle_global(pickle *p) {
    const unsigned char *module, *name;
    size_t module_bytes, name_bytes;
    XD_TRY(pickle_line(p, &module, &module_bytes));
    XD_TRY(pickle_line(p, &name, &name_bytes));
    return pickle_push_class(p, module, module_bytes, name, name_bytes);
}

static xd_result pickle_stack_global(pickle *p) {
    int32_t module, name;
    XD_TRY(pickle_pop(p, &name));
    XD_TRY(pickle_pop(p, &module));
    const pickle_value *m = pickle_at(p, module), *n = pickle_at(p, name);
    PICKLE_REQUIRE(p, m->kind == PICKLE_TEXT && n->kind == PICKLE_TEXT, "a class whose name is no text");
    return pickle_push_class(p, p->bytes + m->at, (size_t)m->integer, p->bytes + n->at, (size_t)n->integer);
}

/* The topmost values become a tuple: those above `first` in the stack. */
static xd_result pickle_tuple(pickle *p, size_t first) {
    int32_t tuple;
    XD_TRY(pickle_push(p, &p->values, &tuple));
    pickle_at(p, tuple)->kind = PICKLE_TUPLE;
    pickle_at(p, tuple)->at = p->opcode;
    pickle_at(p, tuple)->class = pickle_at(p, tuple)->first = PICKLE_NOTHING;
    for (size_t i = first; i < p->stack.count; i++) XD_TRY(pickle_append(p, tuple, *pickle_stack_at(p, i)));
    p->stack.count = first;
    return pickle_push_number(p, &p->stack, tuple);
}

static xd_result pickle_small_tuple(pickle *p, size_t count) {
    PICKLE_REQUIRE(p, pickle_height(p) >= count, "a tuple of %llu values, and %llu are on the stack",
                   (unsigned long long)count, (unsigned long long)pickle_height(p));
    return pickle_tuple(p, p->stack.count - count);
}

/* Where the last mark is, which is taken away. */
static xd_result pickle_pop_mark(pickle *p, size_t *first) {
    PICKLE_REQUIRE(p, p->marks.count > 0, "an instruction looks for a mark, and there is none");
    *first = (size_t)((int32_t *)p->marks.data)[--p->marks.count];
    return XD_OK;
}

/* The values above `first` become items of the list or dict below them. */
static xd_result pickle_extend(pickle *p, size_t first, pickle_kind kind) {
    const size_t count = p->stack.count - first;
    int32_t to;
    XD_TRY(pickle_peek(p, count, &to));
    PICKLE_REQUIRE(p, pickle_at(p, to)->kind == kind, "items for what is no %s",
                   kind == PICKLE_LIST ? "list" : "dict");
    PICKLE_REQUIRE(p, kind == PICKLE_LIST || count % 2 == 0, "a key without a value");
    for (size_t i = first; i < p->stack.count; i++) XD_TRY(pickle_append(p, to, *pickle_stack_at(p, i)));
    p->stack.count = first;
    return XD_OK;
}

static xd_result pickle_extend_to_mark(pickle *p, pickle_kind kind) {
    size_t first;
    XD_TRY(pickle_pop_mark(p, &first));
    return pickle_extend(p, first, kind);
}

static xd_result pickle_extend_by(pickle *p, size_t count, pickle_kind kind) {
    PICKLE_REQUIRE(p, pickle_height(p) > count, "items for a value that is not on the stack");
    return pickle_extend(p, p->stack.count - count, kind);
}

static bool pickle_is_class(const pickle *p, int32_t value, const char *name) {
    const pickle_value *v = pickle_at(p, value);
    return v->class >= 0 && strcmp(pickle_classes[v->class].name, name) == 0;
}

/* NEWOBJ and REDUCE: an object of its class and its arguments. */
static xd_result pickle_object(pickle *p, int how) {
    int32_t arguments, class;
    pickle_value *object;
    XD_TRY(pickle_pop(p, &arguments));
    XD_TRY(pickle_pop(p, &class));
    PICKLE_REQUIRE(p, pickle_at(p, class)->kind == PICKLE_CLASS, "a call of what is no class");
    const int32_t which = pickle_at(p, class)->class;
    PICKLE_REQUIRE(p, pickle_classes[which].makes == how, "\"%s\" is not made this way",
                   pickle_classes[which].name);
    PICKLE_REQUIRE(p, pickle_at(p, arguments)->kind == PICKLE_TUPLE, "arguments of \"%s\" that are no tuple",
                   pickle_classes[which].name);
    PICKLE_REQUIRE(p, how == PICKLE_CALL || pickle_at(p, arguments)->integer == 0,
                   "arguments of a new \"%s\"", pickle_classes[which].name);
    const bool dict = pickle_is_class(p, class, "OrderedDict");
    PICKLE_REQUIRE(p, !dict || pickle_at(p, arguments)->integer == 0, "arguments of an OrderedDict");
    XD_TRY(pickle_make(p, dict ? PICKLE_DICT : PICKLE_OBJECT, &object));
    if (dict) return XD_OK;
    object->class = which;
    object->first = arguments;
    return XD_OK;
}

static xd_result pickle_build(pickle *p) {
    int32_t state, object;
    XD_TRY(pickle_pop(p, &state));
    XD_TRY(pickle_peek(p, 0, &object));
    pickle_value *o = pickle_at(p, object);
    if (o->kind == PICKLE_DICT && (p->where & PICKLE_FILE))
        return XD_OK; /* the versions of a state_dict's modules */
    PICKLE_REQUIRE(p, o->kind == PICKLE_OBJECT && pickle_classes[o->class].makes == PICKLE_NEW,
                   "a state for what has none");
    PICKLE_REQUIRE(p, o->last == PICKLE_NOTHING, "a second state of a \"%s\"", pickle_classes[o->class].name);
    o->last = state;
    return XD_OK;
}

static xd_result pickle_storage(pickle *p) {
    int32_t what;
    pickle_value *storage;
    PICKLE_REQUIRE(p, p->where & PICKLE_TENSOR, "a reference to a storage outside of a tensor");
    XD_TRY(pickle_pop(p, &what));
    PICKLE_REQUIRE(p, pickle_at(p, what)->kind == PICKLE_TUPLE, "a reference to a storage that is no tuple");
    XD_TRY(pickle_make(p, PICKLE_STORAGE, &storage));
    storage->first = what;
    return XD_OK;
}

/* Keeps the topmost value under a number. Pickles count from 0, so there are no more numbers than bytes. */
static xd_result pickle_put(pickle *p, uint64_t index) {
    int32_t value;
    XD_TRY(pickle_peek(p, 0, &value));
    PICKLE_REQUIRE(p, index <= p->memo.count, "the value of memory %llu, and %llu have been kept",
                   (unsigned long long)index, (unsigned long long)p->memo.count);
    if (index == p->memo.count) return pickle_push_number(p, &p->memo, value);
    ((int32_t *)p->memo.data)[index] = value;
    return XD_OK;
}

static xd_result pickle_get(pickle *p, int bytes) {
    uint64_t index;
    XD_TRY(pickle_number(p, bytes, &index));
    PICKLE_REQUIRE(p, index < p->memo.count, "the value of memory %llu, and %llu have been kept",
                   (unsigned long long)index, (unsigned long long)p->memo.count);
    PICKLE_REQUIRE(p, p->stack.count < PICKLE_STACK_MOST, "more than %d values wait to become one",
                   PICKLE_STACK_MOST);
    return pickle_push_number(p, &p->stack, ((int32_t *)p->memo.data)[index]);
}

static xd_result pickle_put_numbered(pickle *p, int bytes) {
    uint64_t index;
    XD_TRY(pickle_number(p, bytes, &index));
    return pickle_put(p, index);
}

static xd_result pickle_frame(pickle *p) {
    uint64_t bytes;
    XD_TRY(pickle_number(p, 8, &bytes));
    PICKLE_REQUIRE(p, bytes <= p->length - p->at, "a frame of %llu bytes, and %llu are left",
                   (unsigned long long)bytes, (unsigned long long)(p->length - p->at));
    return XD_OK;
}

static xd_result pickle_protocol(pickle *p) {
    uint64_t version;
    XD_TRY(pickle_number(p, 1, &version));
    PICKLE_REQUIRE(p, p->opcode == p->begin, "a protocol that is not at the beginning");
    PICKLE_REQUIRE(p, version >= 2 && version <= 5, "protocol %llu, of 2 to 5", (unsigned long long)version);
    return XD_OK;
}

/* Numbers and texts. */
static xd_result pickle_run_scalar(pickle *p, unsigned char opcode) {
    uint64_t number;
    pickle_value *value;
    switch (opcode) {
    case 'N': return pickle_make(p, PICKLE_NONE, &value);
    case 0x88: return pickle_push_integer(p, PICKLE_BOOL, 1);
    case 0x89: return pickle_push_integer(p, PICKLE_BOOL, 0);
    case 'K':
        XD_TRY(pickle_number(p, 1, &number));
        return pickle_push_integer(p, PICKLE_INTEGER, (int64_t)number);
    case 'M':
        XD_TRY(pickle_number(p, 2, &number));
        return pickle_push_integer(p, PICKLE_INTEGER, (int64_t)number);
    case 'J':
        XD_TRY(pickle_number(p, 4, &number));
        return pickle_push_integer(p, PICKLE_INTEGER,
                                   (int64_t)number - (number >> 31 ? INT64_C(1) << 32 : 0));
    case 0x8a: return pickle_push_long(p);
    case 'G': return pickle_push_float(p);
    case 0x8c: return pickle_push_text(p, 1);
    case 'X': return pickle_push_text(p, 4);
    default: return pickle_push_text(p, 8);
    }
}

/* What is made of other values. */
static xd_result pickle_run_container(pickle *p, unsigned char opcode) {
    size_t first;
    pickle_value *value;
    switch (opcode) {
    case ')': return pickle_make(p, PICKLE_TUPLE, &value);
    case ']': return pickle_make(p, PICKLE_LIST, &value);
    case '}': return pickle_make(p, PICKLE_DICT, &value);
    case '(':
        PICKLE_REQUIRE(p, p->marks.count < PICKLE_STACK_MOST, "more than %d marks", PICKLE_STACK_MOST);
        return pickle_push_number(p, &p->marks, (int32_t)p->stack.count);
    case 't': XD_TRY(pickle_pop_mark(p, &first)); return pickle_tuple(p, first);
    case 0x85: return pickle_small_tuple(p, 1);
    case 0x86: return pickle_small_tuple(p, 2);
    case 0x87: return pickle_small_tuple(p, 3);
    case 'a': return pickle_extend_by(p, 1, PICKLE_LIST);
    case 'e': return pickle_extend_to_mark(p, PICKLE_LIST);
    case 's': return pickle_extend_by(p, 2, PICKLE_DICT);
    default: return pickle_extend_to_mark(p, PICKLE_DICT);
    }
}

/* Everything else. */
static xd_result pickle_run_other(pickle *p, unsigned char opcode) {
    switch (opcode) {
    case 0x80: return pickle_protocol(p);
    case 0x95: return pickle_frame(p);
    case 'c': return pickle_global(p);
    case 0x93: return pickle_stack_global(p);
    case 0x81: return pickle_object(p, PICKLE_NEW);
    case 'R': return pickle_object(p, PICKLE_CALL);
    case 'b': return pickle_build(p);
    case 'Q': return pickle_storage(p);
    case 'q': return pickle_put_numbered(p, 1);
    case 'r': return pickle_put_numbered(p, 4);
    case 0x94: return pickle_put(p, p->memo.count);
    case 'h': return pickle_get(p, 1);
    default: return pickle_get(p, 4);
    }
}

static bool pickle_is_one_of(unsigned char opcode, const char *list) {
    return opcode && strchr(list, opcode) != NULL;
}

/* The name of an instruction that is not in the list. */
static const char *pickle_opcode_name(unsigned char opcode) {
    static const struct {
        unsigned char opcode;
        const char *name;
    } names[] = {
        { '0', "POP" },
        { '1', "POP_MARK" },
        { '2', "DUP" },
        { 'F', "FLOAT" },
        { 'I', "INT" },
        { 'L', "LONG" },
        { 'P', "PERSID" },
        { 'S', "STRING" },
        { 'T', "BINSTRING" },
        { 'U', "SHORT_BINSTRING" },
        { 'V', "UNICODE" },
        { 'B', "BINBYTES" },
        { 'C', "SHORT_BINBYTES" },
        { 0x8e, "BINBYTES8" },
        { 0x96, "BYTEARRAY8" },
        { 'd', "DICT" },
        { 'l', "LIST" },
        { 'g', "GET" },
        { 'p', "PUT" },
        { 'i', "INST" },
        { 'o', "OBJ" },
        { 0x82, "EXT1" },
        { 0x83, "EXT2" },
        { 0x84, "EXT4" },
        { 0x8b, "LONG4" },
        { 0x8f, "EMPTY_SET" },
        { 0x90, "ADDITEMS" },
        { 0x91, "FROZENSET" },
        { 0x92, "NEWOBJ_EX" },
        { 0x97, "NEXT_BUFFER" },
        { 0x98, "READONLY_BUFFER" },
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].opcode == opcode) return names[i].name;
    return "unknown";
}

static xd_result pickle_run(pickle *p) {
    for (;;) {
        p->opcode = p->at;
        PICKLE_REQUIRE(p, p->at < p->length, "the pickle has no end");
        const unsigned char opcode = p->bytes[p->at++];
        if (opcode == '.') break;
        if (pickle_is_one_of(opcode, "N\x88\x89KMJ\x8aG\x8cX\x8d"))
            XD_TRY(pickle_run_scalar(p, opcode));
        else if (pickle_is_one_of(opcode, ")]}(t\x85\x86\x87"
                                          "aesu"))
            XD_TRY(pickle_run_container(p, opcode));
        else if (pickle_is_one_of(opcode, "\x80\x95"
                                          "c\x93\x81RbQqr\x94hj"))
            XD_TRY(pickle_run_other(p, opcode));
        else
            PICKLE_REQUIRE(p, false, "instruction 0x%02x, %s, is not in the list", opcode,
                           pickle_opcode_name(opcode));
    }
    PICKLE_REQUIRE(p, p->marks.count == 0 && p->stack.count == 1, "an end with %llu marks and %llu values",
                   (unsigned long long)p->marks.count, (unsigned long long)p->stack.count);
    PICKLE_REQUIRE(p, p->stream || p->at == p->length, "%llu bytes after the end",
                   (unsigned long long)(p->length - p->at));
    p->root = *pickle_stack_at(p, 0);
    return XD_OK;
}

static void pickle_begin(pickle *p, xd_ctx *ctx, const char *label, const void *bytes, size_t length,
                         int where) {
    memset(p, 0, sizeof *p);
    p->ctx = ctx;
    p->label = label;
    p->bytes = (const unsigned char *)bytes;
    p->length = length;
    p->where = where;
    p->values.size = sizeof(pickle_value);
    p->items.size = sizeof(pickle_item);
    p->stack.size = p->marks.size = p->memo.size = sizeof(int32_t);
}

/* Reads a pickle; `label` and `bytes` must outlive it. It is to be closed whatever the result. */
static xd_result pickle_open(pickle *p, xd_ctx *ctx, const char *label, const void *bytes, size_t length,
                             int where) {
    pickle_begin(p, ctx, label, bytes, length, where);
    return pickle_run(p);
}

/* The same for a pickle that begins at byte *at and need not end with the bytes; *at then is where it ends. */
static xd_result pickle_open_at(pickle *p, xd_ctx *ctx, const char *label, const void *bytes, size_t length,
                                size_t *at) {
    pickle_begin(p, ctx, label, bytes, length, PICKLE_TENSOR | PICKLE_FILE);
    p->stream = true;
    p->at = p->begin = *at;
    const xd_result result = pickle_run(p);
    *at = p->at;
    return result;
}

static void pickle_close(pickle *p) {
    if (!p->ctx) return;
    xd_release(p->ctx, p->values.data);
    xd_release(p->ctx, p->items.data);
    xd_release(p->ctx, p->stack.data);
    xd_release(p->ctx, p->marks.data);
    xd_release(p->ctx, p->memo.data);
    memset(p, 0, sizeof *p);
}

/* ---- looking at it ---- */

static bool pickle_is(const pickle *p, int32_t value, pickle_kind kind) {
    return value >= 0 && pickle_at(p, value)->kind == kind;
}

/* An object of a class. */
static bool pickle_is_object(const pickle *p, int32_t value, const char *name) {
    return pickle_is(p, value, PICKLE_OBJECT) && pickle_is_class(p, value, name);
}

static bool pickle_is_text(const pickle *p, int32_t value, const char *text) {
    return pickle_is(p, value, PICKLE_TEXT) && (size_t)pickle_at(p, value)->integer == strlen(text) &&
           memcmp(p->bytes + pickle_at(p, value)->at, text, strlen(text)) == 0;
}

/* The first of the items of a container, and the one after an item; PICKLE_NOTHING at the end. */
static int32_t pickle_first(const pickle *p, int32_t container) {
    return pickle_at(p, container)->integer ? pickle_at(p, container)->first : PICKLE_NOTHING;
}
static int32_t pickle_next(const pickle *p, int32_t item) {
    return pickle_item_at(p, item)->next;
}

/* The value of a key of a dict, or of the state of an object that is a dict; the last one, as in Python. */
static int32_t pickle_find(const pickle *p, int32_t value, const char *key) {
    enum { MOST = 128 /* items: a dict that a thousand objects share cannot cost more */ };
    int32_t found = PICKLE_NOTHING;
    if (pickle_is(p, value, PICKLE_OBJECT)) value = pickle_at(p, value)->last;
    if (!pickle_is(p, value, PICKLE_DICT) || pickle_at(p, value)->integer > MOST) return found;
    for (int32_t i = pickle_first(p, value); i >= 0; i = pickle_next(p, pickle_next(p, i)))
        if (pickle_is_text(p, pickle_item_at(p, i)->value, key))
            found = pickle_item_at(p, pickle_next(p, i))->value;
    return found;
}

/* Item `index` of a tuple or a list; PICKLE_NOTHING when there is none. */
static int32_t pickle_item_value(const pickle *p, int32_t container, int64_t index) {
    if (!pickle_is(p, container, PICKLE_TUPLE) && !pickle_is(p, container, PICKLE_LIST))
        return PICKLE_NOTHING;
    int32_t at = pickle_first(p, container);
    while (at >= 0 && index-- > 0) at = pickle_next(p, at);
    return at < 0 ? PICKLE_NOTHING : pickle_item_at(p, at)->value;
}

#endif
