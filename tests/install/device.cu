// A user's program with the CUDA unit: it links, and asks no device.
#include <xdistill.h>

int main() {
    xd_cuda_destroy(NULL);
    return 0;
}
