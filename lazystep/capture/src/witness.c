/* The witness: which places does a call of Python code really read and write?

While `run` calls a function, the interpreter asks `on_event` before each instruction of each Python frame of
this thread. The operands lie on the frame's value stack, so an instruction such as LOAD_ATTR shows the object
and the name, BINARY_SUBSCR the container and the key, CALL the function and its arguments. Nothing of the
user's is replaced, patched or wrapped for that.

[Note: outside] An object is *outside* if the call did not make it: it was read from a global, a cell, an
attribute or a container that was outside itself. Only reads from outside objects can differ between calls, so
only those are told to the sink (a Python object, see capture/witness.py), each distinct one once. Objects that
the call itself makes are never outside.

[Note: numbers] A number that is read from outside is replaced, on the value stack, by a number that remembers
where it came from (`Traced`). Python code computes with it by its operators. C code is not able to follow: it
gets the plain number, and the sink is told that this value must stay the same (`pin`).

Nothing here depends on the release of Python. Its instructions, frames and events do: see [Note: versions] in
operations.h. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define VERSIONS "3.11, 3.12 or 3.13" /* in messages */
#if defined(Py_GIL_DISABLED) || defined(PYPY_VERSION)
#define SUPPORTED 0 /* the state of a witnessed call relies on the interpreter lock */
#elif PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030C0000
#define SUPPORTED 1
#include "frames_311.h"
#elif PY_VERSION_HEX >= 0x030C0000 && PY_VERSION_HEX < 0x030D0000
#define SUPPORTED 1
#include "frames_312.h"
#elif PY_VERSION_HEX >= 0x030D0000 && PY_VERSION_HEX < 0x030E0000
#define SUPPORTED 1
#include "frames_313.h"
#else
#define SUPPORTED 0
#endif

#if SUPPORTED

/* ---- a hash table of pointers ------------------------------------------------------------------------- */

typedef struct {
    void *owner;  /* NULL: an empty row */
    void *key;
    int kind;
    unsigned flags;
} Row;

typedef struct {
    Row *rows;
    size_t size; /* a power of two, or 0 */
    size_t used;
} Table;

static size_t hash_of(const void *owner, const void *key, int kind)
{
    size_t h = (size_t)owner >> 4;
    h ^= ((size_t)key >> 4) * 0x9E3779B97F4A7C15ull;
    h ^= (size_t)kind << 7;
    h *= 0xBF58476D1CE4E5B9ull;
    return h ^ (h >> 29);
}

static Row *table_find(Table *table, const void *owner, const void *key, int kind)
{
    if (table->size == 0) {
        return NULL;
    }
    size_t mask = table->size - 1;
    for (size_t i = hash_of(owner, key, kind) & mask; table->rows[i].owner != NULL; i = (i + 1) & mask) {
        Row *row = &table->rows[i];
        if (row->owner == owner && row->key == key && row->kind == kind) {
            return row;
        }
    }
    return NULL;
}

static Row *table_add(Table *table, void *owner, void *key, int kind, unsigned flags)
{
    if (table->used * 2 >= table->size) {
        size_t size = table->size ? table->size * 2 : 1024;
        Row *rows = PyMem_RawCalloc(size, sizeof(Row));
        if (rows == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        for (size_t i = 0; i < table->size; i++) {
            Row row = table->rows[i];
            if (row.owner != NULL) {
                size_t j = hash_of(row.owner, row.key, row.kind) & (size - 1);
                while (rows[j].owner != NULL) {
                    j = (j + 1) & (size - 1);
                }
                rows[j] = row;
            }
        }
        PyMem_RawFree(table->rows);
        table->rows = rows;
        table->size = size;
    }
    size_t mask = table->size - 1;
    size_t i = hash_of(owner, key, kind) & mask;
    while (table->rows[i].owner != NULL) {
        i = (i + 1) & mask;
    }
    table->rows[i] = (Row){owner, key, kind, flags};
    table->used++;
    return &table->rows[i];
}

static void table_clear(Table *table)
{
    PyMem_RawFree(table->rows);
    *table = (Table){NULL, 0, 0};
}

/* ---- the state of a witnessed call -------------------------------------------------------------------- */

/* Kinds of places, told to the sink. */
enum {
    ATTRIBUTE, ITEM, GLOBAL, CELL,
    RESULT = -1, METHOD = -2, NOTHING = -3, MADE = -4, UNPACKED = -5, RETURNED = -6
};
/* What the sink answers to `read`: numbers there are followed; objects there are outside. */
enum { FOLLOW = 1, OUTSIDE = 2 };
/* The value is the class's own if it is what the class has under this name, and else an object's. */
enum { IF_OF_CLASS = 4 };
/* Flags of an outside object: all of it was told; its function was entered; it was passed on. */
enum { WHOLE = 1, ENTERED = 2, MOVED = 4, PASSED = 8, SIZED = 16 };
/* What the sink answers to `code_kind`. */
/* COVER: hidden, and so is what it calls, up to the user's code. OPS: hidden; below it no mode looks after the
   numbers that go into ops. */
enum { HIDDEN, USERS, FOREIGN, COVER, OPS };
/* What the sink may answer to `called`: call it by a Python function. */
enum { IN_SIGHT = 2 };
/* What the sink answers to `classify`, for a callable that runs no Python frame. */
enum {
    SCAN,      /* may look at everything that it is given */
    IGNORE,    /* looks at no contents of its arguments */
    MOVE,      /* takes containers as a whole, and passes on what is in them: traced numbers stay traced */
    GETATTR,   /* getattr, hasattr */
    SETATTR,   /* setattr, delattr */
    TOLD,      /* the sink wants to know of each call */
    SWAP_IT,   /* the sink has a function that follows numbers, also those in a list */
    GETITEM,   /* dict.get, dict.setdefault, dict.__getitem__: one item */
    TYPE_OF,   /* type(x) */
    PASS,      /* as MOVE, but it looks at no more than the elements of a container */
    SIZE,      /* as PASS, but at no more than its length or keys */
    CALLING,   /* as MOVE, and calls the first of its arguments */
    SORTING,   /* as MOVE, and compares or adds elements; may call an argument that is not the first */
    KINDS,     /* as IGNORE, but the second argument is a class or a tuple of classes, which is looked at */
    INDEXING,  /* as PASS, but an int among the arguments may be an index */
    SEARCHING, /* as MOVE, but an int among the arguments may be an index */
    COPYING    /* as PASS, and makes a container of the elements: numbers in it are followed */
};

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

/* Call a method of the sink; NULL after an error. */
static PyObject *tell(const char *method, PyObject *args)
{
    if (args == NULL) {
        return NULL;
    }
    PyObject *function = PyObject_GetAttrString(state.sink, method);
    PyObject *answer = function == NULL ? NULL : PyObject_Call(function, args, NULL);
    Py_XDECREF(function);
    Py_DECREF(args);
    return answer;
}

static int tell_void(const char *method, PyObject *args)
{
    PyObject *answer = tell(method, args);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

static int tell_int(const char *method, PyObject *args)
{
    PyObject *answer = tell(method, args);
    if (answer == NULL) {
        return -1;
    }
    long number = PyLong_AsLong(answer);
    Py_DECREF(answer);
    return (int)number;
}

/* ---- reads, writes, contents -------------------------------------------------------------------------- */

static void forget_pending(Level *level)
{
    level->pending = NOTHING;
    Py_CLEAR(level->owner);
    Py_CLEAR(level->key);
}

static void expect_value(Level *level, int kind, PyObject *owner, PyObject *key, unsigned flags)
{
    level->pending = kind;
    level->owner = Py_XNewRef(owner);
    level->key = Py_XNewRef(key);
    level->flags = flags;
}

/* The object for which a weak proxy stands, or None: a new reference. */
static PyObject *behind(PyObject *proxy)
{
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *object = NULL;
    if (PyWeakref_GetRef(proxy, &object) < 0) {
        PyErr_Clear();
    }
    return object == NULL ? Py_NewRef(Py_None) : object;
#else
    return Py_NewRef(PyWeakref_GET_OBJECT(proxy));
#endif
}

/* Tell of a read, once for each place. Returns the sink's answer, or -1. */
static int note_read(int kind, PyObject *owner, PyObject *key)
{
    Row *row = table_find(&state.reads, owner, key, kind);
    if (row != NULL) {
        return (int)row->flags;
    }
    int flags = tell_int("read", Py_BuildValue("(iOO)", kind, owner, key ? key : Py_None));
    if (flags < 0) {
        return -1;
    }
    if (PyList_Append(state.held, owner) < 0 || (key != NULL && PyList_Append(state.held, key) < 0)) {
        return -1;
    }
    return table_add(&state.reads, owner, key, kind, (unsigned)flags) == NULL ? -1 : flags;
}

static int read_place(Level *level, int kind, PyObject *owner, PyObject *key)
{
    int flags = note_read(kind, owner, key);
    if (flags > 0) {
        expect_value(level, kind, owner, key, (unsigned)flags);
    }
    return flags < 0 ? -1 : 0;
}

static int note_write(int kind, PyObject *owner, PyObject *key, PyObject *value)
{
    if (PyWeakref_CheckProxy(owner)) {
        PyObject *object = behind(owner);
        int done = object == NULL || object == Py_None ? 0 : note_write(kind, object, key, value);
        Py_XDECREF(object);
        return done;
    }
    if (value != NULL && is_traced(value) &&
        tell_void("stored", Py_BuildValue("(iOO)", kind, owner, key ? key : Py_None)) < 0) {
        return -1;
    }
    if (find_outside(owner) == NULL || table_find(&state.writes, owner, key, kind) != NULL) {
        return 0;
    }
    /* Deleting what is not there raises, and so does writing behind the end of a list. */
    int must_be_there = value == NULL || (kind == ITEM && PyList_Check(owner));
    if (tell_void("write", Py_BuildValue("(iOOi)", kind, owner, key ? key : Py_None, must_be_there)) < 0 ||
        PyList_Append(state.held, owner) < 0 || (key != NULL && PyList_Append(state.held, key) < 0)) {
        return -1;
    }
    return table_add(&state.writes, owner, key, kind, 0) == NULL ? -1 : 0;
}

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

/* ---- calls -------------------------------------------------------------------------------------------- */

/* What identifies a callable: bound C methods are made anew for each call. */
static void *identity_of(PyObject *callable)
{
    return PyCFunction_Check(callable) ? (void *)((PyCFunctionObject *)callable)->m_ml : (void *)callable;
}

static int classify(PyObject *callable)
{
    void *identity = identity_of(callable);
    Row *row = table_find(&state.callables, identity, NULL, 0);
    if (row != NULL) {
        return (int)row->flags;
    }
    int answer = tell_int("classify", Py_BuildValue("(O)", callable));
    if (answer < 0 || PyList_Append(state.held, callable) < 0) {
        return -1;
    }
    return table_add(&state.callables, identity, NULL, 0, (unsigned)answer) == NULL ? -1 : answer;
}

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

static int is_python(PyObject *attribute)
{
    if (attribute == NULL) {
        return 0;
    }
    if (Py_TYPE(attribute) == &PyStaticMethod_Type) {
        PyObject *function = PyObject_GetAttrString(attribute, "__func__");
        int is_function = function != NULL && PyFunction_Check(function);
        Py_XDECREF(function);
        PyErr_Clear();
        return is_function;
    }
    return PyFunction_Check(attribute);
}

/* Whether calling this runs Python code of its own, whose frames show what it does. */
static int runs_python(PyObject *callable)
{
    PyTypeObject *type = Py_TYPE(callable);
    if (type == &PyFunction_Type) {
        return 1;
    }
    if (type == &PyMethod_Type) {
        return runs_python(PyMethod_GET_FUNCTION(callable));
    }
    static PyObject *names[3];
    static const char *const texts[3] = {"__call__", "__init__", "__new__"};
    for (int i = 0; i < 3; i++) {
        if (names[i] == NULL && (names[i] = PyUnicode_InternFromString(texts[i])) == NULL) {
            PyErr_Clear();
            return 0;
        }
    }
    /* An object whose class defines `__call__`; a class that defines how its objects are made. */
    if (is_python(_PyType_Lookup(type, names[0]))) {
        return 1;
    }
    return PyType_Check(callable) && (is_python(_PyType_Lookup((PyTypeObject *)callable, names[1])) ||
                                      is_python(_PyType_Lookup((PyTypeObject *)callable, names[2])));
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

/* Functions in C that another one is going to call, out of sight. */
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

static int read_attribute(Level *level, PyObject **slot, PyObject *name, int kind);

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
    switch (kind) {
    case GETATTR:
        if (num_args >= 2 && PyUnicode_Check(args[1])) {
            /* Interned, so that the name is the same object wherever it is used. */
            PyObject *name = Py_NewRef(args[1]);
            PyUnicode_InternInPlace(&name);
            int done = read_attribute(level, &args[0], name, ATTRIBUTE);
            Py_DECREF(name);
            return done;
        }
        break;
    case SETATTR:
        if (num_args >= 2 && PyUnicode_Check(args[1])) {
            PyObject *name = Py_NewRef(args[1]);
            PyUnicode_InternInPlace(&name);
            int done = note_write(ATTRIBUTE, args[0], name, num_args > 2 ? args[2] : NULL);
            Py_DECREF(name);
            return done;
        }
        break;
    case GETITEM: {
        PyObject *owner = self != NULL ? self : num_args ? args[0] : NULL;
        PyObject **key = self != NULL ? args : args + 1;
        if (owner != NULL && num_args >= (self != NULL ? 1 : 2) && PyDict_Check(owner)) {
            PyObject **given = key + 1 < args + num_args ? key + 1 : NULL; /* which `setdefault` may store */
            if (look_at(key) < 0 || (given != NULL && is_traced(*given) &&
                                     tell_void("stored", Py_BuildValue("(iOO)", ITEM, owner, *key)) < 0)) {
                return -1;
            }
            return find_outside(owner) != NULL ? read_place(level, ITEM, owner, *key) : 0;
        }
        break;
    }
    case SWAP_IT: {
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
    case TYPE_OF:
        if (num_args && is_traced(args[0])) {
            PyObject *plain = tell("plain", Py_BuildValue("(O)", args[0]));
            if (plain == NULL) {
                return -1;
            }
            put(&args[0], plain);
        }
        expect_result(level, NULL, args, num_args);
        return 0;
    case TOLD: {
        PyObject *tuple = tuple_of(args, num_args);
        int keeps = tuple == NULL ? -1 : tell_int("called", Py_BuildValue("(ON)", *callable, tuple));
        if (keeps < 0) {
            return -1;
        }
        if (keeps == IN_SIGHT) {
            return replace_by_visible(callable);
        }
        level->keeps = keeps;
    }
    /* fall through */
    case KINDS:
        if (kind == KINDS && num_args > 1 && note_moved(args[1]) < 0) {
            return -1;
        }
    /* fall through */
    case IGNORE:
        expect_result(level, self, args, num_args);
        return 0;
    default:
        break;
    }
    if (kind == SCAN && num_args == 0 && self == NULL && PyCFunction_Check(*callable)) {
        PyObject *done = tell("called_with_nothing", Py_BuildValue("(O)", *callable));
        if (done == NULL) {
            return -1;
        }
        Py_DECREF(done);
    }
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
            int is_same = PyTuple_CheckExact(args[i]) && *callable == (PyObject *)&PyTuple_Type; /* no copy is made */
            if (!is_same && !is_traced(args[i]) && look_into_copied(&args[i]) < 0) {
                return -1;
            }
        }
        kind = PASS;
    }
    level->keeps = kind != PASS && !is_calling; /* what methods return to C code, such as `__len__`, is a plain number */
    if (self != NULL && (kind == MOVE ? note_moved(self) : kind == PASS   ? note_passed(self)
                         : kind == SIZE ? note_sized(self)
                                        : note_whole(self)) < 0) {
        return -1;
    }
    int is_dict = *callable == (PyObject *)&PyDict_Type; /* which hashes keys, if it is given no dict */
    for (Py_ssize_t i = 0; i < num_args; i++) {
        PyObject *value = args[i];
        if (is_dict && !PyDict_Check(value) && note_moved(value) < 0) {
            return -1;
        }
        if (kind == MOVE || kind == PASS || kind == SIZE) {
            if ((kind == MOVE ? note_moved(value) : kind == PASS ? note_passed(value) : note_sized(value)) < 0) {
                return -1;
            }
            if (kind == MOVE && state.num_ops && (pin(&args[i]) < 0 || pin_inside(args[i]) < 0)) {
                return -1;
            }
            continue;
        }
        if (pin(&args[i]) < 0 || (has_state(args[i]) && note_whole(args[i]) < 0)) {
            return -1;
        }
        if (pin_inside(args[i]) < 0) {
            return -1;
        }
    }
    if (kind != MOVE && kind != PASS && kind != SIZE) {
        expect_result(level, self, args, num_args);
    }
    return 0;
}

static int on_call(Level *level, PyObject **callable, PyObject **args, Py_ssize_t num_args)
{
    PyObject *function = *callable;
    if (has_state(function) && find_outside(function) != NULL && !PyFunction_Check(function) &&
        !PyCFunction_Check(function) && !PyMethod_Check(function)) {
        /* An object that can be called: its class decides what happens. */
        if (tell_void("call_of", Py_BuildValue("(O)", function)) < 0) {
            return -1;
        }
    }
    if (!runs_python(function)) {
        return on_c_call(level, callable, args, num_args);
    }
    if (level->code_kind == USERS) {
        level->is_from_elsewhere = 0;
        expect_value(level, RETURNED, NULL, NULL, OUTSIDE);
    }
    return 0;
}

/* CALL_FUNCTION_EX: the arguments are in a tuple and a dict, which other code may hold. */
static int on_call_ex(Level *level, PyObject **callable, PyObject **positional, PyObject **keywords)
{
    PyObject *function = *callable;
    if (!PyTuple_Check(*positional) || runs_python(function)) {
        if (find_outside(*positional) != NULL &&
            (PyTuple_Check(*positional) ? look_into_copied(positional) : note_whole(*positional)) < 0) {
            return -1;
        }
        if (keywords != NULL && find_outside(*keywords) != NULL && note_whole(*keywords) < 0) {
            return -1;
        }
        return on_call(level, callable, NULL, 0);
    }
    Py_ssize_t num_positional = PyTuple_GET_SIZE(*positional);
    Py_ssize_t num_keywords = keywords != NULL && PyDict_Check(*keywords) ? PyDict_GET_SIZE(*keywords) : 0;
    PyObject **args = PyMem_Calloc(num_positional + num_keywords + 1, sizeof(PyObject *));
    if (args == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < num_positional; i++) {
        args[i] = Py_NewRef(PyTuple_GET_ITEM(*positional, i));
    }
    Py_ssize_t position = 0, number = num_positional;
    PyObject *key, *item;
    while (num_keywords && PyDict_Next(*keywords, &position, &key, &item)) {
        args[number++] = Py_NewRef(item);
    }
    int done = on_call(level, callable, args, number);
    /* Numbers that were pinned: the function is given the plain ones. */
    int any = 0;
    for (Py_ssize_t i = 0; i < num_positional; i++) {
        any |= args[i] != PyTuple_GET_ITEM(*positional, i);
    }
    if (done == 0 && any) {
        PyObject *tuple = tuple_of(args, num_positional);
        if (tuple == NULL) {
            done = -1;
        }
        else {
            put(positional, tuple);
        }
    }
    any = 0;
    for (position = 0, number = num_positional; num_keywords && PyDict_Next(*keywords, &position, &key, &item);) {
        any |= args[number++] != item;
    }
    PyObject *given = done == 0 && any ? PyDict_Copy(*keywords) : NULL;
    for (position = 0, number = num_positional; given != NULL && PyDict_Next(*keywords, &position, &key, &item);) {
        if (PyDict_SetItem(given, key, args[number++]) < 0) {
            done = -1;
        }
    }
    if (given != NULL) {
        put(keywords, given);
    }
    number = num_positional + num_keywords;
    for (Py_ssize_t i = 0; i < number; i++) {
        Py_DECREF(args[i]);
    }
    PyMem_Free(args);
    return done;
}

/* ---- instructions ------------------------------------------------------------------------------------- */

/* The value that the last instruction has pushed. */
static int on_value(Level *level, PyObject **top)
{
    int kind = level->pending;
    PyObject **slot = top - level->distance;
    if (kind == UNPACKED) { /* the first element is on top */
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(level->owner); i++) {
            PyObject *number = PyLong_FromSsize_t(i);
            if (number == NULL) {
                return -1;
            }
            PyObject *before = level->key;
            level->key = number;
            level->pending = ITEM;
            int done = on_value(level, top - i);
            level->key = before;
            Py_DECREF(number);
            if (done < 0) {
                return -1;
            }
        }
        return 0;
    }
    if (kind == METHOD && level->distance == 1 && top[-2] != NULL) {
        slot = &top[-2]; /* a method lies below `self`, and anything else above NULL */
    }
    PyObject *value = *slot;
    if (value == NULL) {
        return 0;
    }
    if (kind == MADE) {
        return PyList_Append(state.held, value) < 0 || table_add(&state.made, value, NULL, 0, 0) == NULL ? -1 : 0;
    }
    if (kind == RESULT) {
        /* Nobody else holds a new object. What others hold too may have been there before the call. */
        if (has_state(value) && Py_REFCNT(value) > 1 && find_outside(value) == NULL && level->code_kind == USERS) {
            int is_new = add_outside(value);
            return is_new > 0 ? tell_void("met", Py_BuildValue("(OiOO)", value, RESULT, Py_None, Py_None)) : is_new;
        }
        return 0;
    }
    if (kind == RETURNED) {
        /* Code of others may return what it has kept since before the call: a logger, a module, a thread. */
        if (level->is_from_elsewhere && has_state(value) && Py_REFCNT(value) > 1 && find_outside(value) == NULL &&
            !PyFunction_Check(value) && !PyMethod_Check(value) && !PyObject_TypeCheck(value, state.tensor)) {
            return tell_void("returned", Py_BuildValue("(O)", value));
        }
        return 0;
    }
    if ((level->flags & IF_OF_CLASS) && _PyType_Lookup((PyTypeObject *)level->owner, level->key) != value) {
        return 0;
    }
    if ((level->flags & FOLLOW) && (PyFloat_CheckExact(value) || PyLong_CheckExact(value)) && kind != METHOD) {
        PyObject *owner = level->owner, *key = level->key ? level->key : Py_None;
        PyObject *traced = tell("number", Py_BuildValue("(iOOO)", kind, owner, key, value));
        if (traced == NULL) {
            return -1;
        }
        if (traced == Py_None) {
            Py_DECREF(traced);
        }
        else {
            put(slot, traced);
        }
        return 0;
    }
    if ((level->flags & OUTSIDE) && has_state(value) && find_outside(value) == NULL) {
        /* A bound method, or what a descriptor has just made, is an object of the call's own. */
        int is_new = Py_REFCNT(value) == 1 || PyMethod_Check(value);
        if (is_new && !PyMethod_Check(value)) {
            return 0;
        }
        /* The sink adds it, unless the call itself has put it there. */
        PyObject *key = level->key ? level->key : Py_None;
        return tell_void("met", Py_BuildValue("(OiOO)", value, kind == METHOD ? ATTRIBUTE : kind, level->owner, key));
    }
    return 0;
}

/* A name is looked up in a class, for an object that the call itself has made or that stands for another one. */
static int read_of_class(Level *level, PyTypeObject *type, PyObject *name, int kind)
{
    int is_new = add_outside((PyObject *)type);
    if (is_new < 0 || (is_new > 0 && tell_void("met", Py_BuildValue("(OiOO)", type, RESULT, Py_None, Py_None)) < 0)) {
        return -1;
    }
    int flags = note_read(ATTRIBUTE, (PyObject *)type, name);
    if (flags > 0) {
        expect_value(level, kind, (PyObject *)type, name, (unsigned)flags | IF_OF_CLASS);
    }
    return flags < 0 ? -1 : 0;
}

/* `super().name`: found in one of the classes behind `this` in the order of the object's class. */
static int read_super(Level *level, PyObject *this, PyObject *object, PyObject *name, int kind)
{
    PyObject *base = tell("super_base", Py_BuildValue("(OOO)", this, object, name));
    if (base == NULL) {
        return -1;
    }
    int done = PyType_Check(base) ? read_of_class(level, (PyTypeObject *)base, name, kind) : 0;
    Py_DECREF(base);
    return done;
}

static int read_attribute(Level *level, PyObject **slot, PyObject *name, int kind)
{
    PyObject *owner = *slot;
    if (is_traced(owner)) {
        return pin(slot);
    }
    if (PyWeakref_CheckProxy(owner)) {
        PyObject *object = behind(owner);
        int done = object == NULL || object == Py_None ? 0 : read_attribute(level, &object, name, kind);
        Py_XDECREF(object);
        return done;
    }
    if (PyObject_TypeCheck(owner, &PySuper_Type)) {
        static const char *const texts[2] = {"__thisclass__", "__self__"};
        PyObject *parts[2] = {NULL, NULL};
        for (int i = 0; i < 2; i++) {
            PyObject *text = PyUnicode_InternFromString(texts[i]);
            parts[i] = text == NULL ? NULL : PyObject_GenericGetAttr(owner, text);
            Py_XDECREF(text);
        }
        int done = parts[0] == NULL || parts[1] == NULL ? -1 : read_super(level, parts[0], parts[1], name, kind);
        Py_XDECREF(parts[0]);
        Py_XDECREF(parts[1]);
        return done;
    }
    if (find_outside(owner) != NULL) {
        int flags = note_read(ATTRIBUTE, owner, name);
        if (flags > 0) {
            expect_value(level, kind, owner, name, (unsigned)flags);
        }
        return flags < 0 ? -1 : 0;
    }
    /* An object of the call's own may still find the name in its class, which is outside. */
    PyTypeObject *type = Py_TYPE(owner);
    if ((type->tp_flags & Py_TPFLAGS_HEAPTYPE) && !PyType_Check(owner) && _PyType_Lookup(type, name) != NULL) {
        return read_of_class(level, type, name, kind);
    }
    return 0;
}

/* Elements of a list or tuple are copied, or more than that of anything else. */
static int read_slice(PyObject **slot, PyObject *slice)
{
    PyObject *owner = *slot;
    if (!PyList_CheckExact(owner) && !PyTuple_CheckExact(owner)) {
        return note_whole(owner);
    }
    Py_ssize_t size = PySequence_Fast_GET_SIZE(owner), start, stop, step;
    if (PySlice_Unpack(slice, &start, &stop, &step) < 0) {
        PyErr_Clear(); /* the instruction raises it */
        return note_whole(owner);
    }
    Py_ssize_t num_taken = PySlice_AdjustIndices(size, &start, &stop, step);
    int is_same = PyTuple_CheckExact(owner) && num_taken == size && step == 1; /* no copy is made */
    return is_same ? look_into(slot) : look_into_copied(slot);
}

static int read_item(Level *level, PyObject **slot, PyObject **key)
{
    PyObject *owner = *slot;
    level->keeps = 1; /* what `__index__` returns */
    if (PyObject_TypeCheck(owner, state.tensor)) {
        return 0; /* an op */
    }
    if (look_at(key) < 0 || pin_inside(*key) < 0) { /* all of a tuple: its hash */
        return -1;
    }
    if (find_outside(owner) == NULL) {
        return 0;
    }
    /* The key is a number, a string or the like: its item alone was read. A slice reads many. */
    if ((PyDict_Check(owner) || PyList_Check(owner) || PyTuple_Check(owner)) && !PySlice_Check(*key)) {
        return read_place(level, ITEM, owner, *key);
    }
    return PySlice_Check(*key) ? read_slice(slot, *key) : note_whole(owner);
}

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
        is_plain = is_number(element) || is_traced(element) || PyBool_Check(element) || PyUnicode_CheckExact(element) || element == Py_None;
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

static int on_operation(Level *level, const Operation *operation)
{
    _PyInterpreterFrame *frame = level->frame;
    PyCodeObject *code = code_of(frame);
    PyObject **top = top_of(frame, operation);
    int does = operation->does, arg = operation->arg;
    if (level->pending != NOTHING) {
        int done = on_value(level, top);
        forget_pending(level);
        if (done < 0) {
            return -1;
        }
    }
    int is_users = level->code_kind == USERS;
    level->keeps = 0;
    level->distance = operation->distance;
    switch (does) {
    case DO_NOTHING:
        return 0;
    case DO_RETURN:
        if (state.num_levels > 1 && (state.levels[state.num_levels - 2].keeps ||
                                     state.levels[state.num_levels - 2].code_kind == OPS)) {
            return look_at(&top[-1]) < 0 ? -1 : pin_inside(top[-1]);
        }
        return 0;
    case DO_READ_GLOBAL: {
        PyObject *name = PyTuple_GET_ITEM(code->co_names, arg);
        PyObject *globals = frame->f_globals;
        if (is_users) {
            return read_place(level, GLOBAL, globals, name);
        }
        return note_read(GLOBAL, globals, name) < 0 ? -1 : 0;
    }
    case DO_READ_NAME: {
        PyObject *name = PyTuple_GET_ITEM(code->co_names, arg);
        return is_users ? read_place(level, GLOBAL, frame->f_globals, name) : 0;
    }
    case DO_WRITE_GLOBAL:
    case DO_DELETE_GLOBAL: {
        PyObject *value = does == DO_WRITE_GLOBAL ? top[-1] : NULL;
        if (is_users && add_outside(frame->f_globals) < 0) {
            return -1;
        }
        return note_write(GLOBAL, frame->f_globals, PyTuple_GET_ITEM(code->co_names, arg), value);
    }
    case DO_WRITE_NAME: {
        if (frame->f_locals != frame->f_globals) {
            return 0;
        }
        return note_write(GLOBAL, frame->f_globals, PyTuple_GET_ITEM(code->co_names, arg), top[-1]);
    }
    case DO_READ_CELL: {
        PyObject *cell = frame->localsplus[arg];
        return cell != NULL && find_outside(cell) != NULL ? read_place(level, CELL, cell, NULL) : 0;
    }
    case DO_WRITE_CELL:
    case DO_DELETE_CELL: {
        PyObject *cell = frame->localsplus[arg];
        return cell == NULL ? 0 : note_write(CELL, cell, NULL, does == DO_WRITE_CELL ? top[-1] : NULL);
    }
    case DO_READ_ATTRIBUTE:
        return read_attribute(level, &top[-1], PyTuple_GET_ITEM(code->co_names, arg), ATTRIBUTE);
    case DO_READ_METHOD:
        return read_attribute(level, &top[-1], PyTuple_GET_ITEM(code->co_names, arg), METHOD);
    case DO_READ_SUPER:
    case DO_READ_SUPER_METHOD:
        if (top[-3] != (PyObject *)&PySuper_Type) {
            return 0;
        }
        return read_super(level, top[-2], top[-1], PyTuple_GET_ITEM(code->co_names, arg),
                          does == DO_READ_SUPER ? ATTRIBUTE : METHOD);
    case DO_WRITE_ATTRIBUTE:
        return note_write(ATTRIBUTE, top[-1], PyTuple_GET_ITEM(code->co_names, arg), top[-2]);
    case DO_DELETE_ATTRIBUTE:
        return note_write(ATTRIBUTE, top[-1], PyTuple_GET_ITEM(code->co_names, arg), NULL);
    case DO_READ_ITEM:
        return read_item(level, &top[-2], &top[-1]);
    case DO_WRITE_ITEM:
    case DO_DELETE_ITEM: {
        PyObject *owner = top[-2];
        if (PyObject_TypeCheck(owner, state.tensor)) {
            return 0;
        }
        if (look_at(&top[-1]) < 0 || pin_inside(top[-1]) < 0) {
            return -1;
        }
        PyObject *value = does == DO_WRITE_ITEM ? top[-3] : NULL;
        if ((PyDict_Check(owner) || PyList_Check(owner)) && !PySlice_Check(top[-1])) {
            return note_write(ITEM, owner, top[-1], value);
        }
        if (does == DO_WRITE_ITEM && (pin(&top[-3]) < 0 || (!holds_others(owner) && pin_inside(top[-3]) < 0))) {
            return -1;
        }
        return note_whole(owner);
    }
    case DO_READ_SLICE:
    case DO_WRITE_SLICE: {
        PyObject *owner = top[-3];
        if (pin(&top[-2]) < 0 || pin(&top[-1]) < 0) {
            return -1;
        }
        if (PyObject_TypeCheck(owner, state.tensor)) {
            return 0; /* an op */
        }
        if (does == DO_READ_SLICE && find_outside(owner) != NULL) {
            PyObject *slice = PySlice_New(top[-2], top[-1], NULL);
            int done = slice == NULL ? -1 : read_slice(&top[-3], slice);
            Py_XDECREF(slice);
            return done;
        }
        if (does == DO_WRITE_SLICE && (pin(&top[-4]) < 0 || (!holds_others(owner) && pin_inside(top[-4]) < 0))) {
            return -1;
        }
        return note_whole(owner);
    }
    case DO_COMPARE_TRUTH:
        level->keeps = 1; /* what `__lt__` returns is asked for its truth */
        return on_binary(&top[-2], &top[-1], arg);
    case DO_BINARY:
        return on_binary(&top[-2], &top[-1], arg);
    case DO_CONTAINS:
        level->keeps = 1;
        if (is_traced(top[-2]) && has_plain_elements(top[-1])) {
            return find_number(&top[-2], top[-1]);
        }
        if (look_at(&top[-2]) < 0) {
            return -1;
        }
        if (PyDict_Check(top[-1])) { /* only whether the key is there */
            return find_outside(top[-1]) == NULL ? 0 : tell_void("contains", Py_BuildValue("(OO)", top[-1], top[-2]));
        }
        if (PyObject_TypeCheck(top[-2], state.tensor) && find_outside(top[-1]) != NULL &&
            tell_void("hashed", Py_BuildValue("(O)", top[-2])) < 0) {
            return -1;
        }
        return look_at(&top[-1]);
    case DO_IS:
        if (PyObject_TypeCheck(top[-2], state.tensor) && PyObject_TypeCheck(top[-1], state.tensor)) {
            return tell_void("identity", Py_BuildValue("(OO)", top[-2], top[-1]));
        }
        if ((is_traced(top[-2]) || is_traced(top[-1])) && PyNumber_Check(top[-2]) && PyNumber_Check(top[-1])) {
            for (int i = 1; i <= 2; i++) {
                PyObject *original = tell("original", Py_BuildValue("(O)", top[-i]));
                if (original == NULL) {
                    return -1;
                }
                put(&top[-i], original);
            }
            return 0;
        }
        if (has_state(top[-2]) && has_state(top[-1])) {
            for (int i = 1; i <= 2; i++) {
                if (is_plain_container(top[-i]) &&
                    tell_void("identified", Py_BuildValue("(O)", top[-i])) < 0) {
                    return -1;
                }
            }
        }
        return 0;
    case DO_TRUTH:
        return on_truth(level, &top[-1]);
    case DO_UNPACK: {
        PyObject *owner = top[-1];
        if (find_outside(owner) == NULL || !(PyTuple_Check(owner) || PyList_Check(owner)) ||
            PySequence_Fast_GET_SIZE(owner) != arg) {
            if (PyIter_Check(owner) && take_from(owner) < 0) {
                return -1;
            }
            return look_into(&top[-1]);
        }
        if (tell_void("unpacked", Py_BuildValue("(O)", owner)) < 0) {
            return -1;
        }
        expect_value(level, UNPACKED, owner, NULL, FOLLOW | OUTSIDE);
        return 0;
    }
    case DO_LOOK_AT:
        for (int i = arg; i > 0; i--) {
            if (look_at(&top[-i]) < 0) {
                return -1;
            }
        }
        return 0;
    case DO_BUILD_MAP:
        for (int i = arg; i > 0; i--) {
            if (look_at(&top[-2 * i]) < 0) {
                return -1;
            }
        }
        return 0;
    case DO_UNPACK_REST:
        if (PyIter_Check(top[-1]) && take_from(top[-1]) < 0) {
            return -1;
        }
        return PyDict_Check(top[-1]) ? look_into(&top[-1]) : look_into_copied(&top[-1]);
    case DO_LOOK_INTO:
        return look_into(&top[-1]);
    case DO_COPY:
        return PyDict_Check(top[-1]) == arg ? look_into_copied(&top[-1]) : look_into(&top[-1]);
    case DO_LOOK_OVER:
        return look_over(&top[-1]);
    case DO_ITERATE:
        if (PyIter_Check(top[-1])) {
            return 0; /* what is taken from it is told one by one */
        }
        return PyDict_Check(top[-1]) ? look_over(&top[-1]) : look_into(&top[-1]);
    case DO_TAKE:
        return take_from(top[-arg]);
    case DO_MATCH_KEYS:
        return look_at(&top[-2]);
    case DO_MATCH_CLASS: {
        PyObject *subject = top[-3], *names = top[-1];
        if (find_outside(subject) != NULL && PyTuple_Check(names)) {
            return tell_void("matched", Py_BuildValue("(OOi)", subject, names, arg));
        }
        return 0;
    }
    case DO_BUILD_SLICE:
        for (int i = 1; i <= arg; i++) {
            if (pin(&top[-i]) < 0) {
                return -1;
            }
        }
        return 0;
    case DO_ENTER:
        if (find_outside(top[-1]) != NULL) {
            return tell_void("call_of", Py_BuildValue("(O)", top[-1]));
        }
        return 0;
    case DO_IMPORT:
    case DO_IMPORT_FROM: {
        PyObject *name = PyTuple_GET_ITEM(code->co_names, arg);
        if (does == DO_IMPORT_FROM) {
            return find_outside(top[-1]) != NULL ? read_place(level, ATTRIBUTE, top[-1], name) : 0;
        }
        if (is_users) {
            expect_value(level, RESULT, NULL, NULL, OUTSIDE);
            return tell_void("imported", Py_BuildValue("(OOO)", name, frame->f_globals, top[-2]));
        }
        return 0;
    }
    case DO_MAKE_FUNCTION:
        expect_value(level, MADE, NULL, NULL, 0);
        return 0;
    case DO_CALL_KEYWORDS:
        top--; /* their names */
    /* fall through */
    case DO_CALL: {
        PyObject **args = arguments_of(top, arg);
        return on_call(level, callable_of(top, arg), args, top - args);
    }
    case DO_CALL_EXPANDED: {
        PyObject **keywords = arg ? &top[-1] : NULL;
        PyObject **positional = &top[arg ? -2 : -1];
        return on_call_ex(level, positional - EXPANDED_CALLABLE_BELOW, positional, keywords);
    }
    default:
        return 0;
    }
}

/* ---- events ------------------------------------------------------------------------------------------- */

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

/* A frame is entered or resumed. Returns 1 if its instructions are looked at, otherwise 0, or -1. */
static int on_frame(_PyInterpreterFrame *frame)
{
    Py_ssize_t number = number_of(code_of(frame), frame->f_globals);
    if (number < 0) {
        return -1;
    }
    int kind = state.codes[number].kind;
    if (state.num_levels == state.max_levels) {
        size_t size = state.max_levels ? state.max_levels * 2 : 256;
        Level *levels = PyMem_RawRealloc(state.levels, size * sizeof(Level));
        if (levels == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        state.levels = levels;
        state.max_levels = size;
    }
    int is_covered = state.num_levels && state.levels[state.num_levels - 1].code_kind == COVER;
    if (is_covered && kind != USERS) {
        kind = COVER;
    }
    state.levels[state.num_levels++] = (Level){
        .frame = frame,
        .code = (size_t)number,
        .code_kind = kind,
        .pending = NOTHING,
        .distance = 1,
    };
    state.num_ops += kind == OPS;
    int is_looked_at = kind == USERS || kind == FOREIGN;
    if (is_looked_at && state.codes[number].decoded == NULL) {
        Decoded *decoded = decode(code_of(frame));
        if (decoded == NULL) {
            return -1;
        }
        state.codes[number].decoded = decoded;
        if (want_instructions(code_of(frame)) < 0) {
            return -1;
        }
    }
    PyObject *function = function_of(frame);
    if (kind == USERS && table_find(&state.made, function, NULL, 0) == NULL) {
        Row *known = find_outside(function);
        if (known == NULL || !(known->flags & ENTERED)) {
            /* Told before it is marked: the sink adds the function if the call did not make it. */
            if (tell_void("entered", Py_BuildValue("(O)", function)) < 0) {
                return -1;
            }
            known = find_outside(function);
            if (known != NULL) {
                known->flags |= ENTERED;
            }
        }
    }
    /* What another package's function shares with those around it, such as a registry. */
    if (kind == FOREIGN && PyFunction_Check(function) && PyFunction_GET_CLOSURE(function) != NULL &&
        table_find(&state.made, function, NULL, 0) == NULL && table_find(&state.callables, function, NULL, 1) == NULL) {
        if (tell_void("entered_elsewhere", Py_BuildValue("(O)", function)) < 0 ||
            PyList_Append(state.held, function) < 0 ||
            table_add(&state.callables, function, NULL, 1, 0) == NULL) {
            return -1;
        }
    }
    return is_looked_at;
}

static void on_leave(_PyInterpreterFrame *frame)
{
    /* The frames above it, if any, were left without an event. */
    for (size_t i = state.num_levels; i > 0; i--) {
        if (state.levels[i - 1].frame == frame) {
            while (state.num_levels >= i) {
                Level *level = &state.levels[--state.num_levels];
                state.num_ops -= level->code_kind == OPS;
                forget_pending(level);
                if (state.num_levels) {
                    state.levels[state.num_levels - 1].is_from_elsewhere = level->code_kind == FOREIGN;
                }
            }
            return;
        }
    }
}

static void on_raise(_PyInterpreterFrame *frame)
{
    if (state.num_levels && state.levels[state.num_levels - 1].frame == frame) {
        forget_pending(&state.levels[state.num_levels - 1]);
    }
}

/* The unit of code with this number is about to run. */
static int on_unit(_PyInterpreterFrame *frame, Py_ssize_t unit)
{
    Level *level = state.num_levels ? &state.levels[state.num_levels - 1] : NULL;
    if (level == NULL || level->frame != frame || (level->code_kind != USERS && level->code_kind != FOREIGN)) {
        return 0;
    }
    const Decoded *decoded = state.codes[level->code].decoded;
    if (unit < 0 || unit >= decoded->size) {
        PyErr_Format(PyExc_RuntimeError, "%R has no unit %zd", code_of(frame), unit);
        return -1;
    }
    return on_operation(level, &decoded->operations[unit]);
}

static int is_looking(void) { return state.sink != NULL && state.failure == NULL; }

/* Keep an error of ours, or of the sink's: it is none of the code that is being looked at. */
static void finish_event(int done)
{
    if (done < 0) {
        PyObject *type, *traceback;
        PyErr_Fetch(&type, &state.failure, &traceback);
        PyErr_NormalizeException(&type, &state.failure, &traceback);
        if (traceback != NULL && state.failure != NULL) {
            PyException_SetTraceback(state.failure, traceback);
        }
        Py_XDECREF(traceback);
        Py_XDECREF(type);
    }
}

/* ---- the module --------------------------------------------------------------------------------------- */

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
