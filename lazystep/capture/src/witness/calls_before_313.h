/* Where the callable and the arguments of a call are on the stack, until CPython 3.12. See [Note: versions]. */

/* The stack is: method or NULL, self or callable, arguments. */
static inline PyObject **callable_of(PyObject **top, int num_args)
{
    return top[-(num_args + 2)] != NULL ? &top[-(num_args + 2)] : &top[-(num_args + 1)];
}

static inline PyObject **arguments_of(PyObject **top, int num_args) { return callable_of(top, num_args) + 1; }

/* For `f(*a, **k)`: the callable is right below the arguments. */
#define EXPANDED_CALLABLE_BELOW 1
