/* Events by sys.settrace, in C: until CPython 3.11. One trace function for a thread, and events for each frame. */

#define find_depths(decoded, code, units) ((void)(units), 0) /* the frame knows */

#include "events.h"

static int on_event(PyObject *unused, PyFrameObject *object, int what, PyObject *arg)
{
    (void)unused;
    (void)arg;
    if (!is_looking()) {
        return 0;
    }
    /* An exception may be on its way: events of its unwinding must not lose it. */
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    _PyInterpreterFrame *frame = object->f_frame;
    int done = 0;
    if (what == PyTrace_CALL) {
        done = on_frame(frame);
        object->f_trace_lines = 0;
        object->f_trace_opcodes = done > 0;
    }
    else if (what == PyTrace_RETURN) {
        on_leave(frame);
    }
    else if (what == PyTrace_EXCEPTION) {
        on_raise(frame);
    }
    else if (what == PyTrace_OPCODE) {
        done = on_unit(frame, frame->prev_instr - _PyCode_CODE(frame->f_code));
    }
    finish_event(done);
    PyErr_Restore(type, value, traceback);
    return 0;
}

static int begin_events(void)
{
    PyEval_SetTrace(on_event, NULL);
    return 0;
}

static void end_events(void) { PyEval_SetTrace(NULL, NULL); }

/* Each frame asks for its own. */
static int want_instructions(PyCodeObject *code)
{
    (void)code;
    return 0;
}
