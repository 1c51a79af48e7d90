/* A plan of places to read, and what is remembered of its last read. See places.c and steady.c. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

/* How a row gets its value. Mirrored in capture/guards.py. */
enum { DICT_ITEM, ITEM, CELL, SLOT, CLASS, ATTRIBUTE, OBJECT, WEAK, CONTEXT, TYPE_OF, GRAD, NO_GRAD };
/* Attributes of functions, read without a word to hooks of `sys.addaudithook`. */
enum { CODE = NO_GRAD + 1, DEFAULTS, KEYWORD_DEFAULTS };
/* What it checks. */
enum { ANY, IS, VALUE, HAS_TYPE, MISSING, SIZE, KEYS, SAME_AS, UNLIKE };

typedef struct {
    int get;
    int check;
    int is_output;
    int is_needed;     /* another row reads or compares its value */
    Py_ssize_t parent; /* the row whose value is the container, or -1 */
    PyObject *container;
    PyObject *key;      /* TYPE_OF: the dict of the object's attributes, or None */
    PyObject *expected; /* SAME_AS, UNLIKE: the number of the other row */
    PyObject *keys;     /* KEYS: a tuple */
    Py_ssize_t size;    /* SIZE, KEYS, SAME_AS, UNLIKE */
    Py_ssize_t output;  /* the number of an output row among the outputs */
} Row;

/* A dict that rows read, or whose keys a row compares: watch_rows[first] to watch_rows[end]. */
typedef struct {
    PyObject *dict;
    uint64_t version; /* when all of these rows fitted */
    Py_ssize_t first, end;
} Watch;

/* A row that no version speaks for. */
typedef struct {
    enum { LIVE_TYPE, LIVE_ITEM, LIVE_ROW } how;
    Py_ssize_t row;
    PyObject *object; /* LIVE_TYPE: has the type `value`. LIVE_ITEM: a list with `value` at `index`. */
    PyObject *value;
    Py_ssize_t index;
    PyObject *dict;   /* LIVE_TYPE: of the object's attributes, or NULL */
    PyObject **where; /* LIVE_TYPE: where the object has its dict. LIVE_ITEM: where the value was, to prefetch. */
} Live;

typedef struct {
    PyObject_HEAD
    Py_ssize_t num_rows;
    Py_ssize_t num_outputs;
    Row *rows;
    /* Of the last read, if it was remembered: see [Note: steady reads]. `kept` is NULL otherwise. */
    PyObject **kept; /* per row: a value whose identity matters, NULL for others */
    PyObject *outputs;
    Watch *watches;
    Py_ssize_t num_watches;
    Py_ssize_t *watch_rows; /* the row, or ~row for the keys of its value */
    Live *live;
    Py_ssize_t num_live;
    int is_busy;      /* a read of what is remembered is under way */
    int can_remember; /* a weak reference must not become a strong one */
    int num_to_skip;  /* whole reads before the next one is remembered */
    int backoff;
    /* How many rows and dicts the last read has looked at, for tests. */
    Py_ssize_t num_looked_at;
} Plan;

/* The version of a dict, or 0 if this release of Python has none that can be trusted: then all is looked up. */
static uint64_t version_of(PyObject *dict)
{
#if PY_VERSION_HEX >= 0x030E0000
    (void)dict;
    return 0;
#else
#if PY_VERSION_HEX >= 0x030D0000
    /* The values may lie in an object, which sets its attributes there without a word to the dict or its watchers. */
    if (((PyDictObject *)dict)->ma_values != NULL) {
        return 0;
    }
#endif
    _Py_COMP_DIAG_PUSH _Py_COMP_DIAG_IGNORE_DEPR_DECLS /* 3.12 announces that it will go */
    return ((PyDictObject *)dict)->ma_version_tag;
    _Py_COMP_DIAG_POP
#endif
}

/* The dict of a class: a new reference. */
static PyObject *get_class_dict(PyTypeObject *type)
{
#if PY_VERSION_HEX >= 0x030C0000
    return PyType_GetDict(type); /* classes of the interpreter's own keep theirs elsewhere */
#else
    return Py_NewRef(type->tp_dict);
#endif
}

/* From 3.14 on dicts have no versions: a read that rests on nothing is not worth remembering. */
#define HAS_VERSIONS (PY_VERSION_HEX < 0x030E0000)
