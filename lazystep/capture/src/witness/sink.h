/* The sink: the Python object that is told what the call does, and its answers.

What it answers is decided in Python and mirrored there: `read` in capture/testimony.py, `code_kind` in
code_owners.py, `called` in called.py, `classify` in c_calls.py. */

#ifndef LAZYSTEP_SINK_H
#define LAZYSTEP_SINK_H

#include "state.h"

/* Kinds of places, told to the sink. */
enum {
    ATTRIBUTE, ITEM, GLOBAL, CELL,
    RESULT = -1, METHOD = -2, NOTHING = -3, MADE = -4, UNPACKED = -5, RETURNED = -6
};
/* What the sink answers to `read`: numbers there are followed; objects there are outside. */
enum { FOLLOW = 1, OUTSIDE = 2 };
/* The value is the class's own if it is what the class has under this name, and else an object's. */
enum { IF_OF_CLASS = 4 };

/* What the sink answers to `code_kind`. COVER: hidden, and so is what it calls, up to the user's code. OPS: hidden;
   below it no mode looks after the numbers that go into ops. */
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

#endif
