/* Attributes, items and slices that an instruction reads or writes. */

#ifndef LAZYSTEP_ATTRIBUTES_AND_ITEMS_H
#define LAZYSTEP_ATTRIBUTES_AND_ITEMS_H

#include "operands.h"
#include "reads_and_writes.h"

/* A name is looked up in a class, for an object that the call itself has made or that stands for another one. */
static int read_of_class(Level *level, PyTypeObject *type, PyObject *name, int kind)
{
    int is_new = add_outside((PyObject *)type);
    if (is_new < 0 || (is_new > 0 && tell_void("met", Py_BuildValue("(OiOO)", type, RESULT, Py_None, Py_None)) < 0)) {
        return -1;
    }
    int flags = note_read(ATTRIBUTE, (PyObject *)type, name);
    if (flags > 0) {
        expect_value(level, kind, (PyObject *)type, name, (unsigned)flags | IF_OF_CLASS);
    }
    return flags < 0 ? -1 : 0;
}

/* `super().name`: found in one of the classes behind `this` in the order of the object's class. */
static int read_super(Level *level, PyObject *this, PyObject *object, PyObject *name, int kind)
{
    PyObject *base = tell("super_base", Py_BuildValue("(OOO)", this, object, name));
    if (base == NULL) {
        return -1;
    }
    int done = PyType_Check(base) ? read_of_class(level, (PyTypeObject *)base, name, kind) : 0;
    Py_DECREF(base);
    return done;
}

static int read_attribute(Level *level, PyObject **slot, PyObject *name, int kind)
{
    PyObject *owner = *slot;
    if (is_traced(owner)) {
        return pin(slot);
    }
    if (PyFrame_Check(owner) && find_outside(owner) == NULL) {
        return tell_void("read_frame", Py_BuildValue("(O)", name)); /* not held: its variables would live on */
    }
    if (PyWeakref_CheckProxy(owner)) {
        PyObject *object = behind(owner);
        int done = object == NULL || object == Py_None ? 0 : read_attribute(level, &object, name, kind);
        Py_XDECREF(object);
        return done;
    }
    if (PyObject_TypeCheck(owner, &PySuper_Type)) {
        static const char *const texts[2] = {"__thisclass__", "__self__"};
        PyObject *parts[2] = {NULL, NULL};
        for (int i = 0; i < 2; i++) {
            PyObject *text = PyUnicode_InternFromString(texts[i]);
            parts[i] = text == NULL ? NULL : PyObject_GenericGetAttr(owner, text);
            Py_XDECREF(text);
        }
        int done = parts[0] == NULL || parts[1] == NULL ? -1 : read_super(level, parts[0], parts[1], name, kind);
        Py_XDECREF(parts[0]);
        Py_XDECREF(parts[1]);
        return done;
    }
    if (find_outside(owner) != NULL) {
        int flags = note_read(ATTRIBUTE, owner, name);
        if (flags > 0) {
            expect_value(level, kind, owner, name, (unsigned)flags);
        }
        return flags < 0 ? -1 : 0;
    }
    /* An object of the call's own may still find the name in its class, which is outside. */
    PyTypeObject *type = Py_TYPE(owner);
    if ((type->tp_flags & Py_TPFLAGS_HEAPTYPE) && !PyType_Check(owner) && _PyType_Lookup(type, name) != NULL) {
        return read_of_class(level, type, name, kind);
    }
    return 0;
}

/* Elements of a list or tuple are copied, or more than that of anything else. */
static int read_slice(PyObject **slot, PyObject *slice)
{
    PyObject *owner = *slot;
    if (!PyList_CheckExact(owner) && !PyTuple_CheckExact(owner)) {
        return note_whole(owner);
    }
    Py_ssize_t size = PySequence_Fast_GET_SIZE(owner), start, stop, step;
    if (PySlice_Unpack(slice, &start, &stop, &step) < 0) {
        PyErr_Clear(); /* the instruction raises it */
        return note_whole(owner);
    }
    Py_ssize_t num_taken = PySlice_AdjustIndices(size, &start, &stop, step);
    int is_same = PyTuple_CheckExact(owner) && num_taken == size && step == 1; /* no copy is made */
    return is_same ? look_into(slot) : look_into_copied(slot);
}

static int read_item(Level *level, PyObject **slot, PyObject **key)
{
    PyObject *owner = *slot;
    level->keeps = 1; /* what `__index__` returns */
    if (PyObject_TypeCheck(owner, state.tensor)) {
        return 0; /* an op */
    }
    if (look_at(key) < 0 || pin_inside(*key) < 0) { /* all of a tuple: its hash */
        return -1;
    }
    if (find_outside(owner) == NULL) {
        return 0;
    }
    /* The key is a number, a string or the like: its item alone was read. A slice reads many. */
    if ((PyDict_Check(owner) || PyList_Check(owner) || PyTuple_Check(owner)) && !PySlice_Check(*key)) {
        return read_place(level, ITEM, owner, *key);
    }
    return PySlice_Check(*key) ? read_slice(slot, *key) : note_whole(owner);
}

/* `owner[start:stop]`, an instruction of its own from 3.12 on. */
static int read_between(PyObject **slot, PyObject **start, PyObject **stop)
{
    PyObject *owner = *slot;
    if (pin(start) < 0 || pin(stop) < 0) {
        return -1;
    }
    if (PyObject_TypeCheck(owner, state.tensor)) {
        return 0; /* an op */
    }
    if (find_outside(owner) == NULL) {
        return note_whole(owner);
    }
    PyObject *slice = PySlice_New(*start, *stop, NULL);
    int done = slice == NULL ? -1 : read_slice(slot, slice);
    Py_XDECREF(slice);
    return done;
}

/* Something other than one item of a list or dict is written: C code is given the value. */
static int write_part(PyObject *owner, PyObject **value)
{
    if (value != NULL && (pin(value) < 0 || (!holds_others(owner) && pin_inside(*value) < 0))) {
        return -1;
    }
    return note_whole(owner);
}

/* `value` is NULL if the item is deleted. */
static int write_item(PyObject *owner, PyObject **key, PyObject **value)
{
    if (PyObject_TypeCheck(owner, state.tensor)) {
        return 0; /* an op */
    }
    if (look_at(key) < 0 || pin_inside(*key) < 0) {
        return -1;
    }
    if ((PyDict_Check(owner) || PyList_Check(owner)) && !PySlice_Check(*key)) {
        return note_write(ITEM, owner, *key, value == NULL ? NULL : *value);
    }
    return write_part(owner, value);
}

/* `owner[start:stop] = value`, an instruction of its own from 3.12 on. */
static int write_between(PyObject *owner, PyObject **start, PyObject **stop, PyObject **value)
{
    if (pin(start) < 0 || pin(stop) < 0) {
        return -1;
    }
    return PyObject_TypeCheck(owner, state.tensor) ? 0 : write_part(owner, value);
}

#endif
