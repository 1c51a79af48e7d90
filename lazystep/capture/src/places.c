/* Reading many places at once, and comparing what is found with what a captured call found.

A `Plan` is a flat list of rows. A row reads one place, either in a fixed object or in the value of an earlier
row, and checks what it finds. `Plan.read` goes through all rows and stops at the first that does not fit. It
stands on the path of each replay and runs no Python code, but for comparisons of values that are not the same
object. Most reads find nothing changed: see steady.c.  */

#include "plan.h"

/* An interrupt, or another exception that no code should keep, which came while Python code ran. */
static _Thread_local PyObject *held_type, *held_value, *held_traceback;

/* Forget the exception of a read or comparison: nothing is there, or it is another value. An interrupt is no
   answer to that, and is raised when the read is over. */
static void forget_error(void)
{
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception) && held_type == NULL) {
        PyErr_Fetch(&held_type, &held_value, &held_traceback);
    }
    PyErr_Clear();
}

/* Raise what was held. Steals `found`, which the read returns otherwise. */
static PyObject *unless_held(PyObject *found)
{
    if (held_type == NULL) {
        return found;
    }
    Py_XDECREF(found);
    PyErr_Restore(held_type, held_value, held_traceback);
    held_type = held_value = held_traceback = NULL;
    return NULL;
}

/* Whether two values are the same to any code that computes with them: 0.0 is not -0.0, and 1 is not True. */
static int is_same(PyObject *a, PyObject *b)
{
    if (a == b) {
        return 1;
    }
    if (Py_TYPE(a) != Py_TYPE(b)) {
        return 0;
    }
    if (PyFloat_Check(a)) { /* also NumPy's */
        return memcmp(&((PyFloatObject *)a)->ob_fval, &((PyFloatObject *)b)->ob_fval, sizeof(double)) == 0;
    }
    if (PyComplex_Check(a)) {
        return memcmp(&((PyComplexObject *)a)->cval, &((PyComplexObject *)b)->cval, sizeof(Py_complex)) == 0;
    }
    if (PyTuple_Check(a)) {
        Py_ssize_t size = PyTuple_GET_SIZE(a);
        if (size != PyTuple_GET_SIZE(b)) {
            return 0;
        }
        for (Py_ssize_t i = 0; i < size; i++) {
            int same = is_same(PyTuple_GET_ITEM(a, i), PyTuple_GET_ITEM(b, i));
            if (same <= 0) {
                return same;
            }
        }
        return 1;
    }
    if (PyFrozenSet_CheckExact(a)) { /* equal sets may differ in the order and the types of their elements */
        PyObject *elements = PySequence_Tuple(a), *others = PySequence_Tuple(b);
        int same = elements == NULL || others == NULL ? -1 : is_same(elements, others);
        Py_XDECREF(elements);
        Py_XDECREF(others);
        return same;
    }
    if (PyObject_CheckBuffer(a) && !PyBytes_Check(a)) { /* another number of NumPy's, by its bits */
        PyObject *bytes = PyBytes_FromObject(a), *others = PyBytes_FromObject(b);
        int same = bytes == NULL || others == NULL ? -1 : PyObject_RichCompareBool(bytes, others, Py_EQ);
        Py_XDECREF(bytes);
        Py_XDECREF(others);
        if (same < 0) {
            forget_error();
        }
        else {
            return same;
        }
    }
    int equal = PyObject_RichCompareBool(a, b, Py_EQ);
    if (equal < 0) { /* an object that can't be compared has changed */
        forget_error();
        return 0;
    }
    return equal;
}

/* Whether an object's attributes are still in this dict: `object.__dict__ = {}` gives it another one. */
static int has_dict(PyObject *object, PyObject *dict)
{
    if (!PyDict_Check(dict)) {
        return 1;
    }
    PyObject **there = _PyObject_GetDictPtr(object);
    return there != NULL && *there == dict;
}

static PyObject *or_none(PyObject *value) { return Py_NewRef(value == NULL ? Py_None : value); }

/* How an attribute is read. Those of functions not as attributes: hooks of `sys.addaudithook` would run. */
static int how_to_get(PyObject *container, PyObject *key)
{
    if (PyFunction_Check(container) && PyUnicode_Check(key)) {
        if (PyUnicode_CompareWithASCIIString(key, "__code__") == 0) {
            return CODE;
        }
        if (PyUnicode_CompareWithASCIIString(key, "__defaults__") == 0) {
            return DEFAULTS;
        }
        if (PyUnicode_CompareWithASCIIString(key, "__kwdefaults__") == 0) {
            return KEYWORD_DEFAULTS;
        }
    }
    return ATTRIBUTE;
}

/* The value of a place: a new reference, or NULL without an error if nothing is there. */
static PyObject *get(const Row *row, PyObject *container)
{
    switch (row->get) {
    case DICT_ITEM: {
        PyObject *value = PyDict_GetItemWithError(container, row->key);
        if (value == NULL) {
            forget_error();
        }
        return Py_XNewRef(value);
    }
    case ITEM: {
        if (PyDict_Check(container)) {
            PyObject *value = PyDict_GetItemWithError(container, row->key);
            if (value == NULL) {
                forget_error();
            }
            return Py_XNewRef(value);
        }
        if (!PyLong_Check(row->key) || !(PyList_Check(container) || PyTuple_Check(container))) {
            PyObject *value = PyObject_GetItem(container, row->key); /* a deque */
            if (value == NULL) {
                forget_error();
            }
            return value;
        }
        Py_ssize_t index = PyLong_AsSsize_t(row->key);
        Py_ssize_t size = PySequence_Fast_GET_SIZE(container);
        if (index < 0) {
            index += size;
        }
        return index < 0 || index >= size ? NULL : Py_NewRef(PySequence_Fast_GET_ITEM(container, index));
    }
    case CELL:
        return Py_XNewRef(PyCell_GET(container));
    case SLOT: {
        PyObject *value = Py_TYPE(row->key)->tp_descr_get(row->key, container, (PyObject *)Py_TYPE(container));
        if (value == NULL) {
            forget_error();
        }
        return value;
    }
    case CLASS: {
        PyObject *dict = get_class_dict((PyTypeObject *)container);
        PyObject *value = Py_XNewRef(PyDict_GetItemWithError(dict, row->key));
        if (value == NULL) {
            forget_error();
        }
        Py_DECREF(dict);
        return value;
    }
    case CODE:
        return Py_NewRef(PyFunction_GET_CODE(container));
    case DEFAULTS:
        return or_none(PyFunction_GET_DEFAULTS(container));
    case KEYWORD_DEFAULTS:
        return or_none(PyFunction_GET_KW_DEFAULTS(container));
    case ATTRIBUTE: {
        PyObject *value = PyObject_GetAttr(container, row->key);
        if (value == NULL) {
            forget_error();
        }
        return value;
    }
    case GRAD:
    case NO_GRAD: {
        /* torch warns about the gradient of a tensor that is no leaf. */
        PyObject *is_leaf = PyObject_GetAttrString(container, "is_leaf");
        PyObject *value = is_leaf == Py_True ? PyObject_GetAttr(container, row->key) : Py_NewRef(Py_None);
        Py_XDECREF(is_leaf);
        if (value == NULL || is_leaf == NULL) {
            forget_error();
        }
        return value;
    }
    case OBJECT:
        return Py_NewRef(container);
    case WEAK: {
#if PY_VERSION_HEX >= 0x030D0000
        PyObject *value = NULL;
        if (PyWeakref_GetRef(container, &value) < 0) {
            forget_error();
        }
        return value == NULL ? Py_NewRef(Py_None) : value;
#else
        return Py_NewRef(PyWeakref_GetObject(container));
#endif
    }
    case CONTEXT: {
        PyObject *value = NULL;
        if (PyContextVar_Get(container, NULL, &value) < 0) {
            forget_error();
        }
        return value;
    }
    default: /* TYPE_OF */
        return has_dict(container, row->key) ? Py_NewRef((PyObject *)Py_TYPE(container)) : NULL;
    }
}

static int has_keys(PyObject *value, PyObject *keys)
{
    if (PyDict_GET_SIZE(value) != PyTuple_GET_SIZE(keys)) {
        return 0;
    }
    if (PyODict_Check(value)) { /* its order is kept apart from the dict's */
        PyObject *now = PySequence_Tuple(value);
        int same = now != NULL && PyObject_RichCompareBool(now, keys, Py_EQ) == 1;
        forget_error();
        Py_XDECREF(now);
        return same;
    }
    Py_ssize_t position = 0, number = 0;
    PyObject *key, *item;
    while (PyDict_Next(value, &position, &key, &item)) {
        PyObject *expected = PyTuple_GET_ITEM(keys, number++);
        if (key != expected && !is_same(key, expected)) {
            return 0;
        }
    }
    return 1;
}

static int fits(const Row *row, PyObject *value, PyObject **values)
{
    if (value == NULL) {
        return row->check == MISSING;
    }
    switch (row->check) {
    case ANY:
        return 1;
    case IS:
        return value == row->expected;
    case VALUE:
        return is_same(value, row->expected);
    case HAS_TYPE:
        return (PyObject *)Py_TYPE(value) == row->expected;
    case SIZE:
        return (PyObject *)Py_TYPE(value) == row->expected && PyObject_Size(value) == row->size;
    case KEYS:
        return (PyObject *)Py_TYPE(value) == row->expected && has_keys(value, row->keys);
    case SAME_AS:
        return value == values[row->size];
    case UNLIKE:
        return value != values[row->size];
    default:
        return 0;
    }
}

#include "steady.c"

/* Read every row. The values of the outputs as a list, or the number of the first row that does not fit. */
static PyObject *read_all(Plan *plan)
{
    /* Its own, because a comparison may run Python code, and another thread may read meanwhile. */
    PyObject **values = PyMem_Calloc(plan->num_rows + 1, sizeof(PyObject *));
    PyObject *outputs = PyList_New(plan->num_outputs);
    if (values == NULL || outputs == NULL) {
        PyMem_Free(values);
        Py_XDECREF(outputs);
        return PyErr_NoMemory();
    }
    Py_ssize_t failed = -1, num_read = 0;
    for (; num_read < plan->num_rows && failed < 0; num_read++) {
        const Row *row = &plan->rows[num_read];
        PyObject *container = row->parent < 0 ? row->container : values[row->parent];
        PyObject *value = values[num_read] = container == NULL ? NULL : get(row, container);
        if (!fits(row, value, values)) {
            failed = num_read;
        }
        else if (row->is_output) {
            PyList_SET_ITEM(outputs, row->output, Py_NewRef(value == NULL ? Py_None : value));
        }
    }
    plan->num_looked_at = num_read;
    if (failed >= 0) {
        for (Py_ssize_t i = 0; i < plan->num_outputs; i++) {
            if (PyList_GET_ITEM(outputs, i) == NULL) {
                PyList_SET_ITEM(outputs, i, Py_NewRef(Py_None));
            }
        }
        Py_DECREF(outputs);
        outputs = PyLong_FromSsize_t(failed);
    }
    else if (remember(plan, values, outputs) < 0) {
        Py_CLEAR(outputs);
    }
    for (Py_ssize_t i = 0; i < num_read; i++) {
        Py_XDECREF(values[i]);
    }
    PyMem_Free(values);
    return outputs;
}

static PyObject *read_plan(Plan *plan, PyObject *unused)
{
    (void)unused;
    if (plan->is_busy) { /* by another thread, or by code that a comparison runs */
        return unless_held(read_all(plan));
    }
    if (plan->kept != NULL && read_remembered(plan)) {
        return unless_held(Py_NewRef(plan->outputs));
    }
    forget(plan);
    return held_type != NULL ? unless_held(NULL) : unless_held(read_all(plan));
}

static int traverse(Plan *plan, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(plan));
    for (Py_ssize_t i = 0; i < plan->num_rows; i++) {
        Py_VISIT(plan->rows[i].container);
        Py_VISIT(plan->rows[i].key);
        Py_VISIT(plan->rows[i].expected);
        Py_VISIT(plan->rows[i].keys);
        if (plan->kept != NULL) {
            Py_VISIT(plan->kept[i]);
        }
    }
    for (Py_ssize_t i = 0; i < plan->num_watches; i++) {
        Py_VISIT(plan->watches[i].dict);
    }
    Py_VISIT(plan->outputs);
    return 0;
}

static int clear(Plan *plan)
{
    forget(plan);
    Row *rows = plan->rows;
    Py_ssize_t num_rows = plan->num_rows;
    plan->rows = NULL;
    plan->num_rows = 0;
    for (Py_ssize_t i = 0; i < num_rows; i++) {
        Py_XDECREF(rows[i].container);
        Py_XDECREF(rows[i].key);
        Py_XDECREF(rows[i].expected);
        Py_XDECREF(rows[i].keys);
    }
    PyMem_Free(rows);
    return 0;
}

static void deallocate(Plan *plan)
{
    PyObject_GC_UnTrack(plan);
    clear(plan);
    PyTypeObject *type = Py_TYPE(plan);
    type->tp_free((PyObject *)plan);
    Py_DECREF(type);
}

/* Find the rows whose values other rows need. */
static void find_needed(Plan *plan)
{
    plan->can_remember = HAS_VERSIONS;
    for (Py_ssize_t i = 0; i < plan->num_rows; i++) {
        const Row *row = &plan->rows[i];
        if (row->parent >= 0) {
            plan->rows[row->parent].is_needed = 1;
        }
        if (row->check == SAME_AS || row->check == UNLIKE) {
            plan->rows[row->size].is_needed = 1;
        }
        if (row->get == WEAK) {
            plan->can_remember = 0;
        }
    }
}

static int initialize(Plan *plan, PyObject *args, PyObject *kwargs)
{
    (void)kwargs;
    PyObject *list;
    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &list)) {
        return -1;
    }
    clear(plan);
    Py_ssize_t num_rows = PyList_GET_SIZE(list);
    plan->rows = PyMem_Calloc(num_rows + 1, sizeof(Row));
    plan->num_outputs = 0;
    if (plan->rows == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < num_rows; i++) {
        Row *row = &plan->rows[i];
        PyObject *container, *key, *expected;
        if (!PyArg_ParseTuple(
                PyList_GET_ITEM(list, i), "iipnOOO", &row->get, &row->check, &row->is_output, &row->parent, &container,
                &key, &expected)) {
            return -1;
        }
        if (row->parent >= i) {
            PyErr_SetString(PyExc_ValueError, "a row reads the value of a later one");
            return -1;
        }
        if (row->check == SIZE || row->check == KEYS) {
            PyObject *type, *detail;
            if (!PyArg_ParseTuple(expected, "OO", &type, &detail)) {
                return -1;
            }
            if (row->check == SIZE) {
                row->size = PyLong_AsSsize_t(detail);
            }
            else {
                row->keys = Py_NewRef(detail);
            }
            expected = type;
        }
        else if (row->check == SAME_AS || row->check == UNLIKE) {
            row->size = PyLong_AsSsize_t(expected);
            if (row->size >= i) {
                PyErr_SetString(PyExc_ValueError, "a row compares itself with a later one");
                return -1;
            }
        }
        if (PyErr_Occurred()) {
            return -1;
        }
        if (row->get == ATTRIBUTE && row->parent < 0) {
            row->get = how_to_get(container, key);
        }
        row->container = Py_NewRef(container);
        /* A `__dict__` that a class makes up is none. */
        int is_made_up = row->get == TYPE_OF && row->container != NULL && !has_dict(row->container, key);
        row->key = Py_NewRef(is_made_up ? Py_None : key);
        row->expected = Py_NewRef(expected);
        row->output = plan->num_outputs;
        plan->num_outputs += row->is_output;
        plan->num_rows = i + 1;
    }
    find_needed(plan);
    return 0;
}

static PyMethodDef methods[] = {
    {"read", (PyCFunction)read_plan, METH_NOARGS,
     "The values of the output rows, or the number of the first row that does not fit."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"num_looked_at", T_PYSSIZET, offsetof(Plan, num_looked_at), READONLY,
     "How many rows and dicts the last read has looked at."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_init, initialize}, {Py_tp_dealloc, deallocate}, {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},     {Py_tp_methods, methods},    {Py_tp_members, members},
    {Py_tp_new, PyType_GenericNew},
    {0, NULL},
};

static PyType_Spec specification = {
    "lazystep.capture._places.Plan", sizeof(Plan), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots,
};

static PyObject *same(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *a, *b;
    if (!PyArg_ParseTuple(args, "OO", &a, &b)) {
        return NULL;
    }
    return unless_held(PyBool_FromLong(is_same(a, b)));
}

static PyObject *to_float32(PyObject *module, PyObject *number)
{
    (void)module;
    double value = PyFloat_AsDouble(number);
    return value == -1.0 && PyErr_Occurred() ? NULL : PyFloat_FromDouble((float)value);
}

static PyObject *dict_of_class(PyObject *module, PyObject *type)
{
    (void)module;
    if (!PyType_Check(type)) {
        PyErr_SetString(PyExc_TypeError, "expected a class");
        return NULL;
    }
    return get_class_dict((PyTypeObject *)type);
}

static PyMethodDef functions[] = {
    {"dict_of_class", dict_of_class, METH_O, "The dict of a class itself, which `__dict__` only shows."},
    {"to_float32", to_float32, METH_O, "The nearest number that has 32 bits, as a float."},
    {"is_same", same, METH_VARARGS, "Whether two values are the same to any code that computes with them."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_places", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__places(void)
{
    PyObject *module = PyModule_Create(&definition);
    PyObject *type = module == NULL ? NULL : PyType_FromSpec(&specification);
    if (type == NULL || PyModule_AddObject(module, "Plan", type) < 0) {
        Py_XDECREF(type);
        Py_CLEAR(module);
    }
    return module;
}
