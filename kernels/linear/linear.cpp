#include "kernels/linear/linear.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/linear/blocks.h"
#include "kernels/linear/finish.h"
#include "kernels/linear/tile.h"
#include "kernels/native/parallel.h"

namespace pw {
namespace gemm {
namespace {

constexpr int64_t ROW_BLOCK = 96;  // rows of a chunk: their activations stay in the second-level cache
constexpr int64_t K_BLOCK = 1024;  // of k: what a panel holds of it stays there, too
constexpr int64_t GROUPS_AT_ONCE = 10;  // of 64 codes: a panel of them stays in the first-level cache
constexpr int64_t CHUNKS_PER_THREAD = 32;
// Chunks of few rows are long runs of memory, which are read without a pause, but take no longer than about 25 µs: the
// others wait so long for a thread that comes late.
constexpr int64_t STREAMS_PER_THREAD = 4, STREAM_BYTES = 256 << 10;

// The part of `next`, a panel of `bytes`, that one of `tiles` tiles asks for.
Ahead part_of(const float* next, int64_t bytes, int64_t tile, int64_t tiles) {
    if (tiles == 1) return {next, 0};
    const int64_t lines = (bytes / 64 + tiles - 1) / tiles;
    return {next + tile * lines * LINE, lines};
}

// tile(rows, first row, ahead) for the tiles of a chunk, of ROWS rows each.
template <int64_t ROWS = TILE_ROWS, class Tile>
void for_tiles(const Chunk& chunk, const float* next, int64_t bytes, const Tile& tile) {
    for (int64_t row = 0; row < chunk.rows; row += ROWS)
        tile(int(std::min(ROWS, chunk.rows - row)), row, part_of(next, bytes, row / ROWS, chunk.tiles(ROWS)));
}

// c [rows][PANEL] += x times one panel; `next` is the panel after it.
template <class Words>
void multiply(const typename Words::Input* x, int64_t stride, const Chunk& chunk, const float* words,
              const float* next, int64_t k, float* c) {
    const int64_t block = chunk.rows <= TILE_ROWS ? k : K_BLOCK;
    for (int64_t from = 0; from < k; from += block) {
        const int64_t groups = std::min(block, k - from) / Words::GROUP, at = from / Words::GROUP * PANEL;
        for_tiles(chunk, next + at, groups * PANEL * 4, [&](int rows, int64_t row, Ahead ahead) {
            tile_of<Words>(rows, x + row * stride + from, stride, words + at, groups, c + row * PANEL, ahead);
        });
    }
}

// `count` times 64 numbers of a panel, from the 64 numbers `from` on, in all tiles of a chunk. bytes: of the panel after
// it, of which each tile asks for a part.
template <class Form>
void multiply_part(const Codes& x, const Chunk& chunk, const float* words, int64_t from, int64_t count,
                   const float* next, int64_t bytes, float* c) {
    constexpr int64_t GROUPS = 64 / Form::GROUP;
    for_tiles<Form::ROWS_AT_ONCE>(chunk, next, bytes, [&](int rows, int64_t row, Ahead ahead) {
        const Codes part = x.part(chunk.row + row, from * GROUPS, count * GROUPS);
        code_tile_of<Form>(rows, part, words, c + row * PANEL, ahead);
    });
}

// The same as `multiply` for codes.
template <class Form>
void multiply_codes(const Codes& x, const Chunk& chunk, const float* words, const float* next, float* c) {
    constexpr int64_t WORDS = Form::WORDS_PER_64 * PANEL;
    const int64_t all = x.groups * Form::GROUP / 64;
    const int64_t blocks = chunk.rows <= TILE_ROWS ? 1 : (all + GROUPS_AT_ONCE - 1) / GROUPS_AT_ONCE;
    const int64_t block = (all + blocks - 1) / blocks;
    for (int64_t from = 0; from < all; from += block) {
        const int64_t count = std::min(block, all - from), bytes = count * WORDS * int64_t(sizeof(float));
        const float *const here = words + from * WORDS, *const behind = next + from * WORDS;
        if constexpr (Form::IS_NARROW) {
            if (chunk.rows > TILE_ROWS) {
                using Wide = typename Form::Wide;
                alignas(64) float room[GROUPS_AT_ONCE * Wide::WORDS_PER_64 * PANEL];
                Form::widen(here, count, room);
                multiply_part<Wide>(x, chunk, room, from, count, behind, bytes, c);
                continue;
            }
        }
        multiply_part<Form>(x, chunk, here, from, count, behind, bytes, c);
    }
}

// How the work is cut: chunks are numbered by row block, then by panels.
struct Cut {
    int64_t rows, panels, row_blocks, panels_per_chunk, chunks_per_block;

    Cut(int64_t rows, const PackedWeight& weight)
        : rows(rows), panels(weight.column_panels()), row_blocks((rows + ROW_BLOCK - 1) / ROW_BLOCK) {
        const int64_t bytes = panels * weight.parts() * weight.panel_words() * int64_t(sizeof(float));
        const int64_t wanted = rows <= TILE_ROWS ? std::max(STREAMS_PER_THREAD * num_threads(), bytes / STREAM_BYTES)
                                                 : std::max<int64_t>(1, CHUNKS_PER_THREAD * num_threads() / row_blocks);
        panels_per_chunk = even((panels + wanted - 1) / wanted);
        chunks_per_block = blocks_of(panels_per_chunk);
    }

    // Panels of a chunk, at most `most` and at least half of that: the largest that keeps the busiest thread shortest.
    int64_t even(int64_t most) const {
        int64_t best = most;
        for (int64_t size = most - 1; 2 * size >= most && size > 0; --size)
            if (longest(size) < longest(best)) best = size;
        return best;
    }
    int64_t longest(int64_t size) const {
        const int64_t threads = num_threads();
        return (row_blocks * blocks_of(size) + threads - 1) / threads * size;
    }
    int64_t blocks_of(int64_t size) const { return (panels + size - 1) / size; }

    int chunks() const { return int(row_blocks * chunks_per_block); }
    Chunk chunk(int index) const {
        const int64_t row = index / chunks_per_block * ROW_BLOCK, panel = index % chunks_per_block * panels_per_chunk;
        return {row, std::min<int64_t>(ROW_BLOCK, rows - row), panel, std::min(panels_per_chunk, panels - panel)};
    }
};

// multiply(words, next words, c) for each panel of the chunk, then finish.
template <class Multiply, class Finish>
void run_chunk(const PackedWeight& weight, const Chunk& chunk, const Multiply& multiply, const Finish& finish) {
    const int64_t sums = chunk.rows * PANEL, parts = weight.parts();
    float* c = static_cast<float*>(scratch(size_t(parts * sums) * sizeof(float)));
    // Threads take chunks in turn, so the one after the next of the others is the most likely to follow.
    const int64_t behind = chunk.panel + chunk.panels * num_threads();
    for (int64_t panel = chunk.panel; panel < chunk.panel + chunk.panels; ++panel) {
        finish.prepare(chunk, panel);
        std::fill_n(c, parts * sums, 0.0f);
        for (int64_t part = 0; part < parts; ++part) {
            const bool is_last = part == parts - 1 && panel == chunk.panel + chunk.panels - 1;
            const float* const words = weight.panel(panel, part);
            multiply(words, is_last ? weight.panel(behind, 0) : words + weight.panel_words(), c + part * sums);
        }
        finish(chunk, panel, c, weight.is_gated ? c + sums : nullptr);
    }
}

template <class Words, class Finish>
void run_words(const PackedWeight& weight, const LinearInput& x, const Cut& cut, const Finish& finish) {
    parallel(cut.chunks(), [&](int index) {
        const Chunk chunk = cut.chunk(index);
        const auto* rows = static_cast<const typename Words::Input*>(x.data) + chunk.row * x.stride;
        const auto multiply_panel = [&](const float* words, const float* next, float* c) {
            multiply<Words>(rows, x.stride, chunk, words, next, weight.in_features, c);
        };
        run_chunk(weight, chunk, multiply_panel, finish);
    });
}

template <class Form, class Finish>
void run_codes(const PackedWeight& weight, const LinearInput& x, const Cut& cut, const Finish& finish) {
    const Codes codes = encode<Form::GROUP>(x, weight.in_features, Form::OFFSET);
    parallel(cut.chunks(), [&](int index) {
        const Chunk chunk = cut.chunk(index);
        const auto multiply_panel = [&](const float* words, const float* next, float* c) {
            multiply_codes<Form>(codes, chunk, words, next, c);
        };
        run_chunk(weight, chunk, multiply_panel, finish);
    });
}

template <class Finish>
void run(const PackedWeight& weight, const LinearInput& x, const Cut& cut, const Finish& finish) {
    switch (weight.kind) {
        case FLOAT32: return run_words<Float32Words>(weight, x, cut, finish);
        case BFLOAT16:
            if (HAS_PAIR_PRODUCTS && x.is_bf16) return run_words<PairWords>(weight, x, cut, finish);
            return run_words<WidenedWords>(weight, x, cut, finish);
        case INT8: return run_codes<ChannelCodes>(weight, x, cut, finish);
        case Q8_0: return run_codes<BlockQ8_0>(weight, x, cut, finish);
        case Q4_0: return run_codes<BlockQ4_0>(weight, x, cut, finish);
        case Q4_1: return run_codes<BlockQ4_1>(weight, x, cut, finish);
    }
}

}  // namespace
}  // namespace gemm

void linear(const PackedWeight& weight, const LinearInput& x, const LinearOutput& out) {
    if (x.rows == 0) return;
    const gemm::Cut cut(x.rows, weight);
    if (out.is_bf16)
        gemm::run(weight, x, cut, gemm::Store<bf16>{weight, out});
    else
        gemm::run(weight, x, cut, gemm::Store<float>{weight, out});
}

void linear_argmax(const PackedWeight& weight, const LinearInput& x, float soft_cap, Largest* largest) {
    if (x.rows == 0) return;
    const gemm::Cut cut(x.rows, weight);
    const int64_t blocks = cut.chunks_per_block;
    std::vector<Largest> kept(size_t(x.rows * blocks), Largest{-INFINITY, 0});
    gemm::run(weight, x, cut, gemm::KeepLargest{weight, soft_cap, kept.data(), blocks, cut.panels_per_chunk});
    for (int64_t row = 0; row < x.rows; ++row) {
        largest[row] = {-INFINITY, 0};
        for (int64_t block = 0; block < blocks; ++block)
            gemm::KeepLargest::keep_larger(largest[row], kept[size_t(row * blocks + block)]);
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

// `count` products in turn, as a step of a decoder makes them.
PW_EXPORT void pw_linears(int64_t count, const pw::PackedWeight* weights, const pw::LinearInput* inputs,
                          const pw::LinearOutput* outputs) {
    for (int64_t i = 0; i < count; ++i) pw::linear(weights[i], inputs[i], outputs[i]);
}

PW_EXPORT void pw_linear_argmax(const pw::PackedWeight* weight, const pw::LinearInput* x, float soft_cap,
                                pw::Largest* largest) {
    pw::linear_argmax(*weight, *x, soft_cap, largest);
}
