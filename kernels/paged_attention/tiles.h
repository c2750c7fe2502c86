// The two products of attention, for a few query rows at a time so that each word of K and V is loaded once for all.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "kernels/paged_attention/ahead.h"
#include "kernels/paged_attention/kv_words.h"

namespace pw {

constexpr int MAX_ROWS = LANES == 8 ? 4 : 8;  // of a tile: what the registers hold (AVX2 has 16, the others 32)

// Up to LANES tokens of one block.
template <class Words>
struct TokenVector {
    const typename Words::Word* words;  // of dimension group 0
    int token;           // number of the first one within the split
    int lanes;
};

namespace tiles {

// scores[r][token] = query[r] . key[token], ROWS x VECTORS at once.
template <class Words, int ROWS, int VECTORS, bool PART>
void score(const typename Words::Factor* query, int query_stride, const TokenVector<Words>* at, int64_t line_stride, int groups,
           Ahead& ahead, float* scores, int scores_stride) {
    F32 acc[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) acc[r][v] = zero();
    for (int i = 0; i < groups; ++i, query += Words::FACTORS) {
        ahead.step(lines_beside(VECTORS, sizeof(typename Words::Word)));
        typename Words::Line lines[VECTORS];
        for (int v = 0; v < VECTORS; ++v) {
            const auto* words = at[v].words + i * line_stride;
            lines[v] = Words::decode(PART ? load_or_part(words, at[v].lanes) : load(words));
        }
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECTORS; ++v) acc[r][v] = Words::add(query + r * query_stride, lines[v], acc[r][v]);
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) store(scores + r * scores_stride + at[v].token, acc[r][v]);
}

// out[r][d] = sum of weight[r][token] * value[token][d], ROWS x VECTORS at once.
template <class Words, int ROWS, int VECTORS, bool PART>
void weigh(const typename Words::Factor* weights, int weights_stride, const typename Words::Word* const* runs, int num_tokens,
           int block_size, int head_dim, int dim, Ahead& ahead, float* out, int out_stride) {
    constexpr int GROUP = Words::GROUP;
    F32 acc[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) acc[r][v] = zero();
    const auto line = [&](const typename Words::Word* words, int v) {
        const auto* p = words + v * LANES;
        return Words::decode(PART ? load(p, head_dim - dim) : load(p));
    };
    for (int left = num_tokens; left > 0; left -= block_size, ++runs) {
        const auto* words = *runs + dim;
        const int here = std::min(left, block_size);
        for (int g = 0; g < here / GROUP; ++g, words += head_dim, weights += Words::FACTORS) {
            ahead.step(lines_beside(VECTORS, sizeof(typename Words::Word)));
            typename Words::Line lines[VECTORS];
            for (int v = 0; v < VECTORS; ++v) lines[v] = line(words, v);
            for (int r = 0; r < ROWS; ++r)
                for (int v = 0; v < VECTORS; ++v)
                    acc[r][v] = Words::add(weights + r * weights_stride, lines[v], acc[r][v]);
        }
        if (here % GROUP != 0)  // the last token of all: its neighbour in the word is not written yet
            for (int v = 0; v < VECTORS; ++v) {
                const auto values = line(words, v);
                for (int r = 0; r < ROWS; ++r)
                    acc[r][v] = Words::add_first(weights + r * weights_stride, values, acc[r][v]);
            }
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) store(out + r * out_stride + dim + v * LANES, acc[r][v]);
}

// Vectors that a tile of ROWS takes at once: more where there are few rows, to keep the multipliers busy.
constexpr int vectors_beside(int rows) { return LANES == 8 ? (rows == 1 ? 4 : 2) : (rows <= 4 ? 4 : 2); }

template <class Words, int ROWS>
void score_rows(const typename Words::Factor* query, int query_stride, const TokenVector<Words>* at, int num_vectors,
                int64_t line_stride, int groups, Ahead& ahead, float* scores, int scores_stride) {
    constexpr int V = vectors_beside(ROWS);
    int done = 0;
    for (; done + V <= num_vectors; done += V) {
        const bool part = std::any_of(at + done, at + done + V, [](const auto& t) { return t.lanes < LANES; });
        const auto run = part ? score<Words, ROWS, V, true> : score<Words, ROWS, V, false>;
        run(query, query_stride, at + done, line_stride, groups, ahead, scores, scores_stride);
    }
    for (; done < num_vectors; ++done)
        score<Words, ROWS, 1, true>(query, query_stride, at + done, line_stride, groups, ahead, scores, scores_stride);
}

template <class Words, int ROWS>
void weigh_rows(const typename Words::Factor* weights, int weights_stride, const typename Words::Word* const* runs, int num_tokens,
                int block_size, int head_dim, Ahead& ahead, float* out, int out_stride) {
    constexpr int V = vectors_beside(ROWS);
    const auto part = [&](auto run, int dim) {
        run(weights, weights_stride, runs, num_tokens, block_size, head_dim, dim, ahead, out, out_stride);
    };
    int dim = 0;
    for (; dim + V * LANES <= head_dim; dim += V * LANES) part(weigh<Words, ROWS, V, false>, dim);
    for (; dim + LANES <= head_dim; dim += LANES) part(weigh<Words, ROWS, 1, false>, dim);
    if (dim < head_dim) part(weigh<Words, ROWS, 1, true>, dim);
}

// The functions above for 1 … MAX_ROWS rows.
template <class Words, int... I>
constexpr auto score_table(std::integer_sequence<int, I...>) {
    return std::array{score_rows<Words, I + 1>...};
}
template <class Words, int... I>
constexpr auto weigh_table(std::integer_sequence<int, I...>) {
    return std::array{weigh_rows<Words, I + 1>...};
}

}  // namespace tiles

// scores[r][t] for r < rows and every token of the vectors.
template <class Words>
void score(const typename Words::Factor* query, int query_stride, int rows, const TokenVector<Words>* at, int num_vectors,
           int64_t line_stride, int groups, Ahead& ahead, float* scores, int scores_stride) {
    static constexpr auto table = tiles::score_table<Words>(std::make_integer_sequence<int, MAX_ROWS>());
    for (int r = 0; r < rows; r += MAX_ROWS)
        table[std::min(MAX_ROWS, rows - r) - 1](query + r * query_stride, query_stride, at, num_vectors, line_stride,
                                                groups, ahead, scores + r * scores_stride, scores_stride);
}

// out[r][d] for r < rows and d < head_dim; `out` has room up to a whole number of vectors.
template <class Words>
void weigh(const typename Words::Factor* weights, int weights_stride, int rows, const typename Words::Word* const* runs,
           int num_tokens, int block_size, int head_dim, Ahead& ahead, float* out, int out_stride) {
    static constexpr auto table = tiles::weigh_table<Words>(std::make_integer_sequence<int, MAX_ROWS>());
    for (int r = 0; r < rows; r += MAX_ROWS)
        table[std::min(MAX_ROWS, rows - r) - 1](weights + r * weights_stride, weights_stride, runs, num_tokens,
                                                block_size, head_dim, ahead, out + r * out_stride, out_stride);
}

}  // namespace pw
