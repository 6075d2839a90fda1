/* Polls for the next datagram for a short time before its receiver sleeps.
 *
 * Waking a process costs tens of microseconds, more in a virtual machine; a small request takes about as long. So who waits for an
 * answer polls for it, as the worker does for requests, and by the same rule (the daemon's shm/spin.py): for so long as the daemon
 * says at most, only if the last wait was shorter than that, and only after little work since. Between two looks others may have the
 * processor, and the interpreter.
 */

#include "_lane.h"

#include <poll.h>
#include <sched.h>
#include <time.h>

uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Begins a wait. Returns until when to poll; 0: not at all. */
static uint64_t begin(spin_t *self, uint64_t now) {
    self->since = now;
    return self->worth && 2 * (now - self->ended) <= self->limit ? now + self->limit : 0;
}

static void end(spin_t *self, uint64_t now) {
    self->ended = now;
    self->worth = now - self->since < self->limit;
}

static void poll_until(int fd, uint64_t until) {
    struct pollfd one = {fd, POLLIN, 0};
    while (now_ns() < until && poll(&one, 1, 0) == 0)
        sched_yield();
}

void spin_before(spin_t *self, int fd) { poll_until(fd, begin(self, now_ns())); }

void spin_after(spin_t *self) { end(self, now_ns()); }

/* --------------------------------------------------------------------------------------------------------------------- type */

PyDoc_STRVAR(before_text, "before(fd)\n--\n\nBegins a wait: polls, if it is worth it, until the descriptor is readable.");

static PyObject *before(spin_t *self, PyObject *given) {
    long fd = PyLong_AsLong(given);
    if (fd == -1 && PyErr_Occurred())
        return NULL;
    uint64_t until = begin(self, now_ns());
    if (until) {
        Py_BEGIN_ALLOW_THREADS
        poll_until((int)fd, until);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(after_text, "after()\n--\n\nEnds a wait: a datagram has come, or nothing in time.");

static PyObject *after(spin_t *self, PyObject *unused) {
    (void)unused;
    spin_after(self);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(begin_text, "begin(now_ns)\n--\n\nBegins a wait at a time. Returns until when ``before`` would poll; 0: not at all.");

static PyObject *begin_at(spin_t *self, PyObject *given) {
    unsigned long long now = PyLong_AsUnsignedLongLong(given);
    return PyErr_Occurred() ? NULL : PyLong_FromUnsignedLongLong(begin(self, now));
}

PyDoc_STRVAR(end_text, "end(now_ns)\n--\n\nEnds a wait at a time.");

static PyObject *end_at(spin_t *self, PyObject *given) {
    unsigned long long now = PyLong_AsUnsignedLongLong(given);
    if (PyErr_Occurred())
        return NULL;
    end(self, now);
    Py_RETURN_NONE;
}

static PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *named) {
    static char *names[] = {"limit_ns", NULL};
    unsigned long long limit;
    if (!PyArg_ParseTupleAndKeywords(arguments, named, "K", names, &limit))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    spin_t *self = (spin_t *)allocate(type, 0);
    if (self != NULL)
        self->limit = limit;
    return (PyObject *)self;
}

static void drop(spin_t *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"before", (PyCFunction)(void (*)(void))before, METH_O, before_text},
    {"after", (PyCFunction)(void (*)(void))after, METH_NOARGS, after_text},
    {"begin", (PyCFunction)(void (*)(void))begin_at, METH_O, begin_text},
    {"end", (PyCFunction)(void (*)(void))end_at, METH_O, end_text},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {{Py_tp_new, make}, {Py_tp_dealloc, drop}, {Py_tp_methods, methods}, {0, NULL}};

PyType_Spec spin_spec = {"tensord_client._lane.Spin", sizeof(spin_t), 0, Py_TPFLAGS_DEFAULT, slots};
