/* The witness: which places does a call of Python code really read and write?

While `call` calls a function, the interpreter announces each instruction of each Python frame of this thread
before it runs it. The operands lie on the frame's value stack, so an instruction such as LOAD_ATTR shows the object
and the name, BINARY_SUBSCR the container and the key, CALL the function and its arguments. Nothing of the
user's is replaced, patched or wrapped for that.

[Note: outside] An object is *outside* if the call did not make it: it was read from a global, a cell, an
attribute or a container that was outside itself. Only reads from outside objects can differ between calls, so
only those are told to the sink (a Python object, see capture/witness.py), each distinct one once. Objects that
the call itself makes are never outside.

[Note: numbers] A number that is read from outside is replaced, on the value stack, by a number that remembers
where it came from (`Traced`). Python code computes with it by its operators. C code is not able to follow: it
gets the plain number, and the sink is told that this value must stay the same (`pin`).

This file is the module. What it does is in witness/, all of it compiled as one unit, because each instruction goes
through it. Reading order: operations, opcodes, events, frames, table, state, sink, containers, operands, pushed_value,
reads_and_writes, attributes_and_items, operators, callables, c_calls, calls, instructions, code, levels. What depends
on the release of Python, its instructions, frames and events, is in the files around frames_3xx.h: see
[Note: versions] in operations.h. */

#include "witness/frames.h"

#if SUPPORTED

#include "witness/levels.h"

static void finish(void)
{
    end_events();
    while (state.num_levels) {
        forget_pending(&state.levels[--state.num_levels]);
    }
    while (state.num_codes) {
        PyMem_RawFree(state.codes[--state.num_codes].decoded);
    }
    table_clear(&state.outside);
    table_clear(&state.reads);
    table_clear(&state.writes);
    table_clear(&state.made);
    table_clear(&state.code_numbers);
    table_clear(&state.callables);
    Py_CLEAR(state.sink);
    Py_CLEAR(state.traced_float);
    Py_CLEAR(state.traced_int);
    Py_CLEAR(state.tensor);
    PyObject *held = state.held;
    state.held = NULL;
    Py_XDECREF(held);
}

static PyObject *begin(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *sink, *traced_float, *traced_int, *tensor;
    if (!PyArg_ParseTuple(args, "OOOO", &sink, &traced_float, &traced_int, &tensor)) {
        return NULL;
    }
    if (state.sink != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "another call is being witnessed");
        return NULL;
    }
    state.held = PyList_New(0);
    if (state.held == NULL) {
        return NULL;
    }
    state.sink = Py_NewRef(sink);
    state.traced_float = (PyTypeObject *)Py_NewRef(traced_float);
    state.traced_int = (PyTypeObject *)Py_NewRef(traced_int);
    state.tensor = (PyTypeObject *)Py_NewRef(tensor);
    state.failure = NULL;
    Py_RETURN_NONE;
}

static PyObject *call(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *function, *positional, *keywords;
    if (!PyArg_ParseTuple(args, "OO!O!", &function, &PyTuple_Type, &positional, &PyDict_Type, &keywords)) {
        return NULL;
    }
    if (state.sink == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "no call is being witnessed");
        return NULL;
    }
    if (begin_events() < 0) {
        return NULL;
    }
    PyObject *result = PyObject_Call(function, positional, keywords);
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    end_events();
    while (state.num_levels) {
        forget_pending(&state.levels[--state.num_levels]);
    }
    state.num_ops = 0;
    PyErr_Restore(type, value, traceback);
    return result;
}

static PyObject *end(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    finish();
    PyObject *failure = state.failure;
    state.failure = NULL;
    if (failure == NULL) {
        Py_RETURN_NONE;
    }
    return failure;
}

static PyObject *add(PyObject *module, PyObject *value)
{
    (void)module;
    if (state.sink == NULL || !has_state(value)) {
        Py_RETURN_FALSE;
    }
    int is_new = add_outside(value);
    return is_new < 0 ? NULL : PyBool_FromLong(is_new);
}

static PyObject *is_outside(PyObject *module, PyObject *value)
{
    (void)module;
    return PyBool_FromLong(find_outside(value) != NULL);
}

static PyObject *behind_proxy(PyObject *module, PyObject *proxy)
{
    (void)module;
    if (!PyWeakref_CheckProxy(proxy)) {
        PyErr_SetString(PyExc_TypeError, "expected a weak proxy");
        return NULL;
    }
    return behind(proxy);
}

static PyObject *check_code(PyObject *module, PyObject *code)
{
    (void)module;
    if (!PyCode_Check(code)) {
        PyErr_SetString(PyExc_TypeError, "expected a code object");
        return NULL;
    }
    Decoded *decoded = decode((PyCodeObject *)code);
    if (decoded == NULL) {
        return NULL;
    }
    int deepest = 0;
    for (Py_ssize_t i = 0; i < decoded->size; i++) {
        deepest = decoded->operations[i].depth > deepest ? decoded->operations[i].depth : deepest;
    }
    PyMem_RawFree(decoded);
    return PyLong_FromLong(deepest);
}

static PyMethodDef functions[] = {
    {"begin", begin, METH_VARARGS, "Witness calls of this thread, told to a sink."},
    {"call", call, METH_VARARGS, "Call a function with a tuple and a dict of arguments, and look on."},
    {"end", end, METH_NOARGS, "End it. Returns an exception of the sink's, or None."},
    {"add", add, METH_O, "Count an object as outside. Returns whether it is new."},
    {"behind", behind_proxy, METH_O, "The object for which a weak proxy stands, or None."},
    {"check_code", check_code, METH_O, "The greatest depth of a code's value stack that was found, before an instruction."},
    {"is_outside", is_outside, METH_O, "Whether an object is known to be outside."},
    {NULL, NULL, 0, NULL},
};
#else
static PyMethodDef functions[] = {{NULL, NULL, 0, NULL}};
#endif

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_witness", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__witness(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (module != NULL && (PyModule_AddIntConstant(module, "supported", SUPPORTED) < 0 ||
                           PyModule_AddStringConstant(module, "versions", VERSIONS) < 0)) {
        Py_CLEAR(module);
    }
    return module;
}
