/* Calls, by the instructions that make them. */

#ifndef LAZYSTEP_CALLS_H
#define LAZYSTEP_CALLS_H

#include "c_calls.h"

static int on_call(Level *level, PyObject **callable, PyObject **args, Py_ssize_t num_args)
{
    PyObject *function = *callable;
    if (has_state(function) && find_outside(function) != NULL && !PyFunction_Check(function) &&
        !PyCFunction_Check(function) && !PyMethod_Check(function)) {
        /* An object that can be called: its class decides what happens. */
        if (tell_void("call_of", Py_BuildValue("(O)", function)) < 0) {
            return -1;
        }
    }
    if (!runs_python(function)) {
        return on_c_call(level, callable, args, num_args);
    }
    if (level->code_kind == USERS) {
        level->is_from_elsewhere = 0;
        expect_value(level, RETURNED, NULL, NULL, OUTSIDE);
    }
    return 0;
}

/* CALL_FUNCTION_EX: the arguments are in a tuple and a dict, which other code may hold. */
static int on_call_ex(Level *level, PyObject **callable, PyObject **positional, PyObject **keywords)
{
    PyObject *function = *callable;
    if (!PyTuple_Check(*positional) || runs_python(function)) {
        if (find_outside(*positional) != NULL &&
            (PyTuple_Check(*positional) ? look_into_copied(positional) : note_whole(*positional)) < 0) {
            return -1;
        }
        if (keywords != NULL && find_outside(*keywords) != NULL && note_whole(*keywords) < 0) {
            return -1;
        }
        return on_call(level, callable, NULL, 0);
    }
    Py_ssize_t num_positional = PyTuple_GET_SIZE(*positional);
    Py_ssize_t num_keywords = keywords != NULL && PyDict_Check(*keywords) ? PyDict_GET_SIZE(*keywords) : 0;
    PyObject **args = PyMem_Calloc(num_positional + num_keywords + 1, sizeof(PyObject *));
    if (args == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < num_positional; i++) {
        args[i] = Py_NewRef(PyTuple_GET_ITEM(*positional, i));
    }
    Py_ssize_t position = 0, number = num_positional;
    PyObject *key, *item;
    while (num_keywords && PyDict_Next(*keywords, &position, &key, &item)) {
        args[number++] = Py_NewRef(item);
    }
    int done = on_call(level, callable, args, number);
    /* Numbers that were pinned: the function is given the plain ones. */
    int any = 0;
    for (Py_ssize_t i = 0; i < num_positional; i++) {
        any |= args[i] != PyTuple_GET_ITEM(*positional, i);
    }
    if (done == 0 && any) {
        PyObject *tuple = tuple_of(args, num_positional);
        if (tuple == NULL) {
            done = -1;
        }
        else {
            put(positional, tuple);
        }
    }
    any = 0;
    for (position = 0, number = num_positional; num_keywords && PyDict_Next(*keywords, &position, &key, &item);) {
        any |= args[number++] != item;
    }
    PyObject *given = done == 0 && any ? PyDict_Copy(*keywords) : NULL;
    for (position = 0, number = num_positional; given != NULL && PyDict_Next(*keywords, &position, &key, &item);) {
        if (PyDict_SetItem(given, key, args[number++]) < 0) {
            done = -1;
        }
    }
    if (given != NULL) {
        put(keywords, given);
    }
    number = num_positional + num_keywords;
    for (Py_ssize_t i = 0; i < number; i++) {
        Py_DECREF(args[i]);
    }
    PyMem_Free(args);
    return done;
}

#endif
