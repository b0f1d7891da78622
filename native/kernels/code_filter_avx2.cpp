// The filter of item-major codes for AVX2.
#if defined(__x86_64__)

#include <immintrin.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/bodies.hpp"
#include "kernels/code_filters.hpp"
#include "kernels/kernels.hpp"

#define RECPRUNE_AVX2 __attribute__((target("avx2")))

namespace recprune {

namespace {

constexpr std::size_t kBytes = 32;  // of a register

RECPRUNE_AVX2 inline __m256i load(const std::uint8_t* bytes) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
}

// A table of deficits as look-ups of sixteen. With eight of them, codes that differ in their first
// bit share the smaller of their deficits; with sixteen, each has its own.
template <std::size_t parts>
class PartedTable {
  public:
    RECPRUNE_AVX2 void set(const std::uint8_t* deficits) {
        for (std::size_t part = 0; part < parts; part += 2) {
            __m256i two = load(deficits + part * kLaneCodes);
            if constexpr (parts < kLaneCodes)
                two = _mm256_min_epu8(two, load(deficits + (parts + part) * kLaneCodes));
            parts_[part] = _mm256_permute2x128_si256(two, two, 0x00);
            parts_[part + 1] = _mm256_permute2x128_si256(two, two, 0x11);
        }
    }

    // A shuffle takes the lowest four bits of a byte as the place, and gives 0 if the highest is
    // set: where bit 4 is moved there, two parts are joined by an "or". The bits above choose.
    RECPRUNE_AVX2 __m256i look_up(__m256i codes) const {
        const __m256i five_bits = _mm256_and_si256(codes, _mm256_set1_epi8(0x1F));
        const __m256i if_clear = _mm256_add_epi8(five_bits, _mm256_set1_epi8(0x70));
        const __m256i if_set =
            _mm256_xor_si256(if_clear, _mm256_set1_epi8(static_cast<char>(0x80)));
        __m256i joined[parts / 2];
        for (std::size_t at = 0; at < parts / 2; ++at)
            joined[at] = _mm256_or_si256(_mm256_shuffle_epi8(parts_[2 * at], if_clear),
                                         _mm256_shuffle_epi8(parts_[2 * at + 1], if_set));
        const __m256i bit_5 = _mm256_slli_epi16(codes, 2);
        const __m256i bit_6 = _mm256_slli_epi16(codes, 1);
        const __m256i lower = choose_of_four(joined, bit_5, bit_6);
        if constexpr (parts < kLaneCodes)
            return lower;
        else
            return _mm256_blendv_epi8(lower, choose_of_four(joined + 4, bit_5, bit_6), codes);
    }

  private:
    RECPRUNE_AVX2 static __m256i choose_of_four(const __m256i* values, __m256i bit_5,
                                                __m256i bit_6) {
        return _mm256_blendv_epi8(_mm256_blendv_epi8(values[0], values[1], bit_5),
                                  _mm256_blendv_epi8(values[2], values[3], bit_5), bit_6);
    }

    __m256i parts_[parts];  // sixteen deficits each, in both lanes
};

// From `count` registers of two lanes, sixteen codes a lane, to a register for each of a lane's
// first `count` codes: with r the number of a register and c that of a byte in its lane, a round
// turns the bits of (r, c) by one. A lane of eight registers holds two items of eight codes.
template <std::size_t count>
RECPRUNE_AVX2 RECPRUNE_BODY void transpose_codes(__m256i* registers) {
    for (int round = 0; round < 4; ++round) {
        __m256i turned[count];
        for (std::size_t at = 0; at < count / 2; ++at) {
            const __m256i first = registers[at];
            const __m256i second = registers[at + count / 2];
            turned[2 * at] = _mm256_unpacklo_epi8(first, second);
            turned[2 * at + 1] = _mm256_unpackhi_epi8(first, second);
        }
        for (std::size_t at = 0; at < count; ++at) registers[at] = turned[at];
    }
}

// The lanes at two places.
RECPRUNE_AVX2 inline __m256i load_lanes(const std::uint8_t* low, const std::uint8_t* high) {
    const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
    const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(high));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
}

// Adds up the splits of 32 items, a fixed number of them known.
template <std::size_t known>
class CodeSums {
  public:
    RECPRUNE_AVX2 CodeSums(const std::uint8_t* deficits, int limit, std::size_t num_splits)
        : num_splits_(num_splits), limits_(_mm256_set1_epi8(static_cast<char>(limit))) {
        for (std::size_t split = 0; split < num_splits; ++split)
            tables_[split].set(deficits + split * kMaxNarrowSubItems);
    }

    RECPRUNE_AVX2 std::uint64_t passing(const std::uint8_t* block) const {
        const std::uint64_t first = within(add_up(block));
        return first | std::uint64_t{within(add_up(block + kBytes * num_splits()))} << kBytes;
    }

  private:
    static constexpr bool kAny = known == 0;
    static constexpr std::size_t kRows = known == kLaneCodes / 2 ? known : kLaneCodes;

    RECPRUNE_BODY std::size_t num_splits() const { return kAny ? num_splits_ : known; }

    RECPRUNE_AVX2 __m256i add_up(const std::uint8_t* codes) const {
        // A lane of a register is an item's, or two if that is all they have.
        const std::size_t step = kRows < kLaneCodes ? kLaneCodes : num_splits();
        __m256i sums = _mm256_setzero_si256();
        for (std::size_t first = 0; first < num_splits(); first += kRows) {
            __m256i rows[kRows];
            for (std::size_t row = 0; row < kRows; ++row) {
                const std::uint8_t* low = codes + row * step + first;
                rows[row] = load_lanes(low, low + kRows * step);
            }
            transpose_codes<kRows>(rows);
            const std::size_t left = num_splits() - first;
            for (std::size_t row = 0; row < (left < kRows ? left : kRows); ++row)
                sums = _mm256_adds_epu8(sums, tables_[first + row].look_up(rows[row]));
        }
        return sums;
    }

    // x ≤ limit is max(x, limit) == limit: AVX2 compares only signed bytes.
    RECPRUNE_AVX2 std::uint32_t within(__m256i sums) const {
        const __m256i equal = _mm256_cmpeq_epi8(_mm256_max_epu8(sums, limits_), limits_);
        return static_cast<std::uint32_t>(_mm256_movemask_epi8(equal));
    }

    std::size_t num_splits_;
    __m256i limits_;
    // The more splits, the more a sum of shared deficits falls short: all 256 take twice as long,
    // but with more than eight splits, the others would leave too much.
    PartedTable<known == kLaneCodes / 2 ? 8 : 16> tables_[kAny ? kMostFilteredSplits : known];
};

template <std::size_t known>
RECPRUNE_AVX2 void filter_blocks(const std::uint8_t* codes, std::size_t num_items,
                                 std::size_t num_splits, const std::uint8_t* deficits, int limit,
                                 std::uint64_t* passing) {
    const CodeSums<known> filter(deficits, limit, num_splits);
    const std::size_t readable = readable_blocks(num_items, num_splits);
    const std::size_t block_bytes = kBlockItems * num_splits;
    std::size_t block = 0;
    for (; block < readable; ++block) passing[block] = filter.passing(codes + block * block_bytes);
    for (; block * kBlockItems < num_items; ++block) {
        const std::size_t left = num_items - block * kBlockItems;
        const std::size_t count = left < kBlockItems ? left : kBlockItems;
        const LastBlock last(codes + block * block_bytes, count, num_splits);
        passing[block] = filter.passing(last.codes()) & first_items(count);
    }
}

}  // namespace

void filter_codes_avx2(const std::uint8_t* codes, std::size_t num_items, std::size_t num_splits,
                       const std::uint8_t* deficits, int limit, std::uint64_t* passing) {
    const auto filter = num_splits == 8    ? filter_blocks<8>
                        : num_splits == 16 ? filter_blocks<16>
                                           : filter_blocks<0>;
    filter(codes, num_items, num_splits, deficits, limit, passing);
}

}  // namespace recprune

#endif
