// One index, many queries: which engine answers, on how many threads.
#pragma once

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "bounds/deficits.hpp"
#include "engines/cells.hpp"
#include "engines/pqtopk.hpp"
#include "engines/recjpqprune.hpp"
#include "engines/scan.hpp"
#include "kernels/kernels.hpp"
#include "layouts/layouts.hpp"
#include "query.hpp"
#include "top_k.hpp"
#include "util/parallel.hpp"

namespace recprune {

enum class Method : std::int32_t {
    pqtopk = 0,
    recjpqprune = 1,
    scan = 2,
    cells = 3,
    automatic = 4,
    dense = 5  // answered outside the core; here for the records
};

// The parts of an index that are there; views over memory that somebody else keeps alive.
struct IndexView {
    std::size_t num_items = 0;
    std::size_t num_splits = 0;
    std::size_t num_sub_items = 0;
    std::size_t width = 0;                      // of a sub-item embedding
    std::span<const float> transposed;          // [num_splits][width][num_sub_items]
    std::span<const std::uint8_t> codes;        // item-major, or empty
    std::span<const std::uint16_t> wide_codes;  // the same for more than 256 sub-items
    std::optional<ListLayout> lists;
    std::optional<CellLayout> cells;
    std::optional<InvertedIndex<std::int32_t>> inverted;
    std::span<const float> item_bias;  // empty: none
    float highest_bias = 0.0f;
    float largest_bias = 0.0f;  // in magnitude
};

struct Request {
    Method method = Method::automatic;
    std::size_t k = 10;
    std::size_t sub_items_per_step = 8;
    std::int64_t max_steps = std::numeric_limits<std::int64_t>::max();
    double over_inflation = 0.0;
    std::int64_t deadline_ns = 0;  // 0: none
    const Kernels* kernels = nullptr;
};

// What one query returns beside its items. NumPy reads it by the fields that bindings.cpp names.
struct Record {
    std::int64_t method;
    std::int64_t exact;
    std::int64_t steps;
    std::int64_t items_scored;
    std::int64_t items_touched;
    std::int64_t bytes_touched;
    double threshold;
    double upper_bound;
    std::int64_t nanoseconds;                 // of the whole query
    std::int64_t sub_item_score_nanoseconds;  // of these, computing S
};
static_assert(sizeof(Record) % sizeof(std::int64_t) == 0);

// When which engine pays. Constants found by trial; benchmarks/search.py shows their effect, and no
// result hangs on them.
struct CostModel {
    // Nanoseconds.
    static double scan(double num_items, const Kernels& kernels) {
        return kernels.costs.scanned_item * num_items;
    }
    static double cell(double num_items, const Kernels& kernels) {
        const double items = num_items / static_cast<double>(kCells);
        return kernels.costs.cell + kernels.costs.cell_item * items;
    }
    // What the items that are wanted cost more if they are found by cells: two cache misses each.
    static double finding(std::size_t k) { return 200.0 * static_cast<double>(k); }
    // A catalogue smaller than this is scanned before cells could be sorted out.
    static constexpr std::size_t kFewItems = 50'000;
    // Whether cells are worth a thought.
    static bool cells_may_pay(std::size_t num_items, std::size_t k, const Kernels& kernels) {
        return num_items >= kFewItems &&
               finding(k) < 0.75 * scan(static_cast<double>(num_items), kernels);
    }
    // Up to here a few lists are the cheapest source of a first threshold, beyond it a few cells.
    static constexpr std::size_t kManyItems = 4'000'000;
    static std::size_t first_lists(std::size_t k) { return std::min<std::size_t>(2 * k + 3, 16); }
    // If only one item in so many is allowed, these are scored one by one.
    static constexpr std::size_t kSelective = 32;
};

inline CellSettings cell_settings(std::size_t items, std::size_t k, bool may_scan,
                                  const Kernels& kernels) {
    const auto num_items = static_cast<double>(items);
    const double first = 800.0 * std::pow(1e6 / std::max(num_items, 1e6), 0.3) *
                         std::sqrt(static_cast<double>(std::max<std::size_t>(k, 10)) / 10.0);
    const double most = (CostModel::scan(num_items, kernels) - CostModel::finding(k)) /
                        CostModel::cell(num_items, kernels);
    return {first, may_scan ? most : std::numeric_limits<double>::infinity()};
}

inline std::size_t allowed_items(const Query& query, std::size_t num_items) {
    std::size_t count = 0;
    for (std::size_t word = 0; word * 64 < num_items; ++word)
        count += static_cast<std::size_t>(std::popcount(query.allow[word]));
    return count;
}

// Answers one query whose sub-item scores are ready. Returns the method that ran.
inline Method answer(const IndexView& index, const Query& query, const Request& request,
                     const Limits& limits, TopK& top, Stats& stats) {
    Method method = request.method;
    if (method == Method::automatic) {
        const bool cells_may_pay =
            index.cells && CostModel::cells_may_pay(index.num_items, query.k, *request.kernels);
        method = cells_may_pay ? Method::cells : index.lists ? Method::scan : Method::pqtopk;
    }
    if (request.method == Method::automatic && query.allow && !index.codes.empty() &&
        allowed_items(query, index.num_items) * CostModel::kSelective < index.num_items) {
        pqtopk_allowed(index.codes, index.num_items, index.num_splits, index.num_sub_items, query,
                       top, stats);
        return Method::pqtopk;
    }
    auto exhaustive = [&](auto codes) {
        pqtopk(codes, index.num_items, index.num_splits, index.num_sub_items, query, top, stats);
    };
    if (method == Method::cells || method == Method::scan) {
        Deficits deficits(query, *request.kernels, index.num_splits, index.num_sub_items);
        ListScan lists(*index.lists, *request.kernels, query, limits, deficits, top, stats);
        if (method == Method::cells) {
            if (!top.full() && request.kernels->costs.lists_are_cheap &&
                index.num_items < CostModel::kManyItems &&
                lists.run(CostModel::first_lists(query.k)))
                return Method::scan;
            const bool may_scan = request.method == Method::automatic;
            const CellSettings settings =
                cell_settings(index.num_items, query.k, may_scan, *request.kernels);
            // Where cells do not pay by far, which is usual for many items, that should cost little
            // to find out. After a few lists, the tables are about those that cells would have.
            const bool may_pay = !may_scan || !std::isfinite(lists.slack()) ||
                                 may_be_few_cells(deficits, *request.kernels, lists.slack(),
                                                  lists.scanned(), settings.most_cells);
            if (may_pay) lists.settle();
            if (may_pay && search_cells(*index.cells, index.codes.data(), *request.kernels, query,
                                        index.num_sub_items, settings, lists.scanned(), limits,
                                        deficits, top, stats))
                return method;
            method = Method::scan;
        }
        lists.run(index.num_sub_items);
    } else if (method == Method::recjpqprune) {
        auto prune = [&](auto codes) {
            recjpqprune(codes, *index.inverted, index.num_items, index.num_splits,
                        index.num_sub_items, request.sub_items_per_step, query, limits, top, stats);
        };
        if (index.wide_codes.empty())
            prune(index.codes);
        else
            prune(index.wide_codes);
    } else {
        if (!index.wide_codes.empty())
            exhaustive(index.wide_codes);
        else if (!index.codes.empty() || !index.lists)
            exhaustive(index.codes);
        else
            pqtopk(*index.lists, query, top, stats);
    }
    return method;
}

// Queries as they come from outside.
struct Batch {
    std::span<const float> queries;  // sequence embeddings, or sub-item scores
    std::size_t num_queries = 0;
    bool are_scores = false;
    std::span<const std::int64_t> exclude_offsets;  // [num_queries + 1], or empty: nothing
    std::span<const Item> exclude_items;            // ascending for every query
    std::span<const std::uint64_t> allow;           // rows of bits, or empty: everything
    std::size_t allow_rows = 0;                     // one for all queries, or one each
    std::span<const float> floors;                  // [num_queries], or empty: none
};

// Scores that float32 cannot hold, or NaN among them.
struct QueryOverflow : std::invalid_argument {
    explicit QueryOverflow(std::size_t number)
        : std::invalid_argument("query " + std::to_string(number) +
                                ": scores would overflow float32"),
          query(number) {}
    std::size_t query;  // its number in the batch
};

// Says whether no sum of sub-item scores can overflow, and none is NaN.
inline bool scores_are_safe(const IndexView& index, const float* scores) {
    double sum = static_cast<double>(index.largest_bias);
    for (std::size_t split = 0; split < index.num_splits; ++split) {
        // As integers, magnitudes of floats compare like floats, and infinity and NaN are the
        // largest.
        std::int32_t largest = 0;
        for (std::size_t b = 0; b < index.num_sub_items; ++b) {
            const float score = scores[split * index.num_sub_items + b];
            largest = std::max(largest, std::bit_cast<std::int32_t>(score) & 0x7FFFFFFF);
        }
        if (largest >= 0x7F800000) return false;
        sum += std::bit_cast<float>(largest);
    }
    return sum < static_cast<double>(std::numeric_limits<float>::max());
}

inline std::int64_t nanoseconds_between(std::chrono::steady_clock::time_point first,
                                        std::chrono::steady_clock::time_point last) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(last - first).count();
}

// Pre: ids and scores are num_queries × k, records num_queries; visited is empty, or zeros for
// every query's sub-items, of which those that it visits are marked. Every query is answered whole
// by one thread, so nothing depends on their number.
inline void search_batch(const IndexView& index, const Batch& batch, const Request& request,
                         std::size_t threads, std::span<std::int64_t> ids, std::span<float> scores,
                         std::span<Record> records, std::span<std::uint8_t> visited) {
    const std::size_t table_size = index.num_splits * index.num_sub_items;
    const std::size_t query_size = batch.are_scores ? table_size : index.num_splits * index.width;
    run_in_parallel(batch.num_queries, threads, [&](std::size_t number) {
        const auto begun = std::chrono::steady_clock::now();
        Limits limits;
        limits.max_steps = request.max_steps;
        limits.over_inflation = request.over_inflation;
        if (request.deadline_ns > 0)
            limits.deadline = begun + std::chrono::nanoseconds(request.deadline_ns);

        const float* sub_item_scores = batch.queries.data() + number * query_size;
        thread_local std::vector<float> table;
        if (!batch.are_scores) {
            table.resize(table_size);
            request.kernels->sub_item_scores(sub_item_scores, index.transposed.data(),
                                             index.num_splits, index.width, index.num_sub_items,
                                             table.data());
            sub_item_scores = table.data();
        }
        const auto scored = std::chrono::steady_clock::now();
        // NaN and infinity in an embedding end up here too; the caller finds out which it was.
        if (!scores_are_safe(index, sub_item_scores)) throw QueryOverflow(number);
        Query query{
            sub_item_scores, std::min(request.k, index.num_items), {}, nullptr, nullptr, 0.0f};
        if (!index.item_bias.empty()) {
            query.item_bias = index.item_bias.data();
            query.highest_bias = index.highest_bias;
        }
        if (!batch.exclude_offsets.empty()) {
            const auto first = static_cast<std::size_t>(batch.exclude_offsets[number]);
            const auto last = static_cast<std::size_t>(batch.exclude_offsets[number + 1]);
            query.exclude = batch.exclude_items.subspan(first, last - first);
        }
        if (batch.allow_rows > 0) {
            const std::size_t words = batch.allow.size() / batch.allow_rows;
            query.allow = batch.allow.data() + (batch.allow_rows > 1 ? number : 0) * words;
        }
        const float floor =
            batch.floors.empty() ? -std::numeric_limits<float>::infinity() : batch.floors[number];
        TopK top(query.k, floor);
        Stats stats;
        if (!visited.empty()) stats.visited = visited.data() + number * table_size;
        // Nothing is wanted, or nothing is there.
        const Method method =
            query.k == 0 ? Method::pqtopk : answer(index, query, request, limits, top, stats);
        const std::vector<Scored>& best = top.sorted();
        // Where more are wanted than there are items, none of them is the K-th.
        const float threshold = request.k > query.k ? floor : top.threshold();
        std::int64_t* ids_out = ids.data() + number * request.k;
        float* scores_out = scores.data() + number * request.k;
        std::size_t rank = 0;
        for (const Scored& entry : best) {
            ids_out[rank] = entry.item;
            scores_out[rank++] = entry.score;
        }
        for (; rank < request.k; ++rank) {
            ids_out[rank] = -1;
            scores_out[rank] = -std::numeric_limits<float>::infinity();
        }
        const auto ended = std::chrono::steady_clock::now();
        records[number] = {static_cast<std::int64_t>(method),
                           stats.exact,
                           stats.steps,
                           stats.items_scored,
                           stats.items_touched,
                           stats.bytes_touched,
                           threshold,
                           stats.exact ? threshold : stats.upper_bound,
                           nanoseconds_between(begun, ended),
                           nanoseconds_between(begun, scored)};
    });
}

}  // namespace recprune
