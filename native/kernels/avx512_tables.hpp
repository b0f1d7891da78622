// What kernels for AVX-512 with VBMI share: a table of 256 bytes is two permutations of 128 and a
// choice.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.hpp"

#define RECPRUNE_AVX512    \
    __attribute__((target( \
        "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,avx512bitalg,bmi,popcnt")))

namespace recprune {

namespace {

constexpr std::size_t kBytes = 64;  // of a register
static_assert(kBytes == kBlockItems);

struct Table {
    __m512i quarters[4];
};

RECPRUNE_AVX512 inline Table load_table(const std::uint8_t* table) {
    return {{_mm512_loadu_si512(table), _mm512_loadu_si512(table + kBytes),
             _mm512_loadu_si512(table + 2 * kBytes), _mm512_loadu_si512(table + 3 * kBytes)}};
}

RECPRUNE_AVX512 inline __m512i look_up(const Table& table, __m512i codes) {
    const __m512i lower = _mm512_permutex2var_epi8(table.quarters[0], codes, table.quarters[1]);
    const __m512i upper = _mm512_permutex2var_epi8(table.quarters[2], codes, table.quarters[3]);
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(codes), lower, upper);
}

}  // namespace

}  // namespace recprune

#endif
