/* What a callable is: whether it runs Python code, and if not, how the sink classifies it. */

#ifndef LAZYSTEP_CALLABLES_H
#define LAZYSTEP_CALLABLES_H

#include "sink.h"

/* What identifies a callable: bound C methods are made anew for each call. */
static void *identity_of(PyObject *callable)
{
    return PyCFunction_Check(callable) ? (void *)((PyCFunctionObject *)callable)->m_ml : (void *)callable;
}

static int classify(PyObject *callable)
{
    void *identity = identity_of(callable);
    Row *row = table_find(&state.callables, identity, NULL, 0);
    if (row != NULL) {
        return (int)row->flags;
    }
    int answer = tell_int("classify", Py_BuildValue("(O)", callable));
    if (answer < 0 || PyList_Append(state.held, callable) < 0) {
        return -1;
    }
    return table_add(&state.callables, identity, NULL, 0, (unsigned)answer) == NULL ? -1 : answer;
}

static int is_python(PyObject *attribute)
{
    if (attribute == NULL) {
        return 0;
    }
    if (Py_TYPE(attribute) == &PyStaticMethod_Type) {
        PyObject *function = PyObject_GetAttrString(attribute, "__func__");
        int is_function = function != NULL && PyFunction_Check(function);
        Py_XDECREF(function);
        PyErr_Clear();
        return is_function;
    }
    return PyFunction_Check(attribute);
}

/* Whether calling this runs Python code of its own, whose frames show what it does. */
static int runs_python(PyObject *callable)
{
    PyTypeObject *type = Py_TYPE(callable);
    if (type == &PyFunction_Type) {
        return 1;
    }
    if (type == &PyMethod_Type) {
        return runs_python(PyMethod_GET_FUNCTION(callable));
    }
    static PyObject *names[3];
    static const char *const texts[3] = {"__call__", "__init__", "__new__"};
    for (int i = 0; i < 3; i++) {
        if (names[i] == NULL && (names[i] = PyUnicode_InternFromString(texts[i])) == NULL) {
            PyErr_Clear();
            return 0;
        }
    }
    /* An object whose class defines `__call__`; a class that defines how its objects are made. */
    if (is_python(_PyType_Lookup(type, names[0]))) {
        return 1;
    }
    return PyType_Check(callable) && (is_python(_PyType_Lookup((PyTypeObject *)callable, names[1])) ||
                                      is_python(_PyType_Lookup((PyTypeObject *)callable, names[2])));
}

#endif
