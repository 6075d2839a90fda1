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
#include <sys/socket.h>
#include <sys/uio.h>

extern PyType_Spec exchange_spec, lock_spec, repeated_spec;
/* Types of this part, and numpy's ndarray, which are kept for the module's life. */
extern PyObject *exchange_type, *lock_type, *placed_type, *ndarray;

/* Names of attributes, as Python's strings. */
#define NAMES(NAME)                                                                                                               \
    NAME(advance) NAME(ask_slowly) NAME(base) NAME(begun) NAME(call) NAME(call_soon) NAME(cancel) NAME(deadline) NAME(dtype)      \
    NAME(final) NAME(finish) NAME(flush) NAME(handle) NAME(nbytes) NAME(own) NAME(own_count) NAME(parameters) NAME(placed)         \
    NAME(places) NAME(plan) NAME(promote) NAME(shape) NAME(times) NAME(tobytes) NAME(version) NAME(wait_for)
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

/* A lock of which whoever has the interpreter sees whether it is held, and when its holder polls for a datagram before sleeping (_spin.c). */
typedef struct {
    PyObject_HEAD
    int held, waiters;
    /* Released once for each time that the lock is given back while somebody waits for it. */
    PyThread_type_lock woken;
    tensord__waits waits;
    /* The receive timeout that the socket has. */
    long timeout_ms;
} lock_t;

/* Takes a lock without waiting. Returns whether it was free. */
int take_lock(lock_t *self);
void give_lock(lock_t *self);

/* The fields of Placed, a named tuple. */
enum { PLACED_PREPARED, PLACED_CONTENTS, PLACED_SEGMENTS, PLACED_SLOT, PLACED_HOLD, PLACED_KEPT };

typedef struct exchange exchange_t;

/* Sends a request and waits for its answer. Returns the Answer; the request's object, where Python goes on; or None: nothing was done.
 * ``deadline``: in monotonic ns; 0: none. */
PyObject *ask_for(exchange_t *self, PyObject *sender, PyObject *call, PyObject *placed, PyObject *own, uint64_t now, uint64_t deadline);

/* Returns whether an object is an Answer. */
int is_answer(const exchange_t *self, PyObject *object);

uint64_t now_ns(void);

/* Has a receive end after the time that is left, or before: after a power of two in ms, so that the next wait, which is about as long, need
 * not set it again. The rest is waited for after. 0: without limit. Not 0: there is an exception. */
int set_timeout(lock_t *reading, int fd, uint64_t left_ns);

/* Defines where a datagram is received. It has at most one descriptor; there is room for what is wrong with it, too. */
#define MESSAGE(name, memory)                                                                                                     \
    char control[CMSG_SPACE(4 * sizeof(int))] __attribute__((aligned(sizeof(size_t))));                                           \
    struct iovec room = {PyByteArray_AsString(memory), (size_t)PyByteArray_Size(memory)};                                         \
    struct msghdr name = {.msg_iov = &room, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control}

/* Receives, without the interpreter's lock, and polls before if that is worth it. Returns as recvmsg; -1, perhaps with an exception. */
ssize_t receive(lock_t *reading, int fd, int flags, struct msghdr *message);

/* Returns (size, what came with it as recvmsg of Python has it, flags). */
PyObject *datagram_of(ssize_t size, struct msghdr *message);

#endif
