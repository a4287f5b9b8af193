// What a decoder computes on a CPU, in bfloat16: products with weights in ggml's blocks, and what lies between products.
//
// Products with weights in ggml's block formats: rows of activations are rounded to 8 bits in groups of 32, codes stay
// as they are, and products within a group are summed exactly, in integers. Every group's sum is scaled and added in float32, in
// the order of the inputs, so a row has the same bits whatever rows, threads and instructions compute it.
//
// A weight is laid out anew, in tiles of 16 outputs: for every 32 inputs first all outputs' inputs 0-3, then all inputs 4-7, and
// so on ("quads"). A 64-byte register then holds a quad of all 16 outputs, which is what VNNI multiplies.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <omp.h>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define X86 1
#endif
#if X86 && defined(__AVX512F__) && defined(__AVX512BW__)
#define LANES 16
#else
#define LANES 8
#endif
#if LANES == 16 && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define AMX 1
#endif

namespace {

typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint8_t u8;

constexpr int OUT = 16, UNIT = 32, QUADS = 8;

// ---- what differs between processors ----

inline Ints load(const void* at) {
    Ints v;
    memcpy(&v, at, sizeof v);
    return v;
}

inline Floats load_floats(const float* at) {
    Floats v;
    memcpy(&v, at, sizeof v);
    return v;
}

inline float half_to_float(uint16_t h) {
    uint32_t sign = (h & 0x8000u) << 16, rest = h & 0x7fffu, bits;
    if (rest >= 0x7c00) bits = sign | 0x7f800000u | (rest & 0x3ff) << 13;
    else if (rest >= 0x400) bits = sign | ((rest << 13) + (112u << 23));
    else {
        float small = rest * 0x1p-24f;
        memcpy(&bits, &small, 4);
        bits |= sign;
    }
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

inline Floats halves(const u8* at) {
#if LANES == 16
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at));
#elif X86
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at));
#else
    Floats v;
    for (int i = 0; i < LANES; i++) {
        uint16_t h;
        memcpy(&h, at + 2 * i, 2);
        v[i] = half_to_float(h);
    }
    return v;
#endif
}

inline Floats to_floats(Ints v) {
#if LANES == 16
    return (Floats)_mm512_cvtepi32_ps((__m512i)v);
#elif X86
    return (Floats)_mm256_cvtepi32_ps((__m256i)v);
#else
    return __builtin_convertvector(v, Floats);
#endif
}

template <bool SIGNED>
inline Floats bytes_to_floats(const u8* at) {
#if LANES == 16
    __m128i bytes = _mm_loadu_si128((const __m128i*)at);
    return to_floats((Ints)(SIGNED ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes)));
#elif X86
    __m128i bytes = _mm_loadl_epi64((const __m128i*)at);
    return to_floats((Ints)(SIGNED ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes)));
#else
    Ints v;
    for (int i = 0; i < LANES; i++) v[i] = SIGNED ? (int8_t)at[i] : at[i];
    return to_floats(v);
#endif
}

inline Floats fma(Floats a, Floats b, Floats c) {
#if LANES == 16
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif X86
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

inline Floats splat(float x) { return x - Floats{}; }
inline Ints splat(int32_t x) { return x - Ints{}; }

// Adds to each lane the products of its four unsigned bytes with the four signed bytes of `quad`.
inline Ints dot(Ints sum, Ints codes, int32_t quad) {
#if LANES == 16 && defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)splat(quad));
#elif LANES == 16
    __m512i a = (__m512i)splat(quad), w = (__m512i)codes, low = _mm512_set1_epi32(0x00ff00ff);
    __m512i even = _mm512_madd_epi16(_mm512_and_si512(w, low), _mm512_srai_epi16(_mm512_slli_epi16(a, 8), 8));
    return sum + (Ints)even + (Ints)_mm512_madd_epi16(_mm512_srli_epi16(w, 8), _mm512_srai_epi16(a, 8));
#elif X86 && defined(__AVXVNNI__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)splat(quad));
#elif X86
    __m256i a = (__m256i)splat(quad), w = (__m256i)codes, low = _mm256_set1_epi32(0x00ff00ff);
    __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, low), _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8));
    return sum + (Ints)even + (Ints)_mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(a, 8));
#else
    for (int i = 0; i < 4; i++) sum += (codes >> 8 * i & 255) * (int32_t)(int8_t)(quad >> 8 * i);
    return sum;
#endif
}

constexpr int8_t IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// IQ4_NL's value + 128 of every code.
inline Ints looked_up(Ints codes) {
    alignas(16) static const u8 table[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
#if LANES == 16
    return (Ints)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(*(const __m128i*)table), (__m512i)codes);
#elif X86
    return (Ints)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(*(const __m128i*)table), (__m256i)codes);
#else
    u8 bytes[4 * LANES];
    memcpy(bytes, &codes, sizeof bytes);
    for (u8& byte : bytes) byte = table[byte];
    return load(bytes);
#endif
}

// ---- formats ----

// A weight is `d * scale * (code - ZERO) - dmin * minimum`. What 16 outputs have of SUPER inputs lies as: d, then dmin if MINS, in
// half precision; if SUPER is 256 the scales, a byte for each group, and minimums; then the codes of each 32 inputs.
template <int ID_, int BITS_, int SUPER_, int GROUP_, bool MINS_, int ZERO_, int BLOCK_>
struct Format {
    static constexpr int ID = ID_, BITS = BITS_, SUPER = SUPER_, GROUP = GROUP_, ZERO = ZERO_, BLOCK = BLOCK_;
    static constexpr bool MINS = MINS_, SCALES = SUPER == 256;
    static constexpr int GROUPS = UNIT / GROUP;  // of a unit
    static constexpr int UNITS = SUPER / UNIT;
    static constexpr int HALVES = MINS ? 64 : 32;
    static constexpr int HEAD = HALVES + (SCALES ? UNITS * (GROUPS + MINS) * OUT : 0);
    static constexpr int CODES = UNIT * OUT * BITS / 8;
    static constexpr int BYTES = HEAD + UNITS * CODES;
};

// Numbers of types are ggml's; the last number is the bytes of a block there.
using Q4_0 = Format<2, 4, 32, 32, false, 8, 18>;
using Q4_1 = Format<3, 4, 32, 32, true, 0, 20>;
using Q5_0 = Format<6, 5, 32, 32, false, 16, 22>;
using Q5_1 = Format<7, 5, 32, 32, true, 0, 24>;
using Q8_0 = Format<8, 8, 32, 32, false, 128, 34>;
using Q4_K = Format<12, 4, 256, 32, true, 0, 144>;
using Q5_K = Format<13, 5, 256, 32, true, 0, 176>;
using Q6_K = Format<14, 6, 256, 16, false, 32, 210>;
using IQ4_NL = Format<20, 4, 32, 32, false, 128, 18>;

template <class Task>
bool with_format(int id, Task task) {
    switch (id) {
        case Q4_0::ID: task(Q4_0{}); return true;
        case Q4_1::ID: task(Q4_1{}); return true;
        case Q5_0::ID: task(Q5_0{}); return true;
        case Q5_1::ID: task(Q5_1{}); return true;
        case Q8_0::ID: task(Q8_0{}); return true;
        case Q4_K::ID: task(Q4_K{}); return true;
        case Q5_K::ID: task(Q5_K{}); return true;
        case Q6_K::ID: task(Q6_K{}); return true;
        case IQ4_NL::ID: task(IQ4_NL{}); return true;
        default: return false;
    }
}

// One block of ggml's as its codes, one a byte, and its numbers.
struct Block {
    u8 codes[256];
    u8 scale[16], minimum[8];
    u8 d[2], dmin[2];
};

template <class F>
void read_block(const u8* at, Block& block) {
    if constexpr (F::ID == Q4_K::ID || F::ID == Q5_K::ID) {
        memcpy(block.d, at, 2);
        memcpy(block.dmin, at + 2, 2);
        const u8 *s = at + 4, *high = at + 16, *low = F::BITS == 5 ? at + 48 : at + 16;
        for (int j = 0; j < 8; j++) {
            block.scale[j] = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
            block.minimum[j] = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4;
            for (int i = 0; i < 32; i++) {
                int code = low[j / 2 * 32 + i] >> 4 * (j % 2) & 15;
                block.codes[32 * j + i] = F::BITS == 5 ? code | (high[i] >> j & 1) << 4 : code;
            }
        }
    } else if constexpr (F::ID == Q6_K::ID) {
        const u8 *low = at, *high = at + 128;
        memcpy(block.scale, at + 192, 16);
        memcpy(block.d, at + 208, 2);
        for (int i = 0; i < 256; i++) {
            int n = i / 128, part = i / 32 % 4, l = i % 32;
            int code = low[64 * n + 32 * (part % 2) + l] >> 4 * (part / 2) & 15;
            block.codes[i] = code | (high[32 * n + l] >> 2 * part & 3) << 4;
        }
    } else if constexpr (F::ID == Q8_0::ID) {
        memcpy(block.d, at, 2);
        for (int i = 0; i < 32; i++) block.codes[i] = at[2 + i] ^ 128;
    } else {
        constexpr int first = 2 + 2 * F::MINS + 4 * (F::BITS == 5);
        uint32_t high = 0;
        memcpy(block.d, at, 2);
        if (F::MINS) {
            memcpy(block.dmin, at + 2, 2);
            block.dmin[1] ^= 128;  // there it is added
        }
        if (F::BITS == 5) memcpy(&high, at + 2 + 2 * F::MINS, 4);
        for (int i = 0; i < 32; i++) {
            int code = at[first + i % 16] >> 4 * (i / 16) & 15;
            block.codes[i] = F::BITS == 5 ? code | (high >> i & 1) << 4 : code;
        }
    }
}

// Puts one output's block into its lane of a tile.
template <class F>
void place(const Block& block, int lane, u8* tile) {
    memcpy(tile + 2 * lane, block.d, 2);
    if (F::MINS) memcpy(tile + 32 + 2 * lane, block.dmin, 2);
    if (F::SCALES) {
        u8* scales = tile + F::HALVES;
        for (int g = 0; g < F::UNITS * F::GROUPS; g++) scales[g * OUT + lane] = block.scale[g];
        if (F::MINS)
            for (int g = 0; g < F::UNITS; g++) scales[(F::UNITS + g) * OUT + lane] = block.minimum[g];
    }
    for (int u = 0; u < F::UNITS; u++) {
        u8* unit = tile + F::HEAD + u * F::CODES + 4 * lane;
        uint32_t quads[QUADS], high[2] = {0, 0};
        memcpy(quads, block.codes + u * UNIT, UNIT);
        for (int q = 0; q < QUADS; q++) {
            if (F::BITS == 8) memcpy(unit + 64 * q, &quads[q], 4);
            if (F::BITS == 5) high[0] |= (quads[q] >> 4 & 0x01010101) << q;
            if (F::BITS == 6) high[q / 4] |= (quads[q] >> 4 & 0x03030303) << q % 4 * 2;
        }
        for (int q = 0; q < QUADS && F::BITS < 8; q += 2) {
            uint32_t both = (quads[q] & 0x0f0f0f0f) | (quads[q + 1] & 0x0f0f0f0f) << 4;
            memcpy(unit + 32 * q, &both, 4);
        }
        for (int i = 0; i < (F::BITS == 8 ? 0 : F::BITS - 4); i++) memcpy(unit + 256 + 64 * i, &high[i], 4);
    }
}

// The codes of 32 inputs of LANES outputs, one a byte, unsigned.
template <class F>
inline void unpack(const u8* at, Ints* quads) {
    if constexpr (F::BITS == 8) {
        for (int q = 0; q < QUADS; q++) quads[q] = load(at + 64 * q);
        return;
    }
    for (int q = 0; q < QUADS; q += 2) {
        Ints both = load(at + 32 * q);
        quads[q] = both & 0x0f0f0f0f;
        quads[q + 1] = both >> 4 & 0x0f0f0f0f;
    }
    if constexpr (F::BITS == 5) {
        Ints high = load(at + 256);
        for (int q = 0; q < QUADS; q++) quads[q] |= (q < 4 ? high << (4 - q) : high >> (q - 4)) & 0x10101010;
    }
    if constexpr (F::BITS == 6)
        for (int q = 0; q < QUADS; q++) {
            Ints high = load(at + 256 + 64 * (q / 4));
            quads[q] |= (q % 4 < 2 ? high << (4 - q % 4 * 2) : high >> (q % 4 * 2 - 4)) & 0x30303030;
        }
    if constexpr (F::ID == IQ4_NL::ID)
        for (int q = 0; q < QUADS; q++) quads[q] = looked_up(quads[q]);
}

// Scales of a unit's groups, and what is subtracted for each 1 of activation, of LANES outputs from `half` on.
template <class F>
inline void read_scales(const u8* super, int unit, int half, Floats d, Floats dmin, Floats* scale, Floats& minimum) {
    const u8* scales = super + F::HALVES + half;
    for (int g = 0; g < F::GROUPS; g++)
        scale[g] = F::SCALES ? d * bytes_to_floats<F::ID == Q6_K::ID>(scales + (unit * F::GROUPS + g) * OUT) : d;
    if constexpr (F::MINS) minimum = F::SCALES ? dmin * bytes_to_floats<false>(scales + (F::UNITS + unit) * OUT) : dmin;
}

// ---- activations ----

// [inputs / 32][count]: 32 bytes, their scale, the sums of both halves, and the scaled sum of all.
struct Rows {
    int count, units;
    int8_t* codes;
    float *scale, *total;
    int32_t* sums;
};

inline float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

inline uint16_t to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (f != f) return bits >> 16 | 64;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Rounds one row to nearest; a scale is 1/127 of the largest of 32. A row that is not finite gives nothing that is.
void round_row(const uint16_t* x, int row, Rows& rows) {
    constexpr float MAGIC = 12582912;  // added to a small number it leaves the nearest integer in the lowest bits
    for (int u = 0; u < rows.units; u++) {
        const int64_t at = (int64_t)u * rows.count + row;
        float values[UNIT];
        int32_t bits[UNIT], most = 0, sums[2] = {0, 0};
        for (int i = 0; i < UNIT; i++) values[i] = from_bf16(x[u * UNIT + i]);
        memcpy(bits, values, sizeof bits);
        for (int i = 0; i < UNIT; i++) most = std::max(most, bits[i] & 0x7fffffff);
        float largest;
        memcpy(&largest, &most, 4);
        bool finite = most < 0x7f800000;
        float inverse = finite && largest > 1e-30f ? 127 / largest : 0;
        for (int i = 0; i < UNIT; i++) values[i] = values[i] * inverse + MAGIC;
        memcpy(bits, values, sizeof bits);
        int8_t* codes = rows.codes + UNIT * at;
        for (int i = 0; i < UNIT; i++) codes[i] = finite ? (int8_t)(bits[i] & 255) : 0;
        for (int i = 0; i < UNIT; i++) sums[i / 16] += codes[i];
        rows.scale[at] = finite ? largest / 127 : NAN;
        rows.sums[2 * at] = sums[0];
        rows.sums[2 * at + 1] = sums[1];
        rows.total[at] = rows.scale[at] * (sums[0] + sums[1]);
    }
}

// ---- a tile of 16 outputs and some rows ----

// Of R rows from `row` on; `sums` is [R][16].
template <class F, int R>
void few_rows(const u8* tile, const Rows& rows, int row, float* sums) {
    const int units = rows.units, height = rows.count;
    for (int half = 0; half < OUT; half += LANES) {
        Floats total[R] = {};
        const u8* super = tile;
        const int8_t* inputs = rows.codes + UNIT * row;
        const float *of_rows = rows.scale + row, *totals = rows.total + row;
        const int32_t* parts = rows.sums + 2 * row;
        for (int first = 0; first < units; first += F::UNITS, super += F::BYTES) {
            Floats d = halves(super + 2 * half), dmin = F::MINS ? halves(super + 32 + 2 * half) : Floats{};
            for (int unit = 0; unit < F::UNITS; unit++) {
                const u8* codes = super + F::HEAD + unit * F::CODES + 4 * half;
                Ints quads[QUADS];
                unpack<F>(codes, quads);
#if X86
                for (int line = 0; line < F::CODES; line += 64) _mm_prefetch((const char*)codes + line + 8192, _MM_HINT_T0);
#endif
                Floats scale[F::GROUPS], minimum;
                read_scales<F>(super, unit, half, d, dmin, scale, minimum);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
#pragma GCC unroll 2
                    for (int g = 0; g < F::GROUPS; g++) {
                        const int32_t* part = parts + 2 * r;
                        Ints sum = F::ZERO ? splat(-F::ZERO * (F::GROUPS == 2 ? part[g] : part[0] + part[1])) : Ints{};
#pragma GCC unroll 8
                        for (int q = g * QUADS / F::GROUPS; q < (g + 1) * QUADS / F::GROUPS; q++) {
                            int32_t quad;
                            memcpy(&quad, inputs + UNIT * r + 4 * q, 4);
                            sum = dot(sum, quads[q], quad);
                        }
                        total[r] = fma(to_floats(sum) * splat(of_rows[r]), scale[g], total[r]);
                    }
                    if (F::MINS) total[r] = fma(-minimum, splat(totals[r]), total[r]);
                }
                inputs += UNIT * height, of_rows += height, totals += height, parts += 2 * height;
            }
        }
        for (int r = 0; r < R; r++) memcpy(sums + OUT * r + half, &total[r], sizeof total[r]);
    }
}

// `count` rows; `sums` is [count][16].
template <class F>
void tile_product(const u8* tile, const Rows& rows, int count, float* sums) {
    for (int row = 0; row < count;) {
        const int left = count - row;
        float* out = sums + OUT * row;
        if (LANES == 16 && left >= 8) few_rows<F, 8>(tile, rows, row, out), row += 8;
        else if (left >= 4) few_rows<F, 4>(tile, rows, row, out), row += 4;
        else if (left == 3) few_rows<F, 3>(tile, rows, row, out), row += 3;
        else if (left == 2) few_rows<F, 2>(tile, rows, row, out), row += 2;
        else few_rows<F, 1>(tile, rows, row, out), row += 1;
    }
}

#if AMX
// Many rows are multiplied as they are, in bfloat16, by numbers that a tile of 16 outputs is turned into: [inputs / 32][16][16]
// pairs of inputs, as AMX wants them.

constexpr int BLOCK_ROWS = 16, BLOCKS = 4;  // of a register, and that share what is loaded of a weight

bool may_use_tiles() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }  // Linux grants them to who asks (ARCH_REQ_XCOMP_PERM)

void configure() {
    struct alignas(64) {
        u8 palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        u8 rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    asm volatile("" : : "r"(&config) : "memory");  // GCC takes it that only the first bytes are read
    _tile_loadconfig(&config);
}

template <class F>
void to_pairs(const u8* tile, int units, Ints* pairs) {
    alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i interleaved = _mm512_load_si512(order);
    for (int first = 0; first < units; first += F::UNITS, tile += F::BYTES) {
        Floats d = halves(tile), dmin = F::MINS ? halves(tile + 32) : Floats{};
        for (int unit = 0; unit < F::UNITS; unit++, pairs += UNIT / 2) {
            Ints quads[QUADS];
            unpack<F>(tile + F::HEAD + unit * F::CODES, quads);
            Floats scale[F::GROUPS], minimum = {};
            read_scales<F>(tile, unit, 0, d, dmin, scale, minimum);
            auto number = [&](int i) {
                Floats own = scale[i / F::GROUP], least = F::MINS ? minimum : own * splat((float)F::ZERO);
                return (__m512)fma(to_floats(quads[i / 4] >> 8 * (i % 4) & 255), own, -least);
            };
#pragma GCC unroll 16
            for (int i = 0; i < UNIT; i += 2) {
                __m512i both = (__m512i)_mm512_cvtne2ps_pbh(number(i + 1), number(i));
                pairs[i / 2] = (Ints)_mm512_permutexvar_epi16(interleaved, both);
            }
        }
    }
}

// Four blocks of rows, each [units][16][32]; `sums` is [64][16].
void four_blocks(const uint16_t* x, const Ints* pairs, int units, float* sums) {
    const int64_t block = (int64_t)units * BLOCK_ROWS * UNIT;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int u = 0; u < units; u++, x += BLOCK_ROWS * UNIT, pairs += UNIT / 2) {
        _tile_loadd(4, pairs, 64);
        _tile_loadd(5, x, 64);
        _tile_loadd(6, x + block, 64);
        _tile_dpbf16ps(0, 5, 4);
        _tile_dpbf16ps(1, 6, 4);
        _tile_loadd(5, x + 2 * block, 64);
        _tile_loadd(7, x + 3 * block, 64);
        _tile_dpbf16ps(2, 5, 4);
        _tile_dpbf16ps(3, 7, 4);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
}
#endif

constexpr int CACHED = 3 << 18;  // activations that are multiplied with a tile at once, and stay in a core's cache

}  // namespace

struct Part {
    const u8* tiles;
    int32_t type, outputs;
};

namespace {

// What becomes of a tile's sums [count][16].
struct Outcome {
    const float* bias;
    const uint16_t* residual;
    uint16_t* out;
    int64_t outputs;

    void put(const float* sums, int row, int count, int64_t column, int width) const {
        for (int r = 0; r < count; r++) {
            const int64_t place = (row + r) * outputs + column;
            float values[OUT];
            memcpy(values, sums + OUT * r, sizeof values);
            for (int i = 0; i < width && bias; i++) values[i] += bias[column + i];
            for (int i = 0; i < width && residual; i++) values[i] += from_bf16(residual[place + i]);
            for (int i = 0; i < width; i++) out[place + i] = to_bf16(values[i]);
        }
    }
};

// Calls `task(format, first byte of the tile, column, width)` for the tiles of all parts, on all threads of a parallel region.
template <class Task>
void each_tile(const Part* parts, int num_parts, int units, Task task) {
    int64_t column = 0;
    for (int p = 0; p < num_parts; p++) {
        const Part& part = parts[p];
        const int64_t tiles = (part.outputs + OUT - 1) / OUT;
        const int chunk = std::max<int64_t>(1, std::min<int64_t>(16, tiles / (8 * omp_get_num_threads())));
        with_format(part.type, [&](auto f) {
            using F = decltype(f);
#pragma omp for schedule(dynamic, chunk) nowait
            for (int64_t t = 0; t < tiles; t++) {
                const int width = std::min<int64_t>(OUT, part.outputs - t * OUT);
                task(f, part.tiles + t * (units / F::UNITS) * F::BYTES, column + t * OUT, width);
            }
        });
        column += part.outputs;
    }
}

void multiply_few(const Part* parts, int num_parts, const uint16_t* x, int64_t stride, int count, int units, const Outcome& outcome,
                  int threads) {
    thread_local std::vector<char> memory;
    const int64_t places = (int64_t)count * units;
    memory.resize(places * (UNIT + 16));
    float* scale = (float*)(memory.data() + places * UNIT);
    Rows rows{count, units, (int8_t*)memory.data(), scale, scale + places, (int32_t*)(scale + 2 * places)};
    // Waiting for another thread takes as long as some thousand units of 16 outputs.
    const int64_t work = outcome.outputs / OUT * units * (2 + count) / 3;
    threads = std::max<int64_t>(1, std::min<int64_t>(threads, work / 1000));
#pragma omp parallel num_threads(threads)
    {
        thread_local std::vector<float> sums;
        sums.resize(OUT * count);
#pragma omp for schedule(static)
        for (int r = 0; r < count; r++) round_row(x + r * stride, r, rows);
        each_tile(parts, num_parts, units, [&](auto f, const u8* tile, int64_t column, int width) {
            tile_product<decltype(f)>(tile, rows, count, sums.data());
            outcome.put(sums.data(), 0, count, column, width);
        });
    }
}

#if AMX
void multiply_many(const Part* parts, int num_parts, const uint16_t* x, int64_t stride, int count, int units, const Outcome& outcome,
                   int threads) {
    constexpr int STEP = BLOCK_ROWS * BLOCKS;
    const int padded = (count + STEP - 1) / STEP * STEP, together = std::max(CACHED / (units * UNIT) / STEP, 2) * STEP;
    thread_local std::vector<uint16_t> memory;
    memory.resize((int64_t)padded * units * UNIT + 32);
    uint16_t* blocks = (uint16_t*)(((uintptr_t)memory.data() + 63) / 64 * 64);
#pragma omp parallel num_threads(threads)
    {
        thread_local std::vector<Ints> pairs;
        alignas(64) float sums[STEP * OUT];
        pairs.resize(units * UNIT / 2);
#pragma omp for schedule(static)
        for (int r = 0; r < padded; r++)
            for (int u = 0; u < units; u++) {
                uint16_t* at = blocks + ((int64_t)(r / BLOCK_ROWS) * units + u) * BLOCK_ROWS * UNIT + r % BLOCK_ROWS * UNIT;
                if (r < count) memcpy(at, x + r * stride + u * UNIT, 2 * UNIT);
                else memset(at, 0, 2 * UNIT);
            }
        configure();
        for (int row = 0; row < count; row += together)
            each_tile(parts, num_parts, units, [&](auto f, const u8* tile, int64_t column, int width) {
                to_pairs<decltype(f)>(tile, units, pairs.data());
                for (int r = row; r < std::min(row + together, count); r += STEP) {
                    four_blocks(blocks + (int64_t)r * units * UNIT, pairs.data(), units, sums);
                    outcome.put(sums, r, std::min(STEP, count - r), column, width);
                }
            });
        _tile_release();
    }
}
#endif

}  // namespace

extern "C" {

// Bytes of a weight once laid out, for `inputs` that whole blocks hold; 0 for a type that is not known.
int64_t packed_bytes(int type, int64_t outputs, int64_t inputs) {
    int64_t bytes = 0;
    with_format(type, [&](auto f) {
        using F = decltype(f);
        if (inputs % F::SUPER == 0) bytes = (outputs + OUT - 1) / OUT * (inputs / F::SUPER) * F::BYTES;
    });
    return bytes;
}

// Lays out `blocks` [outputs][bytes], ggml's own, into `tiles`.
void pack(int type, const u8* blocks, int64_t outputs, int64_t inputs, u8* tiles, int threads) {
    with_format(type, [&](auto f) {
        using F = decltype(f);
        int64_t supers = inputs / F::SUPER, count = (outputs + OUT - 1) / OUT;
#pragma omp parallel for num_threads(threads)
        for (int64_t t = 0; t < count; t++) {
            u8* tile = tiles + t * supers * F::BYTES;
            memset(tile, 0, supers * F::BYTES);
            Block block;
            for (int lane = 0; lane < std::min<int64_t>(OUT, outputs - t * OUT); lane++)
                for (int64_t s = 0; s < supers; s++) {
                    read_block<F>(blocks + ((t * OUT + lane) * supers + s) * F::BLOCK, block);
                    place<F>(block, lane, tile + s * F::BYTES);
                }
        }
    });
}

// out [count][outputs of all parts] = x [count][inputs] W^T + bias + residual in bfloat16, each number rounded once. `bias` is
// float32 or null, `residual` like `out` or null; `stride` is that of x in numbers. More than `few` rows are multiplied by numbers
// where this CPU has instructions for many.
void multiply(const Part* parts, int num_parts, const uint16_t* x, int64_t stride, int count, int inputs, const float* bias,
              const uint16_t* residual, uint16_t* out, int few, int threads) {
    Outcome outcome{bias, residual, out, 0};
    for (int p = 0; p < num_parts; p++) outcome.outputs += parts[p].outputs;
    const int units = inputs / UNIT;
#if AMX
    static const bool tiles = may_use_tiles();
    if (tiles && count > few) return multiply_many(parts, num_parts, x, stride, count, units, outcome, threads);
#endif
    for (int row = 0; row < count; row += few) {
        const int64_t skipped = row * outcome.outputs;
        Outcome part{bias, residual ? residual + skipped : nullptr, out + skipped, outcome.outputs};
        multiply_few(parts, num_parts, x + row * stride, stride, std::min(few, count - row), units, part, threads);
    }
}

}  // extern "C"

// ---- between products ----

namespace {

inline Floats load_bf16(const uint16_t* at) {
#if LANES == 16
    return (Floats)(Ints)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)), 16);
#else
    Floats v;
    for (int i = 0; i < LANES; i++) v[i] = from_bf16(at[i]);
    return v;
#endif
}

inline void store_bf16(Floats v, uint16_t* at) {
    Ints bits = (Ints)v;
    bits += 0x7fff + (bits >> 16 & 1);
    bits = (v == v) ? bits : (Ints)v;  // NaN stays what it is
    for (int i = 0; i < LANES; i++) at[i] = (uint32_t)bits[i] >> 16;
}

inline float sum_of(Floats v) {
#if LANES == 16
    return _mm512_reduce_add_ps((__m512)v);
#endif
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) v[i] += v[i + step];
    return v[0];
}

// e^x for x from -87 to 0, and 0 below, within 2 units of the last place (range reduction and a polynomial, as in Cephes).
inline Floats exponential(Floats x) {
    const Floats low = splat(-87.0f);
    Ints vanishes = x < low;
    x = vanishes ? low : x;
    Floats shifted = x * splat(1.44269504f) + splat(12582912.0f);
    Ints power = (Ints)shifted - 0x4b400000;
    Floats n = shifted - splat(12582912.0f);
    Floats r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    Floats y = splat(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) y = fma(y, r, splat(c));
    y = fma(y * r, r, r) + splat(1.0f);
    Floats result = y * (Floats)((power + 127) << 23);
    return vanishes ? Floats{} : result;
}

}  // namespace

extern "C" {

// out [count][width] = x / sqrt(mean(x^2) + epsilon), rounded, times weight.
void norm_rows(const uint16_t* x, int64_t stride, int count, int width, const uint16_t* weight, float epsilon, uint16_t* out) {
    for (int r = 0; r < count; r++, x += stride, out += width) {
        Floats squares = {};
        for (int i = 0; i < width; i += LANES) {
            Floats v = load_bf16(x + i);
            squares = fma(v, v, squares);
        }
        const Floats scale = splat(1 / std::sqrt(sum_of(squares) / width + epsilon));
        for (int i = 0; i < width; i += LANES) {
            uint16_t rounded[LANES];
            store_bf16(load_bf16(x + i) * scale, rounded);
            store_bf16(load_bf16(rounded) * load_bf16(weight + i), out + i);
        }
    }
}

// out [count][width] = silu(gate) * up of x [count][gate, up].
void gate_rows(const uint16_t* x, int count, int width, uint16_t* out, int threads) {
#pragma omp parallel for num_threads(threads) collapse(2) schedule(static) if ((int64_t)count * width > 32768)
    for (int r = 0; r < count; r++)
        for (int i = 0; i < width; i += LANES) {
            Floats gate = load_bf16(x + (int64_t)r * 2 * width + i), up = load_bf16(x + ((int64_t)r * 2 + 1) * width + i);
            Ints negative = gate < Floats{};
            Floats small = exponential(negative ? gate : -gate), one = splat(1.0f);  // of a sigmoid's two forms the one without overflow
            Floats sigmoid = (negative ? small : one) / (one + small);
            uint16_t rounded[LANES];
            store_bf16(gate * sigmoid, rounded);
            store_bf16(load_bf16(rounded) * up, out + (int64_t)r * width + i);
        }
}

struct Attention {
    const uint16_t *qkv, *cos, *sin;  // [T][heads + 2 * kv_heads][dim], rows `stride` apart; [T][dim / 2], or null
    uint16_t *keys, *values, *out;    // caches [slots][kv_heads][dim]; [T][heads][dim]
    const uint16_t *query_norm, *key_norm;  // [dim], or null
    const int64_t *slots, *ancestors;  // [T]; of a tree's rows, or null
    const int32_t *lengths, *blocks;  // of requests; their blocks, [requests][blocks]
    int32_t requests, width, heads, kv_heads, dim, num_blocks, block_size, causal, threads;
    float scale, epsilon;
    int64_t stride;
};

}  // extern "C"

namespace {

// result [dim] = a row's head, normed and rotated, rounded to bfloat16.
void turn(const Attention& a, int row, int head, const uint16_t* norm, float* result) {
    const int half = a.dim / 2;
    const uint16_t* x = a.qkv + row * a.stride + (int64_t)head * a.dim;
    uint16_t normed[256];
    if (norm) {
        norm_rows(x, 0, 1, a.dim, norm, a.epsilon, normed);
        x = normed;
    }
    for (int i = 0; i < half; i++) {
        float low = from_bf16(x[i]), high = from_bf16(x[half + i]);
        float c = a.cos ? from_bf16(a.cos[row * half + i]) : 1, s = a.sin ? from_bf16(a.sin[row * half + i]) : 0;
        result[i] = low * c - high * s;
        result[half + i] = high * c + low * s;
    }
    for (int i = 0; i < a.dim; i++) result[i] = from_bf16(to_bf16(result[i]));
}

// Of two vectors lanes with bit `STEP` of the second, else of the first, each with its neighbor across that bit added.
template <int STEP>
inline Floats add_across(Floats x, Floats y) {
#if defined(__clang__)
    Floats sums;
    for (int i = 0; i < LANES; i++) sums[i] = i & STEP ? y[i] + y[i ^ STEP] : x[i] + x[i ^ STEP];
    return sums;
#else
    Ints own, other;
    for (int i = 0; i < LANES; i++) own[i] = i + (i & STEP ? LANES : 0), other[i] = (i ^ STEP) + (i & STEP ? LANES : 0);
    return __builtin_shuffle(x, y, own) + __builtin_shuffle(x, y, other);
#endif
}

// The sums of LANES vectors, one in each lane, all in one order.
inline Floats sums_of(Floats* v) {
    for (int i = 0; i < LANES / 2; i++) v[i] = add_across<1>(v[2 * i], v[2 * i + 1]);
    for (int i = 0; i < LANES / 4; i++) v[i] = add_across<2>(v[2 * i], v[2 * i + 1]);
    for (int i = 0; i < LANES / 8; i++) v[i] = add_across<4>(v[2 * i], v[2 * i + 1]);
#if LANES == 16
    v[0] = add_across<8>(v[0], v[1]);
#endif
    return v[0];
}

// scores [LANES] = the products of LANES keys [LANES][dim] with a query [dim].
inline Floats products(const float* keys, const float* query, int dim) {
    Floats sums[LANES];
#pragma GCC unroll 16
    for (int k = 0; k < LANES; k++) {
        sums[k] = load_floats(keys + k * dim) * load_floats(query);
        for (int i = LANES; i < dim; i += LANES) sums[k] = fma(load_floats(keys + k * dim + i), load_floats(query + i), sums[k]);
    }
    return sums_of(sums);
}

constexpr int TOGETHER = 4;  // queries, and vectors of a value, that are summed at once

// Adds to N vectors of R totals, `dim` apart, the values at `places` times weights, `apart` apart, in their order; a weight of 0 adds nothing.
template <int R, int N>
void add_values(const uint16_t* values, const int64_t* places, int count, const float* weights, int64_t apart, float* totals, int dim) {
    Floats sums[R][N] = {};
    for (int k = 0; k < count; k++) {
        Floats value[N];
#pragma GCC unroll 4
        for (int i = 0; i < N; i++) value[i] = load_bf16(values + places[k] + i * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const float weight = weights[r * apart + k];
            if (weight == 0) continue;
#pragma GCC unroll 4
            for (int i = 0; i < N; i++) sums[r][i] = fma(value[i], splat(weight), sums[r][i]);
        }
    }
    for (int r = 0; r < R; r++) memcpy(totals + r * dim, sums[r], sizeof sums[r]);
}

template <int N>
void add_values(int queries, const uint16_t* values, const int64_t* places, int count, const float* weights, int64_t apart, float* totals,
                int dim) {
    for (int q = 0; q < queries; q += TOGETHER) {
        const float* own = weights + q * apart;
        float* out = totals + q * dim;
        switch (std::min(TOGETHER, queries - q)) {
            case 4: add_values<4, N>(values, places, count, own, apart, out, dim); break;
            case 3: add_values<3, N>(values, places, count, own, apart, out, dim); break;
            case 2: add_values<2, N>(values, places, count, own, apart, out, dim); break;
            default: add_values<1, N>(values, places, count, own, apart, out, dim);
        }
    }
}

// Writes a row's key and value of one head to the cache.
void put(const Attention& a, int row, int kv) {
    float key[256];
    const int64_t place = (a.slots[row] * a.kv_heads + kv) * a.dim;
    turn(a, row, a.heads + kv, a.key_norm, key);
    for (int i = 0; i < a.dim; i++) a.keys[place + i] = to_bf16(key[i]);
    memcpy(a.values + place, a.qkv + row * a.stride + (int64_t)(a.heads + a.kv_heads + kv) * a.dim, 2 * a.dim);
}

}  // namespace

extern "C" {

// Norms and rotates keys of `rows` rows and writes them and their values to the cache; there are no queries in `qkv`.
void store(const Attention* given, int rows) {
    for (int row = 0; row < rows; row++)
        for (int kv = 0; kv < given->kv_heads; kv++) put(*given, row, kv);
}

// Norms and rotates queries and keys, writes keys and values to the cache, and attends: `width` rows of every request see what lies before
// them and each other, up to themselves if `causal`, as the bits of `ancestors` say if there are some. All sums are float32, in the
// order of the keys. `dim` is at most 256.
void attend(const Attention* given) {
    const Attention a = *given;
    const int group = a.heads / a.kv_heads;
#pragma omp parallel for num_threads(std::min(a.threads, a.requests * a.kv_heads)) collapse(2) schedule(dynamic)
    for (int request = 0; request < a.requests; request++)
        for (int kv = 0; kv < a.kv_heads; kv++) {
            thread_local std::vector<float> memory;
            thread_local std::vector<int64_t> places;
            const int length = a.lengths[request], context = length - a.width, queries = a.width * group, first = request * a.width;
            const int padded = (length + LANES - 1) / LANES * LANES;
            memory.resize((int64_t)queries * (2 * a.dim + padded));
            places.resize(length);
            float *query = memory.data(), *total = query + queries * a.dim, *weights = total + queries * a.dim;
            for (int row = first; row < first + a.width; row++) {
                put(a, row, kv);
                for (int g = 0; g < group; g++)
                    turn(a, row, kv * group + g, a.query_norm, query + ((row - first) * group + g) * a.dim);
            }
            auto at = [&](int position) {
                const int64_t block = a.blocks[(int64_t)request * a.num_blocks + position / a.block_size];
                return ((block * a.block_size + position % a.block_size) * a.kv_heads + kv) * a.dim;
            };
            auto sees = [&](int row, int position) {
                const int other = position - context;
                if (other <= 0 || !a.causal) return true;
                return a.ancestors ? other == row || (a.ancestors[first + row] >> (other - 1) & 1) : other <= row;
            };
            for (int k = 0; k < length; k++) places[k] = at(k);
            float keys[LANES * 256];
            for (int k = 0; k < padded; k += LANES) {
                for (int j = 0; j < LANES; j++)
                    for (int i = 0; i < a.dim; i += LANES) {
                        Floats v = k + j < length ? load_bf16(a.keys + places[k + j] + i) : Floats{};
                        memcpy(keys + j * a.dim + i, &v, sizeof v);
                    }
                for (int q = 0; q < queries; q++) {
                    Floats scores = products(keys, query + q * a.dim, a.dim) * splat(a.scale);
                    memcpy(weights + (int64_t)q * padded + k, &scores, sizeof scores);
                }
            }
            for (int q = 0; q < queries; q++) {
                float* own = weights + (int64_t)q * padded;
                for (int k = context + 1; k < length; k++)
                    if (!sees(q / group, k)) own[k] = -INFINITY;
                for (int k = length; k < padded; k++) own[k] = -INFINITY;
                Floats highest = splat(-INFINITY);
                for (int k = 0; k < padded; k += LANES) {
                    Floats v = load_floats(own + k);
                    highest = (v > highest) ? v : highest;
                }
                float most = -INFINITY;
                for (int i = 0; i < LANES; i++) most = std::max(most, highest[i]);
                for (int k = 0; k < padded; k += LANES) {
                    Floats e = exponential(load_floats(own + k) - splat(most));
                    memcpy(own + k, &e, sizeof e);
                }
            }
            for (int q = 0; q < queries; q += TOGETHER) {  // several sums at once, since each waits for its last number
                const int many = std::min(TOGETHER, queries - q);
                float *own = weights + (int64_t)q * padded, sum[TOGETHER] = {};
                if (many == TOGETHER)
                    for (int k = 0; k < length; k++)
                        for (int r = 0; r < TOGETHER; r++) sum[r] += own[r * padded + k];
                else
                    for (int r = 0; r < many; r++)
                        for (int k = 0; k < length; k++) sum[r] += own[r * padded + k];
                for (int r = 0; r < many; r++)
                    for (int k = 0; k < length; k++) own[r * padded + k] /= sum[r];
            }
            for (int i = 0; i < a.dim;) {
                const int left = (a.dim - i) / LANES;
                const auto add = left >= TOGETHER ? add_values<TOGETHER> : add_values<1>;
                add(queries, a.values + i, places.data(), length, weights, padded, total + i, a.dim);
                i += left >= TOGETHER ? TOGETHER * LANES : LANES;
            }
            for (int q = 0; q < queries; q++) {
                uint16_t* out = a.out + ((int64_t)(first + q / group) * a.heads + kv * group + q % group) * a.dim;
                for (int i = 0; i < a.dim; i++) out[i] = to_bf16(total[q * a.dim + i]);
            }
        }
}

// Columns [rows][count] and log-probabilities of the highest of `scores` [rows][width] in falling order, of equal ones the first; a NaN
// counts as infinite, and a row that has one, or no finite maximum, has probabilities of 0. `count` is at most `width`.
void best(const uint16_t* scores, int rows, int width, int count, int64_t* columns, float* logprobs, int threads) {
#pragma omp parallel for num_threads(std::max(1, std::min(threads, rows)))
    for (int r = 0; r < rows; r++) {
        const uint16_t* row = scores + (int64_t)r * width;
        int64_t* found = columns + (int64_t)r * count;
        float *kept = logprobs + (int64_t)r * count, least = -INFINITY;
        int have = 0;
        bool right = true;
        const auto see = [&](int column) {
            float score = from_bf16(row[column]);
            if (score != score) right = false, score = INFINITY;
            if (have == count && score <= least) return;
            int place = have < count ? have++ : count - 1;
            for (; place && kept[place - 1] < score; place--) kept[place] = kept[place - 1], found[place] = found[place - 1];
            kept[place] = score, found[place] = column;
            least = kept[have - 1];
        };
        int at = 0;
        for (; at < std::min(width, count); at++) see(at);
        for (; at % LANES && at < width; at++) see(at);
        for (; at + LANES <= width; at += LANES) {
            Ints below = load_bf16(row + at) <= splat(least);  // of a NaN it is not
            int all = -1;
            for (int i = 0; i < LANES; i++) all &= below[i];
            for (int i = 0; i < LANES && !all; i++) see(at + i);
        }
        for (; at < width; at++) see(at);
        const float most = kept[0];
        Floats total = {};
        float sum = 0;
        for (at = 0; at + LANES <= width; at += LANES) total += exponential(load_bf16(row + at) - splat(most));
        for (; at < width; at++) sum += std::exp(from_bf16(row[at]) - most);
        const float norm = std::log(sum_of(total) + sum);
        right = right && std::isfinite(most);
        for (int i = 0; i < count; i++) kept[i] = right ? std::min(kept[i] - most - norm, 0.0f) : -INFINITY;
    }
}

}  // extern "C"
