// How the work of one call is cut. Nothing here changes a result (attention.h, contract of the numbers).
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/paged_attention/attention.h"

namespace pw {

// Query rows (tokens x heads of a group) that share a pass over K and V: enough that their products, not the loads, take
// the time, few enough that their scores stay in the second-level cache.
constexpr int TILE_ROWS = 48;

// A tile that makes more than this share of a thread's work is cut into its splits.
constexpr int UNITS_PER_THREAD = 4;

// Chunks of units that each thread takes, if there are enough: few starts, and little to wait for at the end.
constexpr int CHUNKS_PER_THREAD = 16;

// Neighbouring queries of a row, and the splits that they see.
struct Tile {
    int row;
    int query;  // first, in the flat batch
    int count;
    int position;  // of the first
    int first_split, end_split;
    int partials;  // place of its first partial result, if its splits are computed apart

    int num_splits() const { return end_split - first_split; }
    int64_t work() const { return int64_t(count) * num_splits(); }
};

// Splits of a tile that one thread does one after the other, for one kv head.
struct Unit {
    int tile;
    int first_split, end_split;
    bool is_part;  // of the splits: results of the tile's units are merged by whoever comes last
};

struct Plan {
    std::vector<Tile> tiles;
    std::vector<Unit> units;
    int num_partials = 0;
    int tile_tokens = 0;  // of the largest tile
};

inline int ceil_div(int64_t a, int64_t b) { return int((a + b - 1) / b); }
inline int round_up(int64_t a, int64_t b) { return int(ceil_div(a, b) * b); }

inline void add_tiles(Plan& plan, const Rows& rows, int group, int split, int64_t window) {
    const int most = std::max(1, TILE_ROWS / group);
    int query = 0;
    for (int row = 0; row < rows.num_rows; ++row) {
        const int length = rows.query_lens[row];
        for (int done = 0; done < length; done += most) {
            const int count = std::min(most, length - done);
            const int position = rows.context_lens[row] - length + done;
            const int first = window > 0 ? int(std::max<int64_t>(0, position + 1 - window) / split) : 0;
            plan.tiles.push_back({row, query + done, count, position, first, ceil_div(position + count, split), 0});
            plan.tile_tokens = std::max(plan.tile_tokens, count);
        }
        query += length;
    }
}

inline Plan make_plan(const Rows& rows, int group, int split, int64_t window, int num_threads) {
    Plan plan;
    add_tiles(plan, rows, group, split, window);
    int64_t work = 0;
    for (const Tile& tile : plan.tiles) work += tile.work();
    for (int t = 0; t < int(plan.tiles.size()); ++t) {
        Tile& tile = plan.tiles[t];
        const bool is_large = tile.work() * num_threads * UNITS_PER_THREAD > work;
        if (num_threads == 1 || tile.num_splits() == 1 || !is_large) {
            plan.units.push_back({t, tile.first_split, tile.end_split, false});
            continue;
        }
        tile.partials = plan.num_partials;
        plan.num_partials += tile.num_splits();
        for (int s = tile.first_split; s < tile.end_split; ++s) plan.units.push_back({t, s, s + 1, true});
    }
    return plan;
}

}  // namespace pw
