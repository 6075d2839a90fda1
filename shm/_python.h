/* Python's API, as all of the daemon's parts in C include it. The client, a distribution of its own, has this in its _lane.h. */

#ifndef TENSORD_PYTHON_H
#define TENSORD_PYTHON_H

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Python 3.13.0's own returns a constant without a reference, because it counts none of them: the Pythons before it would end sooner
 * or later, with a part that was built there. */
#undef Py_RETURN_NONE
#define Py_RETURN_NONE return Py_INCREF(Py_None), Py_None
#undef Py_RETURN_TRUE
#define Py_RETURN_TRUE return Py_INCREF(Py_True), Py_True
#undef Py_RETURN_FALSE
#define Py_RETURN_FALSE return Py_INCREF(Py_False), Py_False

#endif
