// What the kernels of attention over KV caches in pages share: the extents, and which queries and positions a block
// has.

// What all blocks of a launch know.
struct PagedShape {
    int rows_per_sequence, heads, kv_heads, page_count, page_rows, pool_pages;
    int value_dim;                  // of each head of the values, only so many first columns count
    int groups, share, first_head;  // groups of heads that read one KV head each; query heads per KV head of all ranks; place of the first head
    int window, sink;               // `window` is larger than any position if there is none
    int parts, part_positions, tiles;
    float scale;
};

__device__ __forceinline__ int page_row(const float *pages, const PagedShape &s, int position) {
    int page = position / s.page_rows;
    if (page >= s.page_count) return -1;
    float at = pages[page];
    return at >= 0.0f && at < (float)s.pool_pages ? (int)at * s.page_rows + position % s.page_rows : -1;
}
__device__ __forceinline__ bool is_attended(const PagedShape &s, int query, int position) {
    return position <= query && (position < s.sink || query - position < s.window);
}

// A block has up to QUERIES queries of one group of heads of one sequence, and one part of the positions. Query i is
// head `head_of(i)` of the result, in row `row_of(i)` of the sequence.
template <int QUERIES> struct PagedBlock {
    const PagedShape &s;
    int part, tile, group, sequence, group_heads, count;
    // Positions of the first row, of the first and the last query, and of the part. An absent sequence has no query.
    int first, lowest, highest, begin, end;

    __device__ __forceinline__ PagedBlock(const PagedShape &shape, const float *start) : s(shape) {
        part = blockIdx.x % s.parts, tile = blockIdx.x / s.parts % s.tiles;
        group = blockIdx.x / s.parts / s.tiles % s.groups, sequence = blockIdx.x / s.parts / s.tiles / s.groups;
        group_heads = s.heads / s.groups, count = min(QUERIES, s.rows_per_sequence * group_heads - tile * QUERIES);
        bool is_absent = !(start[sequence] >= 0.0f);
        first = is_absent ? 0 : (int)start[sequence], begin = part * s.part_positions;
        lowest = first + row_of(0), highest = is_absent ? -1 : first + row_of(count - 1);
        end = min(begin + s.part_positions, highest + 1);
    }
    __device__ __forceinline__ int row_of(int i) const {
        return (tile * QUERIES + i) / group_heads;
    }
    __device__ __forceinline__ i64 head_of(int i) const {
        return ((i64)sequence * s.rows_per_sequence + row_of(i)) * s.heads + group * group_heads + (tile * QUERIES + i) % group_heads;
    }
    __device__ __forceinline__ int kv_head() const {
        return (s.first_head + group * group_heads) / s.share;
    }
    // The second kernel reads no part that begins behind a query. Without it, this one writes the result.
    __device__ __forceinline__ bool is_unread() const {
        return s.parts > 1 && begin > highest;
    }
    // No query of the block attends to positions between the sink and all windows.
    __device__ __forceinline__ bool attends_to_none(int from, int positions) const {
        return from >= s.sink && lowest - (from + positions - 1) >= s.window;
    }
    // Stores a column of query i, given the sum of weighted values, the largest score and the sum of weights.
    template <typename T> __device__ __forceinline__ void store(int i, int column, float sum, float top, float total, T *out, float *sums) const {
        i64 head = head_of(i);
        if (s.parts == 1) {
            from_f32(total == 0.0f ? 0.0f : sum / total, out[head * s.value_dim + column]);
        } else {
            // For each head and part: the sums of values, the largest score and the sum of weights.
            float *own = sums + (head * s.parts + part) * (s.value_dim + 2);
            own[column] = sum;
            if (column == 0) own[s.value_dim] = top, own[s.value_dim + 1] = total;
        }
    }
};
