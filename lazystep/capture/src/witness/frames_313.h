/* CPython 3.13: as 3.12, with other instructions and callables below `self`. See [Note: versions]. */

#define Py_BUILD_CORE 1
#include <internal/pycore_frame.h>
#include <internal/pycore_intrinsics.h>

#include "opcodes.h"

#define EVENT_AT_PREFIX 0 /* EXTENDED_ARG and its instruction have an event each */

static inline _PyInterpreterFrame *current_frame(PyThreadState *thread) { return thread->current_frame; }
static inline PyCodeObject *code_of(_PyInterpreterFrame *frame) { return (PyCodeObject *)frame->f_executable; }
static inline PyObject *function_of(_PyInterpreterFrame *frame) { return frame->f_funcobj; }

static inline PyObject **top_of(_PyInterpreterFrame *frame, const Operation *operation)
{
    return frame->localsplus + code_of(frame)->co_nlocalsplus + operation->depth;
}

/* The stack is: callable, self or NULL, arguments. */
static inline PyObject **callable_of(PyObject **top, int num_args) { return &top[-(num_args + 2)]; }

static inline PyObject **arguments_of(PyObject **top, int num_args)
{
    return top[-(num_args + 1)] != NULL ? &top[-(num_args + 1)] : &top[-num_args];
}

/* For `f(*a, **k)`: NULL is between the callable and the arguments. */
#define EXPANDED_CALLABLE_BELOW 2

#define COMPARE_MAKES_BOOL 16 /* a bit of COMPARE_OP */

static Operation operation_of(int opcode, int oparg)
{
    switch (opcode) {
    /* What is going to be called has NULL or `self` above it. */
    case LOAD_GLOBAL: return (Operation){DO_READ_GLOBAL, 1 + (oparg & 1), -1, oparg >> 1};
    case LOAD_ATTR:
        return (Operation){(oparg & 1) ? DO_READ_METHOD : DO_READ_ATTRIBUTE, 1 + (oparg & 1), -1, oparg >> 1};
    case LOAD_SUPER_ATTR:
        return (Operation){
            (oparg & 1) ? DO_READ_SUPER_METHOD : DO_READ_SUPER, 1 + (oparg & 1), -1, oparg >> 2};
    case LOAD_FROM_DICT_OR_GLOBALS: DOES(DO_READ_NAME, oparg);
    case LOAD_FROM_DICT_OR_DEREF: DOES(DO_READ_CELL, oparg);
    case BINARY_SLICE: DOES(DO_READ_SLICE, 0);
    case STORE_SLICE: DOES(DO_WRITE_SLICE, 0);
    case COMPARE_OP: DOES((oparg & COMPARE_MAKES_BOOL) ? DO_COMPARE_TRUTH : DO_BINARY, 0);
    case TO_BOOL: DOES(DO_TRUTH, 0); /* jumps and `not` are given a bool */
    case CONVERT_VALUE:
    case FORMAT_SIMPLE: DOES(DO_LOOK_AT, 1);
    case FORMAT_WITH_SPEC: DOES(DO_LOOK_AT, 2);
    case CALL_INTRINSIC_1: DOES(oparg == INTRINSIC_LIST_TO_TUPLE ? DO_LOOK_INTO : DO_NOTHING, 0);
    case CALL_KW: DOES(DO_CALL_KEYWORDS, oparg);
    default: return common_operation_of(opcode, oparg);
    }
}

#include "stack_depths.h"
#include "events_monitoring.h"
