// Kernels for NEON, which every 64-bit ARM has: a table of 64 bytes, in four registers, is looked
// up by one instruction.
#if defined(__aarch64__)

#include <arm_neon.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/bodies.hpp"
#include "kernels/kernels.hpp"
#include "kernels/two_stages.hpp"

namespace recprune {

namespace {

constexpr std::size_t kBytes = 16;  // of a register
constexpr std::size_t kParts = kBlockItems / kBytes;
constexpr std::size_t kQuarter = 64;  // entries of a table that one instruction looks up

void sub_item_scores_neon(const float* sequence_embedding, const float* transposed,
                          std::size_t num_splits, std::size_t width, std::size_t num_sub_items,
                          float* sub_item_scores) {
    sub_item_scores_body(sequence_embedding, transposed, num_splits, width, num_sub_items,
                         sub_item_scores);
}

void quantise_neon(const float* scores, std::size_t count, double highest, double scale,
                   std::uint8_t* out) {
    quantise_body(scores, count, highest, scale, out);
}

// The entries at 64 codes, by as many of their lowest bits as the table needs.
template <std::size_t entries>
RECPRUNE_BODY uint8x16x4_t look_up(const std::uint8_t* table, const uint8x16x4_t& codes) {
    const uint8x16x4_t first = vld1q_u8_x4(table);
    uint8x16x4_t places;
    uint8x16x4_t found;
    for (std::size_t part = 0; part < kParts; ++part) {
        places.val[part] = codes.val[part];
        if constexpr (entries < kMaxNarrowSubItems)
            places.val[part] = vandq_u8(codes.val[part], vdupq_n_u8(entries - 1));
        found.val[part] = vqtbl4q_u8(first, places.val[part]);
    }
    // Beyond its 64 entries a look-up finds zero. (There is one that leaves what was there before,
    // but on most machines it takes longer than a disjunction.)
    for (std::size_t quarter = kQuarter; quarter < entries; quarter += kQuarter) {
        const uint8x16x4_t next = vld1q_u8_x4(table + quarter);
        for (std::size_t part = 0; part < kParts; ++part) {
            places.val[part] = vsubq_u8(places.val[part], vdupq_n_u8(kQuarter));
            found.val[part] = vorrq_u8(found.val[part], vqtbl4q_u8(next, places.val[part]));
        }
    }
    return found;
}

void look_up_neon(const std::uint8_t* table, const std::uint8_t* codes, std::uint8_t* out) {
    for (std::size_t i = 0; i < kMaxNarrowSubItems; i += kParts * kBytes)
        vst1q_u8_x4(out + i, look_up<kMaxNarrowSubItems>(table, vld1q_u8_x4(codes + i)));
}

// Ranks within a block, at most 63, are prefix sums of bits: those of an item's own byte are
// counted under a mask, and those of the bytes before it come from one multiplication.
RECPRUNE_BODY uint8x16x4_t look_up_sorted(const SortedRow& row, std::size_t block) {
    const std::uint64_t changes = row.changes[block];
    const uint8x16_t bits = vreinterpretq_u8_u64(vdupq_n_u64(changes));
    const uint8x16_t before = vreinterpretq_u8_u64(vdupq_n_u64(bits_before_bytes(changes)));
    const uint8x16_t up_to_lane = vreinterpretq_u8_u64(vdupq_n_u64(0xFF7F3F1F0F070301ull));
    const uint8x16x4_t deficits = vld1q_u8_x4(row.deficits + row.bases[block]);
    uint8x16_t own = vcombine_u8(vdup_n_u8(0), vdup_n_u8(1));  // each item's byte of the bits
    uint8x16x4_t found;
    for (uint8x16_t& part : found.val) {
        const uint8x16_t within = vcntq_u8(vandq_u8(vqtbl1q_u8(bits, own), up_to_lane));
        part = vqtbl4q_u8(deficits, vaddq_u8(within, vqtbl1q_u8(before, own)));
        own = vaddq_u8(own, vdupq_n_u8(2));
    }
    return found;
}

template <std::size_t entries>
RECPRUNE_BODY void add_rows(const CodeRow* rows, std::size_t count, std::size_t block,
                            uint8x16x4_t& sums) {
    for (std::size_t row = 0; row < count; ++row) {
        const uint8x16x4_t codes = vld1q_u8_x4(rows[row].codes + block * kBlockItems);
        const uint8x16x4_t deficits = look_up<entries>(rows[row].deficits, codes);
        for (std::size_t part = 0; part < kParts; ++part)
            sums.val[part] = vqaddq_u8(sums.val[part], deficits.val[part]);
    }
}

// Whether any of the 64 items is within the limit.
RECPRUNE_BODY bool any_within(const uint8x16x4_t& sums, int limit) {
    const uint8x16_t lowest =
        vminq_u8(vminq_u8(sums.val[0], sums.val[1]), vminq_u8(sums.val[2], sums.val[3]));
    return vminvq_u8(lowest) <= limit;
}

// A bit for each that is. NEON cannot gather bits: bytes are added in pairs until eight are one.
RECPRUNE_BODY std::uint64_t find_within(const uint8x16x4_t& sums, int limit) {
    const uint8x16_t limits = vdupq_n_u8(static_cast<std::uint8_t>(limit));
    const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201ull));
    auto bits = [&](uint8x16_t values) { return vandq_u8(vcleq_u8(values, limits), bit); };
    const uint8x16_t first = vpaddq_u8(bits(sums.val[0]), bits(sums.val[1]));
    const uint8x16_t second = vpaddq_u8(bits(sums.val[2]), bits(sums.val[3]));
    const uint8x16_t pairs = vpaddq_u8(first, second);
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(pairs, pairs)), 0);
}

std::size_t find_coarsely_neon(const SortedRow& sorted, const CoarseRows& coarse, std::size_t begin,
                               std::size_t end, int limit, std::uint32_t* found,
                               std::uint64_t* items) {
    const auto [rows, whole, half, quarter] = coarse;
    std::size_t num_found = 0;
    for (std::size_t block = begin; block < end; ++block) {
        uint8x16x4_t sums = look_up_sorted(sorted, block);
        add_rows<256>(rows, whole, block, sums);
        add_rows<128>(rows + whole, half, block, sums);
        add_rows<64>(rows + whole + half, quarter, block, sums);
        if (!any_within(sums, limit)) continue;
        found[num_found] = static_cast<std::uint32_t>(block);
        items[num_found++] = find_within(sums, limit);
    }
    return num_found;
}

void look_up_sorted_neon(const SortedRow& row, std::size_t block, std::uint8_t* sums) {
    vst1q_u8_x4(sums, look_up_sorted(row, block));
}

void add_rows_neon(const CodeRow* rows, std::size_t count, std::size_t block, std::uint8_t* sums) {
    uint8x16x4_t totals = vld1q_u8_x4(sums);
    add_rows<kMaxNarrowSubItems>(rows, count, block, totals);
    vst1q_u8_x4(sums, totals);
}

std::uint64_t find_within_neon(const std::uint8_t* sums, int limit) {
    return find_within(vld1q_u8_x4(sums), limit);
}

FoundBlocks find_blocks_neon(const FilterRows& filter, std::size_t begin, std::size_t end,
                             int limit, std::uint32_t* found, std::uint8_t* sums) {
    return find_blocks_body<kQuarter>(filter, begin, end, limit, found, sums, find_coarsely_neon,
                                      look_up_sorted_neon, add_rows_neon, find_within_neon);
}

std::size_t filter_blocks_neon(const CodeRow* rows, std::size_t count, std::uint32_t* blocks,
                               std::size_t num_blocks, std::uint8_t* sums, int limit,
                               std::uint64_t* items) {
    return filter_blocks_body(rows, count, blocks, num_blocks, sums, limit, items, find_within_neon,
                              add_rows_neon);
}

// The entries of a whole table at 16 codes.
RECPRUNE_BODY uint8x16_t look_up_all(const std::uint8_t* table, uint8x16_t codes) {
    uint8x16_t found = vqtbl4q_u8(vld1q_u8_x4(table), codes);
    for (std::size_t quarter = kQuarter; quarter < kMaxNarrowSubItems; quarter += kQuarter) {
        codes = vsubq_u8(codes, vdupq_n_u8(kQuarter));
        found = vorrq_u8(found, vqtbl4q_u8(vld1q_u8_x4(table + quarter), codes));
    }
    return found;
}

std::size_t filter_lines_neon(const std::uint8_t* lines, const LineBatch& batch,
                              const std::uint8_t* const* tables, int two, int three,
                              std::uint32_t* survivors, std::uint8_t* sums) {
    const std::uint8_t* const far[] = {tables[2], tables[3]};
    std::size_t found = 0;
    for (std::size_t at = batch.begin; at < batch.end; ++at) {
        prefetch_lines_after(lines, batch, at);
        const std::uint8_t* line = lines + std::size_t{batch.lines[at]} * kLineBytes;
        const uint8x16_t near = vqaddq_u8(look_up_all(tables[0], vld1q_u8(line)),
                                          look_up_all(tables[1], vld1q_u8(line + kLineItems)));
        const int own = batch.deficits[at];
        const int near_limit = std::min(two - own, kFullDeficit);
        if (vminvq_u8(near) > near_limit) continue;
        std::uint8_t near_sums[kLineItems];
        vst1q_u8(near_sums, near);
        for (std::size_t place = 0; place < kLineItems; ++place) {
            const int both = own + near_sums[place] + far[0][line[2 * kLineItems + place]] +
                             far[1][line[3 * kLineItems + place]];
            // Written always, counted only if it passes: no branch to mispredict.
            survivors[found] = static_cast<std::uint32_t>(at * kLineItems + place);
            sums[found] = static_cast<std::uint8_t>(std::min(both, kFullDeficit));
            found += static_cast<std::size_t>((near_sums[place] <= near_limit) & (both <= three));
        }
    }
    return found;
}

}  // namespace

Kernels neon_kernels() {
    Kernels kernels = portable_kernels();
    kernels.name = "neon";
    // Not measured, but estimated from the instructions of the loops: docs/search.md.
    kernels.costs = {.scan = 200e3,
                     .scanned_item = 0.45,
                     .scan_growth = 0.29,
                     .cells = 50e3,
                     .line = 25.0,
                     .found_item = 470.0,
                     .few_items = 60'000,
                     .allowed_item = 9.0,
                     .filtered_code = 2.2};
    kernels.refinements = CoarseTables<kQuarter>::kRounds;
    kernels.sub_item_scores = sub_item_scores_neon;
    kernels.quantise = quantise_neon;
    kernels.look_up = look_up_neon;
    kernels.find_blocks = find_blocks_neon;
    kernels.filter_blocks = filter_blocks_neon;
    kernels.filter_lines = filter_lines_neon;
    return kernels;
}

}  // namespace recprune

#endif
