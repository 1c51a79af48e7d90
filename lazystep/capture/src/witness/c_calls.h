/* Calls of functions in C, whose work no frame shows.

Each function is of a class, which the sink chooses (`classify`): what it looks at in its arguments, whether it passes
on traced numbers as they are, and whether it calls an argument. */

#ifndef LAZYSTEP_C_CALLS_H
#define LAZYSTEP_C_CALLS_H

#include "callables.h"
#include "attributes_and_items.h"

static PyObject *tuple_of(PyObject **args, Py_ssize_t num_args)
{
    PyObject *tuple = PyTuple_New(num_args);
    for (Py_ssize_t i = 0; tuple != NULL && i < num_args; i++) {
        PyTuple_SET_ITEM(tuple, i, Py_NewRef(args[i]));
    }
    return tuple;
}

static int is_of_the_call(PyObject *value)
{
    return value != NULL && has_state(value) && find_outside(value) == NULL && !PyType_Check(value) &&
           !PyFunction_Check(value) && !PyModule_Check(value);
}

/* What C code returns may be an outside object, unless it was given an object of the call's own to take it from. */
static void expect_result(Level *level, PyObject *self, PyObject **args, Py_ssize_t num_args)
{
    int is_own = is_of_the_call(self);
    for (Py_ssize_t i = 0; i < num_args; i++) {
        is_own |= is_of_the_call(args[i]);
    }
    if (!is_own) {
        expect_value(level, RESULT, NULL, NULL, OUTSIDE);
    }
}

/* Put a Python function in the place of one in C: it calls that, in sight. */
static int replace_by_visible(PyObject **slot)
{
    PyObject *other = tell("visible", Py_BuildValue("(O)", *slot));
    if (other == NULL || PyList_Append(state.held, other) < 0 || table_add(&state.made, other, NULL, 0, 0) == NULL) {
        Py_XDECREF(other);
        return -1;
    }
    put(slot, other);
    return 0;
}

/* Arguments that the function will call, and that are functions in C: no frame would show those calls. */
static int make_visible(PyObject **args, Py_ssize_t num_args, int kind)
{
    Py_ssize_t first = kind == CALLING ? 0 : 1, last = kind == CALLING && num_args ? 1 : num_args;
    for (Py_ssize_t i = first; i < last; i++) {
        if (!PyCallable_Check(args[i]) || runs_python(args[i]) || (kind == SORTING && PyType_Check(args[i]))) {
            continue;
        }
        if (replace_by_visible(&args[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

/* The name of an attribute among the arguments: interned, so that it is the same object wherever it is used. */
static PyObject *interned(PyObject *name)
{
    Py_INCREF(name);
    PyUnicode_InternInPlace(&name);
    return name;
}

static int on_getattr(Level *level, PyObject **args)
{
    PyObject *name = interned(args[1]);
    int done = read_attribute(level, &args[0], name, ATTRIBUTE);
    Py_DECREF(name);
    return done;
}

static int on_setattr(PyObject **args, Py_ssize_t num_args)
{
    PyObject *name = interned(args[1]);
    int done = note_write(ATTRIBUTE, args[0], name, num_args > 2 ? args[2] : NULL);
    Py_DECREF(name);
    return done;
}

/* `key` may have another argument above it, which `setdefault` may store. */
static int on_getitem(Level *level, PyObject *owner, PyObject **key, int has_default)
{
    if (look_at(key) < 0 || (has_default && is_traced(key[1]) &&
                             tell_void("stored", Py_BuildValue("(iOO)", ITEM, owner, *key)) < 0)) {
        return -1;
    }
    return find_outside(owner) != NULL ? read_place(level, ITEM, owner, *key) : 0;
}

/* A function such as `math.sqrt`, for which the sink has one that follows numbers: it is called instead. */
static int on_swapped(Level *level, PyObject **callable, PyObject **args, Py_ssize_t num_args)
{
    int any = num_args == 0; /* a setting that the witness itself has changed, such as gc.get_threshold */
    for (Py_ssize_t i = 0; i < num_args; i++) {
        if (has_state(args[i])) { /* an array of one number, or what `sum` adds */
            int is_sequence = PyList_CheckExact(args[i]) || PyTuple_CheckExact(args[i]);
            any |= holds_others(args[i]) || PyGen_Check(args[i]);
            if ((is_sequence ? look_into_copied(&args[i]) : note_moved(args[i])) < 0) {
                return -1;
            }
        }
        any |= is_traced(args[i]);
    }
    level->keeps = !any; /* what `__float__` returns */
    if (any) {
        PyObject *other = tell("follow", Py_BuildValue("(O)", *callable));
        if (other == NULL) {
            return -1;
        }
        put(callable, other);
    }
    return 0;
}

/* type(x): of a traced number, the type of the plain one. */
static int on_type_of(Level *level, PyObject **args, Py_ssize_t num_args)
{
    if (num_args && is_traced(args[0])) {
        PyObject *plain = tell("plain", Py_BuildValue("(O)", args[0]));
        if (plain == NULL) {
            return -1;
        }
        put(&args[0], plain);
    }
    expect_result(level, NULL, args, num_args);
    return 0;
}

/* A function whose every call is told. */
static int on_told(Level *level, PyObject **callable, PyObject *self, PyObject **args, Py_ssize_t num_args)
{
    PyObject *tuple = tuple_of(args, num_args);
    int answer = tuple == NULL ? -1 : tell_int("called", Py_BuildValue("(ON)", *callable, tuple));
    if (answer < 0) {
        return -1;
    }
    if (answer == IN_SIGHT) {
        return replace_by_visible(callable);
    }
    level->keeps = answer;
    expect_result(level, self, args, num_args);
    return 0;
}

/* How much of an object a function of this class looks at. */
static int note_given(PyObject *value, int kind)
{
    switch (kind) {
    case MOVE: return note_moved(value);
    case PASS: return note_passed(value);
    case SIZE: return note_sized(value);
    default: return note_whole(value);
    }
}

/* What the function is given matters as far as its class says. Numbers are pinned, unless it passes them on. */
static int look_at_arguments(Level *level, int kind, PyObject *callable, PyObject *self, PyObject **args,
                             Py_ssize_t num_args)
{
    int is_calling = kind == CALLING || kind == SORTING;
    if (is_calling) {
        if (make_visible(args, num_args, kind) < 0) {
            return -1;
        }
        kind = MOVE;
    }
    if (kind == INDEXING || kind == SEARCHING) {
        for (Py_ssize_t i = 0; i < num_args; i++) {
            if (Py_TYPE(args[i]) == state.traced_int && pin(&args[i]) < 0) {
                return -1;
            }
        }
        kind = kind == INDEXING ? PASS : MOVE;
    }
    if (kind == COPYING) {
        for (Py_ssize_t i = 0; i < num_args; i++) {
            int is_same = PyTuple_CheckExact(args[i]) && callable == (PyObject *)&PyTuple_Type; /* no copy is made */
            if (!is_same && !is_traced(args[i]) && look_into_copied(&args[i]) < 0) {
                return -1;
            }
        }
        kind = PASS;
    }
    /* What methods return to C code, such as `__len__`, is a plain number. */
    level->keeps = kind != PASS && !is_calling;
    if (self != NULL && note_given(self, kind) < 0) {
        return -1;
    }
    int passes_on = kind == MOVE || kind == PASS || kind == SIZE;
    int is_dict = callable == (PyObject *)&PyDict_Type; /* which hashes keys, if it is given no dict */
    for (Py_ssize_t i = 0; i < num_args; i++) {
        if (is_dict && !PyDict_Check(args[i]) && note_moved(args[i]) < 0) {
            return -1;
        }
        if (passes_on) {
            if (note_given(args[i], kind) < 0 ||
                (kind == MOVE && state.num_ops && (pin(&args[i]) < 0 || pin_inside(args[i]) < 0))) {
                return -1;
            }
        }
        else if (pin(&args[i]) < 0 || (has_state(args[i]) && note_given(args[i], kind) < 0) ||
                 pin_inside(args[i]) < 0) {
            return -1;
        }
    }
    if (!passes_on) {
        expect_result(level, self, args, num_args);
    }
    return 0;
}

/* A call of something that may run no Python frame. `callable` and `args` are slots of the value stack. */
static int on_c_call(Level *level, PyObject **callable, PyObject **args, Py_ssize_t num_args)
{
    int kind = classify(*callable);
    if (kind < 0) {
        return -1;
    }
    PyObject *self = PyCFunction_Check(*callable) ? PyCFunction_GET_SELF(*callable) : NULL;
    if (self != NULL && (PyModule_Check(self) || PyType_Check(self))) {
        self = NULL;
    }
    int is_by_name = num_args >= 2 && PyUnicode_Check(args[1]);
    switch (kind) {
    case GETATTR:
        if (is_by_name) {
            return on_getattr(level, args);
        }
        break;
    case SETATTR:
        if (is_by_name) {
            return on_setattr(args, num_args);
        }
        break;
    case GETITEM: {
        Py_ssize_t first = self == NULL; /* argument: the key, or the dict and the key */
        if (num_args > first && PyDict_Check(first ? args[0] : self)) {
            return on_getitem(level, first ? args[0] : self, args + first, num_args > first + 1);
        }
        break;
    }
    case SWAP_IT:
        return on_swapped(level, callable, args, num_args);
    case TYPE_OF:
        return on_type_of(level, args, num_args);
    case TOLD:
        return on_told(level, callable, self, args, num_args);
    case KINDS:
        if (num_args > 1 && note_moved(args[1]) < 0) {
            return -1;
        }
    /* fall through */
    case IGNORE:
        expect_result(level, self, args, num_args);
        return 0;
    case SCAN:
        if (num_args == 0 && self == NULL && PyCFunction_Check(*callable) &&
            tell_void("called_with_nothing", Py_BuildValue("(O)", *callable)) < 0) {
            return -1;
        }
        break;
    default:
        break;
    }
    return look_at_arguments(level, kind, *callable, self, args, num_args);
}

#endif
