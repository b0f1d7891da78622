// The few inner loops that are worth writing for an instruction set; which version runs is chosen
// once, at run time. Scores have the same bits in every version. A filter may let more through in
// one than in another, but never rejects what is within the limits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace recprune {

constexpr std::size_t kBlockItems = 64;

// The codes of all blocks in one split, 64 a block, and the 256 deficits that belong to them.
struct CodeRow {
    const std::uint8_t* codes;
    const std::uint8_t* deficits;
};

// The same for the split by which the items of a list are sorted. Where the code changes from one
// item to the next, there is a bit; an item's rank, among the codes that its list has, is that of
// its block's first item and as many more as there are bits up to its own.
struct SortedRow {
    const std::uint8_t* bases;     // the rank of each block's first item
    const std::uint64_t* steps;    // the bits of each block; never the lowest
    const std::uint8_t* deficits;  // of the list's codes, by rank: 256, and 64 more
};

// All rows that a filter adds up. Every block is held against the sorted one and the near ones.
struct FilterRows {
    SortedRow sorted;
    const CodeRow* rows;
    std::size_t near;
    std::size_t count;
};

// A stretch of one cell. Items in it pass if the deficits of the next pair, and of the next two
// pairs together, are within these limits.
struct CellPart {
    std::uint32_t start;
    std::uint32_t length;  // at most kPartItems
    std::int16_t next_limit;
    std::int16_t both_limit;
};
constexpr std::size_t kPartItems = 256;
constexpr std::size_t kGroupItems = 32;  // of a cell whose near keys lie side by side
constexpr std::size_t kBatchItems =
    1024;                             // as many keys as can be on their way from memory at once
constexpr std::size_t kDepth = 128;   // how deep the cells of a pair are counted
constexpr std::size_t kBuckets = 16;  // of deficits, for a quick estimate of the same
constexpr std::size_t kBucketUnits = kDepth / kBuckets;

struct Kernels {
    const char* name;

    // S[m][b] = Σ_j φ[m][j] · E[m][j][b], products rounded and added in the order of j.
    // `transposed` is E as [num_splits][width][num_sub_items].
    void (*sub_item_scores)(const float* sequence_embedding, const float* transposed,
                            std::size_t num_splits, std::size_t width, std::size_t num_sub_items,
                            float* sub_item_scores);

    // out[b] = ⌊(highest − scores[b]) · scale⌋, at most 255.
    void (*quantise)(const float* scores, std::size_t count, double highest, double scale,
                     std::uint8_t* out);

    // out[i] = table[codes[i]] for 256 of them.
    void (*look_up)(const std::uint8_t* table, const std::uint8_t* codes, std::uint8_t* out);

    // Finds the blocks in [begin, end) with an item whose deficits in the sorted and the near rows
    // add up to at most `limit` (≤ 254), and asks for the other rows of these blocks. Writes the
    // blocks and, 64 for each, their items' sums, saturated at 255; returns how many. There is room
    // for one more than all blocks.
    std::size_t (*find_blocks)(const FilterRows& rows, std::size_t begin, std::size_t end,
                               int limit, std::uint32_t* found, std::uint8_t* sums);

    // Keeps those of `num_blocks` blocks with an item whose sum and deficits in these rows add up
    // to at most `limit` (≤ 254): writes the blocks and the sums of everything, saturated, over
    // those given, and a bit for each such item of a block to `items`, which has room for one more;
    // returns how many.
    std::size_t (*filter_blocks)(const CodeRow* rows, std::size_t count, std::uint32_t* blocks,
                                 std::size_t num_blocks, std::uint8_t* sums, int limit,
                                 std::uint64_t* items);

    // Writes the positions of the items that pass to `survivors` and returns how many; there is
    // room for one more than the parts, together at most kBatchItems, have items. Parts begin with
    // a group. A key is two codes; `tables` has 256 deficits for each of the four splits, and
    // `pairs` (if needs_pair_tables) their sums for near and for far keys, saturated at 255: two
    // tables of 65,536 entries, and 4 bytes more. Reads up to 31 keys past a part's end.
    std::size_t (*filter_cells)(const CellPart* parts, std::size_t count, const std::uint16_t* keys,
                                const std::uint8_t* const* tables, const std::uint8_t* pairs,
                                std::uint32_t* survivors);
    bool needs_pair_tables;

    // sums[a | b << 8] = low[a] + high[b], saturated at 255.
    void (*fill_pairs)(const std::uint8_t* low, const std::uint8_t* high, std::uint8_t* sums);

    // Writes the sub-item ids b with deficits[b] ≤ limit, ascending; returns how many. `deficits`
    // has 256 entries; `selected` has room for 256 and 64 more.
    std::size_t (*select)(const std::uint8_t* deficits, int limit, std::uint8_t* selected);

    // counts[x] = how many of 256 deficits are in bucket x.
    void (*count_buckets)(const std::uint8_t* deficits, float* counts);

    // sums[x] = Σ_q first[q] · second[x − q] for x < kDepth: whole numbers below 2²⁴, so exact in
    // any order. How many cells of a pair have the deficit x. Before `second` stand kDepth zeros.
    void (*convolve)(const float* first, const float* second, float* sums);
};

// The kernels that this machine can run, the fastest first; the last one runs anywhere.
const std::vector<Kernels>& available_kernels();

// The kernels by name; an empty name means the fastest. Null if there is no such name.
const Kernels* find_kernels(const std::string& name);

}  // namespace recprune
