/* Code objects: the operations of their instructions, and whose they are. */

#ifndef LAZYSTEP_CODE_H
#define LAZYSTEP_CODE_H

#include "sink.h"

/* The operations of a code object. Its own instructions, also where the interpreter has put others in their place. */
static Decoded *decode(PyCodeObject *code)
{
    PyObject *bytes = PyCode_GetCode(code);
    if (bytes == NULL) {
        return NULL;
    }
    const unsigned char *units = (const unsigned char *)PyBytes_AS_STRING(bytes);
    Py_ssize_t size = PyBytes_GET_SIZE(bytes) / 2;
    Decoded *decoded = PyMem_RawCalloc(1, sizeof(Decoded) + size * sizeof(Operation));
    if (decoded == NULL) {
        Py_DECREF(bytes);
        PyErr_NoMemory();
        return NULL;
    }
    decoded->size = size;
    for (Py_ssize_t i = 0; i < size; i++) {
        Py_ssize_t prefix = i;
        int oparg = units[2 * i + 1];
        while (units[2 * i] == EXTENDED_ARG && i + 1 < size) {
            decoded->operations[i++] = (Operation){DO_NOTHING, 1, -1, 0};
            oparg = oparg << 8 | units[2 * i + 1];
        }
        decoded->operations[i] = (Operation){DO_NOTHING, 1, -1, 0};
        decoded->operations[EVENT_AT_PREFIX ? prefix : i] = operation_of(units[2 * i], oparg);
    }
    int done = find_depths(decoded, code, units);
    Py_DECREF(bytes);
    if (done < 0) {
        PyMem_RawFree(decoded);
        return NULL;
    }
    return decoded;
}

/* The number of a code object, or -1. */
static Py_ssize_t number_of(PyCodeObject *code, PyObject *globals)
{
    Row *row = table_find(&state.code_numbers, code, NULL, 0);
    if (row != NULL) {
        return (Py_ssize_t)row->flags;
    }
    int kind = tell_int("code_kind", Py_BuildValue("(OO)", code, globals));
    if (kind < 0 || PyList_Append(state.held, (PyObject *)code) < 0) {
        return -1;
    }
    if (state.num_codes == state.max_codes) {
        size_t size = state.max_codes ? state.max_codes * 2 : 256;
        Code *codes = PyMem_RawRealloc(state.codes, size * sizeof(Code));
        if (codes == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        state.codes = codes;
        state.max_codes = size;
    }
    if (table_add(&state.code_numbers, code, NULL, 0, (unsigned)state.num_codes) == NULL) {
        return -1;
    }
    state.codes[state.num_codes] = (Code){(PyObject *)code, kind, NULL};
    return (Py_ssize_t)state.num_codes++;
}

#endif
