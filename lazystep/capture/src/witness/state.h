/* What is known of the call that is witnessed. There is one at a time.

A level stands for a frame of the call that has not returned. Outside objects, keys, code objects and callables are
kept alive until the end, so that an address in a table stands for one object. */

#ifndef LAZYSTEP_STATE_H
#define LAZYSTEP_STATE_H

#include "frames.h"
#include "table.h"

/* What the sink knows of an outside object: how much of it matters (see containers.h), or that it was entered. */
enum { WHOLE = 1, ENTERED = 2, MOVED = 4, PASSED = 8, SIZED = 16 };

typedef struct {
    PyObject *object; /* kept alive by the state */
    int kind;
    Decoded *decoded; /* NULL until its instructions are looked at */
} Code;

typedef struct {
    _PyInterpreterFrame *frame;
    size_t code; /* its number */
    int code_kind;
    int pending; /* the kind of place whose value the last instruction has pushed */
    int distance; /* of that value from the top */
    PyObject *owner;
    PyObject *key;
    unsigned flags;
    int keeps; /* a function in C is called that keeps what the functions return that it calls */
    int is_from_elsewhere; /* the frame that it has called last was of code that is not the user's */
} Level;

static struct {
    PyObject *sink;       /* NULL: no call is witnessed */
    PyObject *held;       /* keeps outside objects and keys alive: an address stands for one object */
    Table outside;        /* objects */
    Table reads;          /* places, with the sink's answer */
    Table writes;
    Table made;           /* functions that the call itself has made */
    Table code_numbers;   /* code objects, with their numbers in `codes` */
    Code *codes;
    size_t num_codes;
    size_t max_codes;
    Table callables;      /* callables, with their classes */
    Level *levels;
    size_t num_levels;
    size_t max_levels;
    size_t num_ops;       /* levels of the kind OPS */
    PyTypeObject *traced_float;
    PyTypeObject *traced_int;
    PyTypeObject *tensor;
    PyObject *failure;    /* an exception of the sink: a bug of ours, never the user's */
} state;

static int is_traced(PyObject *value)
{
    PyTypeObject *type = Py_TYPE(value);
    return type == state.traced_float || type == state.traced_int;
}

/* Whether a value can hold state of its own. Numbers, strings and C functions do not. */
static int has_state(PyObject *value)
{
    PyTypeObject *type = Py_TYPE(value);
    if (type == &PyLong_Type || type == &PyFloat_Type || type == &PyUnicode_Type || type == &PyBool_Type ||
        type == &PyBytes_Type || type == &PyComplex_Type || type == &PyCode_Type || value == Py_None ||
        value == Py_Ellipsis || value == Py_NotImplemented || is_traced(value)) {
        return 0;
    }
    /* A function of a module. A bound C method holds its object. */
    if (type == &PyCFunction_Type) {
        PyObject *self = PyCFunction_GET_SELF(value);
        return self != NULL && !PyModule_Check(self);
    }
    return type != &PyMethodDescr_Type && type != &PyWrapperDescr_Type && type != &PyClassMethodDescr_Type;
}

static Row *find_outside(PyObject *value) { return table_find(&state.outside, value, NULL, 0); }

static int add_outside(PyObject *value)
{
    if (find_outside(value) != NULL) {
        return 0;
    }
    if (PyList_Append(state.held, value) < 0 || table_add(&state.outside, value, NULL, 0, 0) == NULL) {
        return -1;
    }
    return 1;
}

#endif
