/* Reading a plan again when little has changed since the last time. Included by places.c.

[Note: steady reads] Each change of a dict gives it a version that no dict has had. While the version is that
of a read in which all rows of the dict fitted, the dict holds the same objects as then, and nothing of it is
looked up. A read that fits is therefore remembered: the dicts with their versions (`watches`), and the rows
that no version speaks for (`live`): items of lists, cells, attributes, lengths. If a version has changed, the
rows of that dict are read again, and no others.

What rests on a remembered value rests on its identity, so such values are kept alive: a new object can't have
the address of an old one. An output that nothing rests on may be another one each time, such as a learning
rate. Any other surprise ends in a read of all rows.

Besides a training step, memory is cold: what a steady read touches is asked for in advance, all at once. */

/* Let go of the last read. */
static void forget(Plan *plan)
{
    PyObject **kept = plan->kept;
    Watch *watches = plan->watches;
    Py_ssize_t num_watches = plan->num_watches;
    plan->kept = NULL;
    plan->watches = NULL;
    plan->num_watches = plan->num_live = 0;
    PyMem_Free(plan->watch_rows);
    PyMem_Free(plan->live);
    plan->watch_rows = NULL;
    plan->live = NULL;
    Py_CLEAR(plan->outputs);
    for (Py_ssize_t i = 0; kept != NULL && i < plan->num_rows; i++) {
        Py_XDECREF(kept[i]);
    }
    for (Py_ssize_t i = 0; i < num_watches; i++) {
        Py_DECREF(watches[i].dict);
    }
    PyMem_Free(kept);
    PyMem_Free(watches);
}

/* Whether a dict's version speaks for the order of its keys: an OrderedDict can reorder them under one version. */
static int keys_have_version(PyObject *dict) { return !PyODict_Check(dict) || PyDict_GET_SIZE(dict) < 2; }

/* A row that is read in a dict, before rows of the same dict are brought together. */
typedef struct {
    PyObject *dict;
    Py_ssize_t row;
} Read;

static int by_dict(const void *a, const void *b)
{
    uintptr_t left = (uintptr_t)((const Read *)a)->dict, right = (uintptr_t)((const Read *)b)->dict;
    return left < right ? -1 : left > right;
}

/* The watches of these reads; they become the owner of the dicts. -1 with an error if there is no memory. */
static int add_watches(Plan *plan, Read *reads, Py_ssize_t num_reads)
{
    qsort(reads, num_reads, sizeof(Read), by_dict);
    Py_ssize_t num_watches = 0;
    for (Py_ssize_t i = 0; i < num_reads; i++) {
        num_watches += i == 0 || reads[i].dict != reads[i - 1].dict;
    }
    plan->watches = PyMem_Calloc(num_watches + 1, sizeof(Watch));
    plan->watch_rows = PyMem_Calloc(num_reads + 1, sizeof(Py_ssize_t));
    if (plan->watches == NULL || plan->watch_rows == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < num_reads; i++) {
        if (i == 0 || reads[i].dict != reads[i - 1].dict) {
            Watch *watch = &plan->watches[plan->num_watches++];
            watch->dict = Py_NewRef(reads[i].dict);
            watch->version = version_of(reads[i].dict);
            watch->first = i;
        }
        plan->watch_rows[i] = reads[i].row;
        plan->watches[plan->num_watches - 1].end = i + 1;
    }
    return 0;
}

/* The position in a list that a row reads; -1 if it is not a plain one. */
static Py_ssize_t index_of(const Row *row)
{
    Py_ssize_t index = PyLong_CheckExact(row->key) ? PyLong_AsSsize_t(row->key) : -1;
    forget_error();
    return index;
}

/* Whether the dicts still hold what was read: a comparison may have run code that changed them. */
static int are_current(Plan *plan, PyObject **values)
{
    for (Py_ssize_t i = 0; i < plan->num_watches; i++) {
        const Watch *watch = &plan->watches[i];
        for (Py_ssize_t j = watch->first; j < watch->end; j++) {
            Py_ssize_t number = plan->watch_rows[j];
            int is_current = number < 0
                                 ? has_keys(watch->dict, plan->rows[~number].keys)
                                 : PyDict_GetItemWithError(watch->dict, plan->rows[number].key) == values[number];
            if (!is_current || PyErr_Occurred()) {
                forget_error();
                return 0;
            }
        }
        if (version_of(watch->dict) != watch->version) {
            return 0;
        }
    }
    return 1;
}

/* Write down what a later read can rest on. -1 with an error if there is no memory. */
static int write_down(Plan *plan, PyObject **values, PyObject *outputs)
{
    Py_ssize_t num_rows = plan->num_rows, num_reads = 0;
    Read *reads = PyMem_Calloc(2 * num_rows + 1, sizeof(Read));
    plan->kept = PyMem_Calloc(num_rows + 1, sizeof(PyObject *));
    plan->live = PyMem_Calloc(num_rows + 1, sizeof(Live));
    if (reads == NULL || plan->kept == NULL || plan->live == NULL) {
        PyMem_Free(reads);
        forget(plan);
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < num_rows; i++) {
        const Row *row = &plan->rows[i];
        PyObject *container = row->parent < 0 ? row->container : values[row->parent], *value = values[i];
        int is_item = row->get == DICT_ITEM || row->get == ITEM;
        int has_version = row->get == NO_GRAD; /* the flags of the tensor tell */
        int looks_inside = row->check == SIZE || row->check == KEYS;
        Live live = {LIVE_ROW, i, NULL, NULL, 0, NULL, NULL};
        if (container == NULL) {
            has_version = 1; /* nothing is where the container would be, and that has been compared */
        }
        else if (is_item && PyDict_Check(container)) {
            has_version = 1;
            reads[num_reads++] = (Read){container, i};
        }
        else if (is_item && PyTuple_Check(container)) {
            has_version = 1;
        }
        else if (is_item && PyList_Check(container) && !looks_inside && index_of(row) >= 0) {
            Py_ssize_t index = index_of(row);
            live = (Live){LIVE_ITEM, i, container, value, index, NULL, &((PyListObject *)container)->ob_item[index]};
        }
        else if (row->get == TYPE_OF) {
            live = (Live){LIVE_TYPE, i, container, row->expected, 0, NULL, NULL};
            if (PyDict_Check(row->key)) {
                live.dict = row->key;
                live.where = _PyObject_GetDictPtr(container); /* not NULL: see has_dict */
            }
        }
        if (has_version && looks_inside && value != NULL) {
            /* The object is known; what is inside has a version of its own, or is compared each time. */
            has_version = row->check == KEYS && keys_have_version(value);
            if (has_version) {
                reads[num_reads++] = (Read){value, ~i};
            }
        }
        if (!has_version) {
            plan->live[plan->num_live++] = live;
        }
        if (row->is_needed || row->is_output || looks_inside || live.how == LIVE_ITEM) {
            plan->kept[i] = Py_XNewRef(value);
        }
    }
    int failed = add_watches(plan, reads, num_reads);
    PyMem_Free(reads);
    if (failed || !are_current(plan, values)) {
        forget(plan);
        return failed;
    }
    plan->outputs = Py_NewRef(outputs);
    plan->num_to_skip = plan->backoff; /* until a steady read succeeds, this may not pay */
    plan->backoff = plan->backoff ? (plan->backoff < 32 ? 2 * plan->backoff : 64) : 1;
    return 0;
}

/* Remember a read in which all rows have fitted. -1 with an error if there is no memory. */
static int remember(Plan *plan, PyObject **values, PyObject *outputs)
{
    if (!plan->can_remember || plan->is_busy) {
        return 0;
    }
    if (plan->num_to_skip > 0) {
        plan->num_to_skip--;
        return 0;
    }
    plan->is_busy = 1;
    forget(plan); /* another thread may have read while a comparison ran Python code */
    int failed = write_down(plan, values, outputs);
    plan->is_busy = 0;
    return failed;
}

/* An output that nothing rests on is another one now. The list may be in use. */
static int replace_output(Plan *plan, Py_ssize_t output, PyObject *value)
{
    if (Py_REFCNT(plan->outputs) > 1) {
        PyObject *copy = PyList_GetSlice(plan->outputs, 0, PyList_GET_SIZE(plan->outputs));
        if (copy == NULL) {
            forget_error();
            return 0;
        }
        Py_SETREF(plan->outputs, copy);
    }
    return PyList_SetItem(plan->outputs, output, Py_NewRef(value == NULL ? Py_None : value)) == 0;
}

/* Whether the value of a row is one that the remembered read can rest on. */
static int still_fits(Plan *plan, Py_ssize_t number, PyObject *value)
{
    const Row *row = &plan->rows[number];
    plan->num_looked_at++;
    if (row->check == SIZE || row->check == KEYS) {
        return value == plan->kept[number] && fits(row, value, plan->kept);
    }
    if (row->is_needed) {
        return value == plan->kept[number];
    }
    if (!fits(row, value, plan->kept)) {
        return 0;
    }
    if (row->is_output && value != plan->kept[number]) {
        if (!replace_output(plan, row->output, value)) {
            return 0;
        }
        Py_XSETREF(plan->kept[number], Py_XNewRef(value));
    }
    return 1;
}

static int rows_still_fit(Plan *plan, Watch *watch)
{
    uint64_t version = version_of(watch->dict); /* first: code that a comparison runs may change the dict */
    for (Py_ssize_t i = watch->first; i < watch->end; i++) {
        Py_ssize_t number = plan->watch_rows[i];
        if (number < 0) {
            plan->num_looked_at++;
            if (!keys_have_version(watch->dict) || !has_keys(watch->dict, plan->rows[~number].keys)) {
                return 0;
            }
            continue;
        }
        PyObject *value = Py_XNewRef(PyDict_GetItemWithError(watch->dict, plan->rows[number].key));
        int fits_still = !PyErr_Occurred() && still_fits(plan, number, value);
        forget_error();
        Py_XDECREF(value);
        if (!fits_still) {
            return 0;
        }
    }
    watch->version = version;
    return 1;
}

static int live_still_fits(Plan *plan, Live *live)
{
    if (live->how == LIVE_TYPE) {
        /* Objects of one type have their dict in the same place. */
        return (PyObject *)Py_TYPE(live->object) == live->value && (live->dict == NULL || *live->where == live->dict);
    }
    PyObject *value;
    if (live->how == LIVE_ITEM) {
        value = live->index < PyList_GET_SIZE(live->object) ? PyList_GET_ITEM(live->object, live->index) : NULL;
        if (value == live->value) {
            return 1;
        }
        Py_XINCREF(value);
    }
    else {
        const Row *row = &plan->rows[live->row];
        value = get(row, row->parent < 0 ? row->container : plan->kept[row->parent]);
    }
    int fits_still = still_fits(plan, live->row, value);
    if (fits_still && live->how == LIVE_ITEM) {
        Py_XSETREF(plan->kept[live->row], Py_XNewRef(value));
        live->value = value;
    }
    Py_XDECREF(value);
    return fits_still;
}

/* Whether everything is as remembered, but for outputs that nothing rests on: these are put into `outputs`. */
static int read_remembered(Plan *plan)
{
    plan->is_busy = 1;
    plan->num_looked_at = plan->num_watches + plan->num_live;
    for (Py_ssize_t i = 0; i < plan->num_watches; i++) {
        __builtin_prefetch(&((PyDictObject *)plan->watches[i].dict)->ma_used + 1); /* the version comes next */
    }
    for (Py_ssize_t i = 0; i < plan->num_live; i++) {
        if (plan->live[i].object != NULL) {
            __builtin_prefetch(&((PyVarObject *)plan->live[i].object)->ob_size);
            __builtin_prefetch(plan->live[i].where);
        }
        else {
            __builtin_prefetch(&plan->rows[plan->live[i].row]);
        }
    }
    int fits_still = 1;
    for (Py_ssize_t i = 0; i < plan->num_watches && fits_still; i++) {
        Watch *watch = &plan->watches[i];
        uint64_t version = version_of(watch->dict); /* 0: only a look at the rows tells */
        fits_still = (version && version == watch->version) || rows_still_fit(plan, watch);
    }
    for (Py_ssize_t i = 0; i < plan->num_live && fits_still; i++) {
        fits_still = live_still_fits(plan, &plan->live[i]);
    }
    plan->is_busy = 0;
    if (fits_still) {
        plan->num_to_skip = plan->backoff = 0;
    }
    return fits_still;
}
