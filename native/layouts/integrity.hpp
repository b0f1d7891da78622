// Whether the arrays of an index can be what they claim to be: looked at when a folder is opened,
// which a stranger may have made. What passes keeps every engine inside its arrays and exact: all
// numbers by which memory is addressed are within bounds, every layout has every item once, and all
// layouts have the same codes.
//
// Whether layouts agree is not found by looking items up, which for ten million of them takes
// seconds of cache misses, but by a sum over all items and their codes, with keys that are drawn
// anew in every process: memory is read in its order, and a folder cannot be made to fit keys that
// its maker does not know. That two sums are equal by chance is as unlikely as for any good hash of
// 64 bits; it is not proven to be impossible. Bounds do not rest on chance. Only if sums differ are
// items looked up, to say which of them it is.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/kernels.hpp"
#include "layouts/cells.hpp"
#include "layouts/lists.hpp"
#include "top_k.hpp"
#include "util/parallel.hpp"

namespace recprune {

// Numbers, items, or so, that a thread looks at before it fetches more work.
constexpr std::size_t kCheckedAtOnce = std::size_t{1} << 16;

// Calls work(begin, end) for stretches of [0, count), on several threads. Of what they throw, that
// of the first stretch is thrown, so that a message does not depend on the number of threads.
template <class Work>
void check_in_stretches(std::size_t count, std::size_t at_once, std::size_t threads,
                        const Work& work) {
    run_in_parallel((count + at_once - 1) / at_once, threads, [&](std::size_t stretch) {
        work(stretch * at_once, std::min(count, (stretch + 1) * at_once));
    });
}

// "name[2, 5]": a place in an array whose rows have `width` entries; 0: it has no rows.
inline std::string place_in(std::string name, std::size_t at, std::size_t width = 0) {
    if (width == 0) return name + "[" + std::to_string(at) + "]";
    return name + "[" + std::to_string(at / width) + ", " + std::to_string(at % width) + "]";
}

[[noreturn]] inline void refuse(const std::string& what) { throw std::invalid_argument(what); }

// Every number is finite.
inline void check_finite(std::span<const float> numbers, const char* name, std::size_t threads) {
    check_in_stretches(
        numbers.size(), kCheckedAtOnce, threads, [&](std::size_t at, std::size_t end) {
            for (; at < end; ++at)
                if (!std::isfinite(numbers[at]))
                    refuse(place_in(name, at) + " is " + std::to_string(numbers[at]) +
                           ", expected a finite number");
        });
}

// Every code is less than the number of sub-items. `width` is for the message.
template <class Code>
void check_codes(std::span<const Code> codes, std::size_t num_sub_items, const char* name,
                 std::size_t width, std::size_t threads) {
    if (num_sub_items > std::numeric_limits<Code>::max()) return;
    check_in_stretches(codes.size(), kCheckedAtOnce, threads, [&](std::size_t at, std::size_t end) {
        Code highest = 0;  // first as fast as memory can be read, then where
        for (std::size_t i = at; i < end; ++i) highest = std::max(highest, codes[i]);
        for (; highest >= num_sub_items && at < end; ++at)
            if (codes[at] >= num_sub_items)
                refuse(place_in(name, at, width) + " is " + std::to_string(codes[at]) +
                       ", expected less than " + std::to_string(num_sub_items));
    });
}

// Offsets ascend from 0 to `last`.
template <class Offset>
void check_offsets(std::span<const Offset> offsets, std::size_t last, const std::string& name) {
    auto refuse_at = [&](std::size_t at, const std::string& expected) {
        refuse(place_in(name, at) + " is " + std::to_string(offsets[at]) + ", expected " +
               expected);
    };
    if (offsets[0] != 0) refuse_at(0, "0");
    for (std::size_t at = 1; at < offsets.size(); ++at)
        if (offsets[at] < offsets[at - 1]) refuse_at(at, "no less than the one before it");
    if (static_cast<std::size_t>(offsets.back()) != last)
        refuse_at(offsets.size() - 1, std::to_string(last));
}

inline void check_item(Item item, std::size_t num_items, const char* name, std::size_t at,
                       std::size_t width) {
    if (item >= num_items)
        refuse(place_in(name, at, width) + " is " + std::to_string(item) + ", expected 0 to " +
               std::to_string(num_items - 1));
}

// What an item and its code contribute to a sum: a product with a key for each of them, added up
// and mixed. Without the mixing, items that exchange their codes would not change the sum.
class ItemSums {
  public:
    explicit ItemSums(std::size_t num_splits) : keys_(num_splits + 1) {
        std::random_device device;
        for (std::uint64_t& key : keys_) key = std::uint64_t{device()} << 32 | device() | 1;
    }

    std::uint64_t of_item(std::size_t item) const { return item * keys_[0]; }
    std::uint64_t of_code(std::size_t split, std::size_t code) const {
        return code * keys_[split + 1];
    }
    // The codes of a pair of splits; the second may be missing.
    std::uint64_t of_pair(std::size_t pair, std::size_t first, std::size_t second) const {
        const std::uint64_t sum = of_code(2 * pair, first);
        return 2 * pair + 2 < keys_.size() ? sum + of_code(2 * pair + 1, second) : sum;
    }

    // The last step of MurmurHash3 (Appleby, public domain).
    static std::uint64_t mixed(std::uint64_t sum) {
        sum = (sum ^ sum >> 33) * 0xFF51AFD7ED558CCD;
        sum = (sum ^ sum >> 33) * 0xC4CEB9FE1A85EC53;
        return sum ^ sum >> 33;
    }

  private:
    std::vector<std::uint64_t> keys_;
};

// The sums of item-major codes: with all splits, and with those of the chain that begins with each
// pair of the cells, where that is not all of them.
struct CodeSums {
    std::atomic<std::uint64_t> all{0};
    std::array<std::atomic<std::uint64_t>, kMostPairs> chains{};
};

// `chain_pairs` are those of the cells; 0: there are none.
inline void add_codes(std::span<const std::uint8_t> codes, std::size_t num_items,
                      std::size_t num_splits, std::size_t chain_pairs, const ItemSums& sums,
                      std::size_t threads, CodeSums& total) {
    const std::size_t num_pairs = num_pairs_of(num_splits);
    const bool has_chains = chain_pairs > 0 && num_pairs > chain_pairs;
    check_in_stretches(num_items, kCheckedAtOnce, threads, [&](std::size_t item, std::size_t end) {
        std::uint64_t all = 0;
        std::array<std::uint64_t, kMostPairs> chains{};
        for (; item < end; ++item) {
            std::uint64_t sum = sums.of_item(item);
            const std::uint8_t* code = codes.empty() ? nullptr : &codes[item * num_splits];
            for (std::size_t split = 0; split < num_splits && code; ++split)
                sum += sums.of_code(split, code[split]);
            all += ItemSums::mixed(sum);
            if (!has_chains) continue;
            std::array<std::uint64_t, kMostPairs> of_pairs;
            for (std::size_t pair = 0; pair < num_pairs; ++pair)
                of_pairs[pair] = sums.of_pair(pair, code[2 * pair],
                                              code_or_zero(code, 2 * pair + 1, num_splits));
            for (std::size_t pair = 0; pair < num_pairs; ++pair) {
                std::uint64_t chain = sums.of_item(item);
                for (std::size_t ahead = 0; ahead < chain_pairs; ++ahead)
                    chain += of_pairs[(pair + ahead) % num_pairs];
                chains[pair] += ItemSums::mixed(chain);
            }
        }
        total.all += all;
        for (std::size_t pair = 0; has_chains && pair < num_pairs; ++pair)
            total.chains[pair] += chains[pair];
    });
    if (!has_chains)
        for (auto& chain : total.chains) chain = total.all.load();
}

// Checks the blocks of a list layout. Items of a list ascend by their second code and then by id.
class ListCheck {
  public:
    ListCheck(const ListLayout& lists, std::span<const std::uint8_t> codes, std::size_t num_items,
              const ItemSums& sums)
        : lists_(lists), codes_(codes), num_items_(num_items), sums_(sums) {}

    // `expected` is the sum of all items and, where there are any, of item-major codes.
    void run(std::uint64_t expected, std::size_t threads) {
        const std::size_t num_blocks = lists_.bases.size();
        check_offsets(lists_.block_offsets, num_blocks, "list_offsets");
        check_codes(lists_.second_codes, lists_.num_sub_items, "list_second_codes",
                    kMaxNarrowSubItems, 1);
        check_codes(lists_.codes, lists_.num_sub_items, "list_codes", lists_.items.size(), threads);
        std::atomic<std::size_t> found{0};
        std::atomic<std::uint64_t> total{0};
        for_blocks(threads, [&](std::size_t block, std::size_t end) {
            std::size_t count = 0;
            std::uint64_t sum = 0;
            for (; block < end; ++block) {
                const std::size_t list = list_of(block);
                const std::size_t filled = check_block(list, block);
                sum += sum_of(list, block, filled);
                count += filled;
            }
            found += count;
            total += sum;
        });
        if (found != num_items_)
            refuse("list_items has " + std::to_string(found) + " items, expected " +
                   std::to_string(num_items_));
        if (total != expected) find_difference();
    }

  private:
    template <class Work>
    void for_blocks(std::size_t threads, const Work& work) const {
        check_in_stretches(lists_.bases.size(), kCheckedAtOnce / kBlockItems, threads, work);
    }

    // The last list to begin there: those before it are empty.
    std::size_t list_of(std::size_t block) const {
        const auto& offsets = lists_.block_offsets;
        const auto after =
            std::upper_bound(offsets.begin(), offsets.end(), static_cast<std::int64_t>(block));
        return static_cast<std::size_t>(after - offsets.begin()) - 1;
    }

    // Ranks begin with 0 and go up by one where the second code does; else the item's id goes up.
    // Returns how many items the block has.
    std::size_t check_block(std::size_t list, std::size_t block) const {
        const std::uint64_t changes = lists_.changes[block];
        const std::uint8_t* codes = lists_.second_codes_of(list);
        const bool is_first = static_cast<std::size_t>(lists_.block_offsets[list]) == block;
        std::size_t before = is_first ? 0 : lists_.rank(block - 1, kBlockItems - 1);
        std::size_t rank = lists_.bases[block];
        if (changes & 1 || (is_first ? rank != 0 : rank != before && rank != before + 1))
            refuse(place_in("list_bases", block) + " does not go on from the ranks before it");
        for (std::size_t lane = 0; lane < kBlockItems; ++lane) {
            const std::size_t place = block * kBlockItems + lane;
            const Item item = lists_.items[place];
            if (item == kNoItem) {
                check_padding(list, block, lane);
                return lane;
            }
            check_item(item, num_items_, "list_items", place, kBlockItems);
            rank += changes >> lane & 1;
            if (rank >= kMaxNarrowSubItems)
                refuse(place_in("list_steps", block) + " has more ranks than there are codes");
            if (rank != before && codes[before] >= codes[rank])
                refuse(place_in("list_second_codes", list * kMaxNarrowSubItems + rank,
                                kMaxNarrowSubItems) +
                       " is " + std::to_string(codes[rank]) +
                       ", expected more than the one before it");
            const bool begins = rank != before || (is_first && lane == 0);
            if (!begins && lists_.items[place - 1] >= item)
                refuse(place_in("list_items", place, kBlockItems) + " is " + std::to_string(item) +
                       ", expected more than the one before it");
            before = rank;
        }
        return kBlockItems;
    }

    std::uint64_t sum_of(std::size_t list, std::size_t block, std::size_t count) const {
        std::array<std::uint64_t, kBlockItems> sums;
        const std::size_t first = block * kBlockItems;
        for (std::size_t lane = 0; lane < count; ++lane)
            sums[lane] = sums_.of_item(lists_.items[first + lane]);
        if (!codes_.empty()) {
            const std::uint8_t* second = lists_.second_codes_of(list);
            const std::uint64_t own = sums_.of_code(0, list);
            std::size_t rank = lists_.bases[block];
            for (std::size_t lane = 0; lane < count; ++lane) {
                rank += lists_.changes[block] >> lane & 1;
                sums[lane] += own;
                if (lists_.num_splits > 1) sums[lane] += sums_.of_code(1, second[rank]);
            }
            for (std::size_t split = kSortedSplits; split < lists_.num_splits; ++split)
                for (std::size_t lane = 0; lane < count; ++lane)
                    sums[lane] += sums_.of_code(split, lists_.row(split)[first + lane]);
        }
        std::uint64_t total = 0;
        for (std::size_t lane = 0; lane < count; ++lane) total += ItemSums::mixed(sums[lane]);
        return total;
    }

    // Names an item that is there twice, or whose code is another one in `codes`.
    [[noreturn]] void find_difference() const {
        std::vector<bool> met(num_items_, false);
        for (std::size_t block = 0; block < lists_.bases.size(); ++block) {
            for (std::size_t lane = 0; lane < kBlockItems; ++lane) {
                const Item item = lists_.items[block * kBlockItems + lane];
                if (item == kNoItem) break;
                if (!codes_.empty()) check_code(list_of(block), block, lane);
                if (met[item]) refuse("list_items has item " + std::to_string(item) + " twice");
                met[item] = true;
            }
        }
        refuse("list_items has other items than there are");
    }

    // Only the end of a list is padding, and no block is nothing else.
    void check_padding(std::size_t list, std::size_t block, std::size_t lane) const {
        const std::size_t place = block * kBlockItems + lane;
        const bool is_last = static_cast<std::size_t>(lists_.block_offsets[list + 1]) == block + 1;
        if (!is_last || lane == 0)
            refuse(place_in("list_items", place, kBlockItems) + " is padding, expected an item");
        if (lists_.changes[block] >> lane)
            refuse(place_in("list_steps", block) + " goes on beyond the items of its block");
        for (std::size_t next = lane + 1; next < kBlockItems; ++next)
            if (lists_.items[block * kBlockItems + next] != kNoItem)
                refuse(place_in("list_items", block * kBlockItems + next, kBlockItems) +
                       " comes after padding");
    }

    void check_code(std::size_t list, std::size_t block, std::size_t lane) const {
        const std::size_t place = block * kBlockItems + lane;
        const std::uint8_t* code = codes_.data() + lists_.items[place] * lists_.num_splits;
        bool same = code[0] == list;
        if (lists_.num_splits > 1)
            same &= code[1] == lists_.second_codes_of(list)[lists_.rank(block, lane)];
        for (std::size_t split = kSortedSplits; split < lists_.num_splits; ++split)
            same &= code[split] == lists_.row(split)[place];
        if (!same)
            refuse(place_in("list_items", place, kBlockItems) + " is " +
                   std::to_string(lists_.items[place]) + ", whose code there is not that in codes");
    }

    const ListLayout& lists_;
    std::span<const std::uint8_t> codes_;  // item-major, or empty
    std::size_t num_items_;
    const ItemSums& sums_;
};

// The lines of all pairs are as many as there are, and each cell has one.
inline void check_pair_lines(std::span<const std::int64_t> pair_lines, std::size_t num_lines,
                             std::size_t num_splits, std::size_t num_sub_items) {
    check_offsets(pair_lines, num_lines, "cell_pair_lines");
    for (std::size_t pair = 0; pair + 1 < pair_lines.size(); ++pair) {
        const auto own = static_cast<std::size_t>(pair_lines[pair + 1] - pair_lines[pair]);
        if (own < num_cells_of(pair, num_splits, num_sub_items))
            refuse(place_in("cell_pair_lines", pair + 1) + " leaves a pair fewer lines than cells");
    }
}

// Checks a cell layout: every cell has the items of its codes, with the codes of the next pairs
// that belong to them. As there are as many places as items, none is missing.
class CellCheck {
  public:
    CellCheck(const CellLayout& layout, std::span<const std::uint8_t> codes, const ItemSums& sums)
        : layout_(layout), codes_(codes), sums_(sums) {}

    // `expected` are the sums of item-major codes.
    void run(const CodeSums& expected, std::size_t threads) const {
        for (std::size_t pair = 0; pair < layout_.num_pairs(); ++pair) {
            check_lines(pair);
            std::atomic<std::uint64_t> total{0};
            const CellPair& cells = layout_.pairs[pair];
            const std::size_t at_once =
                kCheckedAtOnce / (1 + layout_.num_items / cells.num_cells) + 1;
            check_in_stretches(cells.num_cells, at_once, threads,
                               [&](std::size_t cell, std::size_t end) {
                                   std::uint64_t sum = 0;
                                   for (; cell < end; ++cell) sum += sum_of(pair, cell);
                                   total += sum;
                               });
            if (total != expected.chains[pair]) find_difference(pair);
        }
    }

  private:
    // Overflow lines come after those of the cells, and no line has more items than places.
    void check_lines(std::size_t pair) const {
        const CellPair& cells = layout_.pairs[pair];
        const std::string of_pair = "of pair " + std::to_string(pair);
        std::size_t before = cells.num_cells;
        for (std::size_t cell = 0; cell <= cells.num_cells; ++cell) {
            const std::size_t first = cells.overflow[cell];
            if (first < before || (cell == 0 && first != before) || first > cells.num_lines)
                refuse(place_in("cell_overflow", cell) + " " + of_pair + " is " +
                       std::to_string(first) + ", expected " + std::to_string(before) + " to " +
                       std::to_string(cells.num_lines));
            before = first;
        }
        if (before != cells.num_lines)
            refuse("cell_overflow " + of_pair + " leaves out lines at its end");
        if (cells.starts[0] != 0 || cells.starts[cells.num_lines] != layout_.num_items)
            refuse("cell_starts " + of_pair + " has other items than there are");
        for (std::size_t line = 0; line < cells.num_lines; ++line)
            if (cells.starts[line + 1] < cells.starts[line] ||
                cells.starts[line + 1] - cells.starts[line] > kLineItems)
                refuse(place_in("cell_starts", line + 1) + " " + of_pair + " is " +
                       std::to_string(cells.starts[line + 1]) + ", expected up to 16 more than " +
                       std::to_string(cells.starts[line]));
    }

    template <class Use>
    void for_lines(const CellPair& cells, std::size_t cell, const Use& use) const {
        use(cell);
        for (std::size_t line = cells.overflow[cell]; line < cells.overflow[cell + 1]; ++line)
            use(line);
    }

    // The codes of the item at a place that stand in a line: of a pair, and of the one after it.
    std::uint64_t sum_in(const std::uint8_t* lines, std::size_t line, std::size_t place,
                         std::size_t pair, std::size_t ahead) const {
        const std::uint8_t* codes = lines + line * kLineBytes + place;
        const std::size_t num_pairs = layout_.num_pairs();
        std::uint64_t sum = sums_.of_pair((pair + ahead) % num_pairs, codes[0], codes[kLineItems]);
        if (ahead + 1 < num_pairs)
            sum += sums_.of_pair((pair + ahead + 1) % num_pairs, codes[2 * kLineItems],
                                 codes[3 * kLineItems]);
        return sum;
    }

    // All codes of the item at a place, but for those of its cell.
    std::uint64_t sum_at(std::size_t pair, std::size_t line, std::size_t place) const {
        const CellPair& cells = layout_.pairs[pair];
        std::uint64_t sum = sum_in(cells.lines, line, place, pair, 1);
        if (cells.second_lines)
            sum += sum_in(cells.second_lines, line, place, pair, kSecondLineAhead);
        if (cells.last_keys) {
            const std::uint16_t key = cells.last_keys[cells.starts[line] + place];
            sum += sums_.of_pair((pair + 3) % layout_.num_pairs(), key & 0xFF, key >> 8);
        }
        return sum;
    }

    // Checks the items of a cell, and returns their sum.
    std::uint64_t sum_of(std::size_t pair, std::size_t cell) const {
        const CellPair& cells = layout_.pairs[pair];
        const std::uint64_t own =
            sums_.of_pair(pair, cell / cells.second_codes, cell % cells.second_codes);
        std::uint64_t total = 0;
        for_lines(cells, cell, [&](std::size_t line) {
            for (std::size_t position = cells.starts[line]; position < cells.starts[line + 1];
                 ++position) {
                const Item item = cells.items[position];
                check_item(item, layout_.num_items, "cell_items",
                           pair * layout_.num_items + position, layout_.num_items);
                total += ItemSums::mixed(sums_.of_item(item) + own +
                                         sum_at(pair, line, position - cells.starts[line]));
            }
        });
        return total;
    }

    // Names an item that does not belong where it is, or whose codes there are not its own.
    [[noreturn]] void find_difference(std::size_t pair) const {
        const CellPair& cells = layout_.pairs[pair];
        std::vector<bool> met(layout_.num_items, false);
        for (std::size_t cell = 0; cell < cells.num_cells; ++cell) {
            for_lines(cells, cell, [&](std::size_t line) {
                for (std::size_t position = cells.starts[line]; position < cells.starts[line + 1];
                     ++position) {
                    const Item item = cells.items[position];
                    const std::uint8_t* code = codes_.data() + layout_.num_splits * item;
                    if (met[item] ||
                        cell_of(code, pair, layout_.num_splits, layout_.num_sub_items) != cell)
                        refuse(place_in("cell_items", pair * layout_.num_items + position,
                                        layout_.num_items) +
                               " is " + std::to_string(item) + ", which does not belong there");
                    met[item] = true;
                    const std::size_t place = position - cells.starts[line];
                    bool same =
                        !cells.last_keys ||
                        cells.last_keys[position] ==
                            pair_key(code, (pair + 3) % layout_.num_pairs(), layout_.num_splits);
                    same &= is_same(cells.lines, line, place, code, pair, 1);
                    if (cells.second_lines)
                        same &=
                            is_same(cells.second_lines, line, place, code, pair, kSecondLineAhead);
                    if (!same)
                        refuse(
                            "cell_lines, cell_second_lines or cell_last_keys: the codes of item " +
                            std::to_string(item) + " are not those in codes");
                }
            });
        }
        refuse("cell_items has other items than there are");
    }

    bool is_same(const std::uint8_t* lines, std::size_t line, std::size_t place,
                 const std::uint8_t* code, std::size_t pair, std::size_t ahead) const {
        std::array<std::uint8_t, kLineBytes> expected;
        LineSplits(pair, layout_.num_splits, ahead)
            .write(code, layout_.num_splits, expected.data(), place);
        const std::uint8_t* there = lines + line * kLineBytes;
        for (std::size_t at = place; at < kLineBytes; at += kLineItems)
            if (there[at] != expected[at]) return false;
        return true;
    }

    const CellLayout& layout_;
    std::span<const std::uint8_t> codes_;
    const ItemSums& sums_;
};

}  // namespace recprune
