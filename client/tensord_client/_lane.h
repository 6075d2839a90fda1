/* What the files of this part share: Python's API, and the types that the module has. */

#ifndef TENSORD_CLIENT_LANE_H
#define TENSORD_CLIENT_LANE_H

#define Py_LIMITED_API 0x03090000
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

#include "common/tensord_wire.h"

extern PyType_Spec exchange_spec, spin_spec;
/* Spin, which is kept for the module's life. */
extern PyObject *spin_type;

/* Makes the names of attributes that an exchange looks for. Not 0: there is an exception. */
int exchange_names(void);

/* Returns the next record of a datagram: an AnswerRecord, or its tag and numbers; NULL: there is an exception, or the reader is bad.
 * ``known``: number -> prepared answer, which learns what the record prepares; ``prepared``: the class of these. */
PyObject *read_record(tensord__reader *from, PyObject *known, PyObject *prepared);

#endif
