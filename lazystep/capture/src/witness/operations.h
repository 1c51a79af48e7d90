/* What an instruction of the interpreter does, as far as the witness cares, in words that no release changes.

[Note: versions] A release of CPython has a file of its own, frames_3xx.h, which says
  - which operation each of its instructions is (`operation_of`),
  - what a frame's code, function and value stack are (`code_of`, `function_of`, `top_of`),
  - at which of the units of a long instruction its event comes (`EVENT_AT_PREFIX`),
  - which source of events it has: sys.settrace until 3.11, sys.monitoring from 3.12 on.
Where the top of the stack is not kept in the frame, stack_depths.h finds it. A release without such a file has
no witness: its calls are recorded, and nothing else changes. */

#ifndef LAZYSTEP_OPERATIONS_H
#define LAZYSTEP_OPERATIONS_H

#include <Python.h>

/* Operands are named from below to the top of the value stack. `arg` is a name's number in co_names for globals,
   names, attributes and imports, a variable's number for cells, and otherwise what is said here. */
enum {
    DO_NOTHING,       /* nothing that the witness wants to know */
    DO_RETURN,        /* value */
    DO_READ_GLOBAL,
    DO_READ_NAME,     /* in the body of a class or module */
    DO_WRITE_GLOBAL,  /* value */
    DO_DELETE_GLOBAL,
    DO_WRITE_NAME,    /* value */
    DO_READ_CELL,
    DO_WRITE_CELL,    /* value */
    DO_DELETE_CELL,
    DO_READ_ATTRIBUTE,   /* owner */
    DO_READ_METHOD,      /* owner; pushes two */
    DO_READ_SUPER,       /* super, class, object */
    DO_READ_SUPER_METHOD, /* the same; pushes two */
    DO_WRITE_ATTRIBUTE,  /* value, owner */
    DO_DELETE_ATTRIBUTE, /* owner */
    DO_READ_ITEM,        /* owner, key */
    DO_WRITE_ITEM,       /* value, owner, key */
    DO_DELETE_ITEM,      /* owner, key */
    DO_READ_SLICE,       /* owner, start, stop */
    DO_WRITE_SLICE,      /* value, owner, start, stop */
    DO_BUILD_SLICE,      /* arg numbers */
    DO_BINARY,           /* left, right; arg is BINARY(of the operation), 0 for a comparison */
    DO_COMPARE_TRUTH,    /* left, right: compares, and asks for the truth of what that gives */
    DO_CONTAINS,         /* element, container */
    DO_IS,               /* left, right */
    DO_TRUTH,            /* value */
    DO_LOOK_AT,          /* arg values, with all that is in them */
    DO_BUILD_MAP,        /* arg pairs of a key, which is hashed, and a value */
    DO_LOOK_INTO,        /* value: its elements */
    DO_COPY,             /* value: its elements; if arg, the items of a dict, else the elements of a sequence */
    DO_LOOK_OVER,        /* value: its length or keys */
    DO_UNPACK,           /* value, into arg variables */
    DO_UNPACK_REST,      /* value, into variables and a list */
    DO_ITERATE,          /* value */
    DO_TAKE,             /* the iterator is the arg-th from the top */
    DO_MATCH_KEYS,       /* value, keys */
    DO_MATCH_CLASS,      /* value, class, names; arg are positional */
    DO_ENTER,            /* context manager */
    DO_IMPORT,           /* level, names */
    DO_IMPORT_FROM,      /* module */
    DO_MAKE_FUNCTION,
    DO_CALL,             /* callable and arg arguments, see `callable_of` */
    DO_CALL_KEYWORDS,    /* the same, and the names of keywords on top */
    DO_CALL_EXPANDED     /* callable, positional, keywords if arg: `f(*a, **k)` */
};

#define BINARY(operation) ((operation) + 1)

typedef struct {
    unsigned char does;
    unsigned char distance; /* from the top, of the value that it pushes and that the witness wants to see */
    short depth;            /* of the value stack before it; -1 if it is never reached, or not known */
    int arg;
} Operation;

/* The operations of a code object, one for each unit of its code. */
typedef struct {
    Py_ssize_t size;
    Operation operations[];
} Decoded;

#endif
