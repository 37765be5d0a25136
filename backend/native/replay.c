/* Records and submits the command buffers of a plan: copies, dispatches in passes of one part each, copies.

   The same as `_replay` in backend/runtime/replay.py, which says what the tables hold, without an interpreter between
   the calls, and with threads beside this one that record later parts while the GPU works on earlier ones. It is linked
   to nothing else: the functions of the WebGPU library come as a table of their addresses. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define MOST_THREADS 8

typedef void *Handle;

typedef struct {
    Handle (*create_encoder)(Handle device, const void *descriptor);
    Handle (*begin_pass)(Handle encoder, const void *descriptor);
    void (*set_pipeline)(Handle pass, Handle pipeline);
    void (*set_group)(Handle pass, uint32_t index, Handle group, size_t offset_count, const uint32_t *offsets);
    void (*dispatch)(Handle pass, uint32_t x, uint32_t y, uint32_t z);
    void (*end_pass)(Handle pass);
    void (*release_pass)(Handle pass);
    void (*copy)(Handle encoder, Handle from, uint64_t from_offset, Handle to, uint64_t to_offset, uint64_t bytes);
    Handle (*finish)(Handle encoder, const void *descriptor);
    void (*release_encoder)(Handle encoder);
    uint64_t (*submit)(Handle queue, size_t count, const Handle *commands);
    void (*release_commands)(Handle commands);
} Functions;

typedef struct {
    Handle pipeline, group;
    uint32_t x, y, z, unused;
} Step;

typedef struct {
    Handle from, to;
    uint64_t from_offset, to_offset, bytes;
} Copy;

typedef struct {
    const Functions *f;
    Handle device;
    const Step *steps;
    const size_t *ends; /* of the parts, as numbers of steps */
    size_t part_count;
    const Copy *before, *after;
    size_t before_count, after_count;
    atomic_size_t next;       /* part that nobody has taken yet */
    _Atomic(Handle) *commands; /* of each part, once it is recorded */
} Job;

static void copy_all(const Functions *f, Handle encoder, const Copy *copies, size_t count) {
    for (size_t i = 0; i < count; i++)
        f->copy(encoder, copies[i].from, copies[i].from_offset, copies[i].to, copies[i].to_offset, copies[i].bytes);
}

static Handle record(const Job *job, size_t part) {
    const Functions *f = job->f;
    size_t first = part ? job->ends[part - 1] : 0, end = job->ends[part];
    Handle encoder = f->create_encoder(job->device, NULL);
    if (part == 0)
        copy_all(f, encoder, job->before, job->before_count);
    if (first < end) {
        Handle pass = f->begin_pass(encoder, NULL);
        Handle pipeline = NULL;
        for (const Step *step = job->steps + first; step < job->steps + end; step++) {
            if (step->pipeline != pipeline) {
                pipeline = step->pipeline;
                f->set_pipeline(pass, pipeline);
            }
            f->set_group(pass, 0, step->group, 0, NULL);
            f->dispatch(pass, step->x, step->y, step->z);
        }
        f->end_pass(pass);
        f->release_pass(pass);
    }
    if (part == job->part_count - 1)
        copy_all(f, encoder, job->after, job->after_count);
    Handle commands = f->finish(encoder, NULL);
    f->release_encoder(encoder);
    return commands;
}

static void *record_parts(void *argument) {
    Job *job = argument;
    for (;;) {
        size_t part = atomic_fetch_add(&job->next, 1);
        if (part >= job->part_count)
            return NULL;
        atomic_store(&job->commands[part], record(job, part));
    }
}

/* Returns the number of the last submission. `thread_count`: how many may record beside this one. `refused` is set by
   whoever the library tells of errors, while it is told: nothing is submitted from then on, which would end the process. */
uint64_t zoo_replay(const Functions *f, Handle device, Handle queue, const Step *steps, const size_t *ends,
                    size_t part_count, const Copy *before, size_t before_count, const Copy *after, size_t after_count,
                    size_t thread_count, const atomic_int *refused) {
    Job job = {f, device, steps, ends, part_count, before, after, before_count, after_count, 1, NULL};
    pthread_t threads[MOST_THREADS];
    size_t running = 0;
    uint64_t submission = 0;
    if (thread_count > MOST_THREADS)
        thread_count = MOST_THREADS;
    if (part_count > 1 && thread_count)
        job.commands = calloc(part_count, sizeof *job.commands);
    while (job.commands && running < thread_count && running < part_count - 1 &&
           !pthread_create(&threads[running], NULL, record_parts, &job))
        running++;
    for (size_t part = 0; part < part_count && !atomic_load(refused); part++) {
        Handle commands;
        if (part == 0 || !running)
            commands = record(&job, part);
        else
            while (!(commands = atomic_exchange(&job.commands[part], NULL)))
                sched_yield();
        if (!atomic_load(refused))
            submission = f->submit(queue, 1, &commands);
        f->release_commands(commands);
    }
    for (size_t i = 0; i < running; i++)
        pthread_join(threads[i], NULL);
    for (size_t part = 1; running && part < part_count; part++) {
        Handle left = atomic_load(&job.commands[part]);
        if (left)
            f->release_commands(left);
    }
    free(job.commands);
    return submission;
}
