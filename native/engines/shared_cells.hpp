// Cells of many queries, visited together: what one of them has brought into the cache, the others
// find there.
//
// Each query plans, and makes its first round, by itself. For the second, pairs are taken one after
// the other: the cells of all queries are sorted by their number, and the lines of a cell are held
// against the tables of every query that visits it before those of the next cell are. Queries share
// nothing but the cache, so each is answered as it would be alone, but for the order of its pairs
// and cells, on which no proof rests.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "bounds/deficits.hpp"
#include "engines/cells.hpp"
#include "engines/ring.hpp"
#include "kernels/kernels.hpp"
#include "layouts/cells.hpp"
#include "query.hpp"
#include "top_k.hpp"

namespace recprune {

class SharedCells {
  public:
    // One of the queries. What it is made of stays where it is.
    class Member {
      public:
        // Pre: no limits, which are of a single search.
        Member(const CellLayout& layout, const std::uint8_t* codes, const Kernels& kernels,
               const Query& query, const Limits& limits, Deficits& deficits, TopK& top,
               Stats& stats)
            : search_(layout, codes, kernels, query, limits, deficits, top, stats) {}

        // Plans, and visits the best cells. Post: the query takes part in `visit`, unless its
        // cells do not pay or its slack was predicted too low.
        void begin(const CellSettings& settings) {
            const double guess = search_.first_guess(settings.slack);
            const bool is_known = search_.top_.full() && search_.slack() <= guess;
            search_.plan_for(guess, is_known, settings.most_lines);
            const RingPlan& plan = search_.plan_;
            const Deficits& deficits = search_.deficits_;
            const int limit =
                is_known ? deficits.limit(search_.slack())
                         : static_cast<int>(CellSearch::kPlannedShare * search_.most_units());
            if (plan.covers() < limit) return;
            const double lines = plan.lines(deficits.limit(is_known ? search_.slack() : guess));
            if (lines > settings.most_lines) return;
            const double first_lines =
                std::max(settings.first_round_lines, CellSearch::kFirstShare * plan.lines(limit));
            const int first_limit = std::min(plan.covered_by(first_lines), limit);
            first_ = plan.depths(first_limit);
            search_.limit_ = plan.covers();
            for (int chain_limit : {limit, plan.covers()}) {
                search_.chains_ = plan.depths(chain_limit);
                for (std::size_t pair = 0; pair < search_.layout_.num_pairs(); ++pair)
                    search_.visit_pair(pair, -1, first_.depths[pair]);
                search_.consider_pending();
                if (search_.limit_ <= chain_limit) break;  // as in a search that is alone
            }
            search_.covered_ = std::max(first_limit, search_.limit_);
            ring_ = plan.depths(search_.limit_);
            takes_part_ = true;
        }

        // Whether all that may enter has been considered. If not, another search goes on with the
        // threshold that was found so far.
        bool is_answered() {
            search_.top_.settle();
            return takes_part_ && search_.top_.full() &&
                   search_.deficits_.limit(search_.slack()) <= search_.covered_;
        }

      private:
        friend class SharedCells;

        // Lowers what is left of the ring to what the threshold leaves; `left` are the pairs whose
        // turn has not come.
        void lower(std::span<const std::size_t> left) {
            search_.plan_.lower(ring_, left, search_.limit_);
            search_.chains_ = ring_;
        }

        CellSearch search_;
        RingDepths first_;  // of the first round
        RingDepths ring_;   // of the second
        bool takes_part_ = false;
    };

    SharedCells(const CellLayout& layout, const Kernels& kernels, std::span<Member* const> members)
        : layout_(layout), kernels_(kernels), members_(members) {}

    // The second round of all that take part.
    void visit() {
        std::array<std::size_t, kMostPairs> pairs;
        std::iota(pairs.begin(), pairs.end(), std::size_t{0});
        held_.resize(members_.size());
        for (std::size_t pair = 0; pair < layout_.num_pairs(); ++pair) {
            const auto left = std::span(pairs).first(layout_.num_pairs()).subspan(pair);
            for (std::size_t next = 0; next < members_.size();) {
                next = find_visits(left, next);
                visit_cells(pair);
                consider_survivors(pair);
            }
        }
    }

  private:
    // Cells from the one that is visited to the one that is prefetched, and the same for visits.
    // Found by trial.
    static constexpr std::size_t kCellsAhead = 2;
    static constexpr std::size_t kVisitsAhead = 2;
    // Visits that are sorted at once, and items that wait to be considered, at most or not many
    // more: 64 MB and 16 MB.
    static constexpr std::size_t kMostVisits = std::size_t{4} << 20;
    static constexpr std::size_t kMostSurvivors = std::size_t{1} << 20;

    // That a query visits a cell.
    struct Visit {
        std::uint32_t cell;
        std::uint16_t member;
        std::uint8_t deficit;
    };

    // What a query holds lines of a pair against: a copy, so that a visit reads nothing else of it.
    struct alignas(kLineBytes) Held {
        std::array<std::array<std::uint8_t, kMaxNarrowSubItems>, 4> tables;
        int two;
        int three;
        std::size_t num_lines = 0;  // that were held against it since items were considered
    };

    // An item that a filter let through.
    struct Survivor {
        std::uint16_t member;
        CellSearch::Pending pending;
    };

    // Finds which cells of the first of these pairs are visited, sorted by cell, by members from
    // this one on. Returns the first whose turn comes later, as there is no room for more.
    std::size_t find_visits(std::span<const std::size_t> left, std::size_t number) {
        const std::size_t pair = left[0];
        const std::size_t num_cells = layout_.pairs[pair].num_cells;
        found_.clear();
        starts_.assign(num_cells + 1, 0);
        for (; number < members_.size() && found_.size() < kMostVisits; ++number) {
            Member& member = *members_[number];
            if (!member.takes_part_) continue;
            member.lower(left);
            CellSearch& search = member.search_;
            hold(search, pair, held_[number]);
            const int low = member.first_.depths[pair];
            const int high = member.ring_.depths[pair];
            if (high <= low) continue;
            search.scratch_.make_room(num_cells);
            const std::uint32_t* cells = search.scratch_.lines.data();
            const std::uint8_t* deficits = search.scratch_.deficits.data();
            const std::size_t count = search.plan_.find_cells(
                pair, low, high, search.scratch_.lines.data(), search.scratch_.deficits.data());
            search.stats_.steps += static_cast<std::int64_t>(count);
            for (std::size_t at = 0; at < count; ++at) {
                ++starts_[cells[at] + 1];
                found_.push_back({cells[at], static_cast<std::uint16_t>(number), deficits[at]});
            }
        }
        std::partial_sum(starts_.begin(), starts_.end(), starts_.begin());
        visits_.resize(found_.size());
        for (const Visit& visit : found_) visits_[starts_[visit.cell]++] = visit;
        return number;
    }

    static void hold(const CellSearch& search, std::size_t pair, Held& held) {
        const CellSearch::LineTables tables = search.tables_of(pair);
        for (std::size_t split = 0; split < tables.size(); ++split)
            std::copy_n(tables[split], kMaxNarrowSubItems, held.tables[split].begin());
        const CellSearch::Chain chain = search.chain_of(pair);
        held.two = chain.two;
        held.three = chain.three;
    }

    void visit_cells(std::size_t pair) {
        const CellPair& cells = layout_.pairs[pair];
        groups_.clear();
        for (std::size_t at = 0; at < visits_.size(); ++at)
            if (at == 0 || visits_[at].cell != visits_[at - 1].cell) groups_.push_back(at);
        const std::size_t num_groups = groups_.size();
        groups_.push_back(visits_.size());
        for (std::size_t group = 0; group < num_groups; ++group) {
            if (group + kCellsAhead < num_groups)
                prefetch(cells, visits_[groups_[group + kCellsAhead]].cell);
            const std::uint32_t cell = visits_[groups_[group]].cell;
            const std::uint32_t first = cells.overflow[cell];
            lines_.resize(1 + cells.overflow[cell + 1] - first);
            lines_[0] = cell;
            std::iota(lines_.begin() + 1, lines_.end(), first);
            for (std::size_t at = groups_[group]; at < groups_[group + 1]; ++at) {
                if (at + kVisitsAhead < visits_.size())
                    prefetch(held_[visits_[at + kVisitsAhead].member]);
                filter_lines(cells, visits_[at]);
                // After each visit: a cell may have most of the catalogue.
                if (survivors_.size() >= kMostSurvivors) consider_survivors(pair);
            }
        }
    }

    // What a cell has beyond so many lines is prefetched as they are filtered.
    static void prefetch(const CellPair& cells, std::uint32_t cell) {
        CellSearch::prefetch_line(cells, cell);
        const std::size_t first = cells.overflow[cell];
        const std::size_t end =
            std::min<std::size_t>(cells.overflow[cell + 1], first + kLinesAhead);
        for (std::size_t line = first; line < end; ++line) CellSearch::prefetch_line(cells, line);
    }

    static void prefetch(const Held& held) {
        for (const auto& table : held.tables)
            for (std::size_t at = 0; at < table.size(); at += kLineBytes)
                __builtin_prefetch(&table[at]);
        __builtin_prefetch(&held.two);
    }

    // Filters the lines of the cell that is visited.
    void filter_lines(const CellPair& cells, const Visit& visit) {
        Held& held = held_[visit.member];
        const CellSearch::LineTables tables = {held.tables[0].data(), held.tables[1].data(),
                                               held.tables[2].data(), held.tables[3].data()};
        deficits_.assign(lines_.size(), visit.deficit);
        passing_.resize(std::max(passing_.size(), lines_.size() * kLineItems + kSurvivorRoom));
        sums_.resize(passing_.size());
        const std::size_t count = kernels_.filter_lines(
            cells.lines, {lines_.data(), deficits_.data(), 0, lines_.size(), lines_.size()},
            tables.data(), held.two, held.three, passing_.data(), sums_.data());
        held.num_lines += lines_.size();
        for (std::size_t at = 0; at < count; ++at) {
            const std::uint32_t line = lines_[passing_[at] / kLineItems];
            const auto place = static_cast<std::uint8_t>(passing_[at] % kLineItems);
            survivors_.push_back(
                {visit.member, {.line = line, .place = place, .sum = sums_[at], .pair = 0}});
        }
    }

    // One query after the other.
    void consider_survivors(std::size_t pair) {
        starts_.assign(members_.size() + 1, 0);
        for (const Survivor& survivor : survivors_) ++starts_[survivor.member + 1u];
        std::partial_sum(starts_.begin(), starts_.end(), starts_.begin());
        pending_.resize(survivors_.size());
        for (const Survivor& survivor : survivors_) {
            CellSearch::Pending& pending = pending_[starts_[survivor.member]++];
            pending = survivor.pending;
            pending.pair = static_cast<std::uint8_t>(pair);
        }
        const CellPair& cells = layout_.pairs[pair];
        std::size_t begin = 0;
        for (std::size_t number = 0; number < members_.size(); ++number) {
            if (!members_[number]->takes_part_) continue;
            CellSearch& search = members_[number]->search_;
            const std::size_t num_lines = std::exchange(held_[number].num_lines, 0);
            search.stats_.items_touched +=
                static_cast<std::int64_t>(num_lines * layout_.num_items / cells.num_lines);
            search.stats_.bytes_touched += static_cast<std::int64_t>(num_lines * kLineBytes);
            const std::size_t end = starts_[number];
            search.scratch_.pending.assign(pending_.begin() + static_cast<std::ptrdiff_t>(begin),
                                           pending_.begin() + static_cast<std::ptrdiff_t>(end));
            for (const CellSearch::Pending& one : search.scratch_.pending)
                __builtin_prefetch(cells.starts + one.line);
            search.consider_pending();
            begin = end;
        }
        survivors_.clear();
    }

    const CellLayout& layout_;
    const Kernels& kernels_;
    std::span<Member* const> members_;
    std::vector<Held> held_;  // by each member
    std::vector<Visit> found_;
    std::vector<Visit> visits_;          // the same by cell
    std::vector<std::uint32_t> starts_;  // of what belongs to each cell, or to each member
    std::vector<std::size_t> groups_;    // where the visits to each visited cell begin
    std::vector<std::uint32_t> lines_;   // of the cell that is visited
    std::vector<std::uint8_t> deficits_;
    std::vector<std::uint32_t> passing_;
    std::vector<std::uint8_t> sums_;  // of what passes
    std::vector<Survivor> survivors_;
    std::vector<CellSearch::Pending> pending_;  // of one member after the other
};

}  // namespace recprune
