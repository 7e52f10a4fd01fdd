/* Heap sort of pointers, and search among what is sorted. */

#include "base/internal.h"

/* Sifts items[root] down in the heap items[0, count). */
static void xdi_sort_sift(const void **items, size_t root, size_t count, xdi_sort_order order) {
    const void *moving = items[root];
    for (size_t child = 2 * root + 1; child < count; child = 2 * root + 1) {
        if (child + 1 < count && order(items[child], items[child + 1]) < 0) child++;
        if (order(moving, items[child]) >= 0) break;
        items[root] = items[child];
        root = child;
    }
    items[root] = moving;
}

/* Heap sort: never quadratic, unlike some implementations of qsort, and it needs no memory. */
XD_PRIVATE void xdi_sort(const void **items, size_t count, xdi_sort_order order) {
    for (size_t i = count / 2; i-- > 0;) xdi_sort_sift(items, i, count, order);
    for (size_t end = count; end-- > 1;) {
        const void *largest = items[0];
        items[0] = items[end];
        items[end] = largest;
        xdi_sort_sift(items, 0, end, order);
    }
}

XD_PRIVATE int64_t xdi_find(const void *key, const void *items, size_t each, int64_t count,
                            xdi_sort_order order) {
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        const int side = order(key, (const char *)items + (size_t)middle * each);
        if (side == 0) return middle;
        if (side < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return -1;
}
