// One index, many queries: on how many threads, and which of them visit their cells together.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "boosts.hpp"
#include "bounds/deficits.hpp"
#include "cost_model.hpp"
#include "engines/shared_cells.hpp"
#include "item_set.hpp"
#include "query.hpp"
#include "search.hpp"
#include "util/parallel.hpp"

namespace recprune {

// A query that waits for others between its first round and its second. It has what is elsewhere
// valid until the thread's next query.
class WaitingQuery {
  public:
    WaitingQuery(const IndexView& index, const Batch& batch, const Request& request,
                 std::size_t number)
        : index_(index),
          request_(request),
          number_(number),
          start_(start_query(index, batch, request, number, index.largest_bias)),
          found_{.top = TopK(0), .stats = {}} {
        if (!batch.are_scores) {
            table_.assign(start_.sub_item_scores,
                          start_.sub_item_scores + index.num_splits * index.num_sub_items);
            start_.sub_item_scores = table_.data();
        }
        query_ =
            query_of(index, batch, *request.kernels, number, start_.sub_item_scores, request.k);
        if (query_.excluded) {
            excluded_ = *query_.excluded;
            query_.excluded = &excluded_;
        }
        const auto [query, boosted, reached] = prepare(index, query_, start_.boosts, start_.floor);
        query_ = query;
        boosted_items_.assign(boosted.items.begin(), boosted.items.end());
        boosted_scores_.assign(boosted.scores.begin(), boosted.scores.end());
        found_.top = TopK(query.k, reached);
        if (boosted_items_.size() < query.k) boosted.offer_to(found_.top);
    }
    WaitingQuery(const WaitingQuery&) = delete;
    WaitingQuery& operator=(const WaitingQuery&) = delete;

    // Its first round, or null if it goes another way.
    SharedCells::Member* begin() {
        const Kernels& kernels = *request_.kernels;
        const CostModel costs = costs_of(index_, query_, kernels);
        const bool may_leave = request_.method == Method::automatic;
        if (may_leave && choose_method(index_, query_, start_.limits, costs) != Method::cells)
            return nullptr;
        deficits_.emplace(query_, kernels, index_.num_splits, index_.num_sub_items);
        member_.emplace(*index_.cells, index_.codes.data(), kernels, query_, start_.limits,
                        *deficits_, found_.top, found_.stats);
        const double slack = predicted_slack(index_, query_, kernels, *deficits_);
        member_->begin(costs.cell_settings(slack, may_leave));
        return &*member_;
    }

    // Post: the answer is written. What cells were not enough for is answered by itself.
    void finish(const Answers& answers) {
        found_.method = Method::cells;
        is_shared_ = member_ && member_->is_answered();
        if (!is_shared_)
            found_.method =
                answer(index_, query_, request_, start_.limits, found_.top, found_.stats);
        BoostedItems{boosted_items_, boosted_scores_}.offer_to(found_.top);
        count_scored(index_, boosted_items_.size(), found_.stats);
        write_answer(start_, found_, query_.k, request_.k, number_, answers);
    }

    bool is_shared() const { return is_shared_; }

  private:
    const IndexView& index_;
    const Request& request_;
    std::size_t number_;
    Start start_;
    std::vector<float> table_;  // of sub-item scores
    ItemSet excluded_;
    std::vector<Item> boosted_items_;
    std::vector<float> boosted_scores_;
    Query query_;
    Found found_;
    std::optional<Deficits> deficits_;
    std::optional<SharedCells::Member> member_;
    bool is_shared_ = false;
};

// Queries that visit cells together, at most, and items that each of them wants: a query has 30 KB
// of its own, and what its best items take.
constexpr std::size_t kMostTogether = 2048;
constexpr std::size_t kMostWanted = 1024;

// Steps from which on there is no limit of them: as src/recprune/search/methods.py has it.
constexpr std::int64_t kUnlimitedSteps = std::int64_t{1} << 62;

// A stretch of a batch.
struct Stretch {
    std::size_t begin;
    std::size_t end;
};

// Whether these queries are to visit cells together, by what a few of them would visit.
inline bool sharing_pays(const IndexView& index, const Batch& batch, const Request& request,
                         Stretch stretch, const Answers& answers) {
    constexpr std::size_t kLookedAt = 8;
    const std::size_t count = stretch.end - stretch.begin;
    const Limits limits;
    const bool may_leave = request.method == Method::automatic;
    const bool is_limited = request.max_steps < kUnlimitedSteps || request.over_inflation > 0.0 ||
                            request.deadline_ns > 0;
    if (!index.cells || !(may_leave || request.method == Method::cells)) return false;
    if (is_limited || !answers.visited.empty() || count < kLookedAt) return false;
    if (request.k == 0 || request.k > kMostWanted || index.num_items == 0) return false;
    double lines_of_cell = 0.0;
    for (const CellPair& pair : index.cells->pairs)
        lines_of_cell += pair.lines_per_cell() / static_cast<double>(index.cells->num_pairs());
    if (!CostModel::sharing_pays(static_cast<double>(count), lines_of_cell)) return false;
    double planned = 0.0;
    for (std::size_t at = 0; at < kLookedAt; ++at) {
        const std::size_t number = stretch.begin + at * count / kLookedAt;
        const float* scores = sub_item_scores_of(index, batch, request, number);
        if (!scores_are_safe(index, *request.kernels, scores, index.largest_bias, 0.0f))
            return false;
        const Query query = query_of(index, batch, *request.kernels, number, scores, request.k);
        const CostModel costs = costs_of(index, query, *request.kernels);
        if (may_leave && choose_method(index, query, limits, costs) != Method::cells) continue;
        planned += planned_lines(index, query, *request.kernels) / kLookedAt;
    }
    double lines = 0.0;
    for (const CellPair& pair : index.cells->pairs) lines += static_cast<double>(pair.num_lines);
    return CostModel::sharing_pays(static_cast<double>(count) * planned / lines, lines_of_cell);
}

inline void search_together(const IndexView& index, const Batch& batch, const Request& request,
                            Stretch stretch, const Answers& answers) {
    const auto begun = std::chrono::steady_clock::now();
    std::vector<std::unique_ptr<WaitingQuery>> queries;
    std::vector<SharedCells::Member*> members;
    for (std::size_t number = stretch.begin; number < stretch.end; ++number) {
        queries.push_back(std::make_unique<WaitingQuery>(index, batch, request, number));
        if (SharedCells::Member* member = queries.back()->begin()) members.push_back(member);
    }
    SharedCells(*index.cells, *request.kernels, members).visit();
    std::int64_t together = 0;
    for (const auto& query : queries) {
        query->finish(answers);
        together += query->is_shared();
    }
    const std::int64_t taken = nanoseconds_between(begun, std::chrono::steady_clock::now());
    for (std::size_t at = 0; at < queries.size(); ++at) {
        Record& record = answers.records[stretch.begin + at];
        record.nanoseconds = taken / static_cast<std::int64_t>(queries.size());
        if (queries[at]->is_shared()) record.together = together;
    }
}

// Every query is answered by one thread, and with the same items and scores in whatever company, so
// no answer depends on the number of threads.
inline void search_batch(const IndexView& index, Batch batch, const Request& request,
                         std::size_t threads, const Answers& answers) {
    if (batch.allow_rows == 1)
        batch.num_allowed = count_allowed(*request.kernels, batch.allow.data(), index.num_items);
    const std::size_t fewest = (batch.num_queries + kMostTogether - 1) / kMostTogether;
    const std::size_t stretches = std::max<std::size_t>({threads, fewest, 1});
    auto stretch = [&](std::size_t number) {
        return Stretch{batch.num_queries * number / stretches,
                       batch.num_queries * (number + 1) / stretches};
    };
    if (sharing_pays(index, batch, request, stretch(0), answers)) {
        run_in_parallel(stretches, threads, [&](std::size_t number) {
            search_together(index, batch, request, stretch(number), answers);
        });
        return;
    }
    run_in_parallel(batch.num_queries, threads, [&](std::size_t number) {
        search_one(index, batch, request, number, answers);
    });
}

}  // namespace recprune
