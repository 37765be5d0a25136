/* Records one command buffer of a plan: copies, the dispatches of one compute pass, copies.

   The same as `_record` in backend/runtime/replay.py, which says what the tables hold, without an interpreter between
   the calls. It is linked to nothing: the functions of the WebGPU library come as a table of their addresses. */
#include <stddef.h>
#include <stdint.h>

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
} Functions;

typedef struct {
    Handle pipeline, group;
    uint32_t x, y, z, unused;
} Step;

typedef struct {
    Handle from, to;
    uint64_t from_offset, to_offset, bytes;
} Copy;

static void copy_all(const Functions *f, Handle encoder, const Copy *copies, size_t count) {
    for (size_t i = 0; i < count; i++)
        f->copy(encoder, copies[i].from, copies[i].from_offset, copies[i].to, copies[i].to_offset, copies[i].bytes);
}

/* Returns the command buffer, which is the caller's to submit and release. */
Handle zoo_record(const Functions *f, Handle device, const Step *steps, size_t step_count, const Copy *before,
                  size_t before_count, const Copy *after, size_t after_count) {
    Handle encoder = f->create_encoder(device, NULL);
    copy_all(f, encoder, before, before_count);
    if (step_count) {
        Handle pass = f->begin_pass(encoder, NULL);
        Handle pipeline = NULL;
        for (size_t i = 0; i < step_count; i++) {
            if (steps[i].pipeline != pipeline) {
                pipeline = steps[i].pipeline;
                f->set_pipeline(pass, pipeline);
            }
            f->set_group(pass, 0, steps[i].group, 0, NULL);
            f->dispatch(pass, steps[i].x, steps[i].y, steps[i].z);
        }
        f->end_pass(pass);
        f->release_pass(pass);
    }
    copy_all(f, encoder, after, after_count);
    Handle commands = f->finish(encoder, NULL);
    f->release_encoder(encoder);
    return commands;
}
