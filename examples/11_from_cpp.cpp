// C++11 and later: distils a table of logits, with unique_ptr as the owner of every object.
//
// Value-initialise every desc, then set what you need. No standard gives a warning:
//
//   xd_loss_desc desc = {};
//
//   c++ -std=c++11 -O2 examples/11_from_cpp.cpp -o from_cpp -lm -lpthread

#define XDISTILL_IMPLEMENTATION
#include "../xdistill.h"

#include <cmath>
#include <cstdio>
#include <memory>
#include <vector>

template <typename T> struct destroyer {
    void (*destroy)(T *);
    void operator()(T *object) const { destroy(object); }
};
template <typename T> using owned = std::unique_ptr<T, destroyer<T>>;

static const int64_t positions = 8, vocabulary = 50;

static xd_result distil(xd_ctx *ctx, double *first, double *last) {
    xd_vocab *columns = nullptr;
    xd_vocab_desc split = {};
    split.size = vocabulary;
    XD_TRY(xd_vocab_create(ctx, &split, &columns));
    const owned<xd_vocab> vocab(columns, { xd_vocab_destroy });

    std::vector<float> student(positions * vocabulary);
    std::vector<float> teacher(student.size());
    std::vector<float> gradient(student.size());
    for (size_t i = 0; i < teacher.size(); i++)
        teacher[i] = 3.0f * std::cos(static_cast<float>(i));

    xd_param param = {};
    param.name = "logits";
    param.value = student.data();
    param.gradient = gradient.data();
    param.dtype = XD_DTYPE_F32;
    param.count = static_cast<int64_t>(student.size());

    xd_optimizer_desc adamw = xd_adamw_defaults(&param, 1);
    adamw.learning_rate = 0.1;
    xd_optimizer *created = nullptr;
    XD_TRY(xd_optimizer_create(ctx, &adamw, &created));
    const owned<xd_optimizer> optimizer(created, { xd_optimizer_destroy });

    xd_loss_desc loss = {};
    loss.student = { student.data(), XD_DTYPE_F32, positions, vocabulary, 0 };
    loss.teacher = { teacher.data(), XD_DTYPE_F32, positions, vocabulary, 0 };
    loss.common.gradient = { gradient.data(), XD_DTYPE_F32, positions, vocabulary, 0 };
    loss.vocab = vocab.get();
    loss.soft_weight = 1.0;

    xd_loss_values values = {};
    for (int step = 0; step < 200; step++) {
        XD_TRY(xd_loss(ctx, &loss, &values));
        XD_TRY(xd_optimizer_step(optimizer.get(), nullptr, nullptr));
        if (step == 0) *first = values.loss;
    }
    *last = values.loss;
    return XD_OK;
}

int main() {
    xd_ctx *created = nullptr;
    if (xd_ctx_create(nullptr, &created) != XD_OK) return 1;
    const owned<xd_ctx> ctx(created, { xd_ctx_destroy });

    double first = 0.0, last = 0.0;
    if (distil(ctx.get(), &first, &last) != XD_OK) {
        std::fprintf(stderr, "%s\n", xd_last_error(ctx.get())->message);
        return 1;
    }
    std::printf("KL to the teacher: %.4f nats, after 200 steps %.4f\n", first, last);
    return last < 0.05 * first ? 0 : 1;
}
