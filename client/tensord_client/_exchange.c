/* One exchange over a lane: a request is sent and its answer received, without a step of Python between them.
 *
 *     ask ─▶ may it be sent at once, and does this thread read? ─no──▶ None: nothing was done, Python asks
 *             │ yes: send, receive
 *             ├─ its answer, alone, whose arrays are in it or in the caller's places ─▶ the Answer
 *             └─ anything else, or nothing in time ─▶ what came: Python goes on with that
 *
 * Between many processes an interpreter finds nothing of its own in the processor's caches any more, and what it would execute then takes
 * twenty times as long as in a loop. What this knows of the lane it reads from the objects that Python reads it from. Until the receive it
 * holds the interpreter's lock, so nothing changes meanwhile.
 */

#include "_lane.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

/* A datagram has at most one descriptor; there is room for what is wrong with it, too. */
#define ANCILLARY CMSG_SPACE(4 * sizeof(int))
/* A datagram of at most so many bytes waits for others of its event loop's iteration, to leave with them. */
#define KEPT (TENSORD_MAX_DATAGRAM / 4)

/* Objects that are kept. Those with a length are containers of the lane. */
enum {
    LANE,
    SOCKET,    /* of the lane: whether it is closing, its timeout, and when to poll */
    MEMORY,    /* whose ``closures`` are those that the lane knows */
    RECEIVED,  /* bytearray: what comes */
    IN_FLIGHT, /* dict: id -> request */
    QUEUED,    /* dict: id -> request */
    OUTGOING,  /* list */
    BACKLOG,
    RELEASES,
    FOLLOWERS,
    NUMBERS,   /* dict: encoded prepared request -> encoded number */
    ONCE,      /* set: encoded prepared requests that were sent once, without a number */
    ANNOUNCED, /* set: numbers of segments */
    KNOWN,     /* dict: number -> PreparedAnswer */
    IDS,       /* iterator */
    ACQUIRE,   /* of the lane's lock ``reading`` */
    RELEASE,   /* of it */
    LOCKED,    /* of the lane's lock ``lock`` */
    PREPARED,  /* the class PreparedAnswer */
    ANSWER,    /* the class Answer */
    OBJECTS
};

typedef struct {
    PyObject_HEAD
    PyObject *object[OBJECTS];
    int fd;
    /* The most requests that the worker takes at a time. */
    Py_ssize_t most;
} exchange_t;

PyObject *spin_type;

/* Returns the truth of an attribute; -1 with an exception. */
static int is_true(PyObject *object, PyObject *attribute) {
    PyObject *value = PyObject_GetAttr(object, attribute);
    int is = value == NULL ? -1 : PyObject_IsTrue(value);
    Py_XDECREF(value);
    return is;
}

/* Returns whether two attributes are equal; -1 with an exception. */
static int is_same(PyObject *one, PyObject *attribute, PyObject *other, PyObject *its) {
    PyObject *value = PyObject_GetAttr(one, attribute), *wanted = value == NULL ? NULL : PyObject_GetAttr(other, its);
    int is = wanted == NULL ? -1 : PyObject_RichCompareBool(value, wanted, Py_EQ);
    Py_XDECREF(value);
    Py_XDECREF(wanted);
    return is;
}

/* Calls something, perhaps with an argument. Returns the truth of what it returns; -1 with an exception. */
static int truth(PyObject *call, PyObject *argument) {
    PyObject *answer = PyObject_CallFunctionObjArgs(call, argument, NULL);
    int is = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return is;
}

/* Calls a method. Not 0: there is an exception. */
static int told(PyObject *object, PyObject *method) {
    PyObject *said = PyObject_CallMethodObjArgs(object, method, NULL);
    Py_XDECREF(said);
    return said == NULL;
}

/* Returns whether nothing has to be sent before a request. */
static int is_first_to_leave(const exchange_t *self) {
    PyObject *const *object = self->object;
    return !(PyList_Size(object[OUTGOING]) || PyObject_Size(object[BACKLOG]) || PyObject_Size(object[RELEASES]));
}

/* Returns whether a request may be sent, after what has to be sent before it; -1 with an exception. */
static int may_send(const exchange_t *self) {
    PyObject *const *object = self->object;
    if (PyDict_Size(object[QUEUED]) || PyDict_Size(object[IN_FLIGHT]) >= self->most)
        return 0;
    int is = is_true(object[SOCKET], attr.closing);
    if (is == 0)
        is = truth(object[LOCKED], NULL);
    return is ? (is < 0 ? -1 : 0) : is_same(object[LANE], attr.known_closures, object[MEMORY], attr.closures);
}

/* Has a receive end after the time that is left, or before: as LaneSocket.limit_wait does. Not 0: there is an exception. */
static int set_timeout(const exchange_t *self, uint64_t left_ns) {
    long milliseconds = 0;
    if (left_ns) {
        uint64_t left = left_ns / 1000000u;
        for (milliseconds = 1; left > 1; left >>= 1)
            milliseconds <<= 1;
    }
    PyObject *has = PyObject_GetAttr(self->object[SOCKET], attr.timeout_ms);
    long found = has == NULL ? -1 : PyLong_AsLong(has);
    Py_XDECREF(has);
    if (found == milliseconds || PyErr_Occurred())
        return found != milliseconds;
    struct timeval timeout = {milliseconds / 1000, milliseconds % 1000 * 1000};
    if (setsockopt(self->fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout) != 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    PyObject *said = PyLong_FromLong(milliseconds);
    int wrong = said == NULL || PyObject_SetAttr(self->object[SOCKET], attr.timeout_ms, said);
    Py_XDECREF(said);
    return wrong;
}

/* Returns whether a prepared request has never been sent, so that it is sent in full, as most are used once; -1 with an exception. */
static int is_first(const exchange_t *self, PyObject *prepared) {
    if (PySet_Size(self->object[ONCE]) >= TENSORD_MAX_NUMBERS)
        return 0;
    int is = PySet_Contains(self->object[ONCE], prepared);
    return is < 0 ? -1 : !is;
}

/* Overwrites the deadline in a request's own fields, which lie at the end of what was written. */
static void put_deadline(tensord__writer *to, Py_ssize_t own_size, uint64_t deadline) {
    tensord__reader from = tensord__read_from(to->at - own_size, (size_t)own_size);
    tensord__take_text(&from);
    tensord__writer at = tensord__write_to((void *)from.at, (size_t)(from.end - from.at));
    if (!from.bad)
        tensord__put_u64(&at, deadline);
}

/* Writes the datagram of a request. Returns whether it can be sent by itself; -1 with an exception. ``deadline``: in monotonic ns; 0: none. */
static int write_request(const exchange_t *self, PyObject *placed, PyObject *own, uint64_t id, uint64_t deadline, tensord__writer *to) {
    PyObject *prepared = PyObject_GetAttr(placed, attr.prepared), *number = NULL;
    PyObject *contents = PyObject_GetAttr(placed, attr.contents), *segments = PyObject_GetAttr(placed, attr.segments);
    int is = prepared == NULL || contents == NULL || segments == NULL ? -1 : 1;
    if (is > 0) {
        number = PyDict_GetItemWithError(self->object[NUMBERS], prepared);
        is = number != NULL ? 1 : PyErr_Occurred() ? -1 : is_first(self, prepared);
    }
    for (Py_ssize_t i = 0; is > 0 && i < PyTuple_Size(segments); i++)
        is = PySet_Contains(self->object[ANNOUNCED], PyTuple_GetItem(segments, i));
    if (is > 0) {
        tensord__put_datagram(to, 1);
        tensord__put_request(to, id);
        put_encoded(to, number == NULL ? prepared : number);
        if (PyList_Size(contents) > 0)
            put_each(to, contents, put_content);
        else
            tensord__put_array(to, 0);
        put_encoded(to, own);
        if (deadline && !to->full)
            put_deadline(to, PyBytes_Size(own), deadline);
        is = PyErr_Occurred() ? -1 : !to->full && to->at - to->begin <= TENSORD_MAX_DATAGRAM;
        if (is > 0 && number == NULL)
            is = PySet_Add(self->object[ONCE], prepared) ? -1 : 1;
    }
    Py_XDECREF(prepared);
    Py_XDECREF(contents);
    Py_XDECREF(segments);
    return is;
}

/* Keeps what was written of a request until the event loop's iteration ends. Returns whether it was kept. */
static int keep(const exchange_t *self, PyObject *loop, PyObject *key, const tensord__writer *to) {
    PyObject *outgoing = self->object[OUTGOING];
    if (PyList_Size(outgoing) == 0) {
        PyObject *flush = PyObject_GetAttr(self->object[LANE], attr.flush);
        PyObject *said = flush == NULL ? NULL : PyObject_CallMethodObjArgs(loop, attr.call_soon, flush, NULL);
        Py_XDECREF(flush);
        Py_XDECREF(said);
        if (said == NULL)
            return 0;
    }
    /* Two bytes begin a datagram of one record. */
    PyObject *record = PyBytes_FromStringAndSize(to->begin + 2, (Py_ssize_t)(to->at - to->begin) - 2);
    PyObject *item = record == NULL ? NULL : PyTuple_Pack(2, record, key);
    int wrong = item == NULL || PyList_Append(outgoing, item);
    Py_XDECREF(item);
    Py_XDECREF(record);
    return !wrong;
}

/* Sends a request and notes that it is in flight, for ``taker``. With an event loop that has others in flight, keeps a small one until the
 * loop's iteration ends. Returns its id; NULL: nothing was done, and there may be an exception. */
static PyObject *send_request(const exchange_t *self, PyObject *placed, PyObject *own, uint64_t deadline, PyObject *taker, PyObject *loop, uint64_t *id) {
    int may_keep = loop != Py_None && PyDict_Size(self->object[IN_FLIGHT]) > 0;
    if (!may_keep && !is_first_to_leave(self))
        return NULL;
    PyObject *key = PyIter_Next(self->object[IDS]);
    *id = key == NULL ? 0 : PyLong_AsUnsignedLongLong(key);
    WRITER(to);
    if (key != NULL && !PyErr_Occurred() && write_request(self, placed, own, *id, deadline, &to) > 0 && PyDict_SetItem(self->object[IN_FLIGHT], key, taker) == 0) {
        int sent = 0;
        if (may_keep && to.at - to.begin <= KEPT)
            sent = keep(self, loop, key, &to);
        else if (is_first_to_leave(self))
            sent = send(self->fd, to.begin, (size_t)(to.at - to.begin), MSG_DONTWAIT | MSG_NOSIGNAL) >= 0;
        if (sent) {
            free(to.grown);
            return key;
        }
        /* Python finds why. */
        PyDict_DelItem(self->object[IN_FLIGHT], key);
    }
    free(to.grown);
    Py_XDECREF(key);
    return NULL;
}

/* Receives, without the interpreter's lock. Returns as recvmsg; -1 with EINTR: there is an exception. */
static ssize_t receive(const exchange_t *self, struct msghdr *message) {
    spin_t *spin = (spin_t *)PyObject_GetAttr(self->object[SOCKET], attr.spin);
    size_t room = message->msg_controllen;
    ssize_t size = -1;
    int failure = EINTR;
    while (spin != NULL) {
        message->msg_controllen = room;
        Py_BEGIN_ALLOW_THREADS
        spin_before(spin, self->fd);
        size = recvmsg(self->fd, message, MSG_CMSG_CLOEXEC);
        failure = errno;
        spin_after(spin);
        Py_END_ALLOW_THREADS
        if (size >= 0 || failure != EINTR || PyErr_CheckSignals())
            break;
    }
    Py_XDECREF(spin);
    errno = failure;
    return size;
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

/* Reads the answer to a request from a datagram that has nothing else. Returns its prepared answer; NULL: what came is something else, of
 * which Python finds out more, or there is an exception. */
static PyObject *read_answer(const exchange_t *self, const struct msghdr *message, size_t size, uint64_t id, tensord__answer *answer) {
    const char *received = PyByteArray_AsString(self->object[RECEIVED]);
    if (message->msg_controllen || message->msg_flags & (MSG_TRUNC | MSG_CTRUNC) || size < 2 || *received != TENSORD_WHOLE)
        return NULL;
    tensord__reader from = tensord__read_from(received + 1, size - 1);
    if (tensord__take_array(&from) != 1)
        return NULL;
    uint64_t fields = tensord__take_array(&from);
    if (!tensord__is(tensord__take_text(&from), "c"))
        return NULL;
    *answer = tensord__take_answer(&from, fields);
    if (from.bad || from.at != from.end || answer->request_id != id || answer->has_lease || answer->code.size)
        return NULL;
    PyObject *kind = answer->numbered ? find_prepared(self->object[KNOWN], answer->number) : prepared_of(&answer->prepared, self->object[PREPARED]);
    if (kind == NULL)
        PyErr_Clear(); /* Python judges it. */
    else if (is_true(kind, attr.final) <= 0)
        Py_CLEAR(kind);
    return kind;
}

/* Adds all outputs to an answer. Returns whether they are numbers in its record, or in the caller's places; -1 with an exception. */
static int put_outputs(PyObject *made, tensord__answer *answer, PyObject *kind, PyObject *call) {
    PyObject *plan = PyObject_GetAttr(kind, attr.plan), *places = plan == NULL ? NULL : PyObject_GetAttr(call, attr.places);
    int is = places == NULL ? -1 : PyTuple_Size(plan) > 0;
    uint64_t left = answer->count;
    for (Py_ssize_t i = 0; is > 0 && i < PyTuple_Size(plan); i++) {
        PyObject *output = PyTuple_GetItem(plan, i);
        tensord__content content = {NULL, 0, 0, 0};
        if (has_content(output) && left > 0) {
            content = tensord__take_content(&answer->contents);
            left--;
        }
        is = put_array(made, output, places, (const char *)content.bytes, (Py_ssize_t)content.byte_size);
    }
    Py_XDECREF(plan);
    Py_XDECREF(places);
    return is > 0 ? left == 0 : is;
}

/* Copies an attribute, if it is true. Not 0: there is an exception. */
static int copy_attribute(PyObject *from, PyObject *to, PyObject *attribute) {
    PyObject *value = PyObject_GetAttr(from, attribute);
    int is = value == NULL ? -1 : PyObject_IsTrue(value);
    int wrong = is < 0 || (is && PyObject_SetAttr(to, attribute, value));
    Py_XDECREF(value);
    return wrong;
}

/* Returns a new Answer of an answer, but for its times; NULL: Python has to make it, or there is an exception. */
static PyObject *fresh_of(const exchange_t *self, tensord__answer *answer, PyObject *kind, PyObject *call) {
    PyObject *made = PyObject_CallFunctionObjArgs(self->object[ANSWER], NULL);
    if (made == NULL || put_outputs(made, answer, kind, call) <= 0 || copy_attribute(kind, made, attr.version) ||
        copy_attribute(kind, made, attr.parameters))
        Py_CLEAR(made);
    return made;
}

/* As fresh_of. It is the one of the last answer
 * where that was of the same kind, and has nothing of its own. */
static PyObject *made_of(const exchange_t *self, tensord__answer *answer, PyObject *kind, PyObject *call, PyObject *placed) {
    PyObject *kept = PyObject_GetAttr(placed, attr.answer), *made = NULL;
    if (kept != NULL && kept != Py_None && PyTuple_GetItem(kept, 0) == kind) {
        made = PyTuple_GetItem(kept, 1);
        Py_INCREF(made);
    }
    Py_XDECREF(kept);
    if (made != NULL || PyErr_Occurred())
        return made;
    made = fresh_of(self, answer, kind, call);
    if (made != NULL && answer->count == 0) {
        kept = PyTuple_Pack(2, kind, made);
        if (kept == NULL || PyObject_SetAttr(placed, attr.answer, kept))
            Py_CLEAR(made);
        Py_XDECREF(kept);
    }
    return made;
}

/* Sets an answer's times. Not 0: there is an exception. */
static int put_times(PyObject *made, const tensord__answer *answer) {
    PyObject *times = answer->has_timing ? uints_of(answer->timing, 3) : (Py_INCREF(Py_None), Py_None);
    int wrong = times == NULL || PyObject_SetAttr(made, attr.times, times);
    Py_XDECREF(times);
    return wrong;
}

/* Answers that were read, for their requests: of each its id, its request and its Answer. */
typedef struct {
    const exchange_t *exchange;
    PyObject *list;
} ready_t;

/* Makes the Answer of a request's last answer. Returns whether that was possible; -1 with an exception. */
static int make_ready(void *given, const tensord__answer *answer) {
    const ready_t *ready = given;
    PyObject *const *object = ready->exchange->object;
    if (answer->has_lease || answer->code.size || !answer->numbered)
        return 0;
    PyObject *key = PyLong_FromUnsignedLongLong(answer->request_id);
    PyObject *request = key == NULL ? NULL : PyDict_GetItemWithError(object[IN_FLIGHT], key);
    PyObject *kind = request == NULL || request == Py_None ? NULL : find_prepared(object[KNOWN], answer->number);
    int is = PyErr_Occurred() ? -1 : kind == NULL ? 0 : is_true(kind, attr.final);
    PyObject *call = is > 0 ? PyObject_GetAttr(request, attr.call) : NULL;
    if (call != NULL) {
        tensord__answer read = *answer;
        PyObject *made = fresh_of(ready->exchange, &read, kind, call);
        if (made != NULL && (put_times(made, answer) || PyList_Append(ready->list, key) || PyList_Append(ready->list, request) || PyList_Append(ready->list, made)))
            Py_CLEAR(made);
        is = made != NULL;
        Py_XDECREF(made);
    }
    if (PyErr_Occurred())
        is = -1;
    Py_XDECREF(call);
    Py_XDECREF(kind);
    Py_XDECREF(key);
    return is;
}

static PyObject *records(exchange_t *self, PyObject *given) {
    Py_ssize_t size = PyLong_AsSsize_t(given);
    if (PyErr_Occurred())
        return NULL;
    if (size < 1 || size > PyByteArray_Size(self->object[RECEIVED])) {
        PyErr_SetString(PyExc_ValueError, "a datagram is cut off");
        return NULL;
    }
    ready_t ready = {self, PyList_New(0)};
    tensord__reader from = tensord__read_from(PyByteArray_AsString(self->object[RECEIVED]) + 1, (size_t)size - 1);
    PyObject *found = ready.list == NULL ? NULL : records_of(&from, self->object[KNOWN], self->object[PREPARED], make_ready, &ready);
    for (Py_ssize_t i = 0; found != NULL && i < PyList_Size(ready.list); i += 3) {
        PyObject *key = PyList_GetItem(ready.list, i), *request = PyList_GetItem(ready.list, i + 1), *said = NULL;
        if (PyDict_GetItemWithError(self->object[IN_FLIGHT], key) != request && !PyErr_Occurred())
            continue; /* It has had its last answer. */
        if (!PyErr_Occurred() && PyDict_DelItem(self->object[IN_FLIGHT], key) == 0)
            said = PyObject_CallMethodObjArgs(request, attr.finish, self->object[LANE], PyList_GetItem(ready.list, i + 2), NULL);
        if (said == NULL)
            Py_CLEAR(found);
        Py_XDECREF(said);
    }
    Py_XDECREF(ready.list);
    return found;
}

/* Lets others read the lane. An exception stays. Not 0: there is one. */
static int end_reading(const exchange_t *self) {
    PyObject *const *object = self->object;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *released = PyObject_CallFunctionObjArgs(object[RELEASE], NULL);
    int wrong = released == NULL;
    Py_XDECREF(released);
    if (PyObject_Size(object[FOLLOWERS]))
        wrong |= told(object[LANE], attr.promote);
    if (PyDict_Size(object[QUEUED]))
        wrong |= told(object[LANE], attr.advance);
    if (type != NULL)
        PyErr_Restore(type, value, traceback);
    return wrong || type != NULL;
}

/* Makes the object of a request that Python has to go on with. Returns it; NULL with an exception. */
static PyObject *begin(const exchange_t *self, PyObject *sender, PyObject *call, PyObject *placed, PyObject *key) {
    PyObject *request = PyObject_CallMethodObjArgs(sender, attr.begun, call, placed, self->object[LANE], key, NULL);
    if (request != NULL && PyDict_SetItem(self->object[IN_FLIGHT], key, request))
        Py_CLEAR(request);
    return request;
}

/* Gives a request up whose caller was interrupted. The exception stays. */
static void leave(const exchange_t *self, PyObject *sender, PyObject *call, PyObject *placed, PyObject *key) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *request = begin(self, sender, call, placed, key);
    if (request == NULL || told(request, attr.cancel))
        PyErr_Clear();
    Py_XDECREF(request);
    PyErr_Restore(type, value, traceback);
    end_reading(self);
}

static PyObject *submit(exchange_t *self, PyObject *arguments) {
    PyObject *request, *loop, *key = NULL;
    uint64_t id;
    if (!PyArg_ParseTuple(arguments, "OO", &request, &loop))
        return NULL;
    if (may_send(self) > 0) {
        PyObject *placed = PyObject_GetAttr(request, attr.placed), *own = placed == NULL ? NULL : PyObject_GetAttr(request, attr.own);
        key = own == NULL ? NULL : send_request(self, placed, own, 0, request, loop, &id);
        Py_XDECREF(own);
        Py_XDECREF(placed);
    }
    if (key == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return key;
}

static PyObject *ask(exchange_t *self, PyObject *arguments) {
    if (PyTuple_Size(arguments) != 5) {
        PyErr_SetString(PyExc_TypeError, "ask takes five arguments");
        return NULL;
    }
    PyObject *sender = PyTuple_GetItem(arguments, 0), *call = PyTuple_GetItem(arguments, 1), *placed = PyTuple_GetItem(arguments, 2);
    PyObject *own = PyTuple_GetItem(arguments, 3), *until = PyTuple_GetItem(arguments, 4);
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
    int is = may_send(self);
    if (is > 0)
        is = is_first_to_leave(self) ? truth(self->object[ACQUIRE], Py_False) : 0;
    if (is < 0)
        return NULL;
    if (is == 0)
        Py_RETURN_NONE;
    PyObject *key = set_timeout(self, deadline ? deadline - now : 0) ? NULL : send_request(self, placed, own, deadline, Py_None, Py_None, &id), *answer = NULL;
    if (key == NULL) {
        if (end_reading(self))
            return NULL;
        Py_RETURN_NONE;
    }
    char control[ANCILLARY] __attribute__((aligned(sizeof(size_t))));
    struct iovec room = {PyByteArray_AsString(self->object[RECEIVED]), (size_t)PyByteArray_Size(self->object[RECEIVED])};
    struct msghdr message = {.msg_iov = &room, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    tensord__answer read;
    ssize_t size = receive(self, &message);
    if (size < 0 && PyErr_Occurred()) {
        leave(self, sender, call, placed, key);
        Py_DECREF(key);
        return NULL;
    }
    PyObject *kind = size < 0 ? NULL : read_answer(self, &message, (size_t)size, id, &read);
    if (kind != NULL)
        answer = made_of(self, &read, kind, call, placed);
    if (answer != NULL && put_times(answer, &read))
        Py_CLEAR(answer);
    Py_XDECREF(kind);
    if (answer != NULL || PyErr_Occurred()) {
        if (PyDict_DelItem(self->object[IN_FLIGHT], key) | end_reading(self))
            Py_CLEAR(answer);
    } else {
        PyObject *request = begin(self, sender, call, placed, key);
        if (request == NULL)
            end_reading(self);
        else if (size < 0)
            answer = Py_BuildValue("NO", request, Py_None);
        else
            answer = Py_BuildValue("N(nNi)", request, (Py_ssize_t)size, ancillary_of(&message), message.msg_flags & ~MSG_CMSG_CLOEXEC);
    }
    Py_DECREF(key);
    return answer;
}

/* --------------------------------------------------------------------------------------------------------------------- type */

/* Where each object is found: the attribute of one that stands before it, or of itself as far as it is found. */
static const struct {
    int object, of;
    const char *attribute;
} found_at[] = {{SOCKET, LANE, "socket"},        {MEMORY, LANE, "memory"},          {RECEIVED, SOCKET, "received"},  {IN_FLIGHT, LANE, "in_flight"},
                {QUEUED, LANE, "queued"},        {OUTGOING, LANE, "_outgoing"},     {BACKLOG, SOCKET, "backlog"},    {RELEASES, LANE, "answers"},
                {RELEASES, RELEASES, "releases"}, {FOLLOWERS, LANE, "followers"},   {NUMBERS, LANE, "_numbers"},     {ONCE, LANE, "_once"},
                {ANNOUNCED, LANE, "_announced"}, {KNOWN, LANE, "_prepared"},        {IDS, LANE, "ids"},              {RELEASE, LANE, "reading"},
                {ACQUIRE, RELEASE, "acquire"},   {RELEASE, RELEASE, "release"},     {LOCKED, LANE, "lock"},          {LOCKED, LOCKED, "locked"}};

static PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *named) {
    PyObject *lane, *prepared, *answer;
    int fd;
    Py_ssize_t most;
    (void)named;
    if (!PyArg_ParseTuple(arguments, "OOOin", &lane, &prepared, &answer, &fd, &most))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    exchange_t *self = (exchange_t *)allocate(type, 0);
    if (self == NULL)
        return NULL;
    self->object[LANE] = (Py_INCREF(lane), lane);
    self->object[PREPARED] = (Py_INCREF(prepared), prepared);
    self->object[ANSWER] = (Py_INCREF(answer), answer);
    self->fd = fd;
    self->most = most;
    for (size_t i = 0; i < sizeof found_at / sizeof *found_at; i++) {
        PyObject *value = PyObject_GetAttrString(self->object[found_at[i].of], found_at[i].attribute);
        if (value == NULL) {
            Py_DECREF(self);
            return NULL;
        }
        Py_XDECREF(self->object[found_at[i].object]);
        self->object[found_at[i].object] = value;
    }
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

/* It is described in _lane.pyi. */
static PyMethodDef methods[] = {
    {"records", (PyCFunction)(void (*)(void))records, METH_O, NULL},
    {"submit", (PyCFunction)(void (*)(void))submit, METH_VARARGS, NULL},
    {"ask", (PyCFunction)(void (*)(void))ask, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, make}, {Py_tp_dealloc, drop}, {Py_tp_traverse, traverse}, {Py_tp_clear, clear}, {Py_tp_methods, methods}, {0, NULL},
};

PyType_Spec exchange_spec = {"tensord_client._lane.Exchange", sizeof(exchange_t), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
