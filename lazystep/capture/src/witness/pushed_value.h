/* The value that an instruction pushes.

An instruction is told before it runs. What it has found, such as the value of an attribute, is on the stack when the
next one is told. `expect_value` says at the first what is to be done with it at the second. */

#ifndef LAZYSTEP_PUSHED_VALUE_H
#define LAZYSTEP_PUSHED_VALUE_H

#include "operands.h"

static void forget_pending(Level *level)
{
    level->pending = NOTHING;
    Py_CLEAR(level->owner);
    Py_CLEAR(level->key);
}

static void expect_value(Level *level, int kind, PyObject *owner, PyObject *key, unsigned flags)
{
    level->pending = kind;
    level->owner = Py_XNewRef(owner);
    level->key = Py_XNewRef(key);
    level->flags = flags;
}

/* The value that the last instruction has pushed. */
static int on_value(Level *level, PyObject **top)
{
    int kind = level->pending;
    PyObject **slot = top - level->distance;
    if (kind == UNPACKED) { /* the first element is on top */
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(level->owner); i++) {
            PyObject *number = PyLong_FromSsize_t(i);
            if (number == NULL) {
                return -1;
            }
            PyObject *before = level->key;
            level->key = number;
            level->pending = ITEM;
            int done = on_value(level, top - i);
            level->key = before;
            Py_DECREF(number);
            if (done < 0) {
                return -1;
            }
        }
        return 0;
    }
    if (kind == METHOD && level->distance == 1 && top[-2] != NULL) {
        slot = &top[-2]; /* a method lies below `self`, and anything else above NULL */
    }
    PyObject *value = *slot;
    if (value == NULL) {
        return 0;
    }
    if (kind == MADE) {
        return PyList_Append(state.held, value) < 0 || table_add(&state.made, value, NULL, 0, 0) == NULL ? -1 : 0;
    }
    if (kind == RESULT) {
        /* Nobody else holds a new object. What others hold too may have been there before the call. */
        if (has_state(value) && Py_REFCNT(value) > 1 && find_outside(value) == NULL && level->code_kind == USERS) {
            int is_new = add_outside(value);
            return is_new > 0 ? tell_void("met", Py_BuildValue("(OiOO)", value, RESULT, Py_None, Py_None)) : is_new;
        }
        return 0;
    }
    if (kind == RETURNED) {
        /* Code of others may return what it has kept since before the call: a logger, a module, a thread. */
        if (level->is_from_elsewhere && has_state(value) && Py_REFCNT(value) > 1 && find_outside(value) == NULL &&
            !PyFunction_Check(value) && !PyMethod_Check(value) && !PyObject_TypeCheck(value, state.tensor)) {
            return tell_void("returned", Py_BuildValue("(O)", value));
        }
        return 0;
    }
    if ((level->flags & IF_OF_CLASS) && _PyType_Lookup((PyTypeObject *)level->owner, level->key) != value) {
        return 0;
    }
    if ((level->flags & FOLLOW) && (PyFloat_CheckExact(value) || PyLong_CheckExact(value)) && kind != METHOD) {
        PyObject *owner = level->owner, *key = level->key ? level->key : Py_None;
        PyObject *traced = tell("number", Py_BuildValue("(iOOO)", kind, owner, key, value));
        if (traced == NULL) {
            return -1;
        }
        if (traced == Py_None) {
            Py_DECREF(traced);
        }
        else {
            put(slot, traced);
        }
        return 0;
    }
    if ((level->flags & OUTSIDE) && has_state(value) && find_outside(value) == NULL) {
        /* A bound method, or what a descriptor has just made, is an object of the call's own. */
        int is_new = Py_REFCNT(value) == 1 || PyMethod_Check(value);
        if (is_new && !PyMethod_Check(value)) {
            return 0;
        }
        /* The sink adds it, unless the call itself has put it there. */
        PyObject *key = level->key ? level->key : Py_None;
        return tell_void("met", Py_BuildValue("(OiOO)", value, kind == METHOD ? ATTRIBUTE : kind, level->owner, key));
    }
    return 0;
}

#endif
