/* Reads and writes of places. The sink is told of each place once. */

#ifndef LAZYSTEP_READS_AND_WRITES_H
#define LAZYSTEP_READS_AND_WRITES_H

#include "pushed_value.h"

/* The object for which a weak proxy stands, or None: a new reference. */
static PyObject *behind(PyObject *proxy)
{
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *object = NULL;
    if (PyWeakref_GetRef(proxy, &object) < 0) {
        PyErr_Clear();
    }
    return object == NULL ? Py_NewRef(Py_None) : object;
#else
    return Py_NewRef(PyWeakref_GET_OBJECT(proxy));
#endif
}

/* Tell of a read, once for each place. Returns the sink's answer, or -1. */
static int note_read(int kind, PyObject *owner, PyObject *key)
{
    Row *row = table_find(&state.reads, owner, key, kind);
    if (row != NULL) {
        return (int)row->flags;
    }
    int flags = tell_int("read", Py_BuildValue("(iOO)", kind, owner, key ? key : Py_None));
    if (flags < 0) {
        return -1;
    }
    if (PyList_Append(state.held, owner) < 0 || (key != NULL && PyList_Append(state.held, key) < 0)) {
        return -1;
    }
    return table_add(&state.reads, owner, key, kind, (unsigned)flags) == NULL ? -1 : flags;
}

static int read_place(Level *level, int kind, PyObject *owner, PyObject *key)
{
    int flags = note_read(kind, owner, key);
    if (flags > 0) {
        expect_value(level, kind, owner, key, (unsigned)flags);
    }
    return flags < 0 ? -1 : 0;
}

static int note_write(int kind, PyObject *owner, PyObject *key, PyObject *value)
{
    if (PyWeakref_CheckProxy(owner)) {
        PyObject *object = behind(owner);
        int done = object == NULL || object == Py_None ? 0 : note_write(kind, object, key, value);
        Py_XDECREF(object);
        return done;
    }
    if (value != NULL && is_traced(value) &&
        tell_void("stored", Py_BuildValue("(iOO)", kind, owner, key ? key : Py_None)) < 0) {
        return -1;
    }
    if (find_outside(owner) == NULL || table_find(&state.writes, owner, key, kind) != NULL) {
        return 0;
    }
    /* Deleting what is not there raises, and so does writing behind the end of a list. */
    int must_be_there = value == NULL || (kind == ITEM && PyList_Check(owner));
    if (tell_void("write", Py_BuildValue("(iOOi)", kind, owner, key ? key : Py_None, must_be_there)) < 0 ||
        PyList_Append(state.held, owner) < 0 || (key != NULL && PyList_Append(state.held, key) < 0)) {
        return -1;
    }
    return table_add(&state.writes, owner, key, kind, 0) == NULL ? -1 : 0;
}

#endif
