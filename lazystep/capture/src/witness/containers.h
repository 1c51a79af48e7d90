/* Containers and other objects that are looked at as a whole or in part.

For each outside object the sink is told once how much of it matters: all of it, its elements, or its length and
keys. A container that the call itself has made may hold outside objects, which are found by going through it. */

#ifndef LAZYSTEP_CONTAINERS_H
#define LAZYSTEP_CONTAINERS_H

#include "sink.h"

static int is_plain_container(PyObject *value)
{
    return PyList_Check(value) || PyTuple_Check(value) || PyDict_Check(value);
}

static int append_to(PyObject *object, void *list) { return PyList_Append(list, object); }

static int is_deque(PyObject *value) { return strcmp(Py_TYPE(value)->tp_name, "collections.deque") == 0; }

/* Containers, views of dicts, and iterators in C. A generator's frame shows what it takes. */
static int holds_others(PyObject *value)
{
    return is_plain_container(value) || PyAnySet_Check(value) || PyDictViewSet_Check(value) ||
           PyDictValues_Check(value) || is_deque(value) || (PyIter_Check(value) && !PyGen_Check(value));
}

/* Append what a container or iterator holds to a list. */
static int append_parts(PyObject *value, PyObject *list)
{
    if (PyList_Check(value) || PyTuple_Check(value)) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); i++) {
            if (PyList_Append(list, PySequence_Fast_GET_ITEM(value, i)) < 0) {
                return -1;
            }
        }
        return 0;
    }
    if (PyDict_Check(value)) {
        Py_ssize_t position = 0;
        PyObject *key, *item;
        while (PyDict_Next(value, &position, &key, &item)) {
            if (PyList_Append(list, key) < 0 || PyList_Append(list, item) < 0) {
                return -1;
            }
        }
        return 0;
    }
    traverseproc traverse = Py_TYPE(value)->tp_traverse;
    return traverse == NULL ? 0 : traverse(value, append_to, list);
}

enum { MAX_PARTS = 1000000 }; /* of containers that are outside there may be more, which are refused elsewhere */

/* Visit all that a container holds, also in containers inside. `visit` answers 1 to go into the part, too. */
static int visit_inside(PyObject *value, int (*visit)(PyObject *))
{
    if (!holds_others(value)) {
        return 0;
    }
    int done = -1;
    /* The sink's methods run in between: containers may change, so their parts are kept here. */
    PyObject *parts = PyList_New(0), *seen = PySet_New(NULL);
    if (parts == NULL || seen == NULL || append_parts(value, parts) < 0) {
        goto end;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(parts) && i < MAX_PARTS; i++) {
        PyObject *part = PyList_GET_ITEM(parts, i);
        int enters = visit(part);
        if (enters < 0) {
            goto end;
        }
        if (!enters || !holds_others(part)) {
            continue;
        }
        PyObject *address = PyLong_FromVoidPtr(part); /* a list may be in itself */
        int is_known = address == NULL ? -1 : PySet_Contains(seen, address);
        if (is_known < 0 || (!is_known && (PySet_Add(seen, address) < 0 || append_parts(part, parts) < 0))) {
            Py_XDECREF(address);
            goto end;
        }
        Py_DECREF(address);
    }
    done = 0;
end:
    Py_XDECREF(parts);
    Py_XDECREF(seen);
    return done;
}

static int note_part(PyObject *part);

/* A container of the call's own is looked at: it may hold outside containers, also in containers inside. */
static int look_inside(PyObject *value) { return visit_inside(value, note_part); }

/* All of an outside object was looked at. */
static int note_whole(PyObject *value)
{
    Row *row = find_outside(value);
    if (row == NULL) {
        return look_inside(value);
    }
    if (row->flags & WHOLE) {
        return 0;
    }
    row->flags |= WHOLE;
    return tell_void("whole", Py_BuildValue("(O)", value));
}

/* An outside object is passed on: if it is a container or an array, all of it. The sink decides that. */
static int note_moved(PyObject *value)
{
    Row *row = find_outside(value);
    if (row == NULL) {
        return look_inside(value);
    }
    if ((row->flags & (WHOLE | MOVED)) || PyObject_TypeCheck(value, state.tensor)) {
        return 0;
    }
    row->flags |= MOVED;
    return tell_void("moved", Py_BuildValue("(O)", value));
}

static int note_part(PyObject *part)
{
    if (!has_state(part) || PyType_Check(part)) {
        return 0;
    }
    return find_outside(part) == NULL ? 1 : note_moved(part);
}

/* The elements of an outside container are passed on, as objects: what is in them is seen when it is used. */
static int note_passed(PyObject *value)
{
    Row *row = find_outside(value);
    if (row == NULL || (row->flags & (WHOLE | MOVED | PASSED)) || PyObject_TypeCheck(value, state.tensor)) {
        return 0;
    }
    row->flags |= PASSED;
    return tell_void("passed", Py_BuildValue("(O)", value));
}

/* The length or the keys of an outside container matter. */
static int note_sized(PyObject *value)
{
    Row *row = find_outside(value);
    if (row == NULL || row->flags & (WHOLE | MOVED | PASSED | SIZED) || PyObject_TypeCheck(value, state.tensor)) {
        return 0;
    }
    row->flags |= SIZED;
    return tell_void("sized", Py_BuildValue("(O)", value));
}

#endif
