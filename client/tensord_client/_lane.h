/* Declarations that the files of this part share: Python's API, and the types that the module has. */

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

#include "common/include/tensord_wire.h"

#include <stdint.h>

extern PyType_Spec exchange_spec, spin_spec;
/* Spin, and numpy's ndarray, which are kept for the module's life. */
extern PyObject *spin_type, *ndarray;

/* Names of attributes, as Python's strings. */
#define NAMES(NAME)                                                                                                               \
    NAME(advance) NAME(answer) NAME(base) NAME(begun) NAME(call) NAME(call_soon) NAME(cancel) NAME(closing) NAME(closures)        \
    NAME(contents) NAME(dtype) NAME(final) NAME(finish) NAME(flush) NAME(known_closures) NAME(nbytes) NAME(own) NAME(own_count)   \
    NAME(parameters) NAME(placed) NAME(places) NAME(plan) NAME(prepared) NAME(promote) NAME(segments) NAME(shape) NAME(spin)      \
    NAME(timeout_ms) NAME(times) NAME(tobytes) NAME(version)
#define DECLARED(text) PyObject *text;
extern struct names {
    NAMES(DECLARED)
} attr;

/* Defines a writer that grows; whoever uses it frees ``grown``. */
#define WRITER(name)                                                                                                              \
    unsigned char stack[1024];                                                                                                    \
    tensord__writer name = tensord__write_to(stack, sizeof stack);                                                                \
    name.grows = 1

/* Writes an array of what a sequence has. */
void put_each(tensord__writer *to, PyObject *given, void (*put)(tensord__writer *, PyObject *));
void put_content(tensord__writer *to, PyObject *content);
/* Writes what is encoded already. */
void put_encoded(tensord__writer *to, PyObject *encoded);

/* Reads an array of records. Returns a list of them; NULL with an exception. ``take``: where there is one, is given each answer first: it
 * returns whether it has taken it; -1 with an exception. */
PyObject *records_of(tensord__reader *from, PyObject *known, PyObject *prepared, int (*take)(void *, const tensord__answer *), void *taker);

/* Returns a prepared answer: an instance of the class ``prepared``, or the one that has a number. NULL: there is an exception. */
PyObject *prepared_of(tensord__prepared_answer *read, PyObject *prepared);
PyObject *find_prepared(PyObject *known, uint64_t number);

/* Returns a tuple of numbers. */
PyObject *uints_of(const uint64_t *numbers, int count);

/* Returns whether an output (name, shape, dtype, byte size) has a content in the answer's record; else it is in the caller's place. */
int has_content(PyObject *output);

/* Adds an output to an answer: an array of the content, or the caller's place for it. Returns whether it is as the output says; -1 with
 * an exception. */
int put_array(PyObject *answer, PyObject *output, PyObject *places, const char *content, Py_ssize_t size);

/* When to poll for a datagram before sleeping (_spin.c). */
typedef struct {
    PyObject_HEAD
    /* How long to poll at most; when the last wait began and ended; in ns of CLOCK_MONOTONIC. */
    uint64_t limit, since, ended;
    /* 1 if the last wait was short enough. */
    int worth;
} spin_t;

uint64_t now_ns(void);

/* Begins a wait: polls, if it is worth it, until the descriptor is readable. Needs no interpreter. */
void spin_before(spin_t *self, int fd);

/* Ends a wait. */
void spin_after(spin_t *self);

#endif
