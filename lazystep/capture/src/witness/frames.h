/* The frames, instructions and events of this release of Python: see [Note: versions] in operations.h. */

#ifndef LAZYSTEP_FRAMES_H
#define LAZYSTEP_FRAMES_H

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

#endif
