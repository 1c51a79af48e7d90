/* Operators: arithmetic, comparisons, `in`, the truth of a value, and what a loop takes. */

#ifndef LAZYSTEP_OPERATORS_H
#define LAZYSTEP_OPERATORS_H

#include "operands.h"
#include "reads_and_writes.h"

/* A dict takes the items of another one: `left |= right`. */
static int on_update(PyObject *left, PyObject **right)
{
    if (look_into_copied(right) < 0) {
        return -1;
    }
    PyObject *items = PyDict_Items(*right);
    int done = items == NULL ? -1 : 0;
    for (Py_ssize_t i = 0; done == 0 && i < PyList_GET_SIZE(items); i++) {
        PyObject *item = PyList_GET_ITEM(items, i);
        done = note_write(ITEM, left, PyTuple_GET_ITEM(item, 0), PyTuple_GET_ITEM(item, 1));
    }
    Py_XDECREF(items);
    return done;
}

/* Whether an operation makes a container of the elements of two others, such as `a + b` of two lists. */
static int is_joining(PyObject *left, PyObject *right, int operation)
{
    if (operation == BINARY(NB_OR)) {
        return PyDict_CheckExact(left) && PyDict_CheckExact(right);
    }
    if (PyList_CheckExact(left) && PyList_CheckExact(right)) {
        return operation == BINARY(NB_ADD);
    }
    /* Not with an empty tuple, which makes no copy of the other one. */
    return (operation == BINARY(NB_ADD) || operation == BINARY(NB_INPLACE_ADD)) && PyTuple_CheckExact(left) &&
           PyTuple_CheckExact(right) && PyTuple_GET_SIZE(left) && PyTuple_GET_SIZE(right);
}

/* `operation`: see DO_BINARY. */
static int on_binary(PyObject **left, PyObject **right, int operation)
{
    int is_left = is_traced(*left), is_right = is_traced(*right);
    if (is_left || is_right) {
        PyObject **other = is_left ? right : left;
        if (is_left && is_right) {
            return 0;
        }
        if (PyObject_TypeCheck(*other, state.tensor)) {
            return state.num_ops ? pin(is_left ? left : right) : 0;
        }
        if (!PyFloat_CheckExact(*other) && !PyLong_CheckExact(*other) && !PyBool_Check(*other)) {
            return pin(is_left ? left : right) < 0 ? -1 : look_at(other);
        }
        /* float's own operators take an int for what it is, and would lose where it came from. */
        if (!is_left && PyFloat_CheckExact(*left)) {
            PyObject *constant = tell("constant", Py_BuildValue("(O)", *left));
            if (constant == NULL) {
                return -1;
            }
            put(left, constant);
        }
        return 0;
    }
    if (operation == BINARY(NB_INPLACE_OR) && PyDict_CheckExact(*left) && PyDict_CheckExact(*right)) {
        return on_update(*left, right);
    }
    if (is_joining(*left, *right, operation)) {
        return look_into_copied(left) < 0 ? -1 : look_into_copied(right);
    }
    if (look_at(left) < 0 || look_at(right) < 0) {
        return -1;
    }
    /* A text that is filled, an array: it takes the numbers out of a container. Two containers pass them on. */
    int is_container[2] = {holds_others(*left), holds_others(*right)};
    PyObject *taker = is_container[0] ? *right : *left;
    if (is_container[0] == is_container[1] || PyLong_Check(taker) || taker == Py_None) { /* `[rate] * 2` */
        return 0;
    }
    return pin_inside(is_container[0] ? *left : *right);
}

/* Whether C code alone finds out if a number is in a container, with numbers, texts and None to compare with. */
static int has_plain_elements(PyObject *container)
{
    static PyObject *name;
    if (name == NULL && (name = PyUnicode_InternFromString("__contains__")) == NULL) {
        PyErr_Clear();
        return 0;
    }
    int is_dict = PyDict_Check(container) &&
                  _PyType_Lookup(Py_TYPE(container), name) == _PyType_Lookup(&PyDict_Type, name);
    if (!is_dict && !PyList_CheckExact(container) && !PyTuple_CheckExact(container) &&
        !PyAnySet_CheckExact(container)) {
        return 0;
    }
    PyObject *elements = PyObject_Size(container) > MAX_FOLLOWED ? NULL : PySequence_List(container);
    int is_plain = elements != NULL;
    for (Py_ssize_t i = 0; is_plain && i < PyList_GET_SIZE(elements); i++) {
        PyObject *element = PyList_GET_ITEM(elements, i);
        is_plain = is_number(element) || is_traced(element) || PyBool_Check(element) || PyUnicode_CheckExact(element) ||
                   element == Py_None;
    }
    Py_XDECREF(elements);
    PyErr_Clear();
    return is_plain;
}

/* Whether a traced number is in a container: it is compared with each element, so that it may change. */
static int find_number(PyObject **number, PyObject *container)
{
    int done = PyDict_Check(container) ? note_sized(container) : note_moved(container);
    if (done < 0) {
        return -1;
    }
    PyObject *plain = tell("sought", Py_BuildValue("(OO)", *number, container));
    if (plain == NULL) {
        return -1;
    }
    put(number, plain);
    return 0;
}

static int on_contains(Level *level, PyObject **element, PyObject **container)
{
    level->keeps = 1; /* what `__eq__` or `__contains__` returns is asked for its truth */
    if (is_traced(*element) && has_plain_elements(*container)) {
        return find_number(element, *container);
    }
    if (look_at(element) < 0) {
        return -1;
    }
    int is_others = find_outside(*container) != NULL;
    if (PyDict_Check(*container)) { /* only whether the key is there */
        return is_others ? tell_void("contains", Py_BuildValue("(OO)", *container, *element)) : 0;
    }
    if (is_others && PyObject_TypeCheck(*element, state.tensor) &&
        tell_void("hashed", Py_BuildValue("(O)", *element)) < 0) {
        return -1;
    }
    return look_at(container);
}

/* Whether two objects are one. */
static int on_is(PyObject **left, PyObject **right)
{
    PyObject **operands[2] = {right, left};
    if (PyObject_TypeCheck(*left, state.tensor) && PyObject_TypeCheck(*right, state.tensor)) {
        return tell_void("identity", Py_BuildValue("(OO)", *left, *right));
    }
    if ((is_traced(*left) || is_traced(*right)) && PyNumber_Check(*left) && PyNumber_Check(*right)) {
        for (int i = 0; i < 2; i++) {
            PyObject *original = tell("original", Py_BuildValue("(O)", *operands[i]));
            if (original == NULL) {
                return -1;
            }
            put(operands[i], original);
        }
        return 0;
    }
    if (has_state(*left) && has_state(*right)) {
        for (int i = 0; i < 2; i++) {
            if (is_plain_container(*operands[i]) &&
                tell_void("identified", Py_BuildValue("(O)", *operands[i])) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

static int on_truth(Level *level, PyObject **slot)
{
    level->keeps = 1; /* what `__bool__` or `__len__` returns */
    return is_traced(*slot) ? 0 : look_over(slot);
}

/* Something is taken from an iterator that others may take from, too. */
static int take_from(PyObject *iterator)
{
    if (find_outside(iterator) == NULL) {
        return 0;
    }
    return tell_void("taken", Py_BuildValue("(O)", iterator));
}

#endif
