/* Operands of an instruction, in their slots of the value stack.

C code that takes a traced number gets the plain one ([Note: numbers] in witness.c), so `pin` puts that into the
slot. Of other operands the sink is told what the instruction looks at. */

#ifndef LAZYSTEP_OPERANDS_H
#define LAZYSTEP_OPERANDS_H

#include "containers.h"

/* Put another object onto the value stack. Steals `value`. */
static void put(PyObject **slot, PyObject *value)
{
    PyObject *old = *slot;
    *slot = value;
    Py_XDECREF(old);
}

/* Replace a traced number by its plain value, which must stay the same from now on. */
static int pin(PyObject **slot)
{
    if (*slot == NULL || !is_traced(*slot)) {
        return 0;
    }
    PyObject *plain = tell("pin", Py_BuildValue("(O)", *slot));
    if (plain == NULL) {
        return -1;
    }
    put(slot, plain);
    return 0;
}

static int pin_part(PyObject *part)
{
    if (is_traced(part)) {
        return tell_void("pin", Py_BuildValue("(O)", part));
    }
    return is_plain_container(part) || find_outside(part) == NULL;
}

/* Traced numbers in a container that C code is given, also in containers inside. */
static int pin_inside(PyObject *value)
{
    int done = pin_part(value);
    return done == 1 ? visit_inside(value, pin_part) : done;
}

/* An operand of an instruction: the contents of a container. Other objects have methods for it, in Python. */
static int look_at(PyObject **slot)
{
    PyObject *value = *slot;
    if (value == NULL) {
        return 0;
    }
    if (is_traced(value)) {
        return pin(slot);
    }
    return has_state(value) ? note_moved(value) : 0;
}

/* The same where only the length or the keys matter. */
static int look_over(PyObject **slot)
{
    if (*slot == NULL) {
        return 0;
    }
    return is_traced(*slot) ? pin(slot) : has_state(*slot) ? note_sized(*slot) : 0;
}

/* The same where only the elements matter, and not what is in them. */
static int look_into(PyObject **slot)
{
    if (*slot == NULL) {
        return 0;
    }
    return is_traced(*slot) ? pin(slot) : has_state(*slot) ? note_passed(*slot) : 0;
}

enum { MAX_FOLLOWED = 256 }; /* elements of a container: numbers in larger ones are compared */

static int is_number(PyObject *value) { return PyFloat_CheckExact(value) || PyLong_CheckExact(value); }

/* Whether there are numbers among the elements of a list, tuple or dict of others. */
static int has_numbers_of_others(PyObject *value)
{
    if (find_outside(value) == NULL) {
        return 0;
    }
    if (PyDict_CheckExact(value)) {
        Py_ssize_t position = 0;
        PyObject *key, *item;
        int any = 0;
        while (!any && PyDict_GET_SIZE(value) <= MAX_FOLLOWED && PyDict_Next(value, &position, &key, &item)) {
            any = is_number(item);
        }
        return any;
    }
    if (!PyList_CheckExact(value) && !PyTuple_CheckExact(value)) {
        return 0;
    }
    Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
    for (Py_ssize_t i = 0; i < size && size <= MAX_FOLLOWED; i++) {
        if (is_number(PySequence_Fast_GET_ITEM(value, i))) {
            return 1;
        }
    }
    return 0;
}

/* The elements are copied into another container. A container of traced numbers takes the place of the one that is
   copied, and the copy has them, too. */
static int look_into_copied(PyObject **slot)
{
    if (*slot == NULL || !has_numbers_of_others(*slot)) {
        return look_into(slot);
    }
    PyObject *followed = tell("followed", Py_BuildValue("(O)", *slot));
    if (followed == NULL) {
        return -1;
    }
    put(slot, followed);
    return 0;
}

#endif
