/* What an instruction reads, writes and calls, by what lies on the value stack before it runs. */

#ifndef LAZYSTEP_INSTRUCTIONS_H
#define LAZYSTEP_INSTRUCTIONS_H

#include "calls.h"
#include "operators.h"

/* The instruction is about to run. */
static int on_operation(Level *level, const Operation *operation)
{
    _PyInterpreterFrame *frame = level->frame;
    PyCodeObject *code = code_of(frame);
    PyObject **top = top_of(frame, operation);
    int does = operation->does, arg = operation->arg;
    if (level->pending != NOTHING) {
        int done = on_value(level, top);
        forget_pending(level);
        if (done < 0) {
            return -1;
        }
    }
    int is_users = level->code_kind == USERS;
    level->keeps = 0;
    level->distance = operation->distance;
    switch (does) {
    case DO_NOTHING:
        return 0;
    case DO_RETURN:
        if (state.num_levels > 1 && (state.levels[state.num_levels - 2].keeps ||
                                     state.levels[state.num_levels - 2].code_kind == OPS)) {
            return look_at(&top[-1]) < 0 ? -1 : pin_inside(top[-1]);
        }
        return 0;
    case DO_READ_GLOBAL:
        return read_place(level, GLOBAL, frame->f_globals, PyTuple_GET_ITEM(code->co_names, arg));
    case DO_READ_NAME: {
        PyObject *name = PyTuple_GET_ITEM(code->co_names, arg);
        return is_users ? read_place(level, GLOBAL, frame->f_globals, name) : 0;
    }
    case DO_WRITE_GLOBAL:
    case DO_DELETE_GLOBAL: {
        PyObject *value = does == DO_WRITE_GLOBAL ? top[-1] : NULL;
        if (is_users && add_outside(frame->f_globals) < 0) {
            return -1;
        }
        return note_write(GLOBAL, frame->f_globals, PyTuple_GET_ITEM(code->co_names, arg), value);
    }
    case DO_WRITE_NAME: {
        if (frame->f_locals != frame->f_globals) {
            return 0;
        }
        return note_write(GLOBAL, frame->f_globals, PyTuple_GET_ITEM(code->co_names, arg), top[-1]);
    }
    case DO_READ_CELL: {
        PyObject *cell = frame->localsplus[arg];
        return cell != NULL && find_outside(cell) != NULL ? read_place(level, CELL, cell, NULL) : 0;
    }
    case DO_WRITE_CELL:
    case DO_DELETE_CELL: {
        PyObject *cell = frame->localsplus[arg];
        return cell == NULL ? 0 : note_write(CELL, cell, NULL, does == DO_WRITE_CELL ? top[-1] : NULL);
    }
    case DO_READ_ATTRIBUTE:
        return read_attribute(level, &top[-1], PyTuple_GET_ITEM(code->co_names, arg), ATTRIBUTE);
    case DO_READ_METHOD:
        return read_attribute(level, &top[-1], PyTuple_GET_ITEM(code->co_names, arg), METHOD);
    case DO_READ_SUPER:
    case DO_READ_SUPER_METHOD:
        if (top[-3] != (PyObject *)&PySuper_Type) {
            return 0;
        }
        return read_super(level, top[-2], top[-1], PyTuple_GET_ITEM(code->co_names, arg),
                          does == DO_READ_SUPER ? ATTRIBUTE : METHOD);
    case DO_WRITE_ATTRIBUTE:
        return note_write(ATTRIBUTE, top[-1], PyTuple_GET_ITEM(code->co_names, arg), top[-2]);
    case DO_DELETE_ATTRIBUTE:
        return note_write(ATTRIBUTE, top[-1], PyTuple_GET_ITEM(code->co_names, arg), NULL);
    case DO_READ_ITEM:
        return read_item(level, &top[-2], &top[-1]);
    case DO_WRITE_ITEM:
        return write_item(top[-2], &top[-1], &top[-3]);
    case DO_DELETE_ITEM:
        return write_item(top[-2], &top[-1], NULL);
    case DO_READ_SLICE:
        return read_between(&top[-3], &top[-2], &top[-1]);
    case DO_WRITE_SLICE:
        return write_between(top[-3], &top[-2], &top[-1], &top[-4]);
    case DO_COMPARE_TRUTH:
        level->keeps = 1; /* what `__lt__` returns is asked for its truth */
        return on_binary(&top[-2], &top[-1], arg);
    case DO_BINARY:
        return on_binary(&top[-2], &top[-1], arg);
    case DO_CONTAINS:
        return on_contains(level, &top[-2], &top[-1]);
    case DO_IS:
        return on_is(&top[-2], &top[-1]);
    case DO_TRUTH:
        return on_truth(level, &top[-1]);
    case DO_UNPACK: {
        PyObject *owner = top[-1];
        if (find_outside(owner) == NULL || !(PyTuple_Check(owner) || PyList_Check(owner)) ||
            PySequence_Fast_GET_SIZE(owner) != arg) {
            if (PyIter_Check(owner) && take_from(owner) < 0) {
                return -1;
            }
            return look_into(&top[-1]);
        }
        if (tell_void("unpacked", Py_BuildValue("(O)", owner)) < 0) {
            return -1;
        }
        expect_value(level, UNPACKED, owner, NULL, FOLLOW | OUTSIDE);
        return 0;
    }
    case DO_LOOK_AT:
        for (int i = arg; i > 0; i--) {
            if (look_at(&top[-i]) < 0) {
                return -1;
            }
        }
        return 0;
    case DO_BUILD_MAP:
        for (int i = arg; i > 0; i--) {
            if (look_at(&top[-2 * i]) < 0) {
                return -1;
            }
        }
        return 0;
    case DO_UNPACK_REST:
        if (PyIter_Check(top[-1]) && take_from(top[-1]) < 0) {
            return -1;
        }
        return PyDict_Check(top[-1]) ? look_into(&top[-1]) : look_into_copied(&top[-1]);
    case DO_LOOK_INTO:
        return look_into(&top[-1]);
    case DO_COPY:
        return PyDict_Check(top[-1]) == arg ? look_into_copied(&top[-1]) : look_into(&top[-1]);
    case DO_LOOK_OVER:
        return look_over(&top[-1]);
    case DO_ITERATE:
        if (PyIter_Check(top[-1])) {
            return 0; /* what is taken from it is told one by one */
        }
        return PyDict_Check(top[-1]) ? look_over(&top[-1]) : look_into(&top[-1]);
    case DO_TAKE:
        return take_from(top[-arg]);
    case DO_MATCH_KEYS:
        return look_at(&top[-2]);
    case DO_MATCH_CLASS: {
        PyObject *subject = top[-3], *names = top[-1];
        if (find_outside(subject) != NULL && PyTuple_Check(names)) {
            return tell_void("matched", Py_BuildValue("(OOi)", subject, names, arg));
        }
        return 0;
    }
    case DO_BUILD_SLICE:
        for (int i = 1; i <= arg; i++) {
            if (pin(&top[-i]) < 0) {
                return -1;
            }
        }
        return 0;
    case DO_ENTER:
        if (find_outside(top[-1]) != NULL) {
            return tell_void("call_of", Py_BuildValue("(O)", top[-1]));
        }
        return 0;
    case DO_IMPORT:
    case DO_IMPORT_FROM: {
        PyObject *name = PyTuple_GET_ITEM(code->co_names, arg);
        if (does == DO_IMPORT_FROM) {
            return find_outside(top[-1]) != NULL ? read_place(level, ATTRIBUTE, top[-1], name) : 0;
        }
        if (is_users) {
            expect_value(level, RESULT, NULL, NULL, OUTSIDE);
            return tell_void("imported", Py_BuildValue("(OOO)", name, frame->f_globals, top[-2]));
        }
        return 0;
    }
    case DO_MAKE_FUNCTION:
        expect_value(level, MADE, NULL, NULL, 0);
        return 0;
    case DO_CALL_KEYWORDS:
        top--; /* their names */
    /* fall through */
    case DO_CALL: {
        PyObject **args = arguments_of(top, arg);
        return on_call(level, callable_of(top, arg), args, top - args);
    }
    case DO_CALL_EXPANDED: {
        PyObject **keywords = arg ? &top[-1] : NULL;
        PyObject **positional = &top[arg ? -2 : -1];
        return on_call_ex(level, positional - EXPANDED_CALLABLE_BELOW, positional, keywords);
    }
    default:
        return 0;
    }
}

#endif
