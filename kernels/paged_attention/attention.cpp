#include "kernels/paged_attention/attention.h"

#include <atomic>
#include <memory>

#include "kernels/native/parallel.h"
#include "kernels/paged_attention/plan.h"
#include "kernels/paged_attention/softmax.h"
#include "kernels/paged_attention/tiles.h"

namespace pw {
namespace {

// Vectors of tokens that are scored for all rows before the next ones, so that they come from the nearest cache.
constexpr int VECTORS_AT_ONCE = 4;

// Cuts memory into pieces that start on cache lines. Without memory it only counts.
class Arena {
public:
    explicit Arena(char* memory) : memory_(memory) {}
    template <class T>
    T* take(int64_t count) {
        char* piece = memory_ + used_;
        used_ += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
        return reinterpret_cast<T*>(piece);
    }
    int64_t used() const { return used_; }

private:
    char* memory_;
    int64_t used_ = 0;
};

// Rows of a tile after some splits: sums of weights, and outputs that are not divided by them yet.
struct Partial {
    Softmax* softmax;  // [rows]
    float* out;        // [rows][room]
};

template <class Words, class T>
class Attention {
    using Factor = typename Words::Factor;
    using Word = typename Words::Word;
    static_assert(sizeof(Factor) == sizeof(float), "weights take the place of their scores");

public:
    Attention(const TokenHeads& queries, const TokenHeads& out, const KvLayer& layer, const Rows& rows,
              const AttentionOptions& options)
        : queries_(queries), out_(out), layer_(layer), rows_(rows), options_(options),
          group_(int(options.num_heads / layer.num_kv_heads)), split_(split_tokens(layer.block_size)),
          room_(round_up(layer.head_dim, LANES)), factors_(int(layer.head_dim) / Words::GROUP * Words::FACTORS),
          plan_(make_plan(rows, group_, split_, options.window, num_threads())) {
        if (plan_.num_partials > 0) reserve_partials();
    }

    void run() {
        const int units = int(plan_.units.size()) * int(layer_.num_kv_heads);
        const int size = std::max(1, units / (num_threads() * CHUNKS_PER_THREAD));
        parallel(ceil_div(units, size), [this, units, size](int chunk) {
            run_units(chunk * size, std::min(units, (chunk + 1) * size));
        });
    }

private:
    // One split of a tile, for one kv head.
    struct Step {
        const Tile* tile;
        int head;
        int split;
    };

    // Memory of one chunk.
    struct Room {
        Factor* query;         // [rows][factors]
        float* scores;         // [rows][score_stride]
        Partial state, next;
        TokenVector<Words>* vectors;  // of a split
        const Word** keys;            // runs of a split
        const Word** values;
        const char** next_runs;  // of the next one: keys, then values
        float* scales;           // of a split's keys or values, if they are codes
    };

    int tile_rows() const { return plan_.tile_tokens * group_; }
    int score_stride() const { return round_up(split_, LANES) + LANES; }
    int blocks_per_split() const { return split_ / int(layer_.block_size); }

    Partial take_partial(Arena& arena) const {
        return {arena.take<Softmax>(tile_rows()), arena.take<float>(int64_t(tile_rows()) * room_)};
    }

    Room take_room(Arena& arena) const {
        const int blocks = blocks_per_split();
        Room room;
        room.query = arena.take<Factor>(int64_t(tile_rows()) * factors_);
        room.scores = arena.take<float>(int64_t(tile_rows()) * score_stride());
        room.state = take_partial(arena);
        room.next = take_partial(arena);
        room.vectors = arena.take<TokenVector<Words>>(blocks * ceil_div(layer_.block_size, LANES));
        room.keys = arena.take<const Word*>(blocks);
        room.values = arena.take<const Word*>(blocks);
        room.next_runs = arena.take<const char*>(2 * blocks);
        room.scales = arena.take<float>(HAS_SCALES<Words> ? score_stride() : 0);
        return room;
    }

    Room make_room() const {
        Arena counter(nullptr);
        take_room(counter);
        Arena arena(static_cast<char*>(scratch(counter.used())));
        return take_room(arena);
    }

    // For tiles whose splits are computed apart: their results, and per (tile, head) the number that is missing.
    void reserve_partials() {
        Arena counter(nullptr);
        take_partial(counter);
        partial_bytes_ = counter.used();
        const int64_t count = int64_t(plan_.num_partials) * layer_.num_kv_heads;
        partials_.reset(new char[count * partial_bytes_ + 64]);  // not cleared: each is written before it is read
        missing_ = std::make_unique<std::atomic<int>[]>(count);
        for (const Unit& unit : plan_.units)
            if (unit.is_part)
                for (int head = 0; head < layer_.num_kv_heads; ++head)
                    missing(plan_.tiles[unit.tile], head).store(plan_.tiles[unit.tile].num_splits());
    }

    std::atomic<int>& missing(const Tile& tile, int head) { return missing_[tile.partials * layer_.num_kv_heads + head]; }

    Partial shared_partial(const Step& step) const {
        const int64_t split = step.tile->partials + step.split - step.tile->first_split;
        const int64_t place = split * layer_.num_kv_heads + step.head;
        const auto start = (reinterpret_cast<uintptr_t>(partials_.get()) + 63) / 64 * 64;
        Arena arena(reinterpret_cast<char*>(start) + place * partial_bytes_);
        return take_partial(arena);
    }

    void load_queries(const Step& step, const Room& room) const {
        const int dim = int(layer_.head_dim);
        const Tile& tile = *step.tile;
        for (int token = 0; token < tile.count; ++token) {
            const T* from = queries_.at<T>(tile.query + token) + int64_t(step.head) * group_ * dim;
            Factor* to = room.query + int64_t(token) * group_ * factors_;
            for (int g = 0; g < group_; ++g) load_query(from + g * dim, to + g * factors_);
        }
    }

    void load_query(const T* from, Factor* to) const {
        const int dim = int(layer_.head_dim);
        if constexpr (Words::FACTORS == Words::GROUP)
            for (int d = 0; d < dim; ++d) to[d] = widen(from[d]);
        else
            std::memcpy(to, from, size_t(dim) * sizeof(T));
    }

    // Units are numbered with their heads side by side, as they lie in memory.
    Step first_step(int number) const {
        const Unit& unit = plan_.units[number / layer_.num_kv_heads];
        return {&plan_.tiles[unit.tile], int(number % layer_.num_kv_heads), unit.first_split};
    }

    void run_units(int first, int end) {
        const Room room = make_room();
        Ahead ahead;
        for (int number = first; number < end; ++number) {
            const Unit& unit = plan_.units[number / layer_.num_kv_heads];
            Step step = first_step(number);
            load_queries(step, room);
            for (; step.split < unit.end_split; ++step.split) {
                if (step.split + 1 < unit.end_split)
                    look_ahead({step.tile, step.head, step.split + 1}, room, ahead);
                else if (number + 1 < end)
                    look_ahead(first_step(number + 1), room, ahead);
                const bool is_first = step.split == unit.first_split;
                run_step(step, room, unit.is_part ? shared_partial(step) : is_first ? room.state : room.next, ahead);
                if (!is_first) merge_tile(*step.tile, room.state, room.next);
                ahead.finish();
            }
            if (unit.is_part)
                finish_if_last(first_step(number));
            else
                finish(first_step(number), room.state);
        }
    }

    void finish_if_last(Step step) {
        const Tile& tile = *step.tile;
        if (missing(tile, step.head).fetch_sub(1) != 1) return;
        step.split = tile.first_split;
        const Partial state = shared_partial(step);
        while (++step.split < tile.end_split) merge_tile(tile, state, shared_partial(step));
        finish(step, state);
    }

    void merge_tile(const Tile& tile, const Partial& state, const Partial& next) const {
        for (int r = 0; r < tile.count * group_; ++r)
            merge(state.softmax[r], state.out + r * room_, next.softmax[r], next.out + r * room_, layer_.head_dim);
    }

    // The partial result of one split.
    void run_step(const Step& step, const Room& room, const Partial& to, Ahead& ahead) const {
        const Tile& tile = *step.tile;
        const int rows = tile.count * group_, tokens = num_tokens(step), size = int(layer_.block_size);
        find_runs(layer_.keys, step, room.keys);
        find_runs(layer_.values, step, room.values);
        const int vectors = cut_vectors(tokens, room);
        for (int v = 0; v < vectors; v += VECTORS_AT_ONCE)
            score<Words>(room.query, factors_, rows, room.vectors + v, std::min(VECTORS_AT_ONCE, vectors - v), size,
                         int(layer_.head_dim) / Words::GROUP, ahead, room.scores, score_stride());
        if (HAS_SCALES<Words>) scale_rows(room, room.keys, rows, tokens);
        for (int r = 0; r < rows; ++r) {
            float* scores = room.scores + r * score_stride();
            to.softmax[r] = softmax_row(scores, reinterpret_cast<Factor*>(scores), tokens,
                                        seen(tile.position + r / group_, step.split), options_.scale, options_.soft_cap, ahead);
        }
        if (HAS_SCALES<Words>) scale_rows(room, room.values, rows, tokens);
        weigh<Words>(reinterpret_cast<const Factor*>(room.scores), score_stride(), rows, room.values, tokens, size,
                     int(layer_.head_dim), ahead, to.out, room_);
    }

    // Scores or weights of all rows, times the scale of the token's codes.
    void scale_rows(const Room& room, const Word* const* runs, int rows, int tokens) const {
        const int size = int(layer_.block_size);
        for (int t = 0; t < tokens; t += size) {
            const auto* scales = reinterpret_cast<const bf16*>(runs[t / size] + layer_.number_bytes());
            for (int i = 0; i < size; i += LANES) store(room.scales + t + i, load_or_part(scales + i, size - i));
        }
        for (int r = 0; r < rows; ++r) {
            float* scores = room.scores + r * score_stride();
            for (int t = 0; t < tokens; t += LANES) store(scores + t, load(scores + t) * load(room.scales + t));
        }
    }

    // The tokens of a split as vectors within blocks; answers their number.
    int cut_vectors(int tokens, const Room& room) const {
        const int size = int(layer_.block_size);
        int count = 0;
        for (int t = 0; t < tokens; t += size)
            for (int in = 0; in < std::min(size, tokens - t); in += LANES)
                room.vectors[count++] = {room.keys[t / size] + in, t + in, std::min(LANES, size - in)};
        return count;
    }

    void look_ahead(const Step& next, const Room& room, Ahead& ahead) const {
        find_runs(layer_.keys, next, room.next_runs);
        find_runs(layer_.values, next, room.next_runs + num_blocks(next));
        ahead.restart(room.next_runs, 2 * num_blocks(next), layer_.run_bytes());
    }

    // Of a split, those that some query of the tile sees.
    int num_tokens(const Step& step) const {
        return std::min(split_, step.tile->position + step.tile->count - step.split * split_);
    }
    int num_blocks(const Step& step) const { return ceil_div(num_tokens(step), layer_.block_size); }

    Span seen(int position, int split) const {
        const int window = int(options_.window), start = split * split_;
        const int first = window > 0 ? position + 1 - window : 0;
        return {std::max(0, first - start), std::min(split_, position + 1 - start)};
    }

    template <class To>
    void find_runs(char* base, const Step& step, const To** runs) const {
        const int32_t* table = rows_.block_tables + step.tile->row * rows_.table_stride;
        table += step.split * blocks_per_split();
        for (int b = 0; b < num_blocks(step); ++b) runs[b] = reinterpret_cast<const To*>(layer_.run(base, table[b], step.head));
    }

    void finish(const Step& step, const Partial& state) const {
        const int dim = int(layer_.head_dim);
        for (int r = 0; r < step.tile->count * group_; ++r) {
            const float* from = state.out + r * room_;
            T* to = out_.at<T>(step.tile->query + r / group_) + int64_t(step.head * group_ + r % group_) * dim;
            const F32 share = set1(1.0f / state.softmax[r].sum);
            for (int d = 0; d < dim; d += LANES) store_or_part(to + d, load(from + d) * share, dim - d);
        }
    }

    const TokenHeads queries_, out_;
    const KvLayer layer_;
    const Rows rows_;
    const AttentionOptions options_;
    const int group_;    // query heads of a kv head
    const int split_;    // tokens of a split
    const int room_;     // floats of an output row: whole vectors
    const int factors_;  // of a query row
    const Plan plan_;
    int64_t partial_bytes_ = 0;
    std::unique_ptr<char[]> partials_;
    std::unique_ptr<std::atomic<int>[]> missing_;
};

}  // namespace

void paged_attention(const TokenHeads& queries, const TokenHeads& out, const KvLayer& layer, const Rows& rows,
                     const AttentionOptions& options) {
    if (layer.type == KvType::INT8 && queries.is_bf16)
        Attention<CodeWords, bf16>(queries, out, layer, rows, options).run();
    else if (layer.type == KvType::INT8)
        Attention<CodeWords, float>(queries, out, layer, rows, options).run();
    else if (layer.type == KvType::FLOAT32)
        Attention<Float32Words, float>(queries, out, layer, rows, options).run();
    else if (!queries.is_bf16)
        Attention<WidenedWords, float>(queries, out, layer, rows, options).run();
    else if (options.pairs)
        Attention<PairWords, bf16>(queries, out, layer, rows, options).run();
    else
        Attention<WidenedWords, bf16>(queries, out, layer, rows, options).run();
}

}  // namespace pw

PW_EXPORT void pw_paged_attention(const pw::TokenHeads* queries, const pw::TokenHeads* out, const pw::KvLayer* layer,
                                  const pw::Rows* rows, const pw::AttentionOptions* options) {
    pw::paged_attention(*queries, *out, *layer, *rows, *options);
}

PW_EXPORT int64_t pw_has_pair_products() { return pw::HAS_PAIR_PRODUCTS; }
