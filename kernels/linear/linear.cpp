#include "kernels/linear/linear.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/linear/int8.h"
#include "kernels/linear/tile.h"
#include "kernels/native/parallel.h"

namespace pw {
namespace gemm {
namespace {

constexpr int ROW_BLOCK = 96;         // rows that a chunk takes at most: its activations stay in the second-level cache
constexpr int64_t K_BLOCK = 512;      // of k, so that a widened panel does, too
constexpr int64_t WIDEN_FROM = 2 * TILE_ROWS;  // rows from which on a panel is widened once instead of for every tile
constexpr int64_t CHUNKS_PER_THREAD = 32;

struct Chunk {
    int64_t row, rows, panel, panels;
};

template <class Words>
void multiply_rows(const typename Words::Input* x, int64_t stride, int64_t rows, const float* words, int64_t groups,
                   float* c, bool resumes) {
    for (int64_t r = 0; r < rows; r += TILE_ROWS)
        tile_of<Words>(int(std::min<int64_t>(TILE_ROWS, rows - r)), x + r * stride, stride, words, groups,
                       c + r * PANEL, resumes);
}

void widen_panel(const float* words, int64_t groups, float* wide) {
    for (int64_t g = 0; g < groups; ++g, words += PANEL, wide += 2 * PANEL)
        for (int v = 0; v < PANEL_VECTORS; ++v) {
            const F32 raw = load(words + v * LANES);
            __builtin_prefetch(words + 64 * PANEL + v * LANES, 0, 2);
            store(wide + v * LANES, lower_halves(raw));
            store(wide + PANEL + v * LANES, upper_halves(raw));
        }
}

// c [rows][PANEL] = x times one panel.
template <class Words>
void multiply(const typename Words::Input* x, int64_t stride, int64_t rows, const float* words, int64_t k, float* c,
              float* wide) {
    const int64_t block = rows <= TILE_ROWS ? k : K_BLOCK;
    for (int64_t from = 0; from < k; from += block) {
        const int64_t groups = std::min(block, k - from) / Words::GROUP;
        const float* here = words + from / Words::GROUP * PANEL;
        if constexpr (Words::PASSES == 2) {
            if (rows >= WIDEN_FROM) {
                widen_panel(here, groups, wide);
                multiply_rows<Float32Words>(x + from, stride, rows, wide, 2 * groups, c, from > 0);
                continue;
            }
        }
        multiply_rows<Words>(x + from, stride, rows, here, groups, c, from > 0);
    }
}

// The same for int8.
void multiply_codes(const Codes& x, int64_t rows, const float* words, float* c) {
    for (int64_t r = 0; r < rows; r += TILE_ROWS)
        code_tile_of(int(std::min<int64_t>(TILE_ROWS, rows - r)), x.from(r), words, c + r * PANEL);
}

PW_INLINE F32 activate(F32 x, Activation activation) {
    if (activation == SILU) return silu(x);
    const F32 inner = set1(0.7978845608028654f) * fma(set1(0.044715f) * x * x, x, x);
    return set1(0.5f) * x * (set1(1.0f) + tanh(inner));
}

PW_INLINE F32 capped(F32 x, float soft_cap) {
    return soft_cap > 0 ? set1(soft_cap) * tanh(x * set1(1 / soft_cap)) : x;
}

// Sums of one panel, of its gated partner if there is one, and what they are of.
struct Sums {
    int64_t row, rows, panel;
    const float* c;
    const float* gated;
};

// Stores sums as LinearOutput says.
template <class T>
struct Store {
    const PackedWeight& weight;
    const LinearOutput& out;

    void operator()(int, const Sums& sums) const {
        const int64_t column = sums.panel * PANEL;
        for (int64_t r = 0; r < sums.rows; ++r) row(sums, r, column, (sums.row + r) * out.stride + column);
    }

    void row(const Sums& sums, int64_t r, int64_t column, int64_t to) const {
        const int columns = int(std::min<int64_t>(PANEL, weight.columns() - column));
        const float* bias = out.bias ? out.bias + column : nullptr;
        const float* scales = weight.scales ? weight.scales + column : nullptr;
        for (int at = 0; at < columns; at += LANES) {
            const int n = columns - at;
            F32 value = load(sums.c + r * PANEL + at);
            if (scales) value = value * load_or_part(scales + at, n);
            if (bias) value = value + load_or_part(bias + at, n);
            if (sums.gated) {
                F32 other = load(sums.gated + r * PANEL + at);
                if (scales) other = other * load_or_part(scales + weight.columns() + at, n);
                if (bias) other = other + load_or_part(bias + weight.columns() + at, n);
                value = activate(value, out.activation) * other;
            }
            value = capped(value, out.soft_cap);
            if (out.residual) value = value + load_or_part(out.residual + to + at, n);
            store_or_part(static_cast<T*>(out.data) + to + at, value, n);
        }
    }
};

// Keeps the largest sum of each row that a chunk has seen.
struct KeepLargest {
    const PackedWeight& weight;
    float soft_cap;
    Largest* kept;  // [chunks][ROW_BLOCK]

    void operator()(int chunk, const Sums& sums) const {
        const int64_t column = sums.panel * PANEL;
        const int columns = int(std::min<int64_t>(PANEL, weight.columns() - column));
        for (int64_t r = 0; r < sums.rows; ++r)
            for (int at = 0; at < columns; at += LANES) {
                F32 values = load(sums.c + r * PANEL + at);
                if (weight.scales) values = values * load_or_part(weight.scales + column + at, columns - at);
                values = capped(values, soft_cap);
                Largest& best = kept[int64_t(chunk) * ROW_BLOCK + r];
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

// How the work is cut: chunks are numbered by row block, then by panels.
struct Cut {
    int64_t rows, panels, row_blocks, panels_per_chunk, chunks_per_block;

    Cut(int64_t rows, int64_t panels) : rows(rows), panels(panels), row_blocks((rows + ROW_BLOCK - 1) / ROW_BLOCK) {
        const int64_t wanted = std::max<int64_t>(1, CHUNKS_PER_THREAD * num_threads() / row_blocks);
        panels_per_chunk = (panels + wanted - 1) / wanted;
        chunks_per_block = (panels + panels_per_chunk - 1) / panels_per_chunk;
    }

    int chunks() const { return int(row_blocks * chunks_per_block); }
    Chunk chunk(int index) const {
        const int64_t row = index / chunks_per_block * ROW_BLOCK, panel = index % chunks_per_block * panels_per_chunk;
        return {row, std::min<int64_t>(ROW_BLOCK, rows - row), panel, std::min(panels_per_chunk, panels - panel)};
    }
};

// multiply(part's words, c, wide) for each panel of the chunk, then finish. `wide` has room for that many floats.
template <class Multiply, class Finish>
void run_chunk(const PackedWeight& weight, const Chunk& chunk, int64_t wide, const Multiply& multiply,
               const Finish& finish) {
    const int64_t sums = chunk.rows * PANEL, parts = weight.parts();
    float* c = static_cast<float*>(scratch(size_t(parts * sums + wide) * sizeof(float)));
    for (int64_t panel = chunk.panel; panel < chunk.panel + chunk.panels; ++panel) {
        for (int64_t part = 0; part < parts; ++part)
            multiply(weight.panel(panel, part), c + part * sums, c + parts * sums);
        finish(Sums{chunk.row, chunk.rows, panel, c, weight.is_gated ? c + sums : nullptr});
    }
}

template <class Words, class Finish>
void run_words(const PackedWeight& weight, const LinearInput& x, const Chunk& chunk, const Finish& finish) {
    const bool widens = Words::PASSES == 2 && chunk.rows >= WIDEN_FROM;
    const int64_t wide = widens ? std::min(K_BLOCK, weight.in_features) * PANEL : 0;
    const auto* rows = static_cast<const typename Words::Input*>(x.data) + chunk.row * x.stride;
    const auto multiply_panel = [&](const float* words, float* c, float* room) {
        multiply<Words>(rows, x.stride, chunk.rows, words, weight.in_features, c, room);
    };
    run_chunk(weight, chunk, wide, multiply_panel, finish);
}

template <class Finish>
void run(const PackedWeight& weight, const LinearInput& x, const Cut& cut, const Finish& finish) {
    Codes codes{};
    if (weight.kind == INT8) codes = encode(x, weight.in_features);
    parallel(cut.chunks(), [&](int index) {
        const Chunk chunk = cut.chunk(index);
        const auto finish_sums = [&](const Sums& sums) { finish(index, sums); };
        if (weight.kind == INT8)
            run_chunk(
                weight, chunk, 0,
                [&](const float* words, float* c, float*) { multiply_codes(codes.from(chunk.row), chunk.rows, words, c); },
                finish_sums);
        else if (weight.kind == FLOAT32)
            run_words<Float32Words>(weight, x, chunk, finish_sums);
        else if (HAS_PAIR_PRODUCTS && x.is_bf16)
            run_words<PairWords>(weight, x, chunk, finish_sums);
        else
            run_words<WidenedWords>(weight, x, chunk, finish_sums);
    });
}

}  // namespace
}  // namespace gemm

void linear(const PackedWeight& weight, const LinearInput& x, const LinearOutput& out) {
    if (x.rows == 0) return;
    const gemm::Cut cut(x.rows, weight.column_panels());
    if (out.is_bf16)
        gemm::run(weight, x, cut, gemm::Store<bf16>{weight, out});
    else
        gemm::run(weight, x, cut, gemm::Store<float>{weight, out});
}

void linear_argmax(const PackedWeight& weight, const LinearInput& x, float soft_cap, Largest* largest) {
    if (x.rows == 0) return;
    const gemm::Cut cut(x.rows, weight.column_panels());
    std::vector<Largest> kept(size_t(cut.chunks()) * gemm::ROW_BLOCK, Largest{-INFINITY, 0});
    gemm::run(weight, x, cut, gemm::KeepLargest{weight, soft_cap, kept.data()});
    for (int64_t row = 0; row < x.rows; ++row) {
        const int64_t first = row / gemm::ROW_BLOCK * cut.chunks_per_block;
        largest[row] = {-INFINITY, 0};
        for (int64_t chunk = first; chunk < first + cut.chunks_per_block; ++chunk)
            gemm::KeepLargest::keep_larger(largest[row], kept[size_t(chunk * gemm::ROW_BLOCK + row % gemm::ROW_BLOCK)]);
    }
}

}  // namespace pw

// Columns of a panel and what is added to int8 codes, for the caller that packs.
PW_EXPORT int64_t pw_linear_panel() { return pw::gemm::PANEL; }
PW_EXPORT int64_t pw_linear_code_offset() { return pw::gemm::CodeWords::OFFSET; }
PW_EXPORT int64_t pw_linear_takes_bf16() { return pw::HAS_PAIR_PRODUCTS; }

PW_EXPORT void pw_linear(const pw::PackedWeight* weight, const pw::LinearInput* x, const pw::LinearOutput* out) {
    pw::linear(*weight, *x, *out);
}

PW_EXPORT void pw_linear_argmax(const pw::PackedWeight* weight, const pw::LinearInput* x, float soft_cap,
                                pw::Largest* largest) {
    pw::linear_argmax(*weight, *x, soft_cap, largest);
}
