/* One exchange over a lane: a request is sent and its answer received, without a step of Python between them.
 *
 *     ask ─▶ may it be sent at once, and does this thread read? ─no──▶ None: nothing was done, Python asks
 *             │ yes: send, receive
 *             ├─ its answer, alone, whose arrays are in it or in the caller's places ─▶ the Answer
 *             └─ anything else, or nothing in time ─▶ the request's object: Python has handled what came, and waits on
 *
 * Between many processes an interpreter finds nothing of its own in the processor's caches any more, and each line of them that a call
 * touches costs 30 to 50 ns. So what this knows of the lane it reads where one function of Python's API finds it: in lists, dicts, tuples
 * and C's own fields, never in attributes. Until the receive it holds the interpreter's lock, so nothing changes meanwhile.
 */

#include "_lane.h"

#include <errno.h>
#include <string.h>
#include <structmember.h>

/* A datagram of at most so many bytes waits for others of its event loop's iteration, to leave with them. */
#define KEPT (TENSORD_MAX_DATAGRAM / 4)

/* Objects that are kept. Those with a length are containers of the lane. */
enum {
    LANE,
    CLOSURES,  /* list of one object, which is replaced when a segment is closed */
    KNOWN_CLOSURES, /* list: the one that was there when the worker was last told */
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
    KNOWN,     /* list: PreparedAnswer or None, by number */
    IDS,       /* iterator */
    HELD,      /* dict of the answers that the process holds */
    READING,   /* Lock */
    SENDING,   /* Lock: the lane's ``lock`` */
    PREPARED,  /* the class PreparedAnswer */
    ANSWER,    /* the class Answer */
    OBJECTS
};

struct exchange {
    PyObject_HEAD
    PyObject *object[OBJECTS];
    int fd;
    /* True: the lane has ended. */
    char ended;
    /* The most requests that the worker takes at a time, and the most answers that the process may hold. */
    Py_ssize_t most, most_held;
};

PyObject *exchange_type, *lock_type;

/* Returns the truth of an attribute; -1 with an exception. */
static int is_true(PyObject *object, PyObject *attribute) {
    PyObject *value = PyObject_GetAttr(object, attribute);
    int is = value == NULL ? -1 : PyObject_IsTrue(value);
    Py_XDECREF(value);
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

int is_answer(const exchange_t *self, PyObject *object) { return (PyObject *)Py_TYPE(object) == self->object[ANSWER]; }

/* Returns whether a request may be sent, after what has to be sent before it. */
static int may_send(const exchange_t *self) {
    PyObject *const *object = self->object;
    return !(self->ended || ((lock_t *)object[SENDING])->held || PyDict_Size(object[QUEUED])) && PyDict_Size(object[IN_FLIGHT]) < self->most &&
           PyList_GetItem(object[CLOSURES], 0) == PyList_GetItem(object[KNOWN_CLOSURES], 0);
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
    PyObject *prepared = PyStructSequence_GetItem(placed, PLACED_PREPARED), *contents = PyStructSequence_GetItem(placed, PLACED_CONTENTS);
    PyObject *segments = PyStructSequence_GetItem(placed, PLACED_SEGMENTS), *number = PyDict_GetItemWithError(self->object[NUMBERS], prepared);
    int is = number != NULL ? 1 : PyErr_Occurred() ? -1 : is_first(self, prepared);
    for (Py_ssize_t i = 0; is > 0 && i < PyTuple_Size(segments); i++)
        is = PySet_Contains(self->object[ANNOUNCED], PyTuple_GetItem(segments, i));
    if (is > 0) {
        tensord__put_datagram(to, 1);
        tensord__put_request(to, id);
        put_encoded(to, number == NULL ? prepared : number);
        tensord__put_array(to, (uint64_t)PyList_Size(contents));
        for (Py_ssize_t i = 0; i < PyList_Size(contents); i++)
            put_content(to, PyList_GetItem(contents, i));
        put_encoded(to, own);
        if (deadline && !to->full)
            put_deadline(to, PyBytes_Size(own), deadline);
        is = PyErr_Occurred() ? -1 : !to->full && to->at - to->begin <= TENSORD_MAX_DATAGRAM;
        if (is > 0 && number == NULL)
            is = PySet_Add(self->object[ONCE], prepared) ? -1 : 1;
    }
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
    PyObject *record = PyBytes_FromStringAndSize((const char *)to->begin + 2, (Py_ssize_t)(to->at - to->begin) - 2);
    PyObject *item = record == NULL ? NULL : PyTuple_Pack(2, record, key);
    int wrong = item == NULL || PyList_Append(outgoing, item);
    Py_XDECREF(item);
    Py_XDECREF(record);
    return !wrong;
}

/* Sends a request and notes that it is in flight, for ``taker``. With an event loop that has others in flight, keeps a small one until the
 * loop's iteration ends. Returns its id; NULL: nothing was done, and there may be an exception. */
static PyObject *send_request(const exchange_t *self, PyObject *placed, PyObject *own, uint64_t deadline, PyObject *taker, PyObject *loop, uint64_t *id) {
    int may_keep = loop != Py_None && PyDict_Size(self->object[IN_FLIGHT]) > 0 && !PyObject_Size(self->object[BACKLOG]);
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

/* Sets an answer's times, a tuple. Not 0: there is an exception. */
static int put_times(PyObject *made, const tensord__answer *answer) {
    PyObject *times = answer->has_timing ? uints_of(answer->timing, 3) : (Py_INCREF(Py_None), Py_None);
    int wrong = times == NULL || PyObject_SetAttr(made, attr.times, times);
    Py_XDECREF(times);
    return wrong;
}

/* Returns a new Answer of the last answer to a request; NULL: Python has to make it, or there is an exception. */
static PyObject *fresh_of(const exchange_t *self, const tensord__answer *answer, PyObject *kind, PyObject *call) {
    tensord__answer read = *answer;
    PyObject *made = is_true(kind, attr.final) > 0 ? PyObject_CallFunctionObjArgs(self->object[ANSWER], NULL) : NULL;
    if (made == NULL || put_outputs(made, &read, kind, call) <= 0 || copy_attribute(kind, made, attr.version) ||
        copy_attribute(kind, made, attr.parameters) || put_times(made, answer))
        Py_CLEAR(made);
    return made;
}

/* Keeps an answer whose outputs all lie in the caller's places, with a memory for the times of the next ones. Not 0: there is an exception. */
static int keep_answer(PyObject *kept, PyObject *kind, PyObject *made, const tensord__answer *answer) {
    PyObject *memory = PyByteArray_FromStringAndSize((const char *)answer->timing, sizeof answer->timing);
    PyObject *view = memory == NULL ? NULL : PyMemoryView_FromObject(memory), *times = view == NULL ? NULL : PyObject_CallMethod(view, "cast", "s", "Q");
    PyObject *items = times == NULL || PyObject_SetAttr(made, attr.times, times) ? NULL : Py_BuildValue("[OOO]", kind, made, memory);
    int wrong = items == NULL || PyList_SetSlice(kept, 0, PyList_Size(kept), items);
    Py_XDECREF(items);
    Py_XDECREF(times);
    Py_XDECREF(view);
    Py_XDECREF(memory);
    return wrong;
}

/* As fresh_of; but the Answer is the last one with new times, where that was of the same kind and had nothing of its own. */
static PyObject *made_of(const exchange_t *self, const tensord__answer *answer, PyObject *kind, PyObject *call, PyObject *placed) {
    PyObject *kept = PyStructSequence_GetItem(placed, PLACED_KEPT), *made;
    int may_keep = kept != Py_None && answer->count == 0 && answer->has_timing;
    if (may_keep && PyList_Size(kept) && PyList_GetItem(kept, 0) == kind) {
        memcpy(PyByteArray_AsString(PyList_GetItem(kept, 2)), answer->timing, sizeof answer->timing);
        made = PyList_GetItem(kept, 1);
        return Py_INCREF(made), made;
    }
    made = fresh_of(self, answer, kind, call);
    if (made != NULL && may_keep && keep_answer(kept, kind, made, answer))
        Py_CLEAR(made);
    return made;
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
    int is = 0;
    PyObject *call = kind == NULL ? NULL : PyObject_GetAttr(request, attr.call);
    if (call != NULL) {
        PyObject *made = fresh_of(ready->exchange, answer, kind, call);
        is = made != NULL && !(PyList_Append(ready->list, key) || PyList_Append(ready->list, request) || PyList_Append(ready->list, made));
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
    give_lock((lock_t *)object[READING]);
    if (PyDict_Size(object[FOLLOWERS]) || PyDict_Size(object[QUEUED])) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        int wrong = PyDict_Size(object[FOLLOWERS]) && told(object[LANE], attr.promote);
        wrong |= PyDict_Size(object[QUEUED]) && told(object[LANE], attr.advance);
        if (type != NULL)
            PyErr_Restore(type, value, traceback);
    }
    return PyErr_Occurred() != NULL;
}

/* Makes the object of a request that Python has to go on with. Returns it; NULL with an exception. */
static PyObject *begin(const exchange_t *self, PyObject *sender, PyObject *call, PyObject *placed, PyObject *key, uint64_t deadline) {
    PyObject *until = deadline ? PyFloat_FromDouble((double)deadline / 1e9) : (Py_INCREF(Py_None), Py_None), *request = NULL;
    if (until != NULL && PyObject_SetAttr(call, attr.deadline, until) == 0)
        request = PyObject_CallMethodObjArgs(sender, attr.begun, call, placed, self->object[LANE], key, NULL);
    Py_XDECREF(until);
    if (request != NULL && PyDict_SetItem(self->object[IN_FLIGHT], key, request))
        Py_CLEAR(request);
    return request;
}

/* Gives a request up whose caller was interrupted. The exception stays. */
static void leave(const exchange_t *self, PyObject *sender, PyObject *call, PyObject *placed, PyObject *key, uint64_t deadline) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *request = begin(self, sender, call, placed, key, deadline);
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
    if (may_send(self)) {
        PyObject *placed = PyObject_GetAttr(request, attr.placed), *own = placed == NULL ? NULL : PyObject_GetAttr(request, attr.own);
        key = own == NULL ? NULL : send_request(self, placed, own, 0, request, loop, &id);
        Py_XDECREF(own);
        Py_XDECREF(placed);
    }
    if (key == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return key;
}

/* Has Python handle what has come, which is not the answer or of a kind that Python reads. Not 0: there is an exception. */
static int pass_on(const exchange_t *self, ssize_t size, struct msghdr *message) {
    PyObject *datagram = datagram_of(size, message), *handle = datagram == NULL ? NULL : PyObject_GetAttr(self->object[LANE], attr.handle);
    PyObject *said = handle == NULL ? NULL : PyObject_CallObject(handle, datagram);
    Py_XDECREF(datagram);
    Py_XDECREF(handle);
    Py_XDECREF(said);
    return said == NULL;
}

PyObject *ask_for(exchange_t *self, PyObject *sender, PyObject *call, PyObject *placed, PyObject *own, uint64_t now, uint64_t deadline) {
    uint64_t id;
    if (!may_send(self) || !is_first_to_leave(self) || PyDict_Size(self->object[HELD]) >= self->most_held || !take_lock((lock_t *)self->object[READING]))
        Py_RETURN_NONE;
    PyObject *key = set_timeout((lock_t *)self->object[READING], self->fd, deadline ? deadline - now : 0) ? NULL : send_request(self, placed, own, deadline, Py_None, Py_None, &id), *answer = NULL;
    if (key == NULL) {
        if (end_reading(self))
            return NULL;
        Py_RETURN_NONE;
    }
    MESSAGE(message, self->object[RECEIVED]);
    tensord__answer read;
    ssize_t size = receive((lock_t *)self->object[READING], self->fd, 0, &message);
    if (size < 0 && PyErr_Occurred()) {
        leave(self, sender, call, placed, key, deadline);
        Py_DECREF(key);
        return NULL;
    }
    PyObject *kind = size < 0 ? NULL : read_answer(self, &message, (size_t)size, id, &read);
    if (kind != NULL)
        answer = made_of(self, &read, kind, call, placed);
    Py_XDECREF(kind);
    if (answer != NULL || PyErr_Occurred()) {
        if (PyDict_DelItem(self->object[IN_FLIGHT], key) | end_reading(self))
            Py_CLEAR(answer);
    } else {
        answer = begin(self, sender, call, placed, key, deadline);
        if ((answer != NULL && size >= 0 && pass_on(self, size, &message)) | end_reading(self))
            Py_CLEAR(answer);
    }
    Py_DECREF(key);
    return answer;
}

static PyObject *ask(exchange_t *self, PyObject *arguments) {
    PyObject *sender, *call, *placed, *own, *until;
    if (!PyArg_ParseTuple(arguments, "OOO!SO", &sender, &call, placed_type, &placed, &own, &until))
        return NULL;
    uint64_t now = now_ns(), deadline = 0;
    if (until != Py_None) {
        double seconds = PyFloat_AsDouble(until);
        if (seconds == -1.0 && PyErr_Occurred())
            return NULL;
        /* What is over, or lies centuries ahead, is left to Python. */
        if (seconds * 1e9 <= (double)now || seconds > 9e9)
            Py_RETURN_NONE;
        deadline = (uint64_t)(seconds * 1e9);
    }
    return ask_for(self, sender, call, placed, own, now, deadline);
}

/* --------------------------------------------------------------------------------------------------------------------- type */

/* Where each object is found: the attribute of one that stands before it, or of itself as far as it is found. */
static const struct {
    int object, of;
    const char *attribute;
} found_at[] = {{RECEIVED, LANE, "socket"},      {BACKLOG, RECEIVED, "backlog"},  {RECEIVED, RECEIVED, "received"},
                {CLOSURES, LANE, "memory"},      {CLOSURES, CLOSURES, "closures"}, {KNOWN_CLOSURES, LANE, "known_closures"}, {IN_FLIGHT, LANE, "in_flight"},
                {QUEUED, LANE, "queued"},        {OUTGOING, LANE, "_outgoing"},   {RELEASES, LANE, "answers"},     {HELD, RELEASES, "held"},
                {RELEASES, RELEASES, "releases"}, {HELD, HELD, "sizes"},          {FOLLOWERS, LANE, "followers"},  {NUMBERS, LANE, "_numbers"},
                {ONCE, LANE, "_once"},           {ANNOUNCED, LANE, "_announced"}, {KNOWN, LANE, "_prepared"},      {IDS, LANE, "ids"},
                {READING, LANE, "reading"},      {SENDING, LANE, "lock"}};

static PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *named) {
    PyObject *lane, *prepared, *answer;
    int fd;
    Py_ssize_t most, most_held;
    (void)named;
    if (!PyArg_ParseTuple(arguments, "OOOinn", &lane, &prepared, &answer, &fd, &most, &most_held))
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
    self->most_held = most_held;
    for (size_t i = 0; i < sizeof found_at / sizeof *found_at; i++) {
        PyObject *value = PyObject_GetAttrString(self->object[found_at[i].of], found_at[i].attribute);
        if (value == NULL) {
            Py_DECREF(self);
            return NULL;
        }
        Py_XDECREF(self->object[found_at[i].object]);
        self->object[found_at[i].object] = value;
    }
    if ((PyObject *)Py_TYPE(self->object[READING]) != lock_type || (PyObject *)Py_TYPE(self->object[SENDING]) != lock_type) {
        PyErr_SetString(PyExc_TypeError, "a lane's lock is of another type");
        Py_CLEAR(self);
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

static PyMemberDef members[] = {{"ended", T_BOOL, offsetof(exchange_t, ended), 0, NULL}, {NULL, 0, 0, 0, NULL}};

static PyType_Slot slots[] = {
    {Py_tp_new, make},     {Py_tp_dealloc, drop},      {Py_tp_traverse, traverse}, {Py_tp_clear, clear},
    {Py_tp_methods, methods}, {Py_tp_members, members}, {0, NULL},
};

PyType_Spec exchange_spec = {"tensord_client._lane.Exchange", sizeof(exchange_t), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
