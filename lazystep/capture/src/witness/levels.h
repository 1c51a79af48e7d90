/* The levels of the call: what is done when a frame is entered, left, or about to run an instruction. */

#ifndef LAZYSTEP_LEVELS_H
#define LAZYSTEP_LEVELS_H

#include "code.h"
#include "events.h"
#include "instructions.h"

/* A frame is entered or resumed. Returns 1 if its instructions are looked at, otherwise 0, or -1. */
static int on_frame(_PyInterpreterFrame *frame)
{
    Py_ssize_t number = number_of(code_of(frame), frame->f_globals);
    if (number < 0) {
        return -1;
    }
    int kind = state.codes[number].kind;
    if (state.num_levels == state.max_levels) {
        size_t size = state.max_levels ? state.max_levels * 2 : 256;
        Level *levels = PyMem_RawRealloc(state.levels, size * sizeof(Level));
        if (levels == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        state.levels = levels;
        state.max_levels = size;
    }
    int is_covered = state.num_levels && state.levels[state.num_levels - 1].code_kind == COVER;
    if (is_covered && kind != USERS) {
        kind = COVER;
    }
    state.levels[state.num_levels++] = (Level){
        .frame = frame,
        .code = (size_t)number,
        .code_kind = kind,
        .pending = NOTHING,
        .distance = 1,
    };
    state.num_ops += kind == OPS;
    int is_looked_at = kind == USERS || kind == FOREIGN;
    if (is_looked_at && state.codes[number].decoded == NULL) {
        Decoded *decoded = decode(code_of(frame));
        if (decoded == NULL) {
            return -1;
        }
        state.codes[number].decoded = decoded;
        if (want_instructions(code_of(frame)) < 0) {
            return -1;
        }
    }
    PyObject *function = function_of(frame);
    if (kind == USERS && table_find(&state.made, function, NULL, 0) == NULL) {
        Row *known = find_outside(function);
        if (known == NULL || !(known->flags & ENTERED)) {
            /* Told before it is marked: the sink adds the function if the call did not make it. */
            if (tell_void("entered", Py_BuildValue("(O)", function)) < 0) {
                return -1;
            }
            known = find_outside(function);
            if (known != NULL) {
                known->flags |= ENTERED;
            }
        }
    }
    /* What another package's function shares with those around it, such as a registry. */
    if (kind == FOREIGN && PyFunction_Check(function) && PyFunction_GET_CLOSURE(function) != NULL &&
        table_find(&state.made, function, NULL, 0) == NULL && table_find(&state.callables, function, NULL, 1) == NULL) {
        if (tell_void("entered_elsewhere", Py_BuildValue("(O)", function)) < 0 ||
            PyList_Append(state.held, function) < 0 ||
            table_add(&state.callables, function, NULL, 1, 0) == NULL) {
            return -1;
        }
    }
    return is_looked_at;
}

static void on_leave(_PyInterpreterFrame *frame)
{
    /* The frames above it, if any, were left without an event. */
    for (size_t i = state.num_levels; i > 0; i--) {
        if (state.levels[i - 1].frame == frame) {
            while (state.num_levels >= i) {
                Level *level = &state.levels[--state.num_levels];
                state.num_ops -= level->code_kind == OPS;
                forget_pending(level);
                if (state.num_levels) {
                    state.levels[state.num_levels - 1].is_from_elsewhere = level->code_kind == FOREIGN;
                }
            }
            return;
        }
    }
}

static void on_raise(_PyInterpreterFrame *frame)
{
    if (state.num_levels && state.levels[state.num_levels - 1].frame == frame) {
        forget_pending(&state.levels[state.num_levels - 1]);
    }
}

/* The unit of code with this number is about to run. */
static int on_unit(_PyInterpreterFrame *frame, Py_ssize_t unit)
{
    Level *level = state.num_levels ? &state.levels[state.num_levels - 1] : NULL;
    if (level == NULL || level->frame != frame || (level->code_kind != USERS && level->code_kind != FOREIGN)) {
        return 0;
    }
    const Decoded *decoded = state.codes[level->code].decoded;
    if (unit < 0 || unit >= decoded->size) {
        PyErr_Format(PyExc_RuntimeError, "%R has no unit %zd", code_of(frame), unit);
        return -1;
    }
    return on_operation(level, &decoded->operations[unit]);
}

static int is_looking(void) { return state.sink != NULL && state.failure == NULL; }

/* Keep an error of the witness or the sink: the code that is looked at must not see it. */
static void finish_event(int done)
{
    if (done < 0) {
        PyObject *type, *traceback;
        PyErr_Fetch(&type, &state.failure, &traceback);
        PyErr_NormalizeException(&type, &state.failure, &traceback);
        if (traceback != NULL && state.failure != NULL) {
            PyException_SetTraceback(state.failure, traceback);
        }
        Py_XDECREF(traceback);
        Py_XDECREF(type);
    }
}

#endif
