/* A thread's columns of a row on the chip, once the whole row's sums are known: the gradient, and before it JSD's mixtures, which
 * leave the logarithm of student/mixture in the teacher's place. */

/* What both types have: exponents relative to the largest element of the row. BF16: divided by their sum, those of HARD, SMOOTH
 * and FORWARD also times the weight, whose sign is in `flip`. */
template <typename X, int KIND> struct xdi_cuda_ring_grade_of : xdi_cuda_ring_sums<X, KIND> {
    typedef xdi_cuda_ring_is<KIND> is;
    typedef xdi_cuda_ring_form<X> form;
    using xdi_cuda_ring_sums<X, KIND>::student;
    using xdi_cuda_ring_sums<X, KIND>::teacher;
    using xdi_cuda_ring_sums<X, KIND>::hard;
    using xdi_cuda_ring_sums<X, KIND>::guarded;
    using xdi_cuda_ring_sums<X, KIND>::mine;
    using xdi_cuda_ring_sums<X, KIND>::largest;
    using xdi_cuda_ring_sums<X, KIND>::sum;
    float weight, hard_weight, teacher_weight; /* what multiplies powers */
    float uniform, slope;                      /* of a smoothed label; see the forms of REVERSE and JSD */
    float top;                                 /* JSD: the logarithm of student/mixture at the row's arg */

    /* The terms of eight columns. The student's at the largest element are relative to that at arg; both terms of arg itself are
     * left to the second kernel, which has their digits. */
    __device__ void add_mixtures(const xdi_cuda_eight &x, const xdi_cuda_eight &power, const xdi_cuda_eight &log, int column,
                                 int part, int row_arg, xdi_cuda_eight *term, xdi_cuda_eight *teacher_term) {
        if (mine && xdi_cuda_max_of(x) == largest) {
            XD_UNROLL
            for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
                const bool likely = column + form::column(part, i) == row_arg;
                if (x.at[i] == largest) term->at[i] = likely ? 0.0f : __fmul_rn(power.at[i], __fsub_rn(log.at[i], top));
                if (likely) teacher_term->at[i] = 0.0f;
            }
        }
        sum[XD_LOSS_STUDENT_MIXTURE] = __fadd_rn(sum[XD_LOSS_STUDENT_MIXTURE], xdi_cuda_sum_of(*term));
        sum[XD_LOSS_TEACHER_MIXTURE] = __fadd_rn(sum[XD_LOSS_TEACHER_MIXTURE], xdi_cuda_sum_of(*teacher_term));
    }
    __device__ void begin_mixtures(const xdi_cuda_ring_row &row, float row_top) {
        top = row_top;
        mine = largest == row.max;
        sum[XD_LOSS_TEACHER_MIXTURE] = sum[XD_LOSS_STUDENT_MIXTURE] = 0.0f;
    }
};

template <typename X, int KIND> struct xdi_cuda_ring_lane;

/* ---- BF16 ---- */

template <int KIND>
struct xdi_cuda_ring_lane<xdi_cuda_bf16, KIND> : xdi_cuda_ring_grade_of<xdi_cuda_bf16, KIND> {
    typedef xdi_cuda_ring_is<KIND> is;
    typedef xdi_cuda_ring_form<xdi_cuda_bf16> form;
    typedef xdi_cuda_ring_grade_of<xdi_cuda_bf16, KIND> base_type;
    using base_type::student;
    using base_type::teacher;
    using base_type::hard;
    using base_type::guarded;
    using base_type::weight;
    using base_type::hard_weight;
    using base_type::uniform;
    using base_type::slope;
    using base_type::sum;
    enum { WEIGHED = is::ALONE || KIND == XDI_CUDA_RING_FORWARD };
    uint32_t flip; /* of a pair's signs */
    float gap;     /* JSD: between the exponents of teacher and student */

    __device__ void settle(const xdi_cuda_ring_call &call, const xdi_cuda_ring_weights &w, const xdi_cuda_ring_row &row) {
        const float own = is::ALONE ? w.hard : w.soft, shift = WEIGHED ? xdi_cuda_log2(fabsf(own)) : 0.0f;
        const float base = xdi_cuda_ring_base(row.max), teacher_base = xdi_cuda_ring_base(row.teacher_max);
        const float log_sum = xdi_cuda_log2(is::ALONE ? row.hard : row.soft), log_teacher = xdi_cuda_log2(row.teacher);
        const bool large = xdi_cuda_ring_large(base) || (is::SOFT && xdi_cuda_ring_large(teacher_base));
        student = xdi_cuda_ring_exponent_of(student.s, base, __fsub_rn(shift, log_sum), large);
        teacher = xdi_cuda_ring_exponent_of(teacher.s, teacher_base, __fsub_rn(shift, log_teacher), large);
        if (is::BOTH && !is::SHARED) hard = xdi_cuda_ring_exponent_of(hard.s, base, -xdi_cuda_log2(row.hard), large);
        flip = WEIGHED && own < 0.0f ? 0x80008000u : 0u;
        guarded = guarded || large || flip != 0u;
        weight = own;
        hard_weight = is::SHARED ? __fadd_rn(w.hard, own) : w.hard;
        uniform = __fmul_rn(fabsf(own), call.uniform);
        gap = __fmaf_rn(__fsub_rn(base, teacher_base), student.s, __fsub_rn(log_sum, log_teacher));
    }
    /* log2 of a ratio, less its mean: REVERSE of student/teacher is (x - y) s + slope, JSD of student/mixture l + slope. */
    __device__ void lean(const xdi_cuda_ring_call &call, const xdi_cuda_ring_weights &w, const xdi_cuda_ring_row &row) {
        if (is::REVERSE) {
            slope = __fmaf_rn(__fsub_rn(row.beside, student.base), student.s, -__fmul_rn(row.mean, call.hard_factor));
            weight = __fmul_rn(w.soft, (float)XDI_CUDA_LN2);
        }
        if (is::JSD) {
            slope = __fmul_rn(-__fadd_rn(row.top, row.mean), call.hard_factor);
            weight = __fmul_rn(__fmul_rn(w.soft, __fsub_rn(1.0f, call.beta)), (float)XDI_CUDA_LN2);
        }
    }
    template <bool GUARDED> __device__ void grade(const unsigned char *at, bool second, xdi_cuda_bf16 *to) const {
        XD_UNROLL
        for (int part = 0; part < form::PARTS; part++) {
            if (part > 0 && !second) break;
            xdi_cuda_words y = {}, out;
            const xdi_cuda_eight x = form::read(at, part, second);
            if (is::SOFT) y = form::words(at + XDI_CUDA_RING_BYTES, part);
            const xdi_cuda_eight g = gradient<GUARDED>(x, y);
            XD_UNROLL
            for (int i = 0; i < 4; i++) {
                out.at[i] = xdi_cuda_bf16_pair(g.at[2 * i], g.at[2 * i + 1]);
                if (WEIGHED && GUARDED) out.at[i] ^= flip;
            }
            xdi_cuda_store16(reinterpret_cast<uint32_t *>(to + form::column(part, 0)), out);
        }
    }
    template <bool GUARDED> __device__ xdi_cuda_eight gradient(const xdi_cuda_eight &x, const xdi_cuda_words &beside) const {
        const xdi_cuda_eight a = student.template of<GUARDED>(x), p = xdi_cuda_ring_powers(a);
        xdi_cuda_eight g = p, y = {};
        if (is::SOFT && !is::JSD) y = xdi_cuda_words_widened(beside);
        if (is::FORWARD) {
            const xdi_cuda_eight q = xdi_cuda_ring_powers(teacher.template of<GUARDED>(y));
            xdi_cuda_eight h = {};
            if (is::BOTH && !is::SHARED) h = xdi_cuda_ring_powers(hard.template of<GUARDED>(x));
            XD_UNROLL
            for (int i = 0; i < XDI_CUDA_EIGHT; i++)
                g.at[i] = is::SHARED ? __fmaf_rn(hard_weight, p.at[i], -__fmul_rn(weight, q.at[i]))
                          : is::BOTH ? __fmaf_rn(hard_weight, h.at[i], __fmul_rn(weight, __fsub_rn(p.at[i], q.at[i])))
                                     : __fsub_rn(p.at[i], q.at[i]);
        }
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            if (is::SMOOTH) g.at[i] = __fsub_rn(p.at[i], uniform);
            if (is::REVERSE) {
                const float log = __fmaf_rn(__fsub_rn(x.at[i], y.at[i]), student.s, slope);
                g.at[i] = GUARDED && !(p.at[i] > 0.0f) ? 0.0f : __fmul_rn(__fmul_rn(p.at[i], weight), log);
            }
            if (is::JSD)
                g.at[i] = __fmul_rn(__fmul_rn(p.at[i], weight), __fadd_rn(xdi_cuda_log_in(beside.at[i / 2], i % 2), slope));
        }
        return g;
    }

    /* ---- JSD ---- */

    /* Of a row: log2 of student/mixture at its arg, relative to which the student's sum is. */
    __device__ float top_of(float beta, const xdi_cuda_ring_row &row) const {
        float student_log, teacher_log;
        const float apart = __fsub_rn(row.beside, xdi_cuda_ring_base(row.max));
        logs(__fmaf_rn(apart, student.s, gap), beta, &student_log, &teacher_log);
        return student_log;
    }
    static __device__ float nats(float log) {
        return __fmul_rn(log, (float)XDI_CUDA_LN2);
    }
    /* log2 of student/mixture and of teacher/mixture, d that of teacher/student. */
    static __device__ void logs(float d, float beta, float *student_log, float *teacher_log) {
        const float rest = __fsub_rn(1.0f, beta), z = xdi_cuda_power(-fabsf(d));
        const bool more = d > 0.0f;
        const float high = -xdi_cuda_log2(__fmaf_rn(more ? rest : beta, z, more ? beta : rest));
        const float low = __fsub_rn(high, fabsf(d));
        *student_log = more ? low : high;
        *teacher_log = more ? high : low;
    }
    template <bool GUARDED> __device__ void mix(unsigned char *at, bool second, int column, float beta, int row_arg) {
        XD_UNROLL
        for (int part = 0; part < form::PARTS; part++) {
            if (part > 0 && !second) break;
            const xdi_cuda_eight x = form::read(at, part, second), y = form::read(at + XDI_CUDA_RING_BYTES, part, second);
            const xdi_cuda_eight log = mixed<GUARDED>(x, y, beta, column, part, row_arg);
            xdi_cuda_words out;
            XD_UNROLL
            for (int i = 0; i < 4; i++) out.at[i] = xdi_cuda_f16_pair(log.at[2 * i], log.at[2 * i + 1]);
            xdi_cuda_put16(at + XDI_CUDA_RING_BYTES + part * (XDI_CUDA_RING_BYTES / 2), out);
        }
    }
    template <bool GUARDED>
    __device__ xdi_cuda_eight mixed(const xdi_cuda_eight &x, const xdi_cuda_eight &y, float beta, int column, int part,
                                    int row_arg) {
        const xdi_cuda_eight a = student.template of<GUARDED>(x), b = teacher.template of<GUARDED>(y);
        const float rest = __fsub_rn(1.0f, beta);
        xdi_cuda_eight log, term, beside_term, power;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            const float apart = GUARDED && y.at[i] == x.at[i] ? 0.0f : __fsub_rn(y.at[i], x.at[i]);
            const float d = __fmaf_rn(apart, student.s, gap), z = xdi_cuda_power(-fabsf(d));
            const bool more = d > 0.0f; /* of the teacher */
            const float large = xdi_cuda_power(fmaxf(a.at[i], b.at[i])), small = __fmul_rn(large, z);
            const float high = -xdi_cuda_log2(__fmaf_rn(more ? rest : beta, z, more ? beta : rest));
            const float low = __fsub_rn(high, fabsf(d)); /* of the smaller over the mixture */
            const float large_term = __fmul_rn(large, high);
            const float small_term = GUARDED && !(small > 0.0f) ? 0.0f : __fmul_rn(small, low);
            log.at[i] = more ? low : high;
            power.at[i] = more ? small : large;
            term.at[i] = more ? small_term : large_term;
            beside_term.at[i] = more ? large_term : small_term;
        }
        this->add_mixtures(x, power, log, column, part, row_arg, &term, &beside_term);
        return log;
    }
};

/* ---- F32 ---- */

template <int KIND> struct xdi_cuda_ring_lane<float, KIND> : xdi_cuda_ring_grade_of<float, KIND> {
    typedef xdi_cuda_ring_is<KIND> is;
    typedef xdi_cuda_ring_form<float> form;
    typedef xdi_cuda_ring_grade_of<float, KIND> base_type;
    using base_type::student;
    using base_type::teacher;
    using base_type::hard;
    using base_type::weight;
    using base_type::hard_weight;
    using base_type::teacher_weight;
    using base_type::uniform;
    using base_type::slope;
    using base_type::sum;
    float beside, log_gap, per_tau; /* log_gap: ln of the student's sum less that of the teacher's */

    __device__ void settle(const xdi_cuda_ring_call &call, const xdi_cuda_ring_weights &w, const xdi_cuda_ring_row &row) {
        const float base = xdi_cuda_ring_base(row.max), teacher_base = xdi_cuda_ring_base(row.teacher_max);
        student = xdi_cuda_ring_exponent_of(student.s, base, 0.0f, true);
        teacher = xdi_cuda_ring_exponent_of(teacher.s, teacher_base, 0.0f, true);
        hard = xdi_cuda_ring_exponent_of(hard.s, base, 0.0f, true);
        hard_weight = is::HARD ? __fdiv_rn(w.hard, row.hard) : 0.0f;
        weight = is::SOFT ? __fdiv_rn(w.soft, row.soft) : 0.0f;
        teacher_weight = is::SOFT ? __fdiv_rn(w.soft, row.teacher) : 0.0f;
        if (is::SHARED) weight = __fadd_rn(weight, hard_weight);
        uniform = __fmul_rn(w.hard, call.uniform);
        beside = row.beside;
        per_tau = call.per_tau;
        if (is::JSD) log_gap = logf(__fdiv_rn(row.soft, row.teacher));
        if (is::JSD) weight = __fdiv_rn(1.0f, row.soft); /* the mixtures are of probabilities */
        if (is::JSD) teacher_weight = __fdiv_rn(1.0f, row.teacher);
    }
    /* The mean of a logarithm, REVERSE of student/teacher, JSD of student/mixture. */
    __device__ void lean(const xdi_cuda_ring_call &call, const xdi_cuda_ring_weights &w, const xdi_cuda_ring_row &row) {
        if (is::REVERSE) slope = row.mean;
        if (is::JSD) slope = __fadd_rn(row.top, row.mean);
        if (is::JSD) weight = __fdiv_rn(__fmul_rn(w.soft, __fsub_rn(1.0f, call.beta)), row.soft);
    }
    template <bool GUARDED> __device__ void grade(const unsigned char *at, bool second, float *to) const {
        xdi_cuda_eight y = {};
        const xdi_cuda_eight x = form::read(at, 0, second);
        if (is::SOFT) y = form::read(at + XDI_CUDA_RING_BYTES, 0, second);
        const xdi_cuda_eight g = gradient(x, y);
        xdi_cuda_store16(to, xdi_cuda_rounded<float>(g.at));
        if (second) xdi_cuda_store16(to + form::column(0, 4), xdi_cuda_rounded<float>(g.at + 4));
    }
    __device__ xdi_cuda_eight gradient(const xdi_cuda_eight &x, const xdi_cuda_eight &y) const {
        const xdi_cuda_eight p = xdi_cuda_ring_powers(student.template of<true>(x));
        xdi_cuda_eight g, q = {}, h = {};
        if (is::FORWARD) q = xdi_cuda_ring_powers(teacher.template of<true>(y));
        if (is::BOTH && !is::SHARED) h = xdi_cuda_ring_powers(hard.template of<true>(x));
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            const float scaled = __fmul_rn(p.at[i], is::ALONE ? hard_weight : weight);
            g.at[i] = scaled;
            if (is::SMOOTH) g.at[i] = __fsub_rn(scaled, uniform);
            if (is::FORWARD) g.at[i] = __fmaf_rn(-q.at[i], teacher_weight, scaled);
            if (is::BOTH && !is::SHARED) g.at[i] = __fmaf_rn(h.at[i], hard_weight, g.at[i]);
            if (is::REVERSE) {
                const float apart = __fsub_rn(__fsub_rn(x.at[i], student.base), __fsub_rn(y.at[i], beside));
                g.at[i] = p.at[i] > 0.0f ? __fmul_rn(scaled, __fmaf_rn(apart, per_tau, -slope)) : 0.0f;
            }
            if (is::JSD) g.at[i] = p.at[i] > 0.0f ? __fmul_rn(scaled, __fsub_rn(y.at[i], slope)) : 0.0f;
        }
        return g;
    }

    /* ---- JSD, in nats ---- */

    __device__ float ratio_of(float x, float y) const {
        return __fmaf_rn(__fsub_rn(__fsub_rn(y, teacher.base), __fsub_rn(x, student.base)), per_tau, log_gap);
    }
    __device__ float top_of(float beta, const xdi_cuda_ring_row &row) const {
        float student_log, teacher_log;
        xdi_cuda_loss_log_ratios_of(ratio_of(student.base, row.beside), beta, &student_log, &teacher_log);
        return student_log;
    }
    static __device__ float nats(float log) {
        return log;
    }
    template <bool GUARDED> __device__ void mix(unsigned char *at, bool second, int column, float beta, int row_arg) {
        const xdi_cuda_eight x = form::read(at, 0, second), y = form::read(at + XDI_CUDA_RING_BYTES, 0, second);
        const xdi_cuda_eight p = xdi_cuda_ring_powers(student.template of<true>(x));
        const xdi_cuda_eight q = xdi_cuda_ring_powers(teacher.template of<true>(y));
        xdi_cuda_eight log, term, power, beside_term;
        XD_UNROLL
        for (int i = 0; i < XDI_CUDA_EIGHT; i++) {
            float teacher_log;
            xdi_cuda_loss_log_ratios_of(ratio_of(x.at[i], y.at[i]), beta, &log.at[i], &teacher_log);
            power.at[i] = __fmul_rn(p.at[i], weight);
            term.at[i] = p.at[i] > 0.0f ? __fmul_rn(power.at[i], log.at[i]) : 0.0f;
            beside_term.at[i] = q.at[i] > 0.0f ? __fmul_rn(__fmul_rn(q.at[i], teacher_weight), teacher_log) : 0.0f;
        }
        this->add_mixtures(x, power, log, column, 0, row_arg, &term, &beside_term);
        xdi_cuda_put16(at + XDI_CUDA_RING_BYTES, xdi_cuda_rounded<float>(log.at));
        if (second) xdi_cuda_put16(at + XDI_CUDA_RING_BYTES * 3 / 2, xdi_cuda_rounded<float>(log.at + 4));
    }
};
