/* CPython 3.12: sys.monitoring; the top of the stack is in a register of the interpreter's. See [Note: versions]. */

#define Py_BUILD_CORE 1
#include <internal/pycore_frame.h>
#include <internal/pycore_intrinsics.h>

#include "opcodes.h"

#define EVENT_AT_PREFIX 0 /* EXTENDED_ARG and its instruction have an event each */

static inline _PyInterpreterFrame *current_frame(PyThreadState *thread) { return thread->cframe->current_frame; }
static inline PyCodeObject *code_of(_PyInterpreterFrame *frame) { return frame->f_code; }
static inline PyObject *function_of(_PyInterpreterFrame *frame) { return frame->f_funcobj; }

static inline PyObject **top_of(_PyInterpreterFrame *frame, const Operation *operation)
{
    return frame->localsplus + frame->f_code->co_nlocalsplus + operation->depth;
}

#include "calls_before_313.h"

static Operation operation_of(int opcode, int oparg)
{
    switch (opcode) {
    case LOAD_GLOBAL: DOES(DO_READ_GLOBAL, oparg >> 1);
    case LOAD_FROM_DICT_OR_GLOBALS: DOES(DO_READ_NAME, oparg);
    case LOAD_FROM_DICT_OR_DEREF: DOES(DO_READ_CELL, oparg);
    case LOAD_ATTR: DOES((oparg & 1) ? DO_READ_METHOD : DO_READ_ATTRIBUTE, oparg >> 1);
    case LOAD_SUPER_ATTR: DOES((oparg & 1) ? DO_READ_SUPER_METHOD : DO_READ_SUPER, oparg >> 2);
    case BINARY_SLICE: DOES(DO_READ_SLICE, 0);
    case STORE_SLICE: DOES(DO_WRITE_SLICE, 0);
    case POP_JUMP_IF_FALSE:
    case POP_JUMP_IF_TRUE: DOES(DO_TRUTH, 0);
    case FORMAT_VALUE: DOES(DO_LOOK_AT, (oparg & 4) ? 2 : 1);
    case CALL_INTRINSIC_1: DOES(oparg == INTRINSIC_LIST_TO_TUPLE ? DO_LOOK_INTO : DO_NOTHING, 0);
    default: return common_operation_of(opcode, oparg);
    }
}

#include "stack_depths.h"
#include "events_monitoring.h"
