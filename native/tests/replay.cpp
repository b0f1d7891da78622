// The core without Python, so that it can be tested where there is none: on a machine that is only
// emulated. Holds every table of kernels against plain arithmetic, then builds indexes from
// recorded catalogues and asks every engine, with every table, questions whose answers are recorded
// beside them: those of the oracle, ids and bits of scores. tests/support/recorded_cases.py writes
// them.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iostream>
#include <limits>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "exclusions.hpp"
#include "kernels/kernels.hpp"
#include "layouts/cells.hpp"
#include "layouts/lists.hpp"
#include "search_batch.hpp"

namespace {

using namespace recprune;
using Random = std::mt19937_64;

[[noreturn]] void disagree(const Kernels& kernels, const std::string& what) {
    throw std::runtime_error(std::string(kernels.name) + " disagrees: " + what);
}

template <class T>
bool same_bits(std::span<const T> one, std::span<const T> other) {
    return one.size() == other.size() &&
           std::memcmp(one.data(), other.data(), one.size_bytes()) == 0;
}

std::vector<std::uint8_t> random_bytes(std::size_t count, Random& random, unsigned below = 256) {
    std::vector<std::uint8_t> bytes(count);
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random() % below);
    return bytes;
}

std::vector<float> random_floats(std::size_t count, Random& random) {
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& value : values) value = normal(random);
    return values;
}

// --- kernels ---

void check_sub_item_scores(const Kernels& kernels, Random& random) {
    for (std::size_t num_sub_items : {1u, 5u, 64u, 100u, 256u, 300u}) {
        const std::size_t num_splits = 1 + random() % 4;
        const std::size_t width = 1 + random() % 40;
        const auto phi = random_floats(num_splits * width, random);
        const auto transposed = random_floats(num_splits * width * num_sub_items, random);
        std::vector<float> found(num_splits * num_sub_items);
        std::vector<float> expected(found.size());
        kernels.sub_item_scores(phi.data(), transposed.data(), num_splits, width, num_sub_items,
                                found.data());
        for (std::size_t split = 0; split < num_splits; ++split) {
            for (std::size_t b = 0; b < num_sub_items; ++b) {
                float sum = 0.0f;
                for (std::size_t j = 0; j < width; ++j) {
                    const std::size_t row = split * width + j;
                    const volatile float product = phi[row] * transposed[row * num_sub_items + b];
                    sum = j == 0 ? float{product} : sum + product;
                }
                expected[split * num_sub_items + b] = sum;
            }
        }
        if (!same_bits<float>(found, expected)) disagree(kernels, "sub_item_scores");
    }
}

void check_extremes(const Kernels& kernels, Random& random) {
    for (std::size_t count : {1u, 2u, 63u, 64u, 65u, 100u, 128u, 256u, 300u}) {
        auto values = random_floats(count, random);
        float lowest;
        float highest;
        kernels.extremes(values.data(), count, &lowest, &highest);
        const auto [low, high] = std::minmax_element(values.begin(), values.end());
        if (lowest != *low || highest != *high) disagree(kernels, "extremes");
        const auto magnitude = std::bit_cast<std::int32_t>(std::max(std::abs(*low), *high));
        if (kernels.largest_magnitude(values.data(), count) != magnitude)
            disagree(kernels, "largest_magnitude");
        for (float strange :
             {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
            values[random() % count] = strange;
            if (kernels.largest_magnitude(values.data(), count) < kInfiniteMagnitude)
                disagree(kernels, "largest_magnitude of what is not finite");
        }
    }
}

void check_quantise(const Kernels& kernels, Random& random) {
    for (double scale : {0.0, 1e-3, 1.0, 77.7, 1e5, 1e292}) {
        const auto scores = random_floats(1 + random() % 300, random);
        const double highest = *std::max_element(scores.begin(), scores.end());
        std::vector<std::uint8_t> found(scores.size());
        kernels.quantise(scores.data(), scores.size(), highest, scale, found.data());
        for (std::size_t b = 0; b < scores.size(); ++b) {
            const volatile double deficit = highest - double{scores[b]};
            const double units = std::min(deficit * scale, double{kFullDeficit});
            if (found[b] != static_cast<int>(units)) disagree(kernels, "quantise");
        }
    }
}

void check_look_up(const Kernels& kernels, Random& random) {
    const auto table = random_bytes(kMaxNarrowSubItems, random);
    const auto codes = random_bytes(kMaxNarrowSubItems, random);
    std::vector<std::uint8_t> found(kMaxNarrowSubItems);
    kernels.look_up(table.data(), codes.data(), found.data());
    for (std::size_t i = 0; i < kMaxNarrowSubItems; ++i) {
        if (found[i] != table[codes[i]]) disagree(kernels, "look_up");
    }
}

// Blocks of random codes, and tables of random deficits.
class RandomBlocks {
  public:
    RandomBlocks(std::size_t num_blocks, std::size_t num_rows, Random& random)
        : num_blocks_(num_blocks),
          num_rows_(num_rows),
          codes_(random_bytes(num_rows * num_blocks * kBlockItems, random)),
          bases_(random_bytes(num_blocks, random, kMaxNarrowSubItems - kBlockItems)),
          changes_(num_blocks),
          sorted_deficits_(random_bytes(kMaxNarrowSubItems + kBlockItems, random, 60)) {
        // Of the more rows, the smaller deficits, so that some sums are within every limit.
        const auto most = static_cast<unsigned>(1 + 600 / (num_rows + 1));
        deficits_ = random_bytes(num_rows * kMaxNarrowSubItems, random, std::min(most, 256u));
        for (std::uint64_t& bits : changes_) {
            bits = random() & random();
            if (random() % 2) bits &= random() & random() & random();
            bits &= ~std::uint64_t{1};
        }
        for (std::size_t row = 0; row < num_rows; ++row)
            rows_.push_back({codes_.data() + row * num_blocks * kBlockItems,
                             deficits_.data() + row * kMaxNarrowSubItems});
    }

    std::size_t num_blocks() const { return num_blocks_; }
    std::size_t num_rows() const { return num_rows_; }
    const CodeRow* rows() const { return rows_.data(); }
    SortedRow sorted() const { return {bases_.data(), changes_.data(), sorted_deficits_.data()}; }

    // An item's sum over the sorted row and so many of the others, saturated.
    int sum(std::size_t block, std::size_t lane, std::size_t num_rows) const {
        std::size_t rank = bases_[block];
        for (std::size_t before = 0; before <= lane; ++before)
            rank += changes_[block] >> before & 1;
        int sum = sorted_deficits_[rank];
        for (std::size_t row = 0; row < num_rows; ++row)
            sum += rows_[row].deficits[rows_[row].codes[block * kBlockItems + lane]];
        return std::min(sum, kFullDeficit);
    }

  private:
    std::size_t num_blocks_;
    std::size_t num_rows_;
    std::vector<std::uint8_t> codes_;
    std::vector<std::uint8_t> bases_;
    std::vector<std::uint64_t> changes_;
    std::vector<std::uint8_t> sorted_deficits_;
    std::vector<std::uint8_t> deficits_;
    std::vector<CodeRow> rows_;
};

// The sums of all items of some blocks.
using Sums = std::vector<std::array<int, kBlockItems>>;

Sums sums_of(const RandomBlocks& blocks, std::size_t num_rows) {
    Sums sums(blocks.num_blocks());
    for (std::size_t block = 0; block < sums.size(); ++block) {
        for (std::size_t lane = 0; lane < kBlockItems; ++lane)
            sums[block][lane] = blocks.sum(block, lane, num_rows);
    }
    return sums;
}

// Whether a block's sums are right where they are within the limit, and beyond it elsewhere.
bool are_right(const std::uint8_t* found, const std::array<int, kBlockItems>& expected, int limit) {
    for (std::size_t lane = 0; lane < kBlockItems; ++lane) {
        if (expected[lane] <= limit ? found[lane] != expected[lane] : found[lane] <= limit)
            return false;
    }
    return true;
}

std::uint64_t items_within(const std::array<int, kBlockItems>& sums, int limit) {
    std::uint64_t items = 0;
    for (std::size_t lane = 0; lane < kBlockItems; ++lane)
        items |= std::uint64_t{sums[lane] <= limit} << lane;
    return items;
}

void check_filters(const Kernels& kernels, const RandomBlocks& blocks, std::size_t near,
                   std::size_t refinement, int limit, const Sums& near_sums, const Sums& all_sums) {
    const std::size_t count = blocks.num_blocks();
    const std::size_t begin = count > 3 ? 1 : 0;
    std::vector<std::uint32_t> found(count + 1);
    std::vector<std::uint8_t> sums((count + 1) * kBlockItems);
    std::vector<std::uint64_t> items(count + 1);
    const FilterRows filter{blocks.sorted(), blocks.rows(), near, blocks.num_rows(), refinement};
    const auto [num_found, num_close] =
        kernels.find_blocks(filter, begin, count, limit, found.data(), sums.data());
    if (num_close < num_found) disagree(kernels, "find_blocks counted too few");
    std::size_t at = 0;
    for (std::size_t block = begin; block < count; ++block) {
        const bool is_found = at < num_found && found[at] == block;
        if (!is_found && items_within(near_sums[block], limit))
            disagree(kernels, "find_blocks lost a block");
        if (is_found && !are_right(&sums[at * kBlockItems], near_sums[block], limit))
            disagree(kernels, "sums of find_blocks");
        at += is_found;
    }
    if (at != num_found) disagree(kernels, "find_blocks found what is not there");
    const std::size_t num_kept =
        kernels.filter_blocks(blocks.rows() + near, blocks.num_rows() - near, found.data(),
                              num_found, sums.data(), limit, items.data());
    at = 0;
    for (std::size_t block = begin; block < count; ++block) {
        const std::uint64_t within = items_within(all_sums[block], limit);
        const bool is_kept = at < num_kept && found[at] == block;
        if (is_kept != (within != 0)) disagree(kernels, "blocks of filter_blocks");
        if (!is_kept) continue;
        if (items[at] != within) disagree(kernels, "items of filter_blocks");
        if (!are_right(&sums[at * kBlockItems], all_sums[block], limit))
            disagree(kernels, "sums of filter_blocks");
        ++at;
    }
    if (at != num_kept) disagree(kernels, "filter_blocks kept what is not there");
}

void check_filters(const Kernels& kernels, Random& random) {
    constexpr int kLimits = kFullDeficit;  // 0 to 254
    for (std::size_t num_rows : {0u, 1u, 2u, 6u, 7u, 14u, 40u}) {
        const RandomBlocks blocks(1 + random() % 40, num_rows, random);
        const Sums all_sums = sums_of(blocks, num_rows);
        for (std::size_t near : {num_rows, num_rows / 2}) {
            const Sums near_sums = sums_of(blocks, near);
            const std::size_t most = kernels.refinements * near;
            for (std::size_t refinement : {std::size_t{0}, most / 2 + 1, most}) {
                for (int limit = 0; limit < kLimits; ++limit)
                    check_filters(kernels, blocks, near, std::min(refinement, most), limit,
                                  near_sums, all_sums);
            }
        }
    }
}

// Lines in any order, and every limit that chains may have: beyond what a byte holds as well.
void check_filter_lines(const Kernels& kernels, Random& random) {
    constexpr std::size_t kNumLines = 200;
    const auto lines = random_bytes(kNumLines * kLineBytes, random);
    for (int round = 0; round < 300; ++round) {
        const auto most = static_cast<unsigned>(1 + random() % 256);
        const auto deficits = random_bytes(4 * kMaxNarrowSubItems, random, most);
        const std::uint8_t* tables[4];
        for (std::size_t split = 0; split < 4; ++split)
            tables[split] = deficits.data() + split * kMaxNarrowSubItems;
        const std::size_t count = 1 + random() % 40;
        std::vector<std::uint32_t> numbers(count);
        for (std::uint32_t& number : numbers)
            number = static_cast<std::uint32_t>(random() % kNumLines);
        const int two = static_cast<int>(random() % 400);
        const int three = two + static_cast<int>(random() % 200);
        const auto own = random_bytes(count, random, static_cast<unsigned>(std::min(two + 1, 255)));
        const std::size_t begin = random() % count;
        std::vector<std::uint32_t> must;  // pass, and may, where a sum is more than a byte holds
        std::vector<std::uint32_t> may;
        std::vector<int> all_sums(count * kLineItems);
        for (std::size_t at = begin; at < count; ++at) {
            for (std::size_t place = 0; place < kLineItems; ++place) {
                const std::uint8_t* codes = lines.data() + numbers[at] * kLineBytes + place;
                int near = 0;
                int both = 0;
                for (std::size_t split = 0; split < 4; ++split) {
                    both += tables[split][codes[split * kLineItems]];
                    if (split == 1) near = both;
                }
                const auto survivor = static_cast<std::uint32_t>(at * kLineItems + place);
                all_sums[survivor] = std::min(own[at] + both, kFullDeficit);
                if (near <= two - own[at] && both <= three - own[at]) must.push_back(survivor);
                if (std::min(near, kFullDeficit) <= two - own[at] &&
                    std::min(both, kFullDeficit) <= three - own[at])
                    may.push_back(survivor);
            }
        }
        std::vector<std::uint32_t> found(count * kLineItems + kSurvivorRoom);
        const LineBatch batch{numbers.data(), own.data(), begin, count, count};
        std::vector<std::uint8_t> sums(found.size());
        found.resize(kernels.filter_lines(lines.data(), batch, tables, two, three, found.data(),
                                          sums.data()));
        if (!std::includes(found.begin(), found.end(), must.begin(), must.end()))
            disagree(kernels, "filter_lines lost an item");
        if (!std::includes(may.begin(), may.end(), found.begin(), found.end()))
            disagree(kernels, "filter_lines found what is not there");
        for (std::size_t at = 0; at < found.size(); ++at)
            if (sums[at] != all_sums[found[at]]) disagree(kernels, "filter_lines, sums");
    }
}

// --- engines ---

// Arrays as they were written: for each its length in bytes, then these, filled up to whole words.
class Recording {
  public:
    explicit Recording(const char* path) {
        std::ifstream file(path, std::ios::binary | std::ios::ate);
        const auto size = file.tellg();
        if (!file || size < 0) throw std::runtime_error(std::string("cannot read ") + path);
        words_.resize(static_cast<std::size_t>(size) / sizeof(std::uint64_t));
        file.seekg(0);
        file.read(reinterpret_cast<char*>(words_.data()), size);
        if (!file) throw std::runtime_error(std::string("cannot read ") + path);
    }

    template <class T>
    std::span<const T> take() {
        const auto bytes = static_cast<std::size_t>(words_.at(at_++));
        const std::size_t first = at_;
        at_ += (bytes + sizeof(std::uint64_t) - 1) / sizeof(std::uint64_t);
        if (at_ > words_.size()) throw std::runtime_error("the recording is cut short");
        return {reinterpret_cast<const T*>(words_.data() + first), bytes / sizeof(T)};
    }

    bool ended() const { return at_ == words_.size(); }

  private:
    std::vector<std::uint64_t> words_;
    std::size_t at_ = 0;
};

// An index with all parts that its shape allows. Its arrays are those of the bindings.
class BuiltIndex {
  public:
    explicit BuiltIndex(Recording& recording) {
        const auto shape = recording.take<std::int64_t>();
        view_.num_items = static_cast<std::size_t>(shape[0]);
        view_.num_splits = static_cast<std::size_t>(shape[1]);
        view_.num_sub_items = static_cast<std::size_t>(shape[2]);
        view_.width = static_cast<std::size_t>(shape[3]);
        view_.transposed = recording.take<float>();
        view_.codes = recording.take<std::uint8_t>();
        view_.item_bias = recording.take<float>();
        if (!view_.item_bias.empty()) {
            const auto [lowest, highest] =
                std::minmax_element(view_.item_bias.begin(), view_.item_bias.end());
            view_.highest_bias = *highest;
            view_.largest_bias = std::max(std::abs(*lowest), std::abs(*highest));
        }
        build_list_layout();
        if (has_cells(view_.num_items, view_.num_splits, view_.num_sub_items)) build_cell_layout();
    }
    BuiltIndex(const BuiltIndex&) = delete;  // it points into itself

    const IndexView& view() const { return view_; }

  private:
    void build_list_layout() {
        const auto [num_items, num_splits, num_sub_items] =
            std::array{view_.num_items, view_.num_splits, view_.num_sub_items};
        block_offsets_.resize(num_sub_items + 1);
        count_list_blocks(view_.codes, num_items, num_splits, block_offsets_);
        const auto num_blocks = static_cast<std::size_t>(block_offsets_.back());
        second_codes_.resize(num_sub_items * kMaxNarrowSubItems);
        bases_.resize(num_blocks);
        changes_.resize(num_blocks);
        rows_.resize(num_code_rows(num_splits) * num_blocks * kBlockItems);
        list_items_.resize(num_blocks * kBlockItems);
        std::vector<std::uint8_t> second(num_blocks * kBlockItems);
        fill_list_blocks(view_.codes, num_items, num_splits, block_offsets_, second, rows_,
                         list_items_);
        for (std::size_t list = 0; list < num_sub_items; ++list) {
            const auto first = static_cast<std::size_t>(block_offsets_[list]);
            const auto last = static_cast<std::size_t>(block_offsets_[list + 1]);
            sort_list(first * kBlockItems, last * kBlockItems, second, rows_, list_items_);
            rank_list(
                first, last, second, list_items_, bases_, changes_,
                std::span(second_codes_).subspan(list * kMaxNarrowSubItems, kMaxNarrowSubItems));
        }
        view_.lists = ListLayout{block_offsets_, second_codes_,   bases_,     changes_,     rows_,
                                 list_items_,    view_.num_items, num_splits, num_sub_items};
    }

    void build_cell_layout() {
        const auto [num_items, num_splits, num_sub_items] =
            std::array{view_.num_items, view_.num_splits, view_.num_sub_items};
        const std::size_t num_pairs = num_pairs_of(num_splits);
        std::vector<std::vector<std::uint32_t>> overflow;
        pair_lines_ = {0};
        for (std::size_t pair = 0; pair < num_pairs; ++pair) {
            overflow.emplace_back(num_cells_of(pair, num_splits, num_sub_items) + 1);
            const std::size_t num_lines = count_cell_lines(view_.codes, num_items, num_splits,
                                                           num_sub_items, pair, overflow.back());
            pair_lines_.push_back(pair_lines_.back() + static_cast<std::int64_t>(num_lines));
            overflow_.insert(overflow_.end(), overflow.back().begin(), overflow.back().end());
        }
        const auto num_lines = static_cast<std::size_t>(pair_lines_.back());
        lines_.resize(num_lines * kLineBytes);
        starts_.resize(num_lines + num_pairs);
        if (num_pairs == kPairsWithLastKeys) last_keys_.resize(num_pairs * num_items);
        if (num_pairs >= kPairsWithSecondLines) second_lines_.resize(lines_.size());
        cell_items_.resize(num_pairs * num_items);
        const std::vector<std::uint8_t> padding(num_splits, 0);
        for (std::size_t pair = 0; pair < num_pairs; ++pair) {
            const auto first = static_cast<std::size_t>(pair_lines_[pair]);
            const std::size_t count = static_cast<std::size_t>(pair_lines_[pair + 1]) - first;
            auto part = [](auto& all, std::size_t begin, std::size_t size) {
                return all.empty() ? std::span(all) : std::span(all).subspan(begin, size);
            };
            fill_cell_lines(view_.codes, num_items, num_splits, num_sub_items, pair, padding,
                            {overflow[pair], part(lines_, first * kLineBytes, count * kLineBytes),
                             part(starts_, first + pair, count + 1),
                             part(last_keys_, pair * num_items, num_items),
                             part(second_lines_, first * kLineBytes, count * kLineBytes),
                             part(cell_items_, pair * num_items, num_items)});
        }
        view_.cells = cell_layout(
            {pair_lines_, overflow_, lines_, starts_, last_keys_, second_lines_, cell_items_},
            num_items, num_splits, num_sub_items);
        shares_ = sub_item_shares(view_.codes, num_items, num_splits, num_sub_items);
        view_.sub_item_shares = shares_;
        bias_sample_ = bias_sample(view_.item_bias);
        bias_shares_.assign(bias_sample_.size(),
                            1.0f / static_cast<float>(bias_sample_.size() + 1));
        view_.bias_sample = bias_sample_;
        view_.bias_shares = bias_shares_;
    }

    IndexView view_;
    std::vector<std::int64_t> block_offsets_;
    std::vector<std::uint8_t> second_codes_;
    std::vector<std::uint8_t> bases_;
    std::vector<std::uint64_t> changes_;
    std::vector<std::uint8_t> rows_;
    std::vector<Item> list_items_;
    std::vector<std::int64_t> pair_lines_;
    std::vector<std::uint32_t> overflow_;
    std::vector<std::uint8_t> lines_;
    std::vector<std::uint32_t> starts_;
    std::vector<std::uint16_t> last_keys_;
    std::vector<std::uint8_t> second_lines_;
    std::vector<Item> cell_items_;
    std::vector<float> shares_;
    std::vector<float> bias_sample_;
    std::vector<float> bias_shares_;
};

struct Question {
    explicit Question(Recording& recording)
        : sequence_embedding(recording.take<float>()),
          exclude(recording.take<std::int64_t>()),
          allow(recording.take<std::uint64_t>()),
          floor(recording.take<float>()),
          sub_item_scores(recording.take<float>()),
          ids(recording.take<std::int64_t>()),
          scores(recording.take<float>()) {}

    std::span<const float> sequence_embedding;
    std::span<const std::int64_t> exclude;
    std::span<const std::uint64_t> allow;  // empty: everything
    std::span<const float> floor;          // empty: none
    // What is right.
    std::span<const float> sub_item_scores;
    std::span<const std::int64_t> ids;
    std::span<const float> scores;
};

void ask(const IndexView& index, const Question& question, const Kernels& kernels,
         const NamedMethod& named) {
    const std::size_t k = question.ids.size();
    BatchExclusions exclude(static_cast<std::int64_t>(index.num_items));
    exclude.add(question.exclude);
    Batch batch;
    batch.queries = question.sequence_embedding;
    batch.num_queries = 1;
    batch.exclude = &exclude;
    batch.allow = question.allow;
    batch.allow_rows = question.allow.empty() ? 0 : 1;
    batch.floors = question.floor;
    const Request request{.method = named.method,
                          .k = k,
                          .sub_items_per_step = 8,
                          .max_steps = std::numeric_limits<std::int64_t>::max(),
                          .over_inflation = 0.0,
                          .deadline_ns = 0,
                          .kernels = &kernels};
    std::vector<std::int64_t> ids(k);
    std::vector<float> scores(k);
    std::vector<Record> records(1);
    search_batch(index, batch, request, 1, {.ids = ids, .scores = scores, .records = records});
    if (!same_bits<std::int64_t>(ids, question.ids))
        disagree(kernels, std::string(named.name) + ", ids");
    if (!same_bits<float>(scores, question.scores))
        disagree(kernels, std::string(named.name) + ", scores");
    if (!records[0].exact) disagree(kernels, std::string(named.name) + " says it is not exact");
}

// Returns how many searches that were.
std::size_t replay(Recording& recording) {
    std::size_t searches = 0;
    while (!recording.ended()) {
        const BuiltIndex built(recording);
        const IndexView& index = built.view();
        const auto num_questions = static_cast<std::size_t>(recording.take<std::int64_t>()[0]);
        for (std::size_t number = 0; number < num_questions; ++number) {
            const Question question(recording);
            for (const Kernels& kernels : available_kernels()) {
                std::vector<float> scores(index.num_splits * index.num_sub_items);
                kernels.sub_item_scores(question.sequence_embedding.data(), index.transposed.data(),
                                        index.num_splits, index.width, index.num_sub_items,
                                        scores.data());
                if (!same_bits<float>(scores, question.sub_item_scores))
                    disagree(kernels, "sub-item scores of a recorded question");
                for (const NamedMethod& named : kMethods) {
                    const bool needs_more =
                        named.method == Method::recjpqprune || named.method == Method::dense;
                    if (needs_more) continue;
                    ask(index, question, kernels, named);
                    ++searches;
                }
            }
        }
    }
    return searches;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) {
        std::cerr << "expected the path of recorded cases\n";
        return EXIT_FAILURE;
    }
    try {
        for (const Kernels& kernels : available_kernels()) {
            Random random(1);
            check_sub_item_scores(kernels, random);
            check_extremes(kernels, random);
            check_quantise(kernels, random);
            check_look_up(kernels, random);
            check_filters(kernels, random);
            check_filter_lines(kernels, random);
            std::cout << kernels.name << ' ';
        }
        Recording recording(argv[1]);
        std::cout << replay(recording) << '\n';
    } catch (const std::exception& error) {
        std::cerr << error.what() << '\n';
        return EXIT_FAILURE;
    }
    return EXIT_SUCCESS;
}
