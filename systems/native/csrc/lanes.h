// One vector of floats for each instruction set: a namespace apiece with the same names (vec, WIDTH, load, store, ...),
// so that kernels.h is written once. Functions carry their own target attribute; the library needs no -march and runs
// on any machine.
#pragma once

#include "formats.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define HAS_X86 1
#define TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#else
#define HAS_X86 0
#endif

#define LANE_FN(target) target static inline __attribute__((always_inline))

constexpr int LINE = 16;          // elements handled together: one cache line of fp32
constexpr int LINE_BYTES = 64;
constexpr int SQUARE_LANES = 32;  // accumulators of sum_squares: element i of a block goes to lane i % 32

namespace plain {
using vec = float;
constexpr int WIDTH = 1;
#define FN LANE_FN()
FN vec all(float x) { return x; }
FN vec add(vec a, vec b) { return a + b; }
FN vec sub(vec a, vec b) { return a - b; }
FN vec mul(vec a, vec b) { return a * b; }
FN vec div(vec a, vec b) { return a / b; }
FN vec fma(vec a, vec b, vec c) { return std::fmaf(a, b, c); }
FN vec root(vec a) { return std::sqrt(a); }
template <class T>
FN vec load(const T* x) {
    return widen(*x);
}
template <class T>
FN void store(T* y, vec x) {
    *y = narrowed<T>(x);
}
FN void store(absent*, vec) {}
FN void stream_line(void* to, const void* from) { std::memcpy(to, from, LINE_BYTES); }
FN void drain() {}
template <class T>
FN void add_squares(const T* x, int64_t rows, double* lanes) {
    for (int64_t row = 0; row < rows; row++)
        for (int lane = 0; lane < SQUARE_LANES; lane++) {
            const double value = widen(x[row * SQUARE_LANES + lane]);
            lanes[lane] += value * value;  // exact product: fused or not, the sum is the same
        }
}
#undef FN
}  // namespace plain

#if HAS_X86
namespace avx2 {
using vec = __m256;
constexpr int WIDTH = 8;
#define FN LANE_FN(TARGET_AVX2)
FN vec all(float x) { return _mm256_set1_ps(x); }
FN vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
FN vec sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
FN vec mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
FN vec div(vec a, vec b) { return _mm256_div_ps(a, b); }
FN vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
FN vec root(vec a) { return _mm256_sqrt_ps(a); }
FN vec quiet(vec a) {
    const vec nan = _mm256_castsi256_ps(_mm256_set1_epi32(QUIET_NAN));
    return _mm256_blendv_ps(a, nan, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
FN vec load(const float* x) { return _mm256_loadu_ps(x); }
FN vec load(const bf16* x) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
FN vec load(const fp16* x) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))); }
FN void store(float* y, vec x) { _mm256_storeu_ps(y, quiet(x)); }
FN void store(bf16* y, vec x) {
    const __m256i bits = _mm256_castps_si256(quiet(x));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m128i half = _mm_packus_epi32(_mm256_castsi256_si128(up), _mm256_extracti128_si256(up, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y), half);
}
FN void store(fp16* y, vec x) {
    const __m128i half = _mm256_cvtps_ph(quiet(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(y), half);
}
FN void store(absent*, vec) {}
FN void stream_line(void* to, const void* from) {  // to: a whole line, written past the caches
    const __m256i* half = static_cast<const __m256i*>(from);
    _mm256_stream_si256(static_cast<__m256i*>(to), _mm256_loadu_si256(half));
    _mm256_stream_si256(static_cast<__m256i*>(to) + 1, _mm256_loadu_si256(half + 1));
}
FN void drain() { _mm_sfence(); }  // what was streamed is seen before what follows
template <class T>
FN void add_squares(const T* x, int64_t rows, double* lanes) {
    __m256d sum[SQUARE_LANES / 4];
    for (int k = 0; k < SQUARE_LANES / 4; k++) sum[k] = _mm256_loadu_pd(lanes + 4 * k);
    for (int64_t row = 0; row < rows; row++, x += SQUARE_LANES)
        for (int k = 0; k < SQUARE_LANES / WIDTH; k++) {
            const vec value = load(x + WIDTH * k);
            const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(value));
            const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1));
            sum[2 * k] = _mm256_fmadd_pd(low, low, sum[2 * k]);
            sum[2 * k + 1] = _mm256_fmadd_pd(high, high, sum[2 * k + 1]);
        }
    for (int k = 0; k < SQUARE_LANES / 4; k++) _mm256_storeu_pd(lanes + 4 * k, sum[k]);
}
#undef FN
}  // namespace avx2

namespace avx512 {
using vec = __m512;
constexpr int WIDTH = 16;
#define FN LANE_FN(TARGET_AVX512)
FN vec all(float x) { return _mm512_set1_ps(x); }
FN vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
FN vec sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
FN vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
FN vec div(vec a, vec b) { return _mm512_div_ps(a, b); }
FN vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
FN vec root(vec a) { return _mm512_sqrt_ps(a); }
FN vec quiet(vec a) {
    const vec nan = _mm512_castsi512_ps(_mm512_set1_epi32(QUIET_NAN));
    return _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), nan);
}
FN vec load(const float* x) { return _mm512_loadu_ps(x); }
FN vec load(const bf16* x) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
FN vec load(const fp16* x) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))); }
FN void store(float* y, vec x) { _mm512_storeu_ps(y, quiet(x)); }
FN void store(bf16* y, vec x) {  // not vcvtneps2bf16, which flushes subnormals
    const __m512i bits = _mm512_castps_si512(quiet(x));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), _mm512_cvtepi32_epi16(up));
}
FN void store(fp16* y, vec x) {
    const __m256i half = _mm512_cvtps_ph(quiet(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), half);
}
FN void store(absent*, vec) {}
FN void stream_line(void* to, const void* from) { _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(from)); }
FN void drain() { _mm_sfence(); }
template <class T>
FN void add_squares(const T* x, int64_t rows, double* lanes) {
    __m512d sum[SQUARE_LANES / 8];
    for (int k = 0; k < SQUARE_LANES / 8; k++) sum[k] = _mm512_loadu_pd(lanes + 8 * k);
    for (int64_t row = 0; row < rows; row++, x += SQUARE_LANES)
        for (int k = 0; k < SQUARE_LANES / WIDTH; k++) {
            const vec value = load(x + WIDTH * k);
            const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(value));
            const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, 1));
            sum[2 * k] = _mm512_fmadd_pd(low, low, sum[2 * k]);
            sum[2 * k + 1] = _mm512_fmadd_pd(high, high, sum[2 * k + 1]);
        }
    for (int k = 0; k < SQUARE_LANES / 8; k++) _mm512_storeu_pd(lanes + 8 * k, sum[k]);
}
#undef FN
}  // namespace avx512
#endif
