/* A keyed hash: HMAC (RFC 2104) with SHA-256 (FIPS 180-4), which takes keys of any length. */

static uint32_t xdi_nccl_load(const unsigned char *from) {
    return (uint32_t)from[0] << 24 | (uint32_t)from[1] << 16 | (uint32_t)from[2] << 8 | (uint32_t)from[3];
}

static void xdi_nccl_store(unsigned char *to, uint32_t value) {
    for (int i = 0; i < 4; i++) to[i] = (unsigned char)(value >> (24 - 8 * i) & 255u);
}

static uint32_t xdi_nccl_turn_right(uint32_t x, int bits) {
    return x >> bits | x << (32 - bits);
}

/* One block of SHA-256. */
static void xdi_nccl_hash_block(uint32_t state[8], const unsigned char *block) {
    static const uint32_t constants[64] = {
        0x428a2f98u, 0x71374491u, 0xb5c0fbcfu, 0xe9b5dba5u, 0x3956c25bu, 0x59f111f1u, 0x923f82a4u,
        0xab1c5ed5u, 0xd807aa98u, 0x12835b01u, 0x243185beu, 0x550c7dc3u, 0x72be5d74u, 0x80deb1feu,
        0x9bdc06a7u, 0xc19bf174u, 0xe49b69c1u, 0xefbe4786u, 0x0fc19dc6u, 0x240ca1ccu, 0x2de92c6fu,
        0x4a7484aau, 0x5cb0a9dcu, 0x76f988dau, 0x983e5152u, 0xa831c66du, 0xb00327c8u, 0xbf597fc7u,
        0xc6e00bf3u, 0xd5a79147u, 0x06ca6351u, 0x14292967u, 0x27b70a85u, 0x2e1b2138u, 0x4d2c6dfcu,
        0x53380d13u, 0x650a7354u, 0x766a0abbu, 0x81c2c92eu, 0x92722c85u, 0xa2bfe8a1u, 0xa81a664bu,
        0xc24b8b70u, 0xc76c51a3u, 0xd192e819u, 0xd6990624u, 0xf40e3585u, 0x106aa070u, 0x19a4c116u,
        0x1e376c08u, 0x2748774cu, 0x34b0bcb5u, 0x391c0cb3u, 0x4ed8aa4au, 0x5b9cca4fu, 0x682e6ff3u,
        0x748f82eeu, 0x78a5636fu, 0x84c87814u, 0x8cc70208u, 0x90befffau, 0xa4506cebu, 0xbef9a3f7u,
        0xc67178f2u,
    };
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++) w[i] = xdi_nccl_load(block + 4 * i);
    for (int i = 16; i < 64; i++) {
        const uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + w[i - 7] + (xdi_nccl_turn_right(a, 7) ^ xdi_nccl_turn_right(a, 18) ^ a >> 3) +
               (xdi_nccl_turn_right(b, 17) ^ xdi_nccl_turn_right(b, 19) ^ b >> 10);
    }
    memcpy(s, state, sizeof s);
    for (int i = 0; i < 64; i++) {
        const uint32_t a = s[0], e = s[4];
        const uint32_t mixed =
            s[7] + constants[i] + w[i] + ((e & s[5]) ^ (~e & s[6])) +
            (xdi_nccl_turn_right(e, 6) ^ xdi_nccl_turn_right(e, 11) ^ xdi_nccl_turn_right(e, 25));
        const uint32_t majority = (a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]);
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += mixed;
        s[0] = mixed + majority +
               (xdi_nccl_turn_right(a, 2) ^ xdi_nccl_turn_right(a, 13) ^ xdi_nccl_turn_right(a, 22));
    }
    for (int i = 0; i < 8; i++) state[i] += s[i];
}

typedef struct xdi_nccl_hash {
    uint32_t state[8];
    uint64_t bytes;
    unsigned char block[XDI_NCCL_BLOCK];
} xdi_nccl_hash;

static void xdi_nccl_hash_begin(xdi_nccl_hash *h) {
    static const uint32_t start[8] = {
        0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au,
        0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u,
    };
    memcpy(h->state, start, sizeof start);
    h->bytes = 0;
}

static void xdi_nccl_hash_add(xdi_nccl_hash *h, const void *data, size_t bytes) {
    const unsigned char *from = (const unsigned char *)data;
    for (size_t i = 0; i < bytes; i++) {
        h->block[h->bytes++ % XDI_NCCL_BLOCK] = from[i];
        if (h->bytes % XDI_NCCL_BLOCK == 0) xdi_nccl_hash_block(h->state, h->block);
    }
}

static void xdi_nccl_hash_end(xdi_nccl_hash *h, unsigned char out[XDI_NCCL_TAG]) {
    static const unsigned char zero = 0, one = 0x80;
    unsigned char length[8];
    xdi_nccl_store(length, (uint32_t)(h->bytes >> 29));
    xdi_nccl_store(length + 4, (uint32_t)(h->bytes << 3 & 0xffffffffu));
    xdi_nccl_hash_add(h, &one, 1);
    while (h->bytes % XDI_NCCL_BLOCK != XDI_NCCL_BLOCK - sizeof length) xdi_nccl_hash_add(h, &zero, 1);
    xdi_nccl_hash_add(h, length, sizeof length);
    for (int i = 0; i < 8; i++) xdi_nccl_store(out + 4 * i, h->state[i]);
}

typedef struct xdi_nccl_mac {
    xdi_nccl_hash inner, outer;
} xdi_nccl_mac;

static void xdi_nccl_mac_begin(xdi_nccl_mac *m, const char *secret) {
    unsigned char key[XDI_NCCL_BLOCK] = { 0 };
    const size_t bytes = strlen(secret);
    if (bytes > sizeof key) {
        xdi_nccl_hash_begin(&m->inner);
        xdi_nccl_hash_add(&m->inner, secret, bytes);
        xdi_nccl_hash_end(&m->inner, key);
    } else {
        memcpy(key, secret, bytes);
    }
    for (size_t i = 0; i < sizeof key; i++) key[i] ^= 0x36;
    xdi_nccl_hash_begin(&m->inner);
    xdi_nccl_hash_add(&m->inner, key, sizeof key);
    for (size_t i = 0; i < sizeof key; i++) key[i] ^= 0x36 ^ 0x5c;
    xdi_nccl_hash_begin(&m->outer);
    xdi_nccl_hash_add(&m->outer, key, sizeof key);
}

static void xdi_nccl_mac_end(xdi_nccl_mac *m, unsigned char tag[XDI_NCCL_TAG]) {
    xdi_nccl_hash_end(&m->inner, tag);
    xdi_nccl_hash_add(&m->outer, tag, XDI_NCCL_TAG);
    xdi_nccl_hash_end(&m->outer, tag);
}

/* Takes the same time wherever the two differ. */
static bool xdi_nccl_equal(const unsigned char *a, const unsigned char *b, size_t bytes) {
    volatile unsigned char difference = 0;
    for (size_t i = 0; i < bytes; i++) difference = (unsigned char)(difference | (a[i] ^ b[i]));
    return difference == 0;
}
