/* CPython 3.11: sys.settrace, and a frame that knows the top of its stack. See [Note: versions]. */

#define Py_BUILD_CORE 1
#include <internal/pycore_frame.h>

#include "opcodes.h"

#define EVENT_AT_PREFIX 1 /* EXTENDED_ARG goes on to its instruction without another event */

static inline PyCodeObject *code_of(_PyInterpreterFrame *frame) { return frame->f_code; }
static inline PyObject *function_of(_PyInterpreterFrame *frame) { return (PyObject *)frame->f_func; }

/* The interpreter saves it before it traces. */
static inline PyObject **top_of(_PyInterpreterFrame *frame, const Operation *operation)
{
    (void)operation;
    return frame->localsplus + frame->stacktop;
}

#include "calls_before_313.h"

static Operation operation_of(int opcode, int oparg)
{
    switch (opcode) {
    case LOAD_GLOBAL: DOES(DO_READ_GLOBAL, oparg >> 1);
    case LOAD_CLASSDEREF: DOES(DO_READ_CELL, oparg);
    case LOAD_ATTR: DOES(DO_READ_ATTRIBUTE, oparg);
    case LOAD_METHOD: DOES(DO_READ_METHOD, oparg);
    case JUMP_IF_FALSE_OR_POP:
    case JUMP_IF_TRUE_OR_POP:
    case POP_JUMP_FORWARD_IF_FALSE:
    case POP_JUMP_FORWARD_IF_TRUE:
    case POP_JUMP_BACKWARD_IF_FALSE:
    case POP_JUMP_BACKWARD_IF_TRUE: DOES(DO_TRUTH, 0);
    case FORMAT_VALUE: DOES(DO_LOOK_AT, (oparg & 4) ? 2 : 1);
    case LIST_TO_TUPLE: DOES(DO_LOOK_INTO, 0);
    default: return common_operation_of(opcode, oparg);
    }
}

#include "events_settrace.h"
