// What becomes of the sums of a panel: they are stored, or the largest of each row is kept.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels/gated/gated.h"
#include "kernels/linear/linear.h"

namespace pw::gemm {

constexpr int64_t ROWS_AHEAD = TILE_ROWS;  // of results, whose lines are asked for before they are written

// Rows and panels that one thread does.
struct Chunk {
    int64_t row, rows, panel, panels;
    int64_t tiles(int64_t rows_at_once) const { return (rows + rows_at_once - 1) / rows_at_once; }
};

PW_INLINE F32 capped(F32 x, float soft_cap) {
    return soft_cap > 0 ? set1(soft_cap) * tanh(x * set1(1 / soft_cap)) : x;
}

// Stores sums as LinearOutput says. c: [rows][PANEL] of one panel, gated: of its partner in a gated weight, or null.
template <class T>
struct Store {
    const PackedWeight& weight;
    const LinearOutput& out;

    T* place(const Chunk& chunk, int64_t r, int64_t panel) const {
        return static_cast<T*>(out.data) + (chunk.row + r) * out.stride + panel * PANEL;
    }

    // Asks for the lines that will be written first.
    void prepare(const Chunk& chunk, int64_t panel) const {
        for (int64_t r = 0; r < std::min(chunk.rows, ROWS_AHEAD); ++r) ask_for(place(chunk, r, panel));
    }

    static PW_INLINE void ask_for(const T* to) {
        for (int at = 0; at < PANEL; at += 64 / int(sizeof(T))) __builtin_prefetch(to + at, 1);
    }

    void operator()(const Chunk& chunk, int64_t panel, const float* c, const float* gated) const {
        const int64_t column = panel * PANEL;
        const bool is_full = column + PANEL <= weight.columns();
        if (is_full && !gated && !out.bias && out.soft_cap == 0) return plain(chunk, panel, c);
        const auto rows = [&](auto full) {
            for (int64_t r = 0; r < chunk.rows; ++r) {
                if (r + ROWS_AHEAD < chunk.rows) ask_for(place(chunk, r + ROWS_AHEAD, panel));
                row<full.value>(place(chunk, r, panel), column, c + r * PANEL, gated ? gated + r * PANEL : nullptr);
            }
        };
        if (is_full)
            rows(std::true_type());
        else
            rows(std::false_type());
    }

    // Whole panels of which only the scales of the weight and a residual are left to do: nothing is asked per number.
    void plain(const Chunk& chunk, int64_t panel, const float* c) const {
        F32 scales[PANEL_VECTORS];
        for (int v = 0; v < PANEL_VECTORS; ++v)
            scales[v] = weight.scales ? load(weight.scales + panel * PANEL + v * LANES) : set1(1);
        const int64_t stride = out.stride, rows = chunk.rows;
        T* to = place(chunk, 0, panel);
        const float* residual = out.residual ? out.residual + (to - static_cast<T*>(out.data)) : nullptr;
        for (int64_t r = 0; r < rows; ++r, to += stride, c += PANEL) {
            if (r + ROWS_AHEAD < rows) ask_for(to + ROWS_AHEAD * stride);
            for (int v = 0; v < PANEL_VECTORS; ++v) {
                const F32 value = load(c + v * LANES) * scales[v];
                store(to + v * LANES, residual ? value + load(residual + r * stride + v * LANES) : value);
            }
        }
    }

    template <bool IS_FULL>
    PW_INLINE void row(T* to, int64_t column, const float* c, const float* gated) const {
        const int columns = IS_FULL ? PANEL : int(weight.columns() - column);
        const int64_t other = column + weight.columns();  // the gated partner's place in scales and bias
        for (int at = 0; at < columns; at += LANES) {
            const int n = IS_FULL ? LANES : columns - at;
            F32 value = scaled(load(c + at), column + at, n);
            if (gated) {
                const F32 rest = scaled(load(gated + at), other + at, n);
                value = out.activation == Gate::SILU ? pw::gated<Gate::SILU>(value, rest)
                                                     : pw::gated<Gate::GELU_TANH>(value, rest);
            }
            value = capped(value, out.soft_cap);
            if (out.residual) value = value + load_or_part(out.residual + (to - static_cast<T*>(out.data)) + at, n);
            store_or_part(to + at, value, n);
        }
    }

    F32 scaled(F32 value, int64_t column, int n) const {
        if (weight.scales) value = value * load_or_part(weight.scales + column, n);
        return out.bias ? value + load_or_part(out.bias + column, n) : value;
    }
};

// Keeps the largest sum of each row that a chunk has seen.
struct KeepLargest {
    const PackedWeight& weight;
    float soft_cap;
    Largest* kept;  // [rows][column blocks]
    int64_t blocks, panels_per_block;

    void prepare(const Chunk&, int64_t) const {}

    void operator()(const Chunk& chunk, int64_t panel, const float* c, const float*) const {
        const int64_t column = panel * PANEL;
        const int columns = int(std::min<int64_t>(PANEL, weight.columns() - column));
        for (int64_t r = 0; r < chunk.rows; ++r)
            for (int at = 0; at < columns; at += LANES) {
                F32 values = load(c + r * PANEL + at);
                if (weight.scales) values = values * load_or_part(weight.scales + column + at, columns - at);
                values = capped(values, soft_cap);
                Largest& best = kept[(chunk.row + r) * blocks + panel / panels_per_block];
                if (any_above(values, best.value)) look_at(values, std::min(LANES, columns - at), column + at, best);
            }
    }

    static void look_at(F32 values, int n, int64_t column, Largest& best) {
        float each[LANES];
        store(each, values);
        for (int i = 0; i < n; ++i) keep_larger(best, {each[i], int32_t(column + i)});
    }

    static void keep_larger(Largest& best, const Largest& next) {
        if (next.value > best.value || (std::isnan(next.value) && !std::isnan(best.value))) best = next;
    }
};

}  // namespace pw::gemm
