// The three number formats of gradients and compute weights, and their exact conversions in portable C++.
// Everything here rounds to nearest even, and turns every NaN into the one quiet NaN 0x7fc00000 before it is narrowed
// or stored, so that a result has the same bits on every instruction set.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};
struct absent {  // the element type of an output that is not wanted
    uint16_t bits;
};

constexpr uint32_t QUIET_NAN = 0x7fc00000u;

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

static inline float widen(float x) { return x; }

static inline float widen(bf16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }

static inline float widen(fp16 x) {
    const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
    const uint32_t exponent = (x.bits >> 10) & 31u, mantissa = x.bits & 1023u;
    if (exponent == 0) return float_of(sign | bits_of(static_cast<float>(mantissa) * 0x1p-24f));
    if (exponent == 31) return float_of(sign | 0x7f800000u | (mantissa ? 0x400000u : 0u) | (mantissa << 13));
    return float_of(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

static inline float quieted(float x) { return x != x ? float_of(QUIET_NAN) : x; }

template <class T>
static inline T narrowed(float x);

template <>
inline float narrowed<float>(float x) {
    return quieted(x);
}

template <>
inline absent narrowed<absent>(float) {
    return {0};
}

template <>
inline bf16 narrowed<bf16>(float x) {
    const uint32_t bits = bits_of(quieted(x));
    return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
inline fp16 narrowed<fp16>(float x) {
    const uint32_t bits = bits_of(quieted(x));
    const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude > 0x7f800000u) {
        half = 0x7e00u;
    } else if (magnitude >= 0x47800000u) {  // 65536 and more
        half = 0x7c00u;
    } else if (magnitude >= 0x38800000u) {  // a normal half; a carry out of the mantissa reaches infinity by itself
        half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    } else {  // subnormal: the last place of [0.5, 1) is a half's smallest step, so the addition rounds for us
        half = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    }
    return {static_cast<uint16_t>(sign | half)};
}
