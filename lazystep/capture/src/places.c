/* Reading many places at once, and comparing what is found with what a captured call found.

A `Plan` is a flat list of rows. A row reads one place, either in a fixed object or in the value of an earlier
row, and checks what it finds. `Plan.read` goes through all rows and stops at the first that does not fit. It
stands on the path of each replay and runs no Python code, but for comparisons of values that are not the same
object.

[Note: versions of dicts] Each change of a dict gives it a version that no dict has had. While the version is
that of the last read in which all rows fitted, the dict holds the same objects as then, so nothing is looked up.
Rows that nobody needs the value of stand together if they are in the same dict: one comparison does for all. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* How a row gets its value. Mirrored in capture/guards.py. */
enum { DICT_ITEM, ITEM, CELL, SLOT, CLASS, ATTRIBUTE, OBJECT, WEAK, CONTEXT, TYPE_OF, GRAD };
/* What it checks. */
enum { ANY, IS, VALUE, HAS_TYPE, MISSING, SIZE, KEYS, SAME_AS };

typedef struct {
    int get;
    int check;
    int is_output;
    Py_ssize_t parent; /* the row whose value is the container, or -1 */
    PyObject *container;
    PyObject *key;
    PyObject *expected; /* SAME_AS: the number of the other row */
    PyObject *keys;     /* KEYS: a tuple */
    Py_ssize_t size;    /* SIZE, KEYS, SAME_AS */
    /* Of the last read of a dict that fitted; the dict keeps the value alive. */
    PyObject *seen_in;
    uint64_t seen_version;
    PyObject *seen;
    Py_ssize_t end; /* of the rows of this dict whose values nobody needs; 0 for all but the first of them */
} Row;

typedef struct {
    PyObject_HEAD
    Py_ssize_t num_rows;
    Py_ssize_t num_outputs;
    Row *rows;
} Plan;

/* Whether two values are the same to any code that computes with them: 0.0 is not -0.0, and 1 is not True. */
static int is_same(PyObject *a, PyObject *b)
{
    if (a == b) {
        return 1;
    }
    if (Py_TYPE(a) != Py_TYPE(b)) {
        return 0;
    }
    if (PyFloat_CheckExact(a)) {
        return memcmp(&((PyFloatObject *)a)->ob_fval, &((PyFloatObject *)b)->ob_fval, sizeof(double)) == 0;
    }
    if (PyComplex_CheckExact(a)) {
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
    int equal = PyObject_RichCompareBool(a, b, Py_EQ);
    if (equal < 0) { /* an object that can't be compared has changed */
        PyErr_Clear();
        return 0;
    }
    return equal;
}

#if PY_VERSION_HEX < 0x030E0000
#define VERSION_OF(dict) (((PyDictObject *)(dict))->ma_version_tag)
#else
#define VERSION_OF(dict) 0 /* no such thing any more: everything is looked up */
#endif

/* The value of a place: a new reference, or NULL without an error if nothing is there. */
static PyObject *get(const Row *row, PyObject *container)
{
    switch (row->get) {
    case DICT_ITEM: {
        PyObject *value = PyDict_GetItemWithError(container, row->key);
        if (value == NULL) {
            PyErr_Clear();
        }
        return Py_XNewRef(value);
    }
    case ITEM: {
        if (PyDict_Check(container)) {
            PyObject *value = PyDict_GetItemWithError(container, row->key);
            if (value == NULL) {
                PyErr_Clear();
            }
            return Py_XNewRef(value);
        }
        if (!PyLong_Check(row->key) || !(PyList_Check(container) || PyTuple_Check(container))) {
            PyObject *value = PyObject_GetItem(container, row->key); /* a deque */
            if (value == NULL) {
                PyErr_Clear();
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
            PyErr_Clear();
        }
        return value;
    }
    case CLASS: {
        PyObject *value = PyDict_GetItemWithError(((PyTypeObject *)container)->tp_dict, row->key);
        if (value == NULL) {
            PyErr_Clear();
        }
        return Py_XNewRef(value);
    }
    case ATTRIBUTE: {
        PyObject *value = PyObject_GetAttr(container, row->key);
        if (value == NULL) {
            PyErr_Clear();
        }
        return value;
    }
    case GRAD: {
        /* torch warns about the gradient of a tensor that is no leaf. */
        PyObject *is_leaf = PyObject_GetAttrString(container, "is_leaf");
        PyObject *value = is_leaf == Py_True ? PyObject_GetAttr(container, row->key) : Py_NewRef(Py_None);
        Py_XDECREF(is_leaf);
        if (value == NULL || is_leaf == NULL) {
            PyErr_Clear();
        }
        return value;
    }
    case OBJECT:
        return Py_NewRef(container);
    case WEAK: {
#if PY_VERSION_HEX >= 0x030D0000
        PyObject *value = NULL;
        if (PyWeakref_GetRef(container, &value) < 0) {
            PyErr_Clear();
        }
        return value == NULL ? Py_NewRef(Py_None) : value;
#else
        return Py_NewRef(PyWeakref_GetObject(container));
#endif
    }
    case CONTEXT: {
        PyObject *value = NULL;
        if (PyContextVar_Get(container, NULL, &value) < 0) {
            PyErr_Clear();
        }
        return value;
    }
    default:
        return Py_NewRef((PyObject *)Py_TYPE(container));
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
        PyErr_Clear();
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
    default:
        return 0;
    }
}

static PyObject *read_plan(Plan *plan, PyObject *unused)
{
    (void)unused;
    /* Its own, because a comparison may run Python code, and another thread may read meanwhile. */
    PyObject **values = PyMem_Calloc(plan->num_rows + 1, sizeof(PyObject *));
    PyObject *outputs = PyList_New(plan->num_outputs);
    if (values == NULL || outputs == NULL) {
        PyMem_Free(values);
        Py_XDECREF(outputs);
        return PyErr_NoMemory();
    }
    Py_ssize_t failed = -1, num_read = 0, num_outputs = 0;
    for (; num_read < plan->num_rows; num_read++) {
        Row *row = &plan->rows[num_read];
        if (row->end && VERSION_OF(row->container) == row->seen_version && row->seen_version) {
            num_read = row->end - 1;
            continue;
        }
        PyObject *container = row->parent < 0 ? row->container : values[row->parent];
        int is_dict = container != NULL && (row->get == DICT_ITEM || row->get == ITEM) && PyDict_Check(container);
        PyObject *value;
        int is_known = 0;
        if (is_dict && row->seen_in == container && row->seen_version && row->seen_version == VERSION_OF(container)) {
            value = Py_XNewRef(row->seen);
            is_known = row->check < SIZE;
        }
        else {
            value = container == NULL ? NULL : get(row, container);
        }
        values[num_read] = value;
        if (!is_known && !fits(row, value, values)) {
            failed = num_read++;
            break;
        }
        if (is_dict && !is_known && !row->end) {
            row->seen_in = container;
            row->seen = value;
            row->seen_version = VERSION_OF(container);
        }
        if (row->is_output) {
            PyList_SET_ITEM(outputs, num_outputs++, Py_NewRef(value == NULL ? Py_None : value));
        }
    }
    for (Py_ssize_t i = 0; i < num_read; i++) {
        Row *row = &plan->rows[i];
        if (row->end && i < row->end && failed < 0) {
            row->seen_version = VERSION_OF(row->container); /* all rows of this dict have fitted */
        }
        Py_XDECREF(values[i]);
    }
    PyMem_Free(values);
    if (failed >= 0) {
        for (; num_outputs < plan->num_outputs; num_outputs++) {
            PyList_SET_ITEM(outputs, num_outputs, Py_NewRef(Py_None));
        }
        Py_DECREF(outputs);
        return PyLong_FromSsize_t(failed);
    }
    return outputs;
}

static int traverse(Plan *plan, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(plan));
    for (Py_ssize_t i = 0; i < plan->num_rows; i++) {
        Py_VISIT(plan->rows[i].container);
        Py_VISIT(plan->rows[i].key);
        Py_VISIT(plan->rows[i].expected);
        Py_VISIT(plan->rows[i].keys);
    }
    return 0;
}

static int clear(Plan *plan)
{
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

/* Find the rows that stand together in a dict, and whose values nobody needs. */
static int find_groups(Plan *plan)
{
    char *is_needed = PyMem_Calloc(plan->num_rows + 1, 1);
    if (is_needed == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < plan->num_rows; i++) {
        Row *row = &plan->rows[i];
        if (row->parent >= 0) {
            is_needed[row->parent] = 1;
        }
        if (row->check == SAME_AS) {
            is_needed[row->size] = 1;
        }
        is_needed[i] |= row->is_output || row->get != DICT_ITEM || row->parent >= 0 || row->check >= SIZE ||
                        !PyDict_Check(row->container);
    }
    for (Py_ssize_t i = 0; i < plan->num_rows;) {
        Py_ssize_t end = i;
        while (end < plan->num_rows && !is_needed[end] && plan->rows[end].container == plan->rows[i].container) {
            end++;
        }
        if (end > i) {
            plan->rows[i].end = end;
        }
        i = end > i ? end : i + 1;
    }
    PyMem_Free(is_needed);
    return 0;
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
        else if (row->check == SAME_AS) {
            row->size = PyLong_AsSsize_t(expected);
            if (row->size >= i) {
                PyErr_SetString(PyExc_ValueError, "a row compares itself with a later one");
                return -1;
            }
        }
        if (PyErr_Occurred()) {
            return -1;
        }
        row->container = Py_NewRef(container);
        row->key = Py_NewRef(key);
        row->expected = Py_NewRef(expected);
        plan->num_outputs += row->is_output;
        plan->num_rows = i + 1;
    }
    return find_groups(plan);
}

static PyMethodDef methods[] = {
    {"read", (PyCFunction)read_plan, METH_NOARGS,
     "The values of the output rows, or the number of the first row that does not fit."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_init, initialize}, {Py_tp_dealloc, deallocate}, {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},     {Py_tp_methods, methods},    {Py_tp_new, PyType_GenericNew},
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
    return PyBool_FromLong(is_same(a, b));
}

static PyObject *dict_of_class(PyObject *module, PyObject *type)
{
    (void)module;
    if (!PyType_Check(type)) {
        PyErr_SetString(PyExc_TypeError, "expected a class");
        return NULL;
    }
    return Py_NewRef(((PyTypeObject *)type)->tp_dict);
}

static PyMethodDef functions[] = {
    {"dict_of_class", dict_of_class, METH_O, "The dict of a class itself, which `__dict__` only shows."},
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
