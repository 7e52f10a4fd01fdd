/* sharded_memory.c - memory that is counted by threads: ranks are threads of one process, and share their allocator. */
#include "sharded.h"

#include <pthread.h>
#include <stdlib.h>

/* Stands before each piece, and leaves what follows aligned for any type. */
typedef union sharded_piece {
    size_t bytes;
    long double align[2];
} sharded_piece;

static pthread_once_t sharded_once = PTHREAD_ONCE_INIT;
static pthread_key_t sharded_key; /* of each thread's int64_t */

static void sharded_make_key(void) {
    (void)pthread_key_create(&sharded_key, free);
}

static void sharded_count(int64_t bytes) {
    int64_t *counter = NULL;
    pthread_once(&sharded_once, sharded_make_key);
    counter = (int64_t *)pthread_getspecific(sharded_key);
    if (counter) *counter += bytes;
}

static void *sharded_allocate(void *user, size_t bytes) {
    (void)user;
    if (bytes > SIZE_MAX - sizeof(sharded_piece)) return NULL;
    sharded_piece *piece = (sharded_piece *)malloc(sizeof *piece + bytes);
    if (!piece) return NULL;
    piece->bytes = bytes;
    sharded_count((int64_t)bytes);
    return piece + 1;
}

static void sharded_release(void *user, void *memory) {
    sharded_piece *piece = (sharded_piece *)memory - 1;
    (void)user;
    sharded_count(-(int64_t)piece->bytes);
    free(piece);
}

xd_allocator sharded_counting_allocator(void) {
    const xd_allocator allocator = { sharded_allocate, sharded_release, NULL };
    return allocator;
}

int64_t sharded_counted(void) {
    pthread_once(&sharded_once, sharded_make_key);
    int64_t *counter = (int64_t *)pthread_getspecific(sharded_key);
    if (counter) return *counter;
    counter = (int64_t *)calloc(1, sizeof *counter);
    if (counter) (void)pthread_setspecific(sharded_key, counter);
    return 0;
}
