/* The functions of _records.c, for the module. */

#ifndef TENSORD_CLIENT_RECORDS_H
#define TENSORD_CLIENT_RECORDS_H

#define Py_LIMITED_API 0x03090000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyMethodDef record_functions[];

/* Makes the names that they look for. Not 0: there is an exception. */
int record_names(void);

#endif
