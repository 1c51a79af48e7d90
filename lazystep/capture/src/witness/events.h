/* What levels.h does when an event comes: each source of events calls these. See [Note: versions]. */

static int on_frame(_PyInterpreterFrame *frame);
static void on_leave(_PyInterpreterFrame *frame);
static void on_raise(_PyInterpreterFrame *frame);
static int on_unit(_PyInterpreterFrame *frame, Py_ssize_t unit);
static int is_looking(void);
static void finish_event(int done);
