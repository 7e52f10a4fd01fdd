/* A training step of wrapped models over the emulated NCCL as one graph. */
#include "cuda_test.h"
#include "wrap_calls.h"

#if defined(XD_EMU)
#    include "cuda_nccl_test.h"

enum { WEIGHT = 700, STEPS = 4 };

enum Wrapper { DDP, SHARDED_OPTIMIZER, FSDP, WRAPPERS };
static Wrapper wrapper;
static bool is_recorded;

/* A student of one weight under a wrapper, and what its step needs. */
struct Student {
    Member *m;
    Buffer data;
    Device norm;
    xd_model *model = nullptr;
    xd_parallel *parallel = nullptr;
    xd_optimizer *optimizer = nullptr;
    xd_param param = {};
    cudaGraphExec_t replay = nullptr;

    explicit Student(Member *member)
        : m(member), data(m, elements(XD_DTYPE_F32, WEIGHT, &m->random, false)),
          norm(std::vector<unsigned char>(sizeof(xd_gradient_norm))) {
        const xd_model_desc desc = {};
        const xd_init normal = { XD_INIT_NORMAL, 0.0f, 1.0f };
        xd_weight_desc weight = {};
        xd_ddp_desc ddp = {};
        xd_fsdp_desc fsdp = {};
        int64_t count = 0;
        weight.name = "w";
        weight.dtype = XD_DTYPE_F32;
        weight.ndim = 1;
        weight.shape[0] = WEIGHT;
        weight.init = normal;
        ddp.sharded_optimizer = wrapper == SHARDED_OPTIMIZER;
        CHECK(xd_model_create(m->ctx, &desc, &model) == XD_OK);
        CHECK(xd_weight_add(xd_model_root(model), &weight, nullptr) == XD_OK && xd_model_seal(model) == XD_OK);
        CHECK((wrapper == FSDP ? wrap_over_fsdp(model, m->comm, &fsdp, &parallel)
                               : wrap_over_ddp(model, m->comm, &ddp, &parallel)) == XD_OK);
        CHECK(xd_parallel_params(parallel, 1, &param, &count) == XD_OK && count == 1);
        const xd_optimizer_desc adam = xd_adam_defaults(&param, 1);
        CHECK(xd_optimizer_create(m->ctx, &adam, &optimizer) == XD_OK);
    }
    ~Student() {
        if (replay) CHECK(cudaGraphExecDestroy(replay) == cudaSuccess);
        xd_optimizer_destroy(optimizer);
        xd_parallel_destroy(parallel);
        xd_model_destroy(model);
    }
    Student(const Student &) = delete;
    /* The gradient of an odd rank is its weight, that of another its data. */
    xd_result step() {
        const xd_pass pass = { XD_PASS_BACKWARD, 0, false };
        xd_block_view view;
        xd_gradient_norm_desc of = {};
        xd_optimizer_step_desc clipped = {};
        xd_gradient_norm *found = norm.at<xd_gradient_norm>();
        XD_TRY(xd_block_begin(xd_model_root(model), pass, &view));
        CHECK(cudaMemcpyAsync(view.gradients[0], m->rank % 2 ? view.values[0] : data.at(), WEIGHT * sizeof(float),
                              cudaMemcpyDeviceToDevice, m->stream) == cudaSuccess);
        XD_TRY(xd_block_end(xd_model_root(model)));
        XD_TRY(xd_parallel_reduce(parallel));
        of.params = &param;
        of.param_count = 1;
        of.max_norm = 0.5;
        XD_TRY(xd_gradient_norm_compute(m->ctx, m->comm, &of, found));
        clipped.gradient_scale = &found->coefficient;
        XD_TRY(xd_optimizer_step(optimizer, &clipped, nullptr));
        return xd_parallel_publish(parallel);
    }
    xd_result record() {
        cudaGraph_t graph = nullptr;
        CHECK(cudaStreamBeginCapture(m->stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
        const xd_result result = step();
        CHECK(cudaStreamEndCapture(m->stream, &graph) == cudaSuccess && graph);
        CHECK(cudaGraphInstantiate(&replay, graph, 0) == cudaSuccess);
        CHECK(cudaGraphDestroy(graph) == cudaSuccess);
        return result;
    }
    void launch() {
        CHECK(cudaGraphLaunch(replay, m->stream) == cudaSuccess);
    }
    void keep() {
        std::vector<unsigned char> values((size_t)param.count * sizeof(float));
        CHECK(xd_read(m->ctx, values.data(), param.value, values.size()) == XD_OK);
        std::vector<unsigned char> &log = m->world->log[m->rank];
        log.insert(log.end(), values.begin(), values.end());
    }
};

static void train(Member *m) {
    Student student(m);
    CHECK_EQ_INT(student.step(), XD_OK);
    if (is_recorded) {
        const int before = rounds;
        CHECK_EQ_STR(student.record() == XD_OK ? "" : m->message(), "");
        for (int k = 1; k < STEPS; k++) student.launch();
        CHECK_EQ_INT(rounds - before, 0);
        student.keep();
        student.launch(); /* and a step that is called afterwards */
        CHECK_EQ_INT(student.step(), XD_OK);
    } else {
        for (int k = 1; k < STEPS; k++) CHECK_EQ_INT(student.step(), XD_OK);
        student.keep();
        CHECK(student.step() == XD_OK && student.step() == XD_OK);
    }
    student.keep();
    CHECK(xd_parallel_publish(student.parallel) == XD_OK);
}

XD_TEST(a_graph_of_a_step_gives_the_weights_of_the_steps) {
    for (int mode = XD_REDUCTION_DETERMINISTIC; mode <= XD_REDUCTION_INVARIANT; mode++) {
        for (int kind = 0; kind < WRAPPERS; kind++) {
            World called, replayed;
            wrapper = (Wrapper)kind;
            called.reduction = replayed.reduction = (xd_reduction)mode;
            called.desc.compare = replayed.desc.compare = 2;
            is_recorded = false;
            join_and_run(&called, train);
            is_recorded = true;
            join_and_run(&replayed, train);
            CHECK(!called.log[0].empty());
            for (int r = 0; r < RANKS; r++) CHECK_SAME(called.log[r], replayed.log[r]);
        }
    }
}

/* A step that this rank cannot make is an error of its own: nothing is lost, and the next step outside of the graph goes on. */
static void refuse(Member *m) {
    Student student(m);
    CHECK_EQ_INT(student.step(), XD_OK);
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamBeginCapture(m->stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    if (m->rank == 1) {
        CHECK_EQ_INT(xd_parallel_reduce(student.parallel), XD_ERROR_STATE);
        CHECK(m->says("has had backward passes of 0 micro-batches, not of 1"));
    }
    CHECK(cudaStreamEndCapture(m->stream, &graph) == cudaSuccess && cudaGraphDestroy(graph) == cudaSuccess);
    CHECK_EQ_INT(student.step(), XD_OK);
}

XD_TEST(an_error_in_a_capture_is_of_one_rank_alone) {
    World world;
    wrapper = DDP;
    world.desc.compare = 2;
    join_and_run(&world, refuse);
}

/* Rank 1's copy changes between two launches: every call outside of the graph compares. */
static void change_one(Member *m) {
    Student student(m);
    CHECK(student.step() == XD_OK && student.record() == XD_OK);
    for (int k = 0; k < 2; k++) {
        student.launch();
        CHECK_EQ_INT(xd_parallel_publish(student.parallel), XD_OK);
    }
    const float wrong = 3.0f;
    if (m->rank == 1)
        CHECK(cudaMemcpyAsync(student.param.value, &wrong, sizeof wrong, cudaMemcpyHostToDevice, m->stream) ==
              cudaSuccess);
    student.launch();
    CHECK_EQ_INT(xd_parallel_publish(student.parallel), XD_ERROR_MISMATCH);
    CHECK(m->says("weight \"w\" has other values on rank 1 than on rank 0"));
}

XD_TEST(copies_are_compared_outside_of_a_graph) {
    World world;
    wrapper = DDP;
    world.desc.compare = 2;
    join_and_run(&world, change_one);
}

/* Rank 1 no longer launches: the others learn of it in the next call that waits with a deadline. */
static void stop_one(Member *m) {
    Student student(m);
    CHECK(student.step() == XD_OK && student.record() == XD_OK);
    student.launch();
    CHECK_EQ_INT(xd_parallel_publish(student.parallel), XD_OK);
    m->world->meet(); /* no hour passes while others still publish */
    if (m->rank == 1) return m->world->pass();
    student.launch();
    CHECK_EQ_INT(xd_parallel_publish(student.parallel), XD_ERROR_TIMEOUT);
    CHECK(m->says("this rank's last call in it is agree "));
    CHECK(cudaStreamSynchronize(m->stream) == cudaSuccess); /* what waited has ended */
    CHECK_EQ_INT(xd_parallel_publish(student.parallel), XD_ERROR_PEER);
    m->world->finished++;
}

XD_TEST(a_rank_that_launches_no_more_ends_in_timeouts_of_publish) {
    World world;
    wrapper = FSDP;
    world.desc.compare = 2;
    join_and_run(&world, stop_one);
    emu_take_reports(nullptr, 0);
}
#else
XD_TEST(wrapped_steps_over_nccl_are_graphs) {
    SKIP("NCCL wants a process and a GPU for every rank");
}
#endif

XD_CUDA_TEST_MAIN()
