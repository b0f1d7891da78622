// What kernels for AVX-512 share, with VBMI or without: lines of cells, four at a time.
#pragma once

#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/bodies.hpp"
#include "kernels/kernels.hpp"

#define RECPRUNE_AVX512BW __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,bmi,popcnt")))

namespace recprune {

namespace {

constexpr std::size_t kLinesAtOnce = 4;  // whose items fill a register
static_assert(kLinesAtOnce * kLineItems == 64 && kLineBytes == 64);

// Four lines, turned so that each register has the codes of one split.
struct FourLines {
    __m512i codes[4];
    __m512i own;      // the deficit of each item's cell
    __mmask64 there;  // items of lines that are in the batch
};

// The lines of a batch from one on; the next ones are prefetched.
RECPRUNE_AVX512BW RECPRUNE_BODY FourLines load_four_lines(const std::uint8_t* lines,
                                                          const LineBatch& batch, std::size_t at) {
    alignas(64) static constexpr std::array<std::uint8_t, 64> kLine = [] {
        std::array<std::uint8_t, 64> line{};
        for (std::size_t lane = 0; lane < line.size(); ++lane)
            line[lane] = static_cast<std::uint8_t>(lane / kLineItems);
        return line;
    }();
    for (std::size_t line = 0; line < kLinesAtOnce; ++line)
        prefetch_lines_after(lines, batch, at + line);
    const std::size_t left = batch.end - at;
    std::uint32_t numbers[kLinesAtOnce];
    std::uint32_t deficits = 0;
    FourLines four;
    four.there = ~__mmask64{0};
    if (left >= kLinesAtOnce) {
        std::memcpy(numbers, batch.lines + at, sizeof numbers);
        std::memcpy(&deficits, batch.deficits + at, sizeof deficits);
    } else {
        for (std::size_t line = 0; line < kLinesAtOnce; ++line)
            numbers[line] = batch.lines[at + std::min(line, left - 1)];
        std::memcpy(&deficits, batch.deficits + at, left);
        four.there = (__mmask64{1} << left * kLineItems) - 1;
    }
    __m512i whole[kLinesAtOnce];
    for (std::size_t line = 0; line < kLinesAtOnce; ++line)
        whole[line] = _mm512_loadu_si512(lines + std::size_t{numbers[line]} * kLineBytes);
    const __m512i near01 = _mm512_shuffle_i64x2(whole[0], whole[1], 0x44);
    const __m512i near23 = _mm512_shuffle_i64x2(whole[2], whole[3], 0x44);
    const __m512i far01 = _mm512_shuffle_i64x2(whole[0], whole[1], 0xEE);
    const __m512i far23 = _mm512_shuffle_i64x2(whole[2], whole[3], 0xEE);
    four.codes[0] = _mm512_shuffle_i64x2(near01, near23, 0x88);
    four.codes[1] = _mm512_shuffle_i64x2(near01, near23, 0xDD);
    four.codes[2] = _mm512_shuffle_i64x2(far01, far23, 0x88);
    four.codes[3] = _mm512_shuffle_i64x2(far01, far23, 0xDD);
    four.own = _mm512_shuffle_epi8(_mm512_set1_epi32(static_cast<int>(deficits)),
                                   _mm512_load_si512(kLine.data()));
    return four;
}

// Of the items of four lines, those within the limits, and the deficits that they were held
// against.
struct WithinLimits {
    __mmask64 items;
    __m512i sums;
};

// How far the chains of two and of three pairs may go, in limits that may be more than a byte
// holds.
class ChainLimits {
  public:
    RECPRUNE_AVX512BW ChainLimits(int two, int three) : near_(two), far_(three) {}

    // The items whose deficits in the near splits, and in these and the far ones, are within them.
    RECPRUNE_AVX512BW RECPRUNE_BODY WithinLimits find_within(const FourLines& four, __m512i near,
                                                             __m512i far) const {
        const __mmask64 near_within =
            _mm512_mask_cmple_epu8_mask(four.there, near, near_.less(four.own));
        const __m512i both = _mm512_adds_epu8(near, far);
        return {_mm512_mask_cmple_epu8_mask(near_within, both, far_.less(four.own)),
                _mm512_adds_epu8(both, four.own)};
    }

  private:
    class ByteLimit {
      public:
        RECPRUNE_AVX512BW explicit ByteLimit(int limit)
            : bytes_(_mm512_set1_epi8(static_cast<char>(std::min(limit, kFullDeficit)))),
              beyond_(_mm512_set1_epi8(
                  static_cast<char>(std::clamp(limit - kFullDeficit, 0, kFullDeficit)))) {}

        // What a deficit leaves of it, at most 255.
        RECPRUNE_AVX512BW RECPRUNE_BODY __m512i less(__m512i deficits) const {
            return _mm512_subs_epu8(bytes_, _mm512_subs_epu8(deficits, beyond_));
        }

      private:
        __m512i bytes_;
        __m512i beyond_;
    };

    ByteLimit near_;
    ByteLimit far_;
};

}  // namespace

}  // namespace recprune

#endif
