// Not an ordinary header: the loops, written once and included once per instruction set. TARGET is the function
// attribute; vec, WIDTH, load, store, add, sub, mul, div, fma, root and add_squares are those of the namespace around
// it (lanes.h).
//
// Every element goes through the same operations in the same order on every instruction set, so where a vector starts
// does not matter: a short head brings the index to a multiple of LINE (aligned if the tensors are), and head and tail
// pass through a small buffer instead of masks.

struct Constants {
    vec factor, decay, l2, w1, b2, w2, inverse_root_correction2, eps, negative_step;
    bool coupled;
};

// One line of elements. Adam (Kingma and Ba 2015, algorithm 1) in the form of torch.optim: lerp for the first moment,
// division by sqrt(v) / sqrt(1 - beta2^t) + eps. gradient and out may be the same memory.
template <class G, class O>
LANE_FN(TARGET) void adam_line(float* master, float* first, float* second, const G* gradient, O* out,
                               const Constants& c) {
    for (int k = 0; k < LINE; k += WIDTH) {
        vec p = load(master + k), m = load(first + k), v = load(second + k);
        vec g = mul(load(gradient + k), c.factor);
        if (c.coupled) g = fma(p, c.l2, g);
        m = fma(sub(g, m), c.w1, m);
        v = fma(mul(g, c.w2), g, mul(v, c.b2));
        p = fma(div(m, fma(root(v), c.inverse_root_correction2, c.eps)), c.negative_step, mul(p, c.decay));
        store(first + k, m);
        store(second + k, v);
        store(master + k, p);
        store(out + k, p);
    }
}

template <class G, class O>
TARGET static void adam_part_of_line(float* master, float* first, float* second, const G* gradient, O* out,
                                     const Constants& c, int64_t n) {
    float p[LINE] = {}, m[LINE] = {}, v[LINE] = {};
    G g[LINE] = {};
    O o[LINE] = {};
    std::memcpy(p, master, n * sizeof(float));
    std::memcpy(m, first, n * sizeof(float));
    std::memcpy(v, second, n * sizeof(float));
    std::memcpy(g, gradient, n * sizeof(G));
    adam_line(p, m, v, g, o, c);
    std::memcpy(master, p, n * sizeof(float));
    std::memcpy(first, m, n * sizeof(float));
    std::memcpy(second, v, n * sizeof(float));
    if (!std::is_same<O, absent>::value) std::memcpy(out, o, n * sizeof(O));
}

template <class G, class O>
TARGET static void adam_span(const AdamTensors& t, const AdamRow& row, float factor, int64_t begin, int64_t end) {
    float *p = t.master, *m = t.first, *v = t.second;
    const G* g = static_cast<const G*>(t.gradient);
    O* o = static_cast<O*>(t.out);
    const Constants c = {all(factor), all(row.decay), all(row.l2), all(row.w1), all(row.b2), all(row.w2),
                         all(row.inverse_root_correction2), all(row.eps), all(row.negative_step), row.l2 != 0.0f};
    int64_t i = begin;
    if (const int64_t head = std::min<int64_t>((LINE - i % LINE) % LINE, end - i)) {
        adam_part_of_line(p + i, m + i, v + i, g + i, o + i, c, head);
        i += head;
    }
    for (; i + LINE <= end; i += LINE) {
        const int64_t ahead = i + ADAM_PREFETCH;
        __builtin_prefetch(p + ahead);
        __builtin_prefetch(m + ahead);
        __builtin_prefetch(v + ahead);
        __builtin_prefetch(g + ahead);
        if (!std::is_same<O, absent>::value) __builtin_prefetch(o + ahead);
        adam_line(p + i, m + i, v + i, g + i, o + i, c);
    }
    if (i < end) adam_part_of_line(p + i, m + i, v + i, g + i, o + i, c, end - i);
}

template <class G>
TARGET static double squares_span(const void* x, int64_t begin, int64_t end) {
    constexpr int64_t STRIDE = 32;  // rows between two rounds of prefetching
    double lanes[SQUARE_LANES] = {};
    const G* values = static_cast<const G*>(x) + begin;
    const int64_t rows = (end - begin) / SQUARE_LANES, left = (end - begin) % SQUARE_LANES;
    for (int64_t row = 0; row < rows; row += STRIDE) {
        const G* at = values + row * SQUARE_LANES;
        const int64_t now = std::min(STRIDE, rows - row), nbytes = now * SQUARE_LANES * static_cast<int64_t>(sizeof(G));
        const char* ahead = reinterpret_cast<const char*>(at) + SQUARES_PREFETCH;
        for (int64_t byte = 0; byte < nbytes; byte += 64) __builtin_prefetch(ahead + byte);
        add_squares(at, now, lanes);
    }
    for (int64_t k = 0; k < left; k++) {
        const double value = widen(values[rows * SQUARE_LANES + k]);
        lanes[k] += value * value;
    }
    for (int width = SQUARE_LANES / 2; width > 0; width /= 2)
        for (int k = 0; k < width; k++) lanes[k] += lanes[k + width];
    return lanes[0];
}

template <class G>
TARGET static void accumulate_span(float* accumulator, const void* gradient, int64_t begin, int64_t end) {
    const G* g = static_cast<const G*>(gradient);
    int64_t i = begin;
    for (; i + WIDTH <= end; i += WIDTH) store(accumulator + i, add(load(accumulator + i), load(g + i)));
    for (; i < end; i++) accumulator[i] = quieted(accumulator[i] + widen(g[i]));
}

template <class O>
TARGET static void cast_span(const float* x, void* out, int64_t begin, int64_t end) {
    O* o = static_cast<O*>(out);
    int64_t i = begin;
    for (; i + WIDTH <= end; i += WIDTH) store(o + i, load(x + i));
    for (; i < end; i++) o[i] = narrowed<O>(x[i]);
}

static const Kernels kernels = {
    {{adam_span<float, float>, adam_span<float, bf16>, adam_span<float, fp16>, adam_span<float, absent>},
     {adam_span<bf16, float>, adam_span<bf16, bf16>, adam_span<bf16, fp16>, adam_span<bf16, absent>},
     {adam_span<fp16, float>, adam_span<fp16, bf16>, adam_span<fp16, fp16>, adam_span<fp16, absent>}},
    {squares_span<float>, squares_span<bf16>, squares_span<fp16>},
    {accumulate_span<float>, accumulate_span<bf16>, accumulate_span<fp16>},
    {cast_span<float>, cast_span<bf16>, cast_span<fp16>},
};
