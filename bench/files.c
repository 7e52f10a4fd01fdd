/* Checkpoints of two ranks beside the rates at which the same threads write and read the same bytes.
 *
 *     make bench-files        or      build/bench/files [-J FILE]
 *
 * BENCH_DIRECTORY names a folder on the disk to measure (build/bench/files.d otherwise), BENCH_MIB the size (1024 otherwise).
 * A memory file system is measured too where there is /dev/shm. Everything that was written is removed again.
 *
 * What is "raw": both ranks write into one file, of full length from the beginning, in the pieces and at the places of the save,
 * by pwrite, and then fsync it; "direct" is the same with O_DIRECT. Reads likewise by pread. Cold: the file's pages have been
 * dropped from the cache, as far as the system does what it is asked; a virtual machine's host may still have them. Start: for how
 * long xd_checkpoint_save_start keeps training, beside copying the same bytes; the save itself is waited for outside of the clock.
 *
 * `build/bench/files serve DIRECTORY` carries out orders from standard input for bench/torch/files.py: "step ARM", answered with a
 * line of seconds and bytes. */
#define _GNU_SOURCE /* O_DIRECT, posix_fadvise */
#define BENCH_ROUNDS 3
#define BENCH_WARMUP 1
#define XDISTILL_IMPLEMENTATION
#include "xdistill.h"

#include "bench.h"
#include "team.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#if !defined(O_DIRECT)
#    define O_DIRECT 0
#endif

enum { PIECE = 16 << 20, STEP = 1, TENSORS_MOST = 512, PATH_ROOM = 512 };

typedef enum arm {
    SAVE,
    WRITE,
    WRITE_DIRECT,
    LOAD,
    LOAD_CHECKED,
    READ,
    LOAD_COLD,
    LOAD_CHECKED_COLD,
    READ_COLD,
    START,
    COPY,
    MAP,
    VERIFY,
    READ_ALONE,
    CHECKSUM,
    REMOVE,
    ARMS
} arm;

static const char *const arm_names[ARMS] = {
    "save",         "write",      "write-direct", "load",
    "load-checked", "read",       "load-cold",    "load-checked-cold",
    "read-cold",    "start",      "copy",         "map",
    "verify",       "read-alone", "checksum",     "remove"
};

/* What a rank has: of every tensor, two pieces long, one. */
typedef struct stage {
    team_rank *me;
    const char *directory;
    int tensors;
    xd_tensor_part parts[TENSORS_MOST];
    char names[TENSORS_MOST][16];
    char *memory; /* [tensors][PIECE], aligned as direct writing wants it */
    char *copies; /* as much */
    xd_checkpoint_saver *saver;
    double seconds;
} stage;

static void require(bool good, const char *what) {
    if (good) return;
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(2);
}

static int tensor_count(void) {
    const char *mib = getenv("BENCH_MIB");
    const long count = (mib ? strtol(mib, NULL, 10) : 1024) * (1 << 20) / (2 * PIECE);
    return count < 1 ? 1 : count > TENSORS_MOST ? TENSORS_MOST : (int)count;
}

static double total_bytes(int tensors) {
    return 2.0 * PIECE * tensors;
}

/* ---- the parts ---- */

/* No page and no block is like another. */
static float element(int64_t i, int rank) {
    return (float)(i * 7919 + rank);
}

static void fill(stage *st) {
    const int64_t count = (int64_t)st->tensors * PIECE / 4;
    for (int64_t i = 0; i < count; i++) ((float *)(void *)st->memory)[i] = element(i, st->me->rank);
}

static void make_parts(stage *st) {
    const int64_t own = PIECE / 4;
    void *memory = NULL;
    st->tensors = tensor_count();
    require(posix_memalign(&memory, 4096, (size_t)st->tensors * PIECE) == 0, "memory");
    st->memory = (char *)memory;
    for (int i = 0; i < st->tensors; i++) {
        xd_tensor_part *p = &st->parts[i];
        snprintf(st->names[i], sizeof st->names[i], "weight.%03d",
                 i); /* files have them in the order of names */
        memset(p, 0, sizeof *p);
        p->name = st->names[i];
        p->dtype = XD_DTYPE_F32;
        p->ndim = 2;
        p->shape[0] = 2 * own / 1024;
        p->shape[1] = 1024;
        p->range.begin = st->me->rank * own;
        p->range.end = p->range.begin + own;
        p->data = st->memory + (size_t)i * PIECE;
    }
}

/* ---- files ---- */

static void path_of(const stage *st, const char *name, char path[PATH_ROOM]) {
    snprintf(path, PATH_ROOM, "%s/%s", st->directory, name);
}

/* Removes a directory of files. */
static void wipe(const char *directory) {
    char path[PATH_ROOM];
    DIR *names = opendir(directory);
    if (!names) return;
    for (const struct dirent *e = readdir(names); e; e = readdir(names)) {
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        if (snprintf(path, sizeof path, "%s/%s", directory, e->d_name) < (int)sizeof path) remove(path);
    }
    closedir(names);
    rmdir(directory);
}

static void drop_pages(const char *path) {
    const int file = open(path, O_RDONLY);
    require(file >= 0, path);
    require(fsync(file) == 0, path);
    require(posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED) == 0, path);
    close(file);
}

static void remove_all(const stage *st) {
    char path[PATH_ROOM];
    path_of(st, "step-1", path);
    wipe(path);
    wipe(st->directory);
}

/* The checkpoint that loads and reads find. */
static void model_path(const stage *st, char path[PATH_ROOM]) {
    path_of(st, "step-1/model.safetensors", path);
}

/* ---- arms ---- */

static xd_checkpoint_network network(const stage *st) {
    xd_checkpoint_network n;
    memset(&n, 0, sizeof n);
    n.parts = st->parts;
    n.part_count = st->tensors;
    return n;
}

/* Beside what follows, or at once. */
static void save(stage *st, bool beside) {
    const xd_checkpoint_network n = network(st);
    xd_checkpoint_save_desc d;
    memset(&d, 0, sizeof d);
    d.root = st->directory;
    d.step = STEP;
    d.networks = &n;
    d.network_count = 1;
    team_require(st->me->ctx[0],
                 beside ? xd_checkpoint_save_start(st->saver, &d) : xd_checkpoint_save(st->me->comm[0], &d));
}

/* The saver, and memory for copies of its bytes, which has been touched. */
static void reserve(stage *st) {
    const xd_checkpoint_network n = network(st);
    const xd_checkpoint_saver_desc desc = { &n, 1 };
    if (st->saver) return;
    team_require(st->me->ctx[0], xd_checkpoint_saver_create(st->me->comm[0], &desc, &st->saver));
    st->copies = (char *)xd_allocate(st->me->ctx[0], (size_t)st->tensors * PIECE);
    require(st->copies != NULL, "memory");
}

static void give_back(stage *st) {
    xd_checkpoint_saver_destroy(st->saver);
    xd_release(st->me->ctx[0], st->copies);
    st->saver = NULL;
    st->copies = NULL;
}

static void copy(stage *st) {
    for (int i = 0; i < st->tensors; i++)
        memcpy(st->copies + (size_t)i * PIECE, st->memory + (size_t)i * PIECE, PIECE);
}

static void load(stage *st, xd_checkpoint_check check) {
    const xd_checkpoint_network n = network(st);
    xd_checkpoint_load_desc d;
    memset(&d, 0, sizeof d);
    d.root = st->directory;
    d.step = STEP;
    d.networks = &n;
    d.network_count = 1;
    d.check = check;
    team_require(st->me->ctx[0], xd_checkpoint_load(st->me->comm[0], &d, NULL, NULL));
}

/* The bytes of the save by pwrite, each tensor's pieces side by side. */
static void write_raw(stage *st, int flag) {
    char path[PATH_ROOM];
    path_of(st, "raw", path);
    if (st->me->rank == 0) {
        const int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0666);
        require(file >= 0 && ftruncate(file, (off_t)total_bytes(st->tensors)) == 0, path);
        close(file);
    }
    team_require(st->me->ctx[0], xd_barrier(st->me->comm[0]));
    int file = open(path, O_RDWR | flag);
    if (file < 0 && errno == EINVAL) file = open(path, O_RDWR); /* this file system has no direct writing */
    require(file >= 0, path);
    for (int i = 0; i < st->tensors; i++)
        for (size_t done = 0; done < PIECE;) {
            const off_t at = (off_t)(2 * i + st->me->rank) * PIECE + (off_t)done;
            const ssize_t put = pwrite(file, st->memory + (size_t)i * PIECE + done, PIECE - done, at);
            require(put > 0, path);
            done += (size_t)put;
        }
    require(fsync(file) == 0, path);
    close(file);
}

/* This rank's bytes of the checkpoint's file by pread; the header moves them by less than a page. */
static void read_raw(stage *st) {
    char path[PATH_ROOM];
    model_path(st, path);
    const int file = open(path, O_RDONLY);
    require(file >= 0, path);
    for (int i = 0; i < st->tensors; i++)
        for (size_t done = 0; done < PIECE;) {
            const off_t at = (off_t)(2 * i + st->me->rank) * PIECE + (off_t)done;
            const ssize_t got = pread(file, st->memory + (size_t)i * PIECE + done, PIECE - done, at);
            require(got > 0, path);
            done += (size_t)got;
        }
    close(file);
}

/* Opens the file by mapping it and asks for the address of every tensor. */
static void map(const stage *st) {
    char path[PATH_ROOM];
    xd_weights *file = NULL;
    model_path(st, path);
    team_require(st->me->ctx[0], xd_weights_open(st->me->ctx[0], &(xd_weights_desc){ .file = path }, &file));
    for (int64_t i = 0; i < xd_weights_describe(file).tensor_count; i++)
        if (!xd_weights_data(file, i)) exit(2);
    xd_weights_close(file);
}

static void verify(const stage *st) {
    char path[PATH_ROOM];
    path_of(st, "step-1", path);
    team_require(st->me->ctx[0], xd_checkpoint_verify(st->me->ctx[0], path));
}

/* All bytes of the checkpoint, a MiB at a time, by one rank. */
static void read_alone(const stage *st) {
    enum { PART = 1 << 20 };
    char path[PATH_ROOM], *part = (char *)malloc(PART);
    model_path(st, path);
    const int file = open(path, O_RDONLY);
    require(file >= 0 && part, path);
    while (read(file, part, PART) > 0) {
    }
    close(file);
    free(part);
}

/* As many bytes of memory as the checkpoint has. */
static void checksum(const stage *st) {
    volatile uint32_t keep = 0;
    for (int i = 0; i < 2 * st->tensors; i++)
        keep = xd_crc32c(keep, st->memory + (size_t)(i % st->tensors) * PIECE, PIECE);
}

/* ---- orders ---- */

/* What comes before the clock starts: rank 0. */
static void prepare(const stage *st, arm which) {
    char path[PATH_ROOM];
    if (which == SAVE || which == START) remove_all(st);
    if (which == WRITE || which == WRITE_DIRECT) {
        mkdir(st->directory, 0777);
        path_of(st, "raw", path);
        remove(path);
    }
    if (which != LOAD_COLD && which != LOAD_CHECKED_COLD && which != READ_COLD) return;
    model_path(st, path);
    drop_pages(path);
}

static void carry_out(stage *st, arm which) {
    const bool root = st->me->rank == 0;
    if (root) prepare(st, which);
    if (which == SAVE) fill(st); /* raw reads have put other bytes there */
    if (which == START || which == COPY) reserve(st);
    team_require(st->me->ctx[0], xd_barrier(st->me->comm[0]));
    const double start = bench_now();
    switch (which) {
    case SAVE: save(st, false); break;
    case START: save(st, true); break;
    case COPY: copy(st); break;
    case WRITE: write_raw(st, 0); break;
    case WRITE_DIRECT: write_raw(st, O_DIRECT); break;
    case LOAD:
    case LOAD_COLD: load(st, XD_CHECKPOINT_CHECK_NONE); break;
    case LOAD_CHECKED:
    case LOAD_CHECKED_COLD: load(st, XD_CHECKPOINT_CHECK_TOUCHED); break;
    case READ:
    case READ_COLD: read_raw(st); break;
    default: break;
    }
    if (root && which == MAP) map(st);
    if (root && which == VERIFY) verify(st);
    if (root && which == READ_ALONE) read_alone(st);
    if (root && which == CHECKSUM) checksum(st);
    if (root && which == REMOVE) remove_all(st);
    const double alone = bench_now() - start;
    team_require(st->me->ctx[0], xd_barrier(st->me->comm[0]));
    st->seconds = which >= MAP ? alone : bench_now() - start;
    if (which == START) team_require(st->me->ctx[0], xd_checkpoint_save_wait(st->saver));
    if (which == REMOVE) give_back(st);
}

static double lead(stage *st, arm which) {
    const team_order order = { 0, (int)which };
    team_tell(st->me, order);
    carry_out(st, which);
    return st->seconds;
}

/* ---- rows ---- */

typedef struct arm_state {
    stage *stage;
    arm which;
} arm_state;

static double measure_arm(void *state) {
    const arm_state *a = (const arm_state *)state;
    return lead(a->stage, a->which);
}

/* Every array of the ranks is again what was saved. */
static double load_error(stage *st) {
    const int64_t count = (int64_t)st->tensors * PIECE / 4;
    memset(st->memory, 0, (size_t)count * 4);
    lead(st, LOAD);
    for (int64_t i = 0; i < count; i++)
        if (((const float *)(void *)st->memory)[i] != element(i, 0)) return 1.0;
    return 0.0;
}

static bool compare(stage *st, FILE *json, const bench_machine *m, arm ours, arm other) {
    arm_state a = { st, ours }, b = { st, other };
    char shape[64], variant[64];
    const double bytes = total_bytes(st->tensors);
    snprintf(shape, sizeof shape, "\"n\":%d,\"bytes\":%.0f", ours >= MAP ? 1 : TEAM_RANKS, bytes);
    snprintf(variant, sizeof variant, "%s, %s", strncmp(st->directory, "/dev/shm", 8) ? "disk" : "memory",
             arm_names[ours]);
    const bench_arm one = { arm_names[ours], &a, NULL, measure_arm },
                    two = { arm_names[other], &b, NULL, measure_arm };
    const bench_row row = { "checkpoint",       variant, shape, "f32", bytes, m->copy,
                            "copy, one thread", 0.0,     0.0,   0.0,   0.0 };
    return bench_run(json, m, &row, &one, &two);
}

/* A save comes before a comparison that ends with raw writing: both leave files in the folder. */
static int run_directory(stage *st, FILE *json, const bench_machine *m, const char *directory) {
    static const arm pairs[][2] = {
        { LOAD, READ }, { LOAD_CHECKED, READ }, { LOAD_COLD, READ_COLD }, { LOAD_CHECKED_COLD, READ_COLD },
        { MAP, READ },  { VERIFY, READ_ALONE }, { CHECKSUM, READ_ALONE }, { START, COPY },
    };
    const bool disk = strncmp(directory, "/dev/shm", 8) != 0;
    struct statvfs space;
    int wrong = 0;
    st->directory = directory;
    mkdir(directory, 0777);
    require(statvfs(directory, &space) == 0, directory);
    if ((double)space.f_bavail * (double)space.f_frsize < 4.0 * total_bytes(st->tensors)) {
        printf("skipped: %s has no room for %.0f bytes\n", directory, 4.0 * total_bytes(st->tensors));
        rmdir(directory);
        return 0;
    }
    wrong += !compare(st, json, m, SAVE, WRITE);
    if (disk) wrong += !compare(st, json, m, SAVE, WRITE_DIRECT);
    lead(st, SAVE);
    wrong += load_error(st) > 0.0;
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++)
        if (disk || (pairs[i][1] != READ_COLD)) wrong += !compare(st, json, m, pairs[i][0], pairs[i][1]);
    lead(st, REMOVE);
    return wrong;
}

static void run_rows(stage *st, FILE *json) {
    const bench_machine machine = bench_measure_machine((size_t)128 << 20);
    const char *disk = getenv("BENCH_DIRECTORY");
    char memory[64];
    int wrong = 0;
    bench_header(&machine, "checkpoints, two ranks");
    snprintf(memory, sizeof memory, "/dev/shm/xdistill-bench-%ld", (long)getpid());
    wrong += run_directory(st, json, &machine, disk ? disk : "build/bench/files.d");
    if (access("/dev/shm", W_OK) == 0) wrong += run_directory(st, json, &machine, memory);
    printf("# wrong results: %d\n", wrong);
    if (wrong) exit(1);
}

/* Orders from standard input, until it ends. */
static void serve(stage *st) {
    char line[64], name[32];
    for (int i = 0; i < ARMS; i++) printf("%s%s", arm_names[i], i + 1 < ARMS ? " " : "\n");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        int which = 0;
        if (sscanf(line, "step %31s", name) != 1) exit(2);
        while (which < ARMS && strcmp(name, arm_names[which]) != 0) which++;
        if (which == ARMS) exit(2);
        printf("%.9f %.0f\n", lead(st, (arm)which), total_bytes(st->tensors));
        fflush(stdout);
    }
}

/* ---- the program ---- */

typedef struct options {
    FILE *json;
    const char *directory; /* to serve in; NULL -> rows */
} options;

/* The folder's name reaches the other rank through here: they are threads. */
static stage *lead_stage;

static void work(void *rank, void *argument) {
    const options *o = (const options *)argument;
    stage *st = (stage *)calloc(1, sizeof *st);
    if (!st) exit(2);
    st->me = (team_rank *)rank;
    make_parts(st);
    if (st->me->rank > 0) {
        for (team_order order = team_listen(st->me); order.what != TEAM_LEAVE; order = team_listen(st->me)) {
            st->directory = lead_stage->directory;
            carry_out(st, (arm)order.which);
        }
    } else {
        const team_order leave = { TEAM_LEAVE, 0 };
        lead_stage = st;
        st->directory = o->directory;
        if (o->directory)
            serve(st);
        else
            run_rows(st, o->json);
        team_tell(st->me, leave);
    }
    free(st->memory);
    if (st->me->rank > 0) free(st); /* rank 0's is read until the other has left; the program ends then */
}

int main(int argc, char **argv) {
    options o;
    o.directory = argc == 3 && !strcmp(argv[1], "serve") ? argv[2] : NULL;
    o.json = o.directory ? NULL : bench_open_json(argc, argv);
    team_run(work, &o);
    if (o.json) fclose(o.json);
    free(lead_stage);
    return 0;
}
