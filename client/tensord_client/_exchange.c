/* One exchange of a prepared call (prepared_call.py): its datagram is sent, and an answer that is as the last one is known by comparing.
 *
 *     PreparedCall ─▶ ask ─▶ is everything as it was? ─no──▶ None: nothing was done, Python asks
 *                             │ yes: send, receive
 *                             ├─ the answer is as the last one, but for its id and times ─▶ the outputs
 *                             └─ anything else ─▶ what came: Python goes on with that
 *
 * It is optional, and decides nothing that Python does not: between many processes an interpreter finds nothing of its own in the
 * processor's caches any more, and what it would execute then takes twenty times as long as in a loop.
 *
 * What it knows of the lane it reads from the objects that Python reads it from. Until the receive it holds the interpreter's lock, so
 * nothing changes meanwhile.
 */

#include "_spin.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

/* A datagram has at most one descriptor; there is room for what is wrong with it, too. */
#define ANCILLARY CMSG_SPACE(4 * sizeof(int))
#define ID_SIZE 8

/* Objects that are kept. */
enum {
    DATAGRAM, /* bytearray: what is sent */
    RECEIVED, /* bytearray: what comes */
    HEAD,     /* bytes: what an answer begins with, up to its id */
    TAIL,     /* bytes: what follows the id, up to the times */
    OUTPUTS,  /* the Answer that such an answer stands for, but for its times */
    LANE,
    SOCKET,     /* of the lane: whether it is closing, and its timeout */
    SPIN,       /* of the socket: says when to poll */
    IN_FLIGHT,  /* dict of the lane: id -> request */
    BACKLOG,    /* of the lane, with a length */
    RELEASES,   /* of the lane, with a length */
    FOLLOWERS,  /* of the lane, with a length */
    IDS,        /* iterator */
    ACQUIRE,    /* of the lane's lock ``reading`` */
    RELEASE,    /* of it */
    LOCKED,     /* of the lane's lock ``lock`` */
    MEMORY,     /* whose ``closures`` are those that the lane knows */
    MODELS,     /* dict of the connection */
    MODEL_KEY,  /* the model's key in it */
    MODEL,      /* its value */
    OBJECTS
};

typedef struct {
    PyObject_HEAD
    PyObject *object[OBJECTS];
    int fd;
    Py_ssize_t id_at, deadline_at, tail_at;
    /* Of the lane: how often numbers of prepared requests were given up, and numbers of answers given a meaning. */
    long epoch, learned;
    /* Until when the lanes are the right ones, in monotonic ns. */
    uint64_t until;
} exchange_t;

PyObject *spin_type;
/* Names of attributes. */
static PyObject *closing_name, *epoch_name, *learned_name, *closures_name, *known_closures_name, *timeout_name, *times_name, *promote_name,
    *waiting_name, *request_id_name;

static void write_u64(char *at, uint64_t value) {
    for (int i = 7; i >= 0; i--, value >>= 8)
        at[i] = (char)(value & 0xff);
}

/* Returns whether an attribute is that number; -1 with an exception. */
static int is_number(PyObject *object, PyObject *name, long wanted) {
    PyObject *value = PyObject_GetAttr(object, name);
    long found = value == NULL ? -1 : PyLong_AsLong(value);
    Py_XDECREF(value);
    return found == -1 && PyErr_Occurred() ? -1 : found == wanted;
}

/* Returns whether two attributes are the same number; -1 with an exception. */
static int is_same(PyObject *one, PyObject *name, PyObject *other, PyObject *other_name) {
    PyObject *value = PyObject_GetAttr(other, other_name);
    long wanted = value == NULL ? -1 : PyLong_AsLong(value);
    Py_XDECREF(value);
    return wanted == -1 && PyErr_Occurred() ? -1 : is_number(one, name, wanted);
}

/* Calls something, perhaps with an argument. Returns the truth of what it returns; -1 with an exception. */
static int truth(PyObject *call, PyObject *argument) {
    PyObject *answer = PyObject_CallFunctionObjArgs(call, argument, NULL);
    int is_true = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return is_true;
}

/* Returns whether everything is as it was when this was made, and nothing waits to be sent before; -1 with an exception. */
static int is_ordinary(const exchange_t *self, uint64_t now) {
    PyObject *const *object = self->object;
    if (now >= self->until || PyDict_Size(object[IN_FLIGHT]) || PyObject_Size(object[BACKLOG]) || PyObject_Size(object[RELEASES]))
        return 0;
    if (PyDict_GetItemWithError(object[MODELS], object[MODEL_KEY]) != object[MODEL])
        return PyErr_Occurred() ? -1 : 0;
    int is = is_number(object[SOCKET], closing_name, 0);
    if (is > 0)
        is = is_number(object[LANE], epoch_name, self->epoch);
    if (is > 0)
        is = is_number(object[LANE], learned_name, self->learned);
    if (is > 0)
        is = is_same(object[LANE], known_closures_name, object[MEMORY], closures_name);
    if (is > 0) {
        is = truth(object[LOCKED], NULL);
        is = is < 0 ? -1 : !is;
    }
    return is;
}

/* Has a receive end after the time that is left, or before: as LaneSocket.limit_wait does. Not 0: there is an exception. */
static int set_timeout(const exchange_t *self, uint64_t left_ns) {
    long milliseconds = 0;
    if (left_ns) {
        uint64_t left = left_ns / 1000000u;
        for (milliseconds = 1; left > 1; left >>= 1)
            milliseconds <<= 1;
    }
    int is = is_number(self->object[SOCKET], timeout_name, milliseconds);
    if (is != 0)
        return is < 0;
    struct timeval timeout = {milliseconds / 1000, milliseconds % 1000 * 1000};
    if (setsockopt(self->fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout) != 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    PyObject *said = PyLong_FromLong(milliseconds);
    int wrong = said == NULL || PyObject_SetAttr(self->object[SOCKET], timeout_name, said);
    Py_XDECREF(said);
    return wrong;
}

/* Sends the datagram with the next id, and notes that the request is in flight. Returns the id; NULL: it was not sent, and there may
 * be an exception. */
static PyObject *send_request(const exchange_t *self, PyObject *call, uint64_t deadline, uint64_t *id) {
    PyObject *const *object = self->object;
    PyObject *key = PyIter_Next(object[IDS]);
    *id = key == NULL ? 0 : PyLong_AsUnsignedLongLong(key);
    if (key == NULL || PyErr_Occurred() || PyDict_SetItem(object[IN_FLIGHT], key, call)) {
        Py_XDECREF(key);
        return NULL;
    }
    char *datagram = PyByteArray_AsString(object[DATAGRAM]);
    write_u64(datagram + self->id_at, *id);
    write_u64(datagram + self->deadline_at, deadline);
    if (send(self->fd, datagram, (size_t)PyByteArray_Size(object[DATAGRAM]), MSG_DONTWAIT | MSG_NOSIGNAL) >= 0)
        return key;
    /* Python finds why. */
    PyDict_DelItem(object[IN_FLIGHT], key);
    Py_DECREF(key);
    return NULL;
}

/* Returns whether a datagram is an answer as the last one was. */
static int is_alike(const exchange_t *self, const struct msghdr *message, size_t size, uint64_t id) {
    char *head, *tail;
    Py_ssize_t head_size, tail_size, tail_at = self->tail_at;
    char text[ID_SIZE];
    const char *received = PyByteArray_AsString(self->object[RECEIVED]);
    if (PyBytes_AsStringAndSize(self->object[HEAD], &head, &head_size) || PyBytes_AsStringAndSize(self->object[TAIL], &tail, &tail_size))
        return 0;
    write_u64(text, id);
    return !message->msg_controllen && !(message->msg_flags & (MSG_TRUNC | MSG_CTRUNC)) && size >= (size_t)(tail_at + tail_size) &&
           !memcmp(received + tail_at, tail, (size_t)tail_size) && !memcmp(received, head, (size_t)head_size) &&
           !memcmp(received + tail_at - ID_SIZE, text, ID_SIZE);
}

/* Returns what came with a datagram, as recvmsg does: (level, type, content) of each. */
static PyObject *ancillary_of(struct msghdr *message) {
    PyObject *found = PyList_New(0);
    for (struct cmsghdr *each = CMSG_FIRSTHDR(message); found != NULL && each != NULL; each = CMSG_NXTHDR(message, each)) {
        PyObject *content = PyBytes_FromStringAndSize((const char *)CMSG_DATA(each), (Py_ssize_t)(each->cmsg_len - CMSG_LEN(0)));
        PyObject *item = content == NULL ? NULL : Py_BuildValue("iiN", each->cmsg_level, each->cmsg_type, content);
        if (item == NULL || PyList_Append(found, item))
            Py_CLEAR(found);
        Py_XDECREF(item);
    }
    return found;
}

/* Ends an exchange that was answered as ever. Returns the outputs. */
static PyObject *finish(const exchange_t *self, PyObject *key, size_t size) {
    PyObject *const *object = self->object;
    Py_ssize_t at = self->tail_at + PyBytes_Size(object[TAIL]);
    PyObject *times = PyBytes_FromStringAndSize(PyByteArray_AsString(object[RECEIVED]) + at, (Py_ssize_t)size - at);
    int wrong = times == NULL || PyObject_SetAttr(object[OUTPUTS], times_name, times) || PyDict_DelItem(object[IN_FLIGHT], key);
    Py_XDECREF(times);
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *released = PyObject_CallFunctionObjArgs(object[RELEASE], NULL);
    wrong |= released == NULL;
    Py_XDECREF(released);
    if (type != NULL)
        PyErr_Restore(type, value, traceback);
    if (!wrong && PyObject_Size(object[FOLLOWERS])) {
        PyObject *promoted = PyObject_CallMethodObjArgs(object[LANE], promote_name, NULL);
        wrong = promoted == NULL;
        Py_XDECREF(promoted);
    }
    if (wrong)
        return NULL;
    Py_INCREF(object[OUTPUTS]);
    return object[OUTPUTS];
}

/* Receives, without the interpreter's lock. Returns as recvmsg; -1 with EINTR: there is an exception. */
static ssize_t receive(const exchange_t *self, struct msghdr *message) {
    spin_t *spin = (spin_t *)self->object[SPIN];
    size_t room = message->msg_controllen;
    ssize_t size;
    for (;;) {
        int failure;
        message->msg_controllen = room;
        Py_BEGIN_ALLOW_THREADS
        spin_before(spin, self->fd);
        size = recvmsg(self->fd, message, MSG_CMSG_CLOEXEC);
        failure = errno;
        spin_after(spin);
        Py_END_ALLOW_THREADS
        errno = failure;
        if (size >= 0 || failure != EINTR)
            return size;
        if (PyErr_CheckSignals()) {
            errno = EINTR;
            return size;
        }
    }
}

/* Leaves a call whose caller was interrupted: the next one waits for its answer. The exception stays. */
static void leave(const exchange_t *self, PyObject *call, PyObject *key) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (PyObject_SetAttr(call, request_id_name, key) || PyObject_SetAttr(call, waiting_name, Py_True))
        PyErr_Clear();
    PyObject *released = PyObject_CallFunctionObjArgs(self->object[RELEASE], NULL);
    Py_XDECREF(released);
    if (PyObject_Size(self->object[FOLLOWERS])) {
        PyObject *promoted = PyObject_CallMethodObjArgs(self->object[LANE], promote_name, NULL);
        Py_XDECREF(promoted);
    }
    PyErr_Restore(type, value, traceback);
}

PyDoc_STRVAR(ask_text, "ask(call, until)\n--\n\n"
                       "Asks once. ``until``: monotonic seconds, or None.\n\n"
                       "Returns the outputs; None: nothing was done; or, with ``reading`` held, (id, what recvmsg_into would have returned, but\n"
                       "for the address), whose second is None where nothing came in time.");

static PyObject *ask(exchange_t *self, PyObject *arguments) {
    PyObject *call, *until;
    if (!PyArg_ParseTuple(arguments, "OO", &call, &until))
        return NULL;
    uint64_t now = now_ns(), id, deadline = 0;
    if (until != Py_None) {
        double seconds = PyFloat_AsDouble(until);
        if (seconds == -1.0 && PyErr_Occurred())
            return NULL;
        /* What is over, or lies centuries ahead, is left to Python. */
        if (seconds * 1e9 <= (double)now || seconds > 9e9)
            Py_RETURN_NONE;
        deadline = (uint64_t)(seconds * 1e9);
    }
    int is = is_ordinary(self, now);
    if (is > 0)
        is = truth(self->object[ACQUIRE], Py_False);
    if (is < 0)
        return NULL;
    if (is == 0)
        Py_RETURN_NONE;
    PyObject *key = set_timeout(self, deadline ? deadline - now : 0) ? NULL : send_request(self, call, deadline, &id);
    if (key == NULL) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        PyObject *released = PyObject_CallFunctionObjArgs(self->object[RELEASE], NULL);
        Py_XDECREF(released);
        if (type != NULL || released == NULL) {
            PyErr_Restore(type, value, traceback);
            return NULL;
        }
        Py_RETURN_NONE;
    }
    char control[ANCILLARY] __attribute__((aligned(sizeof(size_t))));
    struct iovec room = {PyByteArray_AsString(self->object[RECEIVED]), (size_t)PyByteArray_Size(self->object[RECEIVED])};
    struct msghdr message = {.msg_iov = &room, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t size = receive(self, &message);
    PyObject *answer = NULL;
    if (size < 0 && errno == EINTR)
        leave(self, call, key);
    else if (size < 0)
        answer = Py_BuildValue("OO", key, Py_None);
    else if (is_alike(self, &message, (size_t)size, id))
        answer = finish(self, key, (size_t)size);
    else
        answer = Py_BuildValue("O(nNi)", key, (Py_ssize_t)size, ancillary_of(&message), message.msg_flags & ~MSG_CMSG_CLOEXEC);
    Py_DECREF(key);
    return answer;
}

/* --------------------------------------------------------------------------------------------------------------------- type */

static PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *named) {
    static char *names[] = {"datagram",       "id_at",          "deadline_at",    "received",       "head",           "tail",
                            "tail_at",        "outputs",        "lane",           "socket",         "spin",           "fd",             "in_flight",
                            "backlog",        "releases",       "followers",      "ids",            "acquire",        "release",
                            "locked",         "memory",         "models",         "model_key",      "model",          "epoch",
                            "learned",        "until",          NULL};
    PyObject *o[OBJECTS];
    int fd;
    Py_ssize_t id_at, deadline_at, tail_at;
    long epoch, learned;
    double until;
    if (!PyArg_ParseTupleAndKeywords(arguments, named, "YnnYSSnOOOO!iO!OOOOOOOOO!OOlld", names, &o[DATAGRAM], &id_at, &deadline_at, &o[RECEIVED],
                                     &o[HEAD], &o[TAIL], &tail_at, &o[OUTPUTS], &o[LANE], &o[SOCKET], (PyTypeObject *)spin_type, &o[SPIN], &fd, &PyDict_Type, &o[IN_FLIGHT], &o[BACKLOG],
                                     &o[RELEASES], &o[FOLLOWERS], &o[IDS], &o[ACQUIRE], &o[RELEASE], &o[LOCKED], &o[MEMORY], &PyDict_Type,
                                     &o[MODELS], &o[MODEL_KEY], &o[MODEL], &epoch, &learned, &until))
        return NULL;
    Py_ssize_t size = PyByteArray_Size(o[DATAGRAM]), room = PyByteArray_Size(o[RECEIVED]);
    if (id_at < 0 || id_at + ID_SIZE > size || deadline_at < 0 || deadline_at + ID_SIZE > size || tail_at < ID_SIZE || tail_at > room ||
        PyBytes_Size(o[HEAD]) > room || PyBytes_Size(o[TAIL]) > room - tail_at) {
        PyErr_SetString(PyExc_ValueError, "a place lies outside of its buffer");
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    exchange_t *self = (exchange_t *)allocate(type, 0);
    if (self == NULL)
        return NULL;
    for (int i = 0; i < OBJECTS; i++) {
        Py_INCREF(o[i]);
        self->object[i] = o[i];
    }
    self->fd = fd;
    self->id_at = id_at;
    self->deadline_at = deadline_at;
    self->tail_at = tail_at;
    self->epoch = epoch;
    self->learned = learned;
    self->until = until >= 9e9 ? UINT64_MAX : (uint64_t)(until * 1e9);
    return (PyObject *)self;
}

static int traverse(exchange_t *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    for (int i = 0; i < OBJECTS; i++)
        Py_VISIT(self->object[i]);
    return 0;
}

static int clear(exchange_t *self) {
    for (int i = 0; i < OBJECTS; i++)
        Py_CLEAR(self->object[i]);
    return 0;
}

static void drop(exchange_t *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"ask", (PyCFunction)(void (*)(void))ask, METH_VARARGS, ask_text},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, make}, {Py_tp_dealloc, drop}, {Py_tp_traverse, traverse}, {Py_tp_clear, clear}, {Py_tp_methods, methods}, {0, NULL},
};

PyType_Spec exchange_spec = {"tensord_client._lane.Exchange", sizeof(exchange_t), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

static int intern(PyObject **name, const char *text) {
    *name = PyUnicode_InternFromString(text);
    return *name == NULL;
}

int exchange_names(void) {
    return intern(&closing_name, "closing") || intern(&epoch_name, "epoch") || intern(&learned_name, "learned") || intern(&closures_name, "closures") ||
           intern(&known_closures_name, "known_closures") || intern(&timeout_name, "timeout_ms") || intern(&times_name, "times") ||
           intern(&promote_name, "promote") || intern(&waiting_name, "waiting") || intern(&request_id_name, "request_id");
}
