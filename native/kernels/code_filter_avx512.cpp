// The filter of item-major codes for AVX-512 with VBMI.
#if defined(__x86_64__)

#include <immintrin.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/avx512_tables.hpp"
#include "kernels/bodies.hpp"
#include "kernels/code_filters.hpp"
#include "kernels/kernels.hpp"

namespace recprune {

namespace {

// A permutation of bytes, made by a function at compile time.
struct Permutation {
    alignas(kBytes) std::array<std::uint8_t, kBytes> places{};
};

RECPRUNE_AVX512 inline __m512i load(const Permutation& permutation) {
    return _mm512_load_si512(permutation.places.data());
}

RECPRUNE_AVX512 inline std::uint64_t within(__m512i sums, int limit) {
    return _mm512_cmple_epu8_mask(sums, _mm512_set1_epi8(static_cast<char>(limit)));
}

constexpr std::size_t kLanes = 4;  // of a register

// Of sixteen items of eight splits, in two registers: four splits from `first` on, each a lane.
constexpr Permutation four_splits(std::size_t first) {
    Permutation permutation;
    for (std::size_t at = 0; at < kBytes; ++at)
        permutation.places[at] =
            static_cast<std::uint8_t>(at % kLaneCodes * 8 + at / kLaneCodes + first);
    return permutation;
}

// Of items that were loaded one after the other, a lane each: item i is in lane i % 4.
constexpr Permutation in_order() {
    Permutation permutation;
    for (std::size_t item = 0; item < kBytes; ++item)
        permutation.places[item] =
            static_cast<std::uint8_t>(item % kLanes * kLaneCodes + item / kLanes);
    return permutation;
}

// Eight splits: a register holds the codes of eight items.
class EightSplits {
  public:
    static constexpr std::size_t kSplits = 8;

    RECPRUNE_AVX512 EightSplits(const std::uint8_t* deficits, int limit)
        : deficits_(deficits), limit_(limit) {
        for (std::size_t split = 0; split < kSplits; ++split) {
            const auto [a, b, c, d] = load_table(deficits + split * kMaxNarrowSubItems).quarters;
            lowest_[split][0] = _mm512_min_epu8(a, c);
            lowest_[split][1] = _mm512_min_epu8(b, d);
        }
    }

    // Codes that differ in their first bit share the smaller of their deficits at first: these
    // tables stay in registers, and nearly all blocks are rejected by them.
    RECPRUNE_AVX512 std::uint64_t passing(const std::uint8_t* block) const {
        __m512i rows[kSplits];
        make_rows(block, rows);
        __m512i sums = look_up_lowest(0, rows);
        for (std::size_t split = 1; split < kSplits; ++split)
            sums = _mm512_adds_epu8(sums, look_up_lowest(split, rows));
        if (within(sums, limit_) == 0) return 0;
        sums = look_up(load_table(deficits_), rows[0]);
        for (std::size_t split = 1; split < kSplits; ++split) {
            const Table table = load_table(deficits_ + split * kMaxNarrowSubItems);
            sums = _mm512_adds_epu8(sums, look_up(table, rows[split]));
        }
        return within(sums, limit_);
    }

  private:
    RECPRUNE_AVX512 static void make_rows(const std::uint8_t* block, __m512i* rows) {
        static constexpr Permutation kFirstFour = four_splits(0);
        static constexpr Permutation kLastFour = four_splits(kLanes);
        __m512i first[kLanes];
        __m512i last[kLanes];
        for (std::size_t part = 0; part < kLanes; ++part) {
            const __m512i low = _mm512_loadu_si512(block + 2 * kBytes * part);
            const __m512i high = _mm512_loadu_si512(block + 2 * kBytes * part + kBytes);
            first[part] = _mm512_permutex2var_epi8(low, load(kFirstFour), high);
            last[part] = _mm512_permutex2var_epi8(low, load(kLastFour), high);
        }
        transpose_lanes(first, rows);
        transpose_lanes(last, rows + kLanes);
    }

    RECPRUNE_AVX512 static void transpose_lanes(const __m512i* parts, __m512i* rows) {
        const __m512i low_0 = _mm512_shuffle_i32x4(parts[0], parts[1], 0x44);
        const __m512i low_1 = _mm512_shuffle_i32x4(parts[2], parts[3], 0x44);
        const __m512i high_0 = _mm512_shuffle_i32x4(parts[0], parts[1], 0xEE);
        const __m512i high_1 = _mm512_shuffle_i32x4(parts[2], parts[3], 0xEE);
        rows[0] = _mm512_shuffle_i32x4(low_0, low_1, 0x88);
        rows[1] = _mm512_shuffle_i32x4(low_0, low_1, 0xDD);
        rows[2] = _mm512_shuffle_i32x4(high_0, high_1, 0x88);
        rows[3] = _mm512_shuffle_i32x4(high_0, high_1, 0xDD);
    }

    RECPRUNE_AVX512 __m512i look_up_lowest(std::size_t split, const __m512i* rows) const {
        return _mm512_permutex2var_epi8(lowest_[split][0], rows[split], lowest_[split][1]);
    }

    const std::uint8_t* deficits_;
    int limit_;
    __m512i lowest_[kSplits][2];
};

// From sixteen registers of four lanes, sixteen codes a lane, to a register for each of these
// codes. With r the number of a register and c that of a byte in its lane, four bits each, a round
// turns the bits of (r, c) by one; after four rounds, they have changed places.
RECPRUNE_AVX512 RECPRUNE_BODY void transpose_codes(__m512i* registers) {
    for (int round = 0; round < 4; ++round) {
        __m512i turned[kLaneCodes];
        for (std::size_t at = 0; at < kLaneCodes / 2; ++at) {
            const __m512i first = registers[at];
            const __m512i second = registers[at + kLaneCodes / 2];
            turned[2 * at] = _mm512_unpacklo_epi8(first, second);
            turned[2 * at + 1] = _mm512_unpackhi_epi8(first, second);
        }
        for (std::size_t at = 0; at < kLaneCodes; ++at) registers[at] = turned[at];
    }
}

RECPRUNE_AVX512 RECPRUNE_BODY __m512i add_rows(const std::uint8_t* deficits, const __m512i* rows,
                                               std::size_t count, __m512i sums) {
    for (std::size_t row = 0; row < count; ++row) {
        const Table table = load_table(deficits + row * kMaxNarrowSubItems);
        sums = _mm512_adds_epu8(sums, look_up(table, rows[row]));
    }
    return sums;
}

// Sixteen splits: a lane holds the code of an item.
class SixteenSplits {
  public:
    SixteenSplits(const std::uint8_t* deficits, int limit) : deficits_(deficits), limit_(limit) {}

    RECPRUNE_AVX512 std::uint64_t passing(const std::uint8_t* block) const {
        static constexpr Permutation kInOrder = in_order();
        __m512i rows[kLaneCodes];
        for (std::size_t row = 0; row < kLaneCodes; ++row)
            rows[row] = _mm512_loadu_si512(block + row * kBytes);
        transpose_codes(rows);
        const __m512i sums = add_rows(deficits_, rows, kLaneCodes, _mm512_setzero_si512());
        return within(_mm512_permutexvar_epi8(load(kInOrder), sums), limit_);
    }

  private:
    const std::uint8_t* deficits_;
    int limit_;
};

// Any number of splits, sixteen at a time: of each item a lane is read, whatever is in the rest.
class AnySplits {
  public:
    AnySplits(const std::uint8_t* deficits, int limit, std::size_t num_splits)
        : deficits_(deficits), limit_(limit), num_splits_(num_splits) {}

    RECPRUNE_AVX512 std::uint64_t passing(const std::uint8_t* block) const {
        __m512i sums = _mm512_setzero_si512();
        for (std::size_t first = 0; first < num_splits_; first += kLaneCodes) {
            __m512i rows[kLaneCodes];
            for (std::size_t row = 0; row < kLaneCodes; ++row)
                rows[row] = load_lanes(block + row * num_splits_ + first);
            transpose_codes(rows);
            const std::size_t left = num_splits_ - first;
            sums = add_rows(deficits_ + first * kMaxNarrowSubItems, rows,
                            left < kLaneCodes ? left : kLaneCodes, sums);
        }
        return within(sums, limit_);
    }

  private:
    // The lanes of an item, and of those sixteen, 32 and 48 items on.
    RECPRUNE_AVX512 __m512i load_lanes(const std::uint8_t* codes) const {
        const std::size_t step = kLaneCodes * num_splits_;
        __m512i lanes = _mm512_castsi128_si512(load_lane(codes));
        lanes = _mm512_inserti32x4(lanes, load_lane(codes + step), 1);
        lanes = _mm512_inserti32x4(lanes, load_lane(codes + 2 * step), 2);
        return _mm512_inserti32x4(lanes, load_lane(codes + 3 * step), 3);
    }

    RECPRUNE_AVX512 static __m128i load_lane(const std::uint8_t* codes) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    }

    const std::uint8_t* deficits_;
    int limit_;
    std::size_t num_splits_;
};

template <class Filter>
RECPRUNE_AVX512 void filter_blocks(const Filter& filter, const std::uint8_t* codes,
                                   std::size_t num_items, std::size_t num_splits,
                                   std::uint64_t* passing) {
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

RECPRUNE_AVX512 void filter_codes_avx512(const std::uint8_t* codes, std::size_t num_items,
                                         std::size_t num_splits, const std::uint8_t* deficits,
                                         int limit, std::uint64_t* passing) {
    if (num_splits == EightSplits::kSplits)
        filter_blocks(EightSplits(deficits, limit), codes, num_items, num_splits, passing);
    else if (num_splits == kLaneCodes)
        filter_blocks(SixteenSplits(deficits, limit), codes, num_items, num_splits, passing);
    else
        filter_blocks(AnySplits(deficits, limit, num_splits), codes, num_items, num_splits,
                      passing);
}

}  // namespace recprune

#endif
