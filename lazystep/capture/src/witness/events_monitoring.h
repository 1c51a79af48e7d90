/* Events by sys.monitoring: from CPython 3.12 on. A tool of our own, for the time of a call.

Entering and leaving is told for all code, each instruction only for code that is looked at: it is asked for when
the code is first entered (`want_instructions`). Events come from all threads; those of others are dropped. A
callback runs no frame of its own, so the thread's current frame is the one that the event is about. What a
callback calls sends no events. Other tools see theirs as before. */

#include "events.h"

/* As sys.monitoring.events numbers them. */
enum { EVENT_INSTRUCTION, EVENT_ENTER, EVENT_LEAVE, EVENT_RAISE, NUM_CALLBACKS };

static struct {
    PyObject *module;    /* sys.monitoring; NULL: no events are asked for */
    long tool;
    PyObject *watched;   /* a list of the code objects that send instructions */
    long instruction;    /* the event */
    PyThreadState *thread;
} monitoring;

#define CALLBACK(name, num_args, body)                                                               \
    static PyObject *name(PyObject *unused, PyObject *const *args, Py_ssize_t count)                  \
    {                                                                                                 \
        (void)unused;                                                                                 \
        (void)args;                                                                                   \
        PyThreadState *thread = PyThreadState_Get();                                                  \
        if (thread == monitoring.thread && count >= (num_args) && is_looking()) {                     \
            _PyInterpreterFrame *frame = current_frame(thread);                                       \
            int done = 0;                                                                             \
            body;                                                                                     \
            finish_event(done);                                                                       \
        }                                                                                             \
        Py_RETURN_NONE;                                                                               \
    }

CALLBACK(on_enter_event, 2, done = on_frame(frame))
CALLBACK(on_leave_event, 2, on_leave(frame))
CALLBACK(on_raise_event, 2, on_raise(frame))
CALLBACK(on_instruction_event, 2, done = on_unit(frame, PyLong_AsSsize_t(args[1]) / (Py_ssize_t)sizeof(_Py_CODEUNIT)))

static PyMethodDef callbacks[] = {
    {"on_instruction", (PyCFunction)(void (*)(void))on_instruction_event, METH_FASTCALL, NULL},
    {"on_enter", (PyCFunction)(void (*)(void))on_enter_event, METH_FASTCALL, NULL},
    {"on_leave", (PyCFunction)(void (*)(void))on_leave_event, METH_FASTCALL, NULL},
    {"on_raise", (PyCFunction)(void (*)(void))on_raise_event, METH_FASTCALL, NULL},
};

static const struct {
    const char *name;
    int callback;
} events[] = {
    {"INSTRUCTION", EVENT_INSTRUCTION},
    {"PY_START", EVENT_ENTER},
    {"PY_RESUME", EVENT_ENTER},
    {"PY_THROW", EVENT_ENTER},
    {"PY_RETURN", EVENT_LEAVE},
    {"PY_YIELD", EVENT_LEAVE},
    {"PY_UNWIND", EVENT_LEAVE},
    {"RAISE", EVENT_RAISE},
};
#define NUM_EVENTS (sizeof(events) / sizeof(events[0]))

static long event_number(const char *name)
{
    PyObject *names = PyObject_GetAttrString(monitoring.module, "events");
    PyObject *number = names == NULL ? NULL : PyObject_GetAttrString(names, name);
    long found = number == NULL ? -1 : PyLong_AsLong(number);
    Py_XDECREF(names);
    Py_XDECREF(number);
    return found;
}

static int call_monitoring(const char *name, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    PyObject *args = Py_VaBuildValue(format, values);
    va_end(values);
    PyObject *function = args == NULL ? NULL : PyObject_GetAttrString(monitoring.module, name);
    PyObject *answer = function == NULL ? NULL : PyObject_Call(function, args, NULL);
    Py_XDECREF(args);
    Py_XDECREF(function);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : 0;
}

/* Take an id that nobody uses. Those of debuggers and coverage tools (0, 1) are left to them. */
static int take_tool(void)
{
    for (monitoring.tool = 5; monitoring.tool >= 2; monitoring.tool--) {
        PyObject *name = PyObject_CallMethod(monitoring.module, "get_tool", "l", monitoring.tool);
        if (name == NULL) {
            return -1;
        }
        Py_DECREF(name);
        if (name == Py_None) {
            return call_monitoring("use_tool_id", "(ls)", monitoring.tool, "lazystep");
        }
    }
    PyErr_SetString(PyExc_RuntimeError, "all ids of sys.monitoring are in use");
    return -1;
}

/* Safe to be called at any time, also after an error of `begin_events`. Keeps an exception that is set. */
static void end_events(void)
{
    if (monitoring.module == NULL) {
        return;
    }
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (monitoring.tool >= 2) {
        call_monitoring("set_events", "(li)", monitoring.tool, 0);
        PyErr_Clear();
        for (Py_ssize_t i = 0; monitoring.watched != NULL && i < PyList_GET_SIZE(monitoring.watched); i++) {
            call_monitoring("set_local_events", "(lOi)", monitoring.tool, PyList_GET_ITEM(monitoring.watched, i), 0);
            PyErr_Clear();
        }
        for (size_t i = 0; i < NUM_EVENTS; i++) {
            call_monitoring("register_callback", "(llO)", monitoring.tool, event_number(events[i].name), Py_None);
            PyErr_Clear();
        }
        call_monitoring("free_tool_id", "(l)", monitoring.tool);
        PyErr_Clear();
    }
    Py_CLEAR(monitoring.watched);
    Py_CLEAR(monitoring.module);
    PyErr_Restore(type, value, traceback);
}

static int begin_events(void)
{
    monitoring.module = Py_XNewRef(PySys_GetObject("monitoring"));
    if (monitoring.module == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "there is no sys.monitoring");
        return -1;
    }
    monitoring.thread = PyThreadState_Get();
    monitoring.watched = PyList_New(0);
    if (monitoring.watched == NULL || take_tool() < 0) {
        monitoring.tool = -1;
        goto failed;
    }
    monitoring.instruction = event_number("INSTRUCTION");
    long wanted = 0;
    for (size_t i = 0; i < NUM_EVENTS; i++) {
        long number = event_number(events[i].name);
        PyObject *callback = number < 0 ? NULL : PyCFunction_New(&callbacks[events[i].callback], NULL);
        int done = callback == NULL ? -1
                                    : call_monitoring("register_callback", "(llO)", monitoring.tool, number, callback);
        Py_XDECREF(callback);
        if (done < 0) {
            goto failed;
        }
        wanted |= number == monitoring.instruction ? 0 : number;
    }
    if (call_monitoring("set_events", "(ll)", monitoring.tool, wanted) == 0) {
        return 0;
    }
failed:
    end_events();
    return -1;
}

static int want_instructions(PyCodeObject *code)
{
    if (PyList_Append(monitoring.watched, (PyObject *)code) < 0) {
        return -1;
    }
    return call_monitoring("set_local_events", "(lOl)", monitoring.tool, code, monitoring.instruction);
}
