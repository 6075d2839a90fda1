/* The lock of those who send on a lane, or receive; who has the latter polls for the next datagram for a short time before it sleeps.
 *
 * Waking a process costs tens of microseconds, more in a virtual machine; a small request takes about as long. So who waits for an
 * answer polls for it, as the worker does for requests, and by the same rule (tensord_wire.h), for so long as the daemon says at most.
 * Between two looks others may have the processor, and the interpreter.
 */

#include "_lane.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <structmember.h>
#include <time.h>

uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void poll_until(int fd, uint64_t until) {
    struct pollfd one = {fd, POLLIN, 0};
    while (now_ns() < until && poll(&one, 1, 0) == 0)
        sched_yield();
}

ssize_t receive(lock_t *reading, int fd, int flags, struct msghdr *message) {
    size_t room = message->msg_controllen;
    for (;;) {
        ssize_t size;
        int failure;
        message->msg_controllen = room;
        Py_BEGIN_ALLOW_THREADS
        if (!(flags & MSG_DONTWAIT))
            poll_until(fd, tensord__begin_wait(&reading->waits, now_ns()));
        size = recvmsg(fd, message, MSG_CMSG_CLOEXEC | flags);
        failure = errno;
        if (!(flags & MSG_DONTWAIT))
            tensord__end_wait(&reading->waits, now_ns());
        Py_END_ALLOW_THREADS
        errno = failure;
        if (size >= 0 || failure != EINTR || PyErr_CheckSignals())
            return size;
    }
}

int set_timeout(lock_t *reading, int fd, uint64_t left_ns) {
    long milliseconds = left_ns > 0;
    for (uint64_t left = left_ns / 1000000u; left > 1; left >>= 1)
        milliseconds <<= 1;
    if (reading->timeout_ms == milliseconds)
        return 0;
    struct timeval timeout = {milliseconds / 1000, milliseconds % 1000 * 1000};
    if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout) != 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    reading->timeout_ms = milliseconds;
    return 0;
}

PyObject *datagram_of(ssize_t size, struct msghdr *message) {
    PyObject *found = PyList_New(0);
    for (struct cmsghdr *each = CMSG_FIRSTHDR(message); found != NULL && each != NULL; each = CMSG_NXTHDR(message, each)) {
        PyObject *content = PyBytes_FromStringAndSize((const char *)CMSG_DATA(each), (Py_ssize_t)(each->cmsg_len - CMSG_LEN(0)));
        PyObject *item = content == NULL ? NULL : Py_BuildValue("iiN", each->cmsg_level, each->cmsg_type, content);
        if (item == NULL || PyList_Append(found, item))
            Py_CLEAR(found);
        Py_XDECREF(item);
    }
    return found == NULL ? NULL : Py_BuildValue("nNi", (Py_ssize_t)size, found, message->msg_flags & ~MSG_CMSG_CLOEXEC);
}

/* --------------------------------------------------------------------------------------------------------------------- type */

static PyObject *receive_into(lock_t *self, PyObject *arguments) {
    PyObject *memory;
    int fd, flags;
    unsigned long long left_ns;
    if (!PyArg_ParseTuple(arguments, "iO!iK", &fd, &PyByteArray_Type, &memory, &flags, &left_ns) || (!(flags & MSG_DONTWAIT) && set_timeout(self, fd, left_ns)))
        return NULL;
    MESSAGE(message, memory);
    ssize_t size = receive(self, fd, flags, &message);
    if (size >= 0)
        return datagram_of(size, &message);
    if (PyErr_Occurred())
        return NULL;
    /* A peer that ended with records unread causes the reset once, before anything else. What it sent is still there. */
    if (errno == EAGAIN || errno == ECONNRESET)
        Py_RETURN_NONE;
    return Py_BuildValue("i[]i", 0, 0);
}

/* Python's own lock can only be asked by a call; this one is a field, which whoever has the interpreter reads. */

int take_lock(lock_t *self) { return self->held ? 0 : (self->held = 1); }

void give_lock(lock_t *self) {
    self->held = 0;
    if (self->waiters)
        PyThread_release_lock(self->woken);
}

static PyObject *acquire(lock_t *self, PyObject *arguments) {
    int waits = 1;
    if (!PyArg_ParseTuple(arguments, "|p", &waits))
        return NULL;
    while (waits && self->held) {
        PyLockStatus status;
        self->waiters++;
        Py_BEGIN_ALLOW_THREADS
        status = PyThread_acquire_lock_timed(self->woken, -1, 1);
        Py_END_ALLOW_THREADS
        self->waiters--;
        if (status == PY_LOCK_INTR && PyErr_CheckSignals())
            return NULL;
    }
    return PyBool_FromLong(take_lock(self));
}

static PyObject *release(lock_t *self, PyObject *unused) {
    (void)unused;
    give_lock(self);
    Py_RETURN_NONE;
}

static PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *named) {
    unsigned long long limit = 0;
    if (!PyArg_ParseTuple(arguments, "|K", &limit))
        return NULL;
    lock_t *self = (lock_t *)PyType_GenericNew(type, arguments, named);
    if (self != NULL && (self->woken = PyThread_allocate_lock()) == NULL) {
        Py_CLEAR(self);
        PyErr_NoMemory();
    }
    if (self != NULL) {
        PyThread_acquire_lock(self->woken, NOWAIT_LOCK);
        self->waits.limit = limit;
    }
    return (PyObject *)self;
}

static void drop(lock_t *self) {
    PyTypeObject *type = Py_TYPE(self);
    if (self->woken != NULL)
        PyThread_free_lock(self->woken);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* They are described in _lane.pyi. */
static PyMethodDef methods[] = {
    {"receive", (PyCFunction)(void (*)(void))receive_into, METH_VARARGS, NULL},
    {"acquire", (PyCFunction)(void (*)(void))acquire, METH_VARARGS, NULL},
    {"release", (PyCFunction)(void (*)(void))release, METH_NOARGS, NULL},
    {"__enter__", (PyCFunction)(void (*)(void))acquire, METH_VARARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))release, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {{"held", T_INT, offsetof(lock_t, held), READONLY, NULL}, {"limit_ns", T_ULONGLONG, offsetof(lock_t, waits.limit), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};

static PyType_Slot slots[] = {{Py_tp_new, make}, {Py_tp_dealloc, drop}, {Py_tp_methods, methods}, {Py_tp_members, members}, {0, NULL}};

PyType_Spec lock_spec = {"tensord_client._lane.Lock", sizeof(lock_t), 0, Py_TPFLAGS_DEFAULT, slots};
